"""Low-rank adapters: put on, stored and merged.

LoRA (arXiv:2106.09685) gives a frozen weight W a term s B A with s = alpha / rank; rsLoRA
(arXiv:2312.03732) has s = alpha / sqrt(rank), with which terms of any rank are of one size; DoRA
(arXiv:2402.09353) also trains how long the rows of W + s B A are, a magnitude for each output.
peft is imported only when one is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from transformers import PreTrainedModel

from oxrl.errors import ConfigError, MissingExtraError
from oxrl.functional.masks import at_least_float32
from oxrl.modelfiles.folder import family_of
from oxrl.models.four_bit import in_four_bits, note_four_bit, whole_weight
from oxrl.models.meta_init import home_of, weights_later
from oxrl.models.stored import NamedTensor, NamedTensors
from oxrl.models.vision_network import language_linears
from oxrl.models.weights import IN_MODEL, adapted_layers, plain_name
from oxrl.types import TensorMap

# Of a layer with DoRA. peft writes this name without `IN_FILE` of models/weights.py and reads it
# either way; transformers, which reads adapters too, would leave out magnitudes that are called as
# peft does.
MAGNITUDE = ".lora_magnitude_vector"
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """The options of an adapter.

    rank: rows of A and columns of B. alpha: of `scale`.
    targets: "all-linear" (all but the output head), or layer names separated by commas.
    rslora: see `scale`. dora: train the lengths of rows too.
    """

    rank: int
    alpha: float
    targets: str = ALL_LINEAR
    rslora: bool = False
    dora: bool = False

    @property
    def scale(self) -> float:
        """The factor that B A is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def add_adapter(
    model: PreTrainedModel,
    options: AdapterOptions,
    *,
    base: str,
    seed: int,
    revision: str | None = None,
) -> None:
    """Freeze `model` and give its linear layers W a trained term, scale * B A.

    Args:
        model: changed in place.
        options: which adapter.
        base: where the frozen weights can be loaded from again; kept in the adapter's files.
        seed: of A; B starts at 0, and so does the term; magnitudes start as the lengths of rows.
        revision: of the base, where that is on the hub; kept beside it.

    Raises:
        ConfigError: no linear layer has one of the names, or peft has no adapter for a layer.
        MissingExtraError: peft is not installed.
    """
    head = model.get_output_embeddings()
    present = {name.rpartition(".")[2] for name, _ in language_linears(model)}
    wanted = present
    if options.targets != ALL_LINEAR:
        wanted = {name.strip() for name in options.targets.split(",")}
    unknown = sorted(wanted - present)
    if unknown or not present:
        raise ConfigError(
            f"lora.targets: the model has no linear layer for {unknown or options.targets}, and "
            "adapters go on no other kind; it has "
            f"{sorted(present) or 'none beside its output head: set lora.rank to 0'}"
        )
    config = _peft().LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        use_rslora=options.rslora,
        use_dora=options.dora,
        target_modules=_target_modules(model, wanted),
        task_type=None if head is None else "CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
        revision=revision,
    )
    if in_four_bits(model):
        # peft asks for it; the backbone of a critic does not say so.
        cast(Any, model).is_loaded_in_4bit = True
    with torch.random.fork_rng(devices=[]), _standing_in(model):
        torch.manual_seed(seed)
        try:
            _peft().inject_adapter_in_model(config, model)  # which also freezes everything else
        except ValueError as error:  # a layer that is no linear one has the name of one that is
            raise ConfigError(f"lora.targets: {error}; name others of {sorted(present)}") from error
    if options.dora:
        _measure_rows(model)
    model.eval()


@torch.no_grad()
def _measure_rows(model: PreTrainedModel) -> None:
    """Begin with the magnitudes that W has: with these nothing changes.

    All of the adapter is float32 then: lengths in bfloat16 would jump as W + s B A changes. peft
    measures in the type of W, and knows nothing of weights that come later. One layer's weight is
    in memory at a time.
    """
    later = weights_later(model)
    for name, layer in adapted_layers(model):
        weight = whole_weight(layer.base_layer.weight)
        if weight.is_meta and later is not None:
            flat = torch.empty(weight.numel(), dtype=weight.dtype)
            later.stored[f"{name}.weight"].fill(flat)
            weight = flat.view(weight.shape)
        for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector):
            parameter = part["default"].weight
            parameter.data = at_least_float32(parameter.data)
        magnitude = layer.lora_magnitude_vector["default"].weight
        magnitude.copy_(row_lengths(at_least_float32(weight)))


