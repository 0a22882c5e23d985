"""The prompt of a group is read once: what that does not go together with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oxrl.config.checks.base import at
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.models.vision import vision_family

FIELD = "train.share_prefix"


class Obstacle(NamedTuple):
    """Why prompts cannot be read once; what else than giving it up would help; which field says."""

    why: str
    instead: str
    field: str


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
        yield Obstacle("is for models that read text alone", "", "model.name")


def check_share_prefix(cfg: Config) -> Iterator[Problem]:
    """Nothing is in the way where it is asked for; auto does without."""
    if cfg.train.share_prefix is not True:
        return
    for why, instead, field in obstacles(cfg):
        yield at(cfg, FIELD, f"{why}; set it to false{instead}", field)
