"""The prompt of a group is read once: what that does not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from oxrl.config.checks.base import at
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.models.vision import vision_family


def check_share_prefix(cfg: Config) -> Iterator[Problem]:
    """Attention is PyTorch's, nothing is computed twice, the model reads text."""
    if not cfg.train.share_prefix:
        return
    field = "train.share_prefix"
    if cfg.model.gradient_checkpointing:
        yield at(
            cfg,
            field,
            "does not go together with model.gradient_checkpointing, which computes layers again "
            "one by one; set one of the two to false",
            "model.gradient_checkpointing",
        )
    if cfg.model.attention not in ("auto", "sdpa"):
        yield at(
            cfg,
            field,
            f"needs model.attention sdpa, and it is {cfg.model.attention}; set it to false, or the "
            "attention to auto",
            "model.attention",
        )
    if cfg.train.backend == "deepspeed":
        yield at(
            cfg,
            field,
            "was not compared with plain rows on DeepSpeed; set it to false, or train.backend to "
            "local or fsdp",
            "train.backend",
        )
    if vision_family(cfg.model.name) is not None:
        yield at(
            cfg,
            field,
            "is for models that read text alone; set it to false",
            "model.name",
        )
