"""`oxrl train --dry-run`: one step, on a random model of the same architecture, made small."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from oxrl.checkpoint.model_files import save_model
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.config.dry_run import dry_run_config
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_policy, is_builtin
from oxrl.modelfiles.builtin_vision import TINY_VL
from oxrl.modelfiles.folder import adapter_base, vision_family
from oxrl.models.load import load_tokenizer, named_in_errors
from oxrl.models.self_checks import shrink
from oxrl.seeds import stable_seed

# Stands in for a model of which nothing is at hand.
STAND_IN = "builtin:tiny"


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
        model = _write_shrunk(
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
        model = _write_stand_in(folder, seed=seed)
        described = f"{STAND_IN} instead of {name}, which cannot be had here ({error})"
    count = sum(parameter.numel() for parameter in model.parameters())
    return str(folder), f"{described}, {count:,} random weights"


def _write_shrunk(
    name: str,
    folder: Path,
    *,
    seed: int,
    trust_remote_code: bool,
    revision: str | None = None,
) -> PreTrainedModel:
    """Write a random model of the architecture of `name`, with its tokenizer, into `folder`.

    Args:
        name: a directory or a hub name.
        folder: is made.
        seed: of the random weights.
        trust_remote_code: run Python code that the model's authors ship with it.
        revision: commit, tag or branch on the hub; None: the main branch.

    Returns:
        The model that was written.

    Raises:
        DataError: nothing loadable under that name.
    """
    base = adapter_base(name)
    if base is not None:
        return _write_shrunk(base, folder, seed=seed, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code, revision=revision)
    with named_in_errors("model", name):
        config = AutoConfig.from_pretrained(
            name, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
        shrink(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code, dtype=torch.float32
            )
    save_model(model, folder)
    tokenizer.save_pretrained(folder)
    for code in Path(name).glob("*.py"):
        shutil.copy(code, folder)
    return model


def _write_stand_in(folder: Path, *, seed: int) -> PreTrainedModel:
    """Write the built-in model and its tokenizer into `folder`, which is made."""
    model = builtin_policy(STAND_IN, seed=seed)
    save_model(model, folder)
    load_tokenizer(STAND_IN).save_pretrained(folder)
    return model
