"""The model: it is there, whole, of a kind that can be trained, and long enough."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from oxrl.config.checks.base import Check, Problems, at
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.data.templates import TRAINING_TEMPLATES, template_file
from oxrl.errors import did_you_mean, why_no_file
from oxrl.modelfiles.builtin import BUILTIN_DIMS, is_builtin
from oxrl.modelfiles.dims import (
    model_context,
    why_unsupported,
    without_attention,
)
from oxrl.modelfiles.files import FLASH, FLASH_INSTALL
from oxrl.modelfiles.folder import ADAPTER_CONFIG, REFERENCE_FILE, folder_problems


def check_model(cfg: Config) -> Problems:
    """Model and template are there, as far as that can be seen without the network."""
    name = cfg.model.name
    if is_builtin(name):
        if name not in BUILTIN_DIMS:
            names = ", ".join(sorted(BUILTIN_DIMS))
            yield Problem(
                "model.name", f"must be one of {names}{did_you_mean(name, BUILTIN_DIMS)}", name
            )
    elif name.startswith((".", "/", "~")):
        folder = Path(name)
        files = ("config.json", ADAPTER_CONFIG, REFERENCE_FILE)
        if not any((folder / file).is_file() for file in files):
            state = "has no config.json" if folder.is_dir() else "is no folder"
            yield Problem(
                "model.name",
                f"{state}; give a folder in Hugging Face format, a hub name or builtin:tiny",
                name,
            )
    template = cfg.model.chat_template
    if template is not None and not template_file(template).is_file():
        near = did_you_mean(template, TRAINING_TEMPLATES)
        known = "" if near else f", nor a template of oxRL: {', '.join(TRAINING_TEMPLATES)}"
        yield Problem("model.chat_template", f"{why_no_file(template)}{near}{known}", template)
    limit = cfg.model.max_length
    context = model_context(name)
    if limit is not None and context is not None and limit > context:
        yield at(
            cfg,
            "model.max_length",
            f"exceeds the model's context {context}; lower it",
            "model.name",
        )


def check_model_files(cfg: Config) -> Problems:
    """The model is a causal language model, and its files are whole where they are here."""
    name = cfg.model.name
    unsupported = why_unsupported(name)
    if unsupported is not None:
        yield Problem("model.name", unsupported, name)
    folder = Path(name)
    is_reference = (folder / REFERENCE_FILE).is_file()
    if folder.is_dir() and (is_reference or any(folder.glob("*.safetensors*"))):
        damages = folder_problems(folder)
        if damages:
            yield Problem("model.name", "; ".join(damages), name)


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
        yield at(cfg, "model.attention", "; ".join(rules), "model.name")


def check_offload(cfg: Config) -> Problems:
    """Activations are offloaded where few of them are kept."""
    if cfg.model.offload_activations and not cfg.model.gradient_checkpointing:
        yield at(
            cfg,
            "model.offload_activations",
            "moves what gradient checkpointing keeps of each layer, and everything is kept without "
            "it; add model.gradient_checkpointing: true, or remove it",
            "model.gradient_checkpointing",
        )


MODEL: tuple[Check, ...] = (check_model, check_model_files, check_attention, check_offload)


def check_context(cfg: Config) -> Problems:
    """Prompt and response fit into the model's context."""
    limit = cfg.model.max_length
    context = cfg.model.context_length
    if context is None:
        return
    bound = f"the model's context {context}" if limit is None else f"model.max_length {limit}"
    prompt = cfg.data.max_prompt_tokens
    response = cfg.rollout.max_tokens
    also = ("model.max_length", "model.name", "data.max_prompt_tokens")
    if prompt is not None and prompt + response > context:
        yield at(
            cfg,
            "rollout.max_tokens",
            (
                f"{response} + data.max_prompt_tokens {prompt} = {prompt + response} "
                f"exceeds {bound}; lower one"
            ),
            *also,
        )
    elif response >= context:
        yield at(
            cfg,
            "rollout.max_tokens",
            f"leaves no room for a prompt in {bound}; set it below {context}",
            *also,
        )
