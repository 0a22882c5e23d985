"""`oxrl train --dry-run`: one step, on a random model of the same architecture, made small."""

from __future__ import annotations

import tempfile
from pathlib import Path

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.config.dry_run import dry_run_config
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.builtin_vision import TINY_VL
from oxrl.modelfiles.vision import vision_family
from oxrl.models.shrink import STAND_IN, write_shrunk, write_stand_in
from oxrl.seeds import stable_seed


def dry_run(cfg: Config) -> str:
    """Run one step of `cfg` in a temporary folder.

    The model is `model.name`, with its tokenizer and chat template, at sizes that a moment is
    enough for. A model on the hub that cannot be had is stood in for by a built-in one.

    Returns:
        What was trained, in words.

    Raises:
        OxrlError: whatever a real run would have raised in its first step.
    """
    with tempfile.TemporaryDirectory(prefix="oxrl-dry-run-") as temporary:
        folder = Path(temporary)
        model, described = _model(cfg, folder / "model")
        run(dry_run_config(cfg, folder / "run", model))
    return described


def _model(cfg: Config, folder: Path) -> tuple[str, str]:
    """The name of what is trained, and what it is in words."""
    name = cfg.model.name
    seed = stable_seed("dry run", cfg.run.seed)
    if is_builtin(name):
        return name, name
    if vision_family(name) is not None:
        return TINY_VL, f"{TINY_VL} instead of {name}, which reads images"
    try:
        model = write_shrunk(
            name,
            folder,
            seed=seed,
            trust_remote_code=cfg.model.trust_remote_code,
            revision=cfg.model.revision,
        )
        described = f"{type(model).__name__} made small after {name}"
    except DataError as error:
        if Path(name).is_dir():
            raise
        model = write_stand_in(folder, seed=seed)
        described = f"{STAND_IN} instead of {name}, which cannot be had here ({error})"
    count = sum(parameter.numel() for parameter in model.parameters())
    return str(folder), f"{described}, {count:,} random weights"
