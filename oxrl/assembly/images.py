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

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
