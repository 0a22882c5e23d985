"""The images of a run: one store in this process, for datasets, batches and the sampler alike."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

from oxrl.config import Config
from oxrl.data.image_files import ImageRules, described, local_path
from oxrl.data.image_rows import references
from oxrl.data.image_store import ImageStore
from oxrl.data.layouts import in_our_words
from oxrl.data.rows import read_rows
from oxrl.modelfiles.hub import locate
from oxrl.models.image_features import ImageReader
from oxrl.models.load import load_tokenizer
from oxrl.runs.files import make_folder, write_atomically

log = logging.getLogger(__name__)
FOLDER = "images"


class _Source(NamedTuple):
    """All that decides what an image becomes."""

    model: str
    revision: str | None
    chat_template: str | None
    trust_remote_code: bool
    roots: tuple[str, ...]
    min_side: int
    max_side: int
    max_pixels: int | None
    run: str


def image_store(cfg: Config) -> ImageStore:
    """The images of the run of `cfg`, the same store whenever it is asked for."""
    data = cfg.data
    source = _Source(
        model=cfg.model.name,
        revision=cfg.model.revision,
        chat_template=cfg.model.chat_template,
        trust_remote_code=cfg.model.trust_remote_code,
        roots=data.image_places,
        min_side=data.image_min_side,
        max_side=data.image_max_side,
        max_pixels=data.image_max_pixels,
        run=str(cfg.run.directory.absolute()),
    )
    return _store(source)


def model_images(model: str) -> ImageStore:
    """The images of questions that belong to no run, from any place.

    Args:
        model: as `model.name`.
    """
    source = _Source(
        model=model,
        revision=None,
        chat_template=None,
        trust_remote_code=False,
        roots=("/",),
        min_side=1,
        max_side=2**16,
        max_pixels=None,
        run="",
    )
    return _store(source)


def keep_images(cfg: Config, *, write: bool) -> None:
    """Keep the images that are used from now on in the run directory, or look for them there.

    Args:
        write: of several ranks only the first does.
    """
    store = image_store(cfg)
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
    for reference, path in _image_paths(cfg, name):
        if path.is_file():  # what is not there is told with its row, when that is read
            found[reference] = path
    return found


def _image_paths(cfg: Config, name: str) -> Iterator[tuple[str, Path]]:
    for row in read_rows(locate(name)):
        record = in_our_words(row, cfg.data.columns)
        for reference in references(record):
            path = local_path(reference, record.folder or Path())
            if path is not None:
                yield described(reference), path


@lru_cache(maxsize=8)
def _store(source: _Source) -> ImageStore:
    rules = ImageRules(roots=source.roots, min_side=source.min_side, max_side=source.max_side)
    return ImageStore(partial(_reader, source), rules)


def _reader(source: _Source) -> ImageReader:
    tokenizer = load_tokenizer(
        source.model,
        chat_template=source.chat_template,
        trust_remote_code=source.trust_remote_code,
        revision=source.revision,
    )
    return ImageReader(
        source.model,
        tokenizer,
        revision=source.revision,
        trust_remote_code=source.trust_remote_code,
        max_pixels=source.max_pixels,
    )
