"""Weights of a model: their types, which of them its files hold, and groups that travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from oxrl.models.adapters import has_adapter
from oxrl.models.stored import NamedTensor

BUCKET_BYTES = 512 * 2**20
# Of weights on their way to a sampler, from a GPU: one bucket is gathered while another is on its
# way. On a CPU memory of more than 32 MB is new to the process every time, which takes longer than
# to send it.
SENT_BYTES = 64 * 2**20
SENT_FROM_CPU = 24 * 2**20


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
