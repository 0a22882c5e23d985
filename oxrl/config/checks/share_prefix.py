"""The prompt of a group is read once: what that does not go together with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oxrl.config.checks.base import Problems, at
from oxrl.config.field import COMPARING
from oxrl.config.schema import Config
from oxrl.modelfiles.vision import vision_family
from oxrl.tables.preference import METHODS

FIELD = "train.share_prefix"


class Obstacle(NamedTuple):
    """A reason why prompts cannot be read once.

    why: the reason. instead: what else than giving it up would help. field: the one that says so.
    """

    why: str
    instead: str
    field: str


def sharing_is_read(cfg: Config) -> bool:
    """True if the recipe has rows of one prompt."""
    return cfg.recipe in COMPARING


def open_choice(cfg: Config) -> bool:
    """True if there is anything to choose: another recipe does not have the field."""
    return sharing_is_read(cfg) and cfg.train.share_prefix == "auto"


def obstacles(cfg: Config) -> Iterator[Obstacle]:
    """Attention is PyTorch's, the engine was compared with plain rows, the model reads text."""
    if cfg.model.attention not in ("auto", "sdpa"):
        yield Obstacle(
            f"needs model.attention sdpa, and it is {cfg.model.attention}",
            ", or the attention to auto",
            "model.attention",
        )
    if cfg.train.backend == "deepspeed":
        yield Obstacle(
            "was not compared with plain rows on DeepSpeed",
            ", or train.backend to local or fsdp",
            "train.backend",
        )
    if vision_family(cfg.model.name) is not None:
        yield Obstacle("does not work with models that see images", "", "model.name")
    if cfg.recipe == "rl":
        return
    if cfg.train.backend != "local":
        yield Obstacle(
            "was not compared with plain rows on several ranks that learn from pairs",
            ", or train.backend to local",
            "train.backend",
        )
    if METHODS[cfg.train.alg_name].unpaired:
        yield Obstacle("needs pairs, and this method reads single completions", "", FIELD)


def check_share_prefix(cfg: Config) -> Problems:
    """Nothing is in the way where it is asked for; auto does without."""
    if cfg.train.share_prefix is not True:
        return
    for why, instead, field in obstacles(cfg):
        yield at(FIELD, f"{why}; set it to false{instead}", field)
