"""Adapters: where they can be trained, and on what."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.checks.base import Check, Problems, at
from oxrl.config.field import EVALUATING
from oxrl.config.schema import Config
from oxrl.modelfiles.builtin import is_builtin
from oxrl.modelfiles.folder import ADAPTER_CONFIG
from oxrl.modelfiles.vision import vision_family


def check_adapter(cfg: Config) -> Problems:
    """Adapters where they can be trained and sampled."""
    if cfg.model.dtype == "bfloat16" and not cfg.train.engine.bfloat16_adapters:
        yield at(
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
            "lora.rank",
            (
                f"{cfg.train.alg_name} moves its reference by all weights, "
                "of which adapters have none: set it to 0"
            ),
            "train.alg_name",
        )


def check_four_bit(cfg: Config) -> Problems:
    """Weights in four bits where whole ones are asked of nobody."""
    if not cfg.model.load_in_4bit:
        return
    rules: list[tuple[str, tuple[str, ...]]] = []
    if cfg.train.backend != "local":
        why = "one process holds the codes, and ranks cut weights up: set train.backend to local"
        rules.append((why, ("train.backend",)))
    if cfg.recipe in EVALUATING and cfg.samplers:
        if cfg.lora.delivery == "adapter":
            why = (
                "samplers that read the model's files have other weights under the adapter than "
                "the codes hold: set lora.delivery to merged, or inference_engine.name to local "
                "and its actors to 0"
            )
            rules.append((why, ("lora.delivery", "inference_engine")))
    if vision_family(cfg.model.name) is not None:
        why = "is known for models of text alone, and this one reads images: set it to false"
        rules.append((why, ("model.name",)))
    for why, also in rules:
        yield at("model.load_in_4bit", why, *also, "lora.rank")


def check_adapter_model(cfg: Config) -> Problems:
    """Adapters on a model that can be loaded again, and has none itself."""
    if is_builtin(cfg.model.name):
        yield at(
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
            "model.name",
            "holds an adapter; merge it first: oxrl export FOLDER --out FOLDER",
            "lora.rank",
        )


ADAPTER: tuple[Check, ...] = (check_adapter, check_adapter_model, check_four_bit)