def row_lengths(weight: Tensor) -> Tensor:
    """Length of each row of a weight [outputs, inputs]: what DoRA has a magnitude for."""
    return torch.linalg.norm(weight, dim=1)


@contextmanager
def _standing_in(model: Module) -> Iterator[None]:
    """Give layers whose weights come later some without memory, on the model's device, inside.

    An adapter is made where the weights of its layer are, and has to have values.
    """
    waiting: list[tuple[Module, Parameter]] = []
    for _, layer in model.named_modules():
        weight = layer._parameters.get("weight")  # pyright: ignore[reportPrivateUsage]
        if isinstance(layer, Linear) and weight is not None and weight.is_meta:
            waiting.append((layer, weight))
            one = torch.zeros((), dtype=weight.dtype, device=home_of(model))
            layer.weight = Parameter(one.expand(weight.shape), requires_grad=False)
    try:
        yield
    finally:
        for layer, weight in waiting:
            layer.weight = weight.requires_grad_(False)


def _target_modules(model: PreTrainedModel, wanted: Collection[str]) -> list[str] | str:
    """The layers that get an adapter, as peft takes them: names, or a pattern of whole names.

    Vision towers have layers of the same names as the language part, which get none.
    """
    family = family_of(model)
    if family is None:
        return sorted(wanted)
    inside = re.escape(f"{model.base_model_prefix}.{family.language}")
    names = "|".join(map(re.escape, sorted(wanted)))
    return rf"{inside}(.*\.)?({names})"


def describe_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Write what is said of an adapter beside its weights, in peft's format.

    Transformers loads them with their base.
    """
    config = cast(Any, model).peft_config["default"]
    if not isinstance(config.target_modules, str):
        # It is a set, whose order differs from process to process.
        config.target_modules = sorted(config.target_modules)
    config.save_pretrained(directory)
    if in_four_bits(model):
        note_four_bit(directory)


def merge_adapter(model: PreTrainedModel, folder: str) -> PreTrainedModel:
    """`model` with the adapter in `folder` merged into its weights, see `merged_weights`."""
    adapted = _peft().PeftModel.from_pretrained(model, folder)
    return adapted.merge_and_unload().requires_grad_(True)


def merged_weights(base: Iterable[NamedTensor], adapter: TensorMap, scale: float) -> NamedTensors:
    """Every weight of a model with an adapter as one without has it.

        LoRA  W' = W + scale * B A
        DoRA  W' = m * (W + scale * B A) / ||W + scale * B A||, row by row

    Source: LoRA, arXiv:2106.09685, section 4.1; DoRA, arXiv:2402.09353, equation 5, whose columns
    are rows here, as PyTorch and peft store W.

    Args:
        base: (name, weight) of the model without adapter.
        adapter: name in the model with adapter -> A, B or m.
        scale: see `AdapterOptions.scale`.

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
        merged = weight.float().add(change, alpha=scale)
        magnitude = adapter.get(f"{layer}{MAGNITUDE}{IN_MODEL}")
        if magnitude is not None:
            stretch = magnitude.float() / row_lengths(merged)
            merged *= stretch[:, None]
        yield name, merged.to(weight.dtype)


def merged_into(model: Module, weights: Iterable[NamedTensor], adapter: TensorMap) -> NamedTensors:
    """The weights of a model with an adapter, as one without has them.

    Args:
        model: says how its adapter is scaled.
        weights: every one, by its name in `model`; those of the adapter are left out.
        adapter: those of the adapter, in any type.

    Returns:
        As `merged_weights`.
    """
    _, first = next(adapted_layers(model))
    base = ((plain_name(name), weight) for name, weight in weights if name not in adapter)
    return merged_weights(base, adapter, first.scaling["default"])


def _peft() -> Any:
    try:
        return import_module("peft")
    except ImportError:
        raise MissingExtraError(
            "adapters need peft, which is not installed: pip install 'oxrl[lora]'"
        ) from None
