"""Weights of a model: grouped to travel, and found in its files, which are read bit for bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from oxrl.errors import CheckpointError, DataError
from oxrl.models.adapters import ADAPTER_FILE, has_adapter, model_name
from oxrl.models.load import VALUE_HEAD_FILE, read_weights
from oxrl.models.meta_init import DECODER
from oxrl.models.network import ValueModel
from oxrl.models.stored import GivenTensor, NamedTensor, Source, stored_in_folder
from oxrl.types import Tensors

BUCKET_BYTES = 512 * 2**20
# Of weights on their way to a sampler, from a GPU: one bucket is gathered while another is on its
# way. On a CPU memory of more than 32 MB is new to the process every time, which takes longer than
# to send it.
SENT_BYTES = 64 * 2**20
SENT_FROM_CPU = 24 * 2**20
# Prefix of a ValueModel's other parameters, which are in a file of their own.
VALUE_HEAD = "value_head."

Sources = Iterator[tuple[str, Source]]


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


def kept_buffers(host: Module) -> Tensors:
    """The buffers that a checkpoint holds: a router's bias, but no rotary frequencies."""
    kept = host.state_dict().keys()
    return {name: buffer.detach().cpu() for name, buffer in host.named_buffers() if name in kept}


def stored_names(model: Module) -> list[str]:
    """The parameters that a model's files hold: all, or with an adapter those that are trained."""
    adapted = has_adapter(model)
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not adapted
    ]


def stored_weights(model: Module, directory: Path, expected: Mapping[str, WeightType]) -> Sources:
    """Every weight that `save_model` wrote: (name in `model`, where to read it).

    Args:
        model: whose weights they are.
        directory: where they were written.
        expected: shape and dtype of each weight of the model.

    Raises:
        CheckpointError: a weight is missing, unknown, or of another shape or dtype than expected.
    """
    missing = {name: expected[name] for name in stored_names(model)}
    for name, source in _read_parts(model, directory):
        held = missing.pop(name, None)
        shown = source.tensor if isinstance(source, GivenTensor) else source
        if held != (shown.shape, shown.dtype):
            has = "no such weight" if held is None else f"{held.dtype} {tuple(held.shape)}"
            raise CheckpointError(
                f"{directory} holds {name!r} as {shown.dtype} {tuple(shown.shape)}, "
                f"the model has {has}"
            )
        yield name, source
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} weights of the model, "
            f"such as {next(iter(missing))!r}"
        )


def _read_parts(model: Module, directory: Path) -> Sources:
    """(name in `model`, where to read it) of everything in the files of `directory`."""
    files = ADAPTER_FILE if has_adapter(model) else "model*.safetensors"
    if not isinstance(model, ValueModel):
        yield from _read_part(model, directory, files)
        return
    for name, source in _read_part(model.decoder, directory, files):
        yield DECODER + name, source
    for name, source in _read_part(model.value_head, directory, VALUE_HEAD_FILE):
        yield VALUE_HEAD + name, source


def _read_part(host: Module, directory: Path, pattern: str) -> Sources:
    """(name in `host`, where to read it) of everything in the files of `pattern`."""
    tensors = stored_in_folder(directory, pattern)
    if not tensors:
        raise CheckpointError(f"no file {directory / pattern}")
    for name in kept_buffers(host):  # nothing changes them: the model has them already
        tensors.pop(name, None)
    if pattern == ADAPTER_FILE:
        for key, source in tensors.items():
            yield model_name(key), source
        return
    own = {name for name, _ in host.named_parameters()}
    if not isinstance(host, PreTrainedModel) or tensors.keys() == own:
        yield from tensors.items()
        return
    # Transformers stores some models otherwise than it computes with them (experts one by one, and
    # fused). It knows how to read that: all at once.
    try:
        whole = read_weights(type(host), str(directory), dtype="auto")
    except DataError as error:
        raise CheckpointError(f"{directory} holds no {type(host).__name__}: {error}") from error
    for name, parameter in whole.named_parameters():
        yield name, GivenTensor(parameter.detach())
