"""Weights of a model: their types, which of them its files hold, adapters, groups that travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from oxrl.models.stored import NamedTensor

BUCKET_BYTES = 512 * 2**20
# Of weights on their way to a sampler, from a GPU: one bucket is gathered while another is on its
# way. On a CPU memory of more than 32 MB is new to the process every time, which takes longer than
# to send it.
SENT_BYTES = 64 * 2**20
SENT_FROM_CPU = 24 * 2**20
# An adapter's parameters in the model and in its file: `x.lora_A.default.weight`,
# `base_model.model.x.lora_A.weight`.
IN_MODEL = ".default.weight"
IN_FILE = ".weight"
# How the weight that an adapter lies beside is called.
UNDER_ADAPTER = ".base_layer."
FILE_PREFIX = "base_model.model."


class WeightType(NamedTuple):
    """Shape and dtype of a weight."""

    shape: torch.Size
    dtype: torch.dtype


def sent_bytes(device: torch.device) -> int:
    """The size in bytes of the buckets that leave a device for a sampler."""
    return SENT_FROM_CPU if device.type == "cpu" else SENT_BYTES


class Sized(Protocol):
    """A tensor, or what is said of one."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...


S = TypeVar("S", bound=Sized)


def buckets(
    named: Iterable[tuple[str, S]], *, limit: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, S]]]:
    """Group named tensors, in order, into lists of at most `limit` bytes.

    A larger tensor gets a list of its own.
    """
    bucket: list[tuple[str, S]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket = []
            size = 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class Whole(NamedTuple):
    """A bucket in one piece of memory, of which its tensors are parts; nobody else has it."""

    bucket: list[NamedTensor]
    memory: Tensor


def room_for(
    shapes: Sequence[tuple[str, Sequence[int]]], dtype: torch.dtype, device: torch.device
) -> Whole:
    """Memory for a bucket, with whatever is in it.

    Args:
        shapes: name and shape of each tensor, which lie one after the other.
        dtype: of all of them.
        device: where.
    """
    sizes = [torch.Size(shape).numel() for _, shape in shapes]
    memory = torch.empty(sum(sizes), dtype=dtype, device=device)
    bucket: list[NamedTensor] = []
    for (name, shape), part in zip(shapes, memory.split(sizes), strict=True):
        bucket.append((name, part.view(torch.Size(shape))))
    return Whole(bucket, memory)


def in_one_piece(bucket: list[NamedTensor]) -> Whole:
    """A copy of tensors of one dtype on one device."""
    _, first = bucket[0]
    shapes = [(name, tensor.shape) for name, tensor in bucket]
    whole = room_for(shapes, first.dtype, first.device)
    torch.cat([tensor.reshape(-1) for _, tensor in bucket], out=whole.memory)
    return whole


def stored_names(model: Module) -> list[str]:
    """The parameters that a model's files hold: all, or with an adapter those that are trained."""
    adapted = has_adapter(model)
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not adapted
    ]


def adapted_layers(model: Module) -> Iterator[tuple[str, Any]]:
    """(name, layer) of all that carry an adapter."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            yield name, module


def has_adapter(model: Module) -> bool:
    """True if some layer of `model` carries an adapter."""
    return any(True for _ in adapted_layers(model))


@contextmanager
def adapter_off(model: Module) -> Iterator[None]:
    """Turn adapters off inside the block: the model is a reference then, without a copy."""
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def plain_name(name: str) -> str:
    """The name that a frozen weight has in the model without an adapter."""
    return name.replace(UNDER_ADAPTER, ".")


def file_name(name: str) -> str:
    """Return the name that a parameter of an adapter has in ADAPTER_FILE."""
    return FILE_PREFIX + name.removesuffix(IN_MODEL) + IN_FILE


def model_name(key: str) -> str:
    """The parameter that ADAPTER_FILE holds under `key`."""
    return key.removeprefix(FILE_PREFIX).removesuffix(IN_FILE) + IN_MODEL
