"""Adapters: where they can be trained, and on what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oxrl.config.checks.base import at
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.models.builtin import is_builtin
from oxrl.models.folder import ADAPTER_CONFIG
from oxrl.tables.engines import TRAINING_ENGINES


def check_adapter(cfg: Config) -> Iterator[Problem]:
    """Adapters where they can be trained and sampled."""
    if not cfg.lora.rank:
        return
    engine = TRAINING_ENGINES[cfg.train.backend]
    if cfg.model.dtype == "bfloat16" and not engine.bfloat16_adapters:
        yield at(
            cfg,
            "lora.rank",
            (
                "DeepSpeed rounds adapters to model.dtype, which are float32 elsewhere: "
                "train with fsdp, or in float32"
            ),
            "train.backend",
            "model.dtype",
        )
    if cfg.train.row.moves_reference:
        yield at(
            cfg,
            "lora.rank",
            (
                f"{cfg.train.alg_name} moves its reference by all weights, "
                "of which adapters have none: set it to 0"
            ),
            "train.alg_name",
        )


def check_adapter_model(cfg: Config) -> Iterator[Problem]:
    """Adapters on a model that can be loaded again, and has none itself."""
    if not cfg.lora.rank:
        return
    if is_builtin(cfg.model.name):
        yield at(
            cfg,
            "model.name",
            (
                "an adapter is stored without the model under it, "
                "and a built-in one is on no disk; "
                "give a folder, for one the checkpoint of an earlier run"
            ),
            "lora.rank",
        )
    elif (Path(cfg.model.name) / ADAPTER_CONFIG).is_file():
        yield at(
            cfg,
            "model.name",
            "holds an adapter; merge it first: oxrl export FOLDER --out FOLDER",
            "lora.rank",
        )
