"""The images of a run: one store in this process, for datasets, batches and the sampler alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from oxrl.config import Config
from oxrl.data.image_files import ImageRules, described, local_path
from oxrl.data.image_rows import references
from oxrl.data.image_store import ImageStore
from oxrl.data.rows import in_our_words, read_rows
from oxrl.modelfiles.hub import locate
from oxrl.models.image_features import ImageReader
from oxrl.runs.files import make_folder, write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLDER = "images"


def image_store(cfg: Config, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> ImageStore:
    """A store of the images of a run.

    Args:
        tokenizer: finds that of the model, when the first image is read.
    """
    data = cfg.data
    rules = ImageRules(
        roots=data.image_places, min_side=data.image_min_side, max_side=data.image_max_side
    )
    return ImageStore(partial(_reader, cfg, tokenizer), rules)


def _reader(cfg: Config, tokenizer: Callable[[], PreTrainedTokenizerBase]) -> ImageReader:
    model = cfg.model
    return ImageReader(
        model.name,
        tokenizer(),
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        max_pixels=cfg.data.image_max_pixels,
    )


def model_images(model: str, tokenizer: PreTrainedTokenizerBase) -> ImageStore:
    """The images of questions that belong to no run, from any place.

    Args:
        model: as `model.name`.
        tokenizer: of the model.
    """
    rules = ImageRules(roots=("/",), min_side=1, max_side=2**16)
    return ImageStore(partial(ImageReader, model, tokenizer), rules)


def keep_images(store: ImageStore, cfg: Config, *, write: bool) -> None:
    """Keep the images that are used from now on in the run directory, or look for them there.

    Args:
        store: of the run's images.
        write: of several ranks only the first does.
    """
    store.folder = cfg.run.directory / FOLDER
    store.writes = write
    stored = cfg.rollout.from_samples if cfg.recipe == "rl" else None
    if write and stored is not None:
        _take_over(Path(stored) / FOLDER, store.folder)


def _take_over(theirs: Path, ours: Path) -> None:
    """Copy what another run was shown: no row has the images of its environments."""
    if not theirs.is_dir():
        return
    make_folder(ours)
    for path in theirs.iterdir():
        if not (ours / path.name).is_file():
            write_atomically(ours / path.name, path.read_bytes())


def image_files(cfg: Config, name: str) -> dict[str, Path]:
    """The files that the rows of a data file name as images, by the names that they give them.

    Args:
        name: of the data file.
    """
    found: dict[str, Path] = {}
    for row in read_rows(locate(name)):
        record = in_our_words(row, cfg.data.columns)
        for reference in references(record):
            path = local_path(reference, record.folder or Path())
            # What is not there is told with its row, when that is read.
            if path is not None and path.is_file():
                found[described(reference)] = path
    return found
