"""The model: it is there, whole, of a kind that can be trained, and long enough."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.checks.base import Check, Problems, at
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.errors import did_you_mean
from oxrl.modelfiles.builtin import BUILTIN_DIMS, is_builtin
from oxrl.modelfiles.dims import model_context, why_unsupported
from oxrl.modelfiles.folder import ADAPTER_CONFIG, REFERENCE_FILE, folder_problems


def check_model(cfg: Config) -> Problems:
    """The model is there, as far as that can be seen without the network."""
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
    limit = cfg.model.max_length
    context = model_context(name)
    if limit is not None and context is not None and limit > context:
        yield at(
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


MODEL: tuple[Check, ...] = (check_model, check_model_files)


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
            "rollout.max_tokens",
            (
                f"{response} + data.max_prompt_tokens {prompt} = {prompt + response} "
                f"exceeds {bound}; lower one"
            ),
            *also,
        )
    elif response >= context:
        yield at(
            "rollout.max_tokens",
            f"leaves no room for a prompt in {bound}; set it below {context}",
            *also,
        )
