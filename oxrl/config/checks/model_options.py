"""How a model is read and computed, where that is not as its own files and PyTorch have it."""

from __future__ import annotations

from importlib.util import find_spec

from oxrl.config.checks.base import Check, Problems, at
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.errors import did_you_mean, why_no_file
from oxrl.modelfiles.chat_templates import TRAINING_TEMPLATES, template_file
from oxrl.modelfiles.dims import without_attention
from oxrl.modelfiles.files import FLASH, FLASH_INSTALL


def check_template(cfg: Config) -> Problems:
    """The chat template is a file, or one of oxRL's."""
    template = cfg.model.chat_template
    if template is not None and not template_file(template).is_file():
        near = did_you_mean(template, TRAINING_TEMPLATES)
        known = "" if near else f", nor a template of oxRL: {', '.join(TRAINING_TEMPLATES)}"
        yield Problem("model.chat_template", f"{why_no_file(template)}{near}{known}", template)


def check_attention(cfg: Config) -> Problems:
    """What computes attention is installed, and can do what the model and the run ask for."""
    wanted = cfg.model.attention
    flash = wanted == "flash_attention_2"
    rules: list[str] = []
    lacking = without_attention(cfg.model.name, wanted)
    if lacking is not None:
        rules.append(f"{lacking}: set it to auto")
    if flash and find_spec(FLASH) is None:
        rules.append(f"needs the flash-attn package, which is not installed: {FLASH_INSTALL}")
    if flash and cfg.run.device == "cpu":
        rules.append("needs a GPU, and run.device is cpu: set it to sdpa")
    if flash and cfg.model.dtype != "bfloat16":
        rules.append("computes in bfloat16 only: set model.dtype to bfloat16, or it to sdpa")
    if rules:
        yield at("model.attention", "; ".join(rules), "model.name")


def check_offload(cfg: Config) -> Problems:
    """Activations are offloaded where few of them are kept."""
    if cfg.model.offload_activations and not cfg.model.gradient_checkpointing:
        yield at(
            "model.offload_activations",
            "moves what gradient checkpointing keeps of each layer, and everything is kept without "
            "it; add model.gradient_checkpointing: true, or remove it",
            "model.gradient_checkpointing",
        )


MODEL_OPTIONS: tuple[Check, ...] = (check_template, check_attention, check_offload)
