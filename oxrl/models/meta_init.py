"""Models whose weights come later: built without them, for an engine that cuts them up.

Each parameter is on the meta device, where a tensor has a shape and no memory; the model remembers
where its weights are stored. Whoever knows which piece it holds reads that piece alone. Buffers,
such as rotary frequencies, are there from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from oxrl.modelfiles.folder import HEADS, has_own_head, stored_kinds, weight_files
from oxrl.modelfiles.hub_status import hub_or_cache
from oxrl.models.stored import StoredTensor, StoredTensors, stored_in_files
from oxrl.models.weights import plain_name
from oxrl.types import Tensors

ATTRIBUTE = "oxrl_weights_later"
# All that is read of a model on the hub, beside what its tokenizer needs.
OF_MODEL = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "model*.safetensors",
)
# In config.json: weights are not there as numbers, or not in the usual files.
OTHERWISE_STORED = ("quantization_config", "transformers_weights")
# Prefix of the backbone's parameters in a ValueModel.
DECODER = "decoder."


@dataclass(frozen=True)
class Later:
    """The stored weights that a model still waits for, and the device that they belong on."""

    stored: Mapping[str, StoredTensor]
    device: torch.device


def weights_later(model: Module) -> Later | None:
    """The weights that a model still waits for; None where they are all there."""
    decoder = getattr(model, "decoder", None)
    return getattr(model, ATTRIBUTE, None) or getattr(decoder, ATTRIBUTE, None)


def home_of(model: Module) -> torch.device:
    """The device that a model computes on, once its weights are there."""
    later = weights_later(model)
    return next(model.parameters()).device if later is None else later.device


def awaited(model: Module) -> StoredTensors:
    """The stored tensor of every parameter that is still to come, by its name in `model`."""
    later = weights_later(model)
    found: StoredTensors = {}
    for name, parameter in model.named_parameters():
        if later is not None and parameter.is_meta:
            plain = plain_name(name)
            if getattr(model, ATTRIBUTE, None) is None:
                plain = plain.removeprefix(DECODER)
            found[name] = later.stored[plain]
    return found


def arrived(model: Module) -> None:
    """Note that all weights are there."""
    for host in (model, getattr(model, "decoder", None)):
        if hasattr(host, ATTRIBUTE):
            delattr(host, ATTRIBUTE)


def base_of(model: PreTrainedModel) -> PreTrainedModel:
    """The backbone of a model; its weights come later where those of the model do."""
    base: Any = model.base_model
    later = weights_later(model)
    if later is not None and base is not model:
        prefix = f"{model.base_model_prefix}."
        names = {name.removeprefix(prefix): stored for name, stored in later.stored.items()}
        setattr(base, ATTRIBUTE, Later(names, later.device))
    return base


def build_without_weights(
    model_class: type[Any],
    name: str,
    *,
    dtype: torch.dtype,
    attention: str,
    revision: str | None,
    device: torch.device,
) -> PreTrainedModel | None:
    """A model without its weights, which remembers where they are stored.

    Args:
        model_class: of transformers, with a `from_config`.
        name: a directory or a hub name.
        dtype: of its parameters.
        attention: what computes it; "auto": transformers' choice.
        revision: commit, tag or branch on the hub; None: the main branch.
        device: where its weights go, and its buffers are.

    Returns:
        None where the files do not hold the parameters as the model computes with them (experts one
        by one, other names, quantised) or have another name: transformers alone knows how to read
        those, whole.
    """
    folder = Path(name) if Path(name).is_dir() else _fetched(name, revision)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if any(getattr(config, key, None) for key in OTHERWISE_STORED):
        return None
    tied = getattr(config, "tie_word_embeddings", False)
    if tied and has_own_head(stored_kinds(folder), dtype):
        config.tie_word_embeddings = False
    chosen = {} if attention == "auto" else {"attn_implementation": attention}
    with parameters_on_meta():
        model: PreTrainedModel = model_class.from_config(config, dtype=dtype, **chosen)
    stored = stored_in_files(weight_files(folder))
    copies = stored.keys() & model.all_tied_weights_keys
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    for parameter, shape in expected.items():
        if parameter not in stored or stored[parameter].shape != shape:
            return None
    if kept_buffers(model) or not all(name.endswith(HEADS) for name in copies):
        return None
    model.config.name_or_path = name
    # As after reading: the files have the names of the parameters, and are written with them.
    setattr(model, "_weight_conversions", [])  # noqa: B010
    if model.can_generate():
        model.generation_config = _generation_config(folder)
    kept = {name: stored[name] for name in expected}
    setattr(model, ATTRIBUTE, Later(kept, device))
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # pyright: ignore[reportPrivateUsage]
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give new parameters of modules no memory inside the block; buffers have theirs.

    A parameter that is there already stays the same one, so tied weights stay tied.
    """
    register = Module.register_parameter

    def on_meta(module: Module, name: str, parameter: Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            empty = parameter.to("meta")
            parameter = Parameter(empty, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    Module.register_parameter = on_meta  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Module.register_parameter = register


def materialised(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor that has none yet; any other as it is."""
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _fetched(name: str, revision: str | None) -> Path:
    """The folder of a model of the hub in its cache."""
    from huggingface_hub import snapshot_download

    with hub_or_cache():
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(OF_MODEL)))


def _generation_config(folder: Path) -> GenerationConfig:
    """The authors' settings of generation, or else those in the model's config.json."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(folder, config_file_name="config.json")


def kept_buffers(host: Module) -> Tensors:
    """The buffers that a checkpoint holds: a router's bias, but no rotary frequencies."""
    kept = host.state_dict().keys()
    return {name: buffer.detach().cpu() for name, buffer in host.named_buffers() if name in kept}
