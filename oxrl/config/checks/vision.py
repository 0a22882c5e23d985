"""Models that read images: where these come from, and what of the model is trained."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.checks.base import Problems, at
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.modelfiles.vision import vision_family

REMOTE = ("http://", "https://")


def check_images(cfg: Config) -> Problems:
    """Check where images come from, how large they are, and what of their model is frozen."""
    family = vision_family(cfg.model.name)
    if family is None:
        return
    for root in cfg.data.image_places:
        if not root.startswith(REMOTE) and not Path(root).is_dir():
            rule = f"{root!r} is neither a folder here nor a URL of http or https"
            yield Problem("data.image_roots", rule, root)
    if cfg.data.image_min_side > cfg.data.image_max_side:
        rule = f"exceeds data.image_max_side {cfg.data.image_max_side}"
        yield at("data.image_min_side", rule, "data.image_max_side")
    if cfg.data.image_max_pixels is not None and family.layout != "patches":
        rule = f"{family.name} shows every image at a size that its own files fix: leave it out"
        yield at("data.image_max_pixels", rule, "model.name")
    still = cfg.lora.rank or "vision" in cfg.model.freeze
    if cfg.train.tower_lr is not None and (still or cfg.train.lr == 0):
        rule = "the vision tower is not trained (lora.rank, model.freeze or train.lr): leave it out"
        yield at("train.tower_lr", rule, "lora.rank", "model.freeze", "train.lr")
    if cfg.train.tower_lr is not None and cfg.train.backend == "deepspeed":
        rule = "DeepSpeed trains all weights at one rate: leave it out, or set train.backend: fsdp"
        yield at("train.tower_lr", rule, "train.backend")
    if cfg.model.freeze != "none" and cfg.lora.rank:
        rule = "adapters freeze all of the model already: leave it out"
        yield at("model.freeze", rule, "lora.rank")
