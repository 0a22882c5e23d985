"""Low-rank adapters: put on, switched off, stored and merged.

peft is imported only when one is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from oxrl.errors import EngineError, MissingExtraError
from oxrl.models.later import home_of
from oxrl.models.vision_network import family_of
from oxrl.models.vision_parts import language_linears

# peft's own file names: whatever reads adapters reads these.
ADAPTER_FILE = "adapter_model.safetensors"
# An adapter's parameters in the model and in its file: `x.lora_A.default.weight`,
# `base_model.model.x.lora_A.weight`.
IN_MODEL = ".default.weight"
IN_FILE = ".weight"
# How the weight that an adapter lies beside is called.
UNDER_ADAPTER = ".base_layer."
FILE_PREFIX = "base_model.model."
ALL_LINEAR = "all-linear"


def add_adapter(
    model: PreTrainedModel,
    *,
    base: str,
    rank: int,
    alpha: float,
    targets: str,
    seed: int,
    revision: str | None = None,
) -> None:
    """Freeze `model` and give its linear layers W a trained term alpha / rank * B A.

    Args:
        model: changed in place.
        base: where the frozen weights can be loaded from again; kept in the adapter's files.
        rank: rows of A and columns of B.
        alpha: see above.
        seed: of A; B starts at 0, and so does the term.
        targets: "all-linear" (all but the output head), or layer names separated by commas.
        revision: of the base, where that is on the hub; kept beside it.

    Raises:
        EngineError: no linear layer has one of the names.
        MissingExtraError: peft is not installed.
    """
    head = model.get_output_embeddings()
    linears = [name for name, _ in language_linears(model)]
    present = {name.rpartition(".")[2] for name in linears}
    wanted = present if targets == ALL_LINEAR else {name.strip() for name in targets.split(",")}
    unknown = sorted(wanted - present)
    if unknown:
        raise EngineError(
            f"lora.targets: {type(model).__name__} has no linear layer {unknown[0]!r}; "
            f"it has {sorted(present)}"
        )
    config = _peft().LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_target_modules(model, wanted),
        task_type=None if head is None else "CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
        revision=revision,
    )
    with torch.random.fork_rng(devices=[]), _standing_in(model):
        torch.manual_seed(seed)
        _peft().inject_adapter_in_model(config, model)  # which also freezes everything else
    model.eval()


@contextmanager
def _standing_in(model: nn.Module) -> Iterator[None]:
    """Inside, layers whose weights come later have some without memory, on the model's device.

    An adapter is made where the weights of its layer are, and has to have values.
    """
    waiting: list[tuple[nn.Module, nn.Parameter]] = []
    for _, layer in model.named_modules():
        weight = layer._parameters.get("weight")  # pyright: ignore[reportPrivateUsage]
        if isinstance(layer, nn.Linear) and weight is not None and weight.is_meta:
            waiting.append((layer, weight))
            one = torch.zeros((), dtype=weight.dtype, device=home_of(model))
            layer.weight = nn.Parameter(one.expand(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in waiting:
            layer.weight = weight.requires_grad_(False)


def _target_modules(model: PreTrainedModel, wanted: Collection[str]) -> list[str] | str:
    """Which layers get an adapter, as peft takes it: names, or a pattern of whole names.

    Vision towers have layers of the same names as the language part, which get none.
    """
    family = family_of(model)
    if family is None:
        return sorted(wanted)
    inside = re.escape(f"{model.base_model_prefix}.{family.language}")
    names = "|".join(map(re.escape, sorted(wanted)))
    return rf"{inside}(.*\.)?({names})"


def has_adapter(model: nn.Module) -> bool:
    """Whether some layer of `model` carries an adapter."""
    return any(hasattr(module, "lora_A") for module in model.modules())


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Inside the block, the model as it was before `add_adapter`: a reference without a copy."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapter(model: PreTrainedModel, directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the adapter's `tensors` (names of `model`) in peft's format.

    Transformers loads them with their base.
    """
    config = cast(Any, model).peft_config["default"]
    if not isinstance(config.target_modules, str):
        # It is a set, whose order differs from process to process.
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(directory)
    named = {
        FILE_PREFIX + name.removesuffix(IN_MODEL) + IN_FILE: tensor
        for name, tensor in tensors.items()
    }
    save_file(named, directory / ADAPTER_FILE, metadata={"format": "pt"})


def model_name(key: str) -> str:
    """The parameter that ADAPTER_FILE holds under `key`."""
    return key.removeprefix(FILE_PREFIX).removesuffix(IN_FILE) + IN_MODEL


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """`model` with W + alpha / rank * B A as its weights, A and B of the adapter in `folder`."""
    adapted = _peft().PeftModel.from_pretrained(model, folder)
    return adapted.merge_and_unload().requires_grad_(True)


def merged_weights(
    base: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of a model with an adapter as one without has it: W + scale * B A.

    Args:
        base: (name, weight) of the model without adapter.
        adapter: name in the model with adapter -> A or B.
        scale: alpha / rank.

    Returns:
        (name, weight in its own dtype), summed in float32.
    """
    for name, weight in base:
        layer = name.removesuffix(".weight")
        lower = adapter.get(f"{layer}.lora_A{IN_MODEL}")
        if lower is None:
            yield name, weight
            continue
        raised = adapter[f"{layer}.lora_B{IN_MODEL}"]
        change = raised.float() @ lower.float()
        yield name, weight.float().add(change, alpha=scale).to(weight.dtype)


def plain_name(name: str) -> str:
    """What a frozen weight is called in the model without adapter."""
    return name.replace(UNDER_ADAPTER, ".")


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError:
        raise MissingExtraError(
            "adapters need peft, which is not installed: pip install 'oxrl[lora]'"
        ) from None
