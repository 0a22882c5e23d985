"""Frozen weights in four bits under an adapter, by bitsandbytes.

Source: QLoRA, arXiv:2305.14314, section 3: NormalFloat (NF4) codes of 64 values with a common
scale, and the scales quantised once more. Each linear layer but the output head takes its weight
apart when it computes, into `model.dtype`; embeddings and norms stay as they are.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from transformers import BitsAndBytesConfig, PreTrainedModel

from oxrl.errors import DataError, MissingExtraError
from oxrl.models.weights import WeightType

# held: weights stay in four bits; rounded: they are what four bits can hold, in an ordinary type.
FourBit = Literal["no", "held", "rounded"]
CODES = "nf4"
# Beside an adapter's files: what was under it while it learned.
NOTE = "base_quantization.json"
INSTALL = "pip install 'oxrl[qlora]'"


def four_bit_settings(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Make the settings by which transformers loads a model's linear layers in four bits.

    Args:
        dtype: that they compute in.

    Returns:
        What `from_pretrained` takes as `quantization_config`.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise MissingExtraError(
            "weights in four bits (model.load_in_4bit, or an adapter that learned on some) need "
            f"bitsandbytes, which is not installed: {INSTALL}"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=CODES,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def whole_weight(parameter: Tensor) -> Tensor:
    """A weight as its layer computes with it: out of its codes, where it is held in four bits.

    Args:
        parameter: of any model.

    Returns:
        [outputs, inputs] of a weight in four bits; any other without its graph, not copied.
    """
    state = _state_of(parameter)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import (  # pyright: ignore[reportMissingImports]  (an extra)
        dequantize_4bit,
    )

    return dequantize_4bit(parameter.data, state)


def whole_type(parameter: Tensor) -> WeightType:
    """Shape and dtype of `whole_weight`.

    Args:
        parameter: of any model.

    Returns:
        What its layer computes with, without computing it.
    """
    state = _state_of(parameter)
    if state is None:
        return WeightType(parameter.shape, parameter.dtype)
    return WeightType(torch.Size(state.shape), state.dtype)


def in_four_bits(model: Module) -> bool:
    """True if some weight of a model is held in four bits.

    Args:
        model: any.
    """
    return any(_state_of(parameter) is not None for parameter in model.parameters())


def keep_readable(model: PreTrainedModel) -> None:
    """Have the codes stay where they are.

    On some CPUs bitsandbytes lays them out anew at the first token that is sampled, which the
    backward pass and whoever reads the weights would have to know of.

    Args:
        model: that was just loaded.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            cast(Any, layer).support_avx512bf16_for_cpu = False


def undo_four_bit(model: PreTrainedModel) -> None:
    """Make ordinary layers of those in four bits, with the weights that they compute with.

    Args:
        model: changed in place.
    """
    for name, layer in list(model.named_modules()):
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, Linear) or _state_of(weight) is None:
            continue
        plain = Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight = Parameter(whole_weight(layer.weight), requires_grad=False)
        plain.bias = layer.bias
        model.set_submodule(name, plain)
    quantizer: Any = model.hf_quantizer
    quantizer.remove_quantization_config(model)
    cast(Any, model).is_loaded_in_4bit = False


def note_four_bit(directory: Path) -> None:
    """Write beside an adapter that the weights under it were in four bits.

    Args:
        directory: of the adapter.
    """
    text = '{"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true, "load_in_4bit": true}'
    (directory / NOTE).write_text(text + "\n", encoding="utf-8")


def learned_in_four_bits(adapter: str) -> bool:
    """True if the weights under the adapter in a folder were in four bits while it learned.

    Args:
        adapter: the folder.

    Raises:
        DataError: they were, in a way that is not known here.
    """
    file = Path(adapter) / NOTE
    if not file.is_file():
        return False
    text = file.read_text(encoding="utf-8")
    if '"load_in_4bit": true' not in text or f'"{CODES}"' not in text:
        raise DataError(
            f"{file} says {text.strip()[:200]!r}, and only NF4 is known here: take an adapter that "
            "this version wrote, or the version that wrote this one"
        )
    return True


def _state_of(parameter: object) -> Any:
    """The state with which bitsandbytes decodes a weight in four bits; None for an ordinary one."""
    return getattr(parameter, "quant_state", None)
