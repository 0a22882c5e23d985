"""Tensors in safetensors files, read in parts: whoever holds a piece of a weight reads that alone.

Read, not mapped: what is read is what the process asked for, and lands where it stays.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite, prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.errors import DataError

# The most that is read on the way to another type or device, in bytes.
READ_BYTES = 16 * 2**20
# By the name that a file gives them.
TypesByName = Mapping[str, torch.dtype]
TYPES: TypesByName = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# What an optimizer keeps may be codes, too.
KEPT_TYPES: TypesByName = {**TYPES, "U8": torch.uint8}


class StoredTensor(NamedTuple):
    """A tensor in a file; `begin`: of its first byte there."""

    path: Path
    dtype: torch.dtype
    shape: torch.Size
    begin: int

    def fill(self, target: Tensor, start: int = 0, rounded: torch.dtype | None = None) -> int:
        """Read a piece, in bounded memory.

        Args:
            target: flat; as many elements as it has are read, and cast to its type.
            start: number of the first of them, counted through the whole tensor.
            rounded: type that they are rounded to on the way; None: that of `target`.

        Returns:
            How many of them are NaN or infinite.

        Raises:
            DataError: the file is cut off.
            OSError: it cannot be read.
        """
        size = self.dtype.itemsize
        rounded = rounded or target.dtype
        direct = target.device.type == "cpu" and self.dtype == rounded == target.dtype
        most = READ_BYTES // size
        wrong = 0
        with self.path.open("rb") as file:
            for at in range(0, target.numel(), most):
                part = target[at : at + most]
                read = part if direct else torch.empty(part.shape, dtype=self.dtype)
                file.seek(self.begin + (start + at) * size)
                if file.readinto(read.view(torch.uint8).numpy().data) < read.nbytes:
                    raise DataError(f"{self.path} is cut off: it ends before byte {file.tell()}")
                if not direct:
                    part.copy_(read.to(rounded))
                wrong += non_finite_values(part)
        return wrong


class GivenTensor(NamedTuple):
    """A whole tensor in memory, which is read as one in a file is."""

    tensor: Tensor

    def fill(self, target: Tensor, start: int = 0, rounded: torch.dtype | None = None) -> int:
        """See StoredTensor; what was given is not looked at."""
        part = self.tensor.reshape(-1)[start : start + target.numel()]
        target.copy_(part if rounded is None else part.to(rounded))
        return 0


# What a piece of a weight is read from.
Source = StoredTensor | GivenTensor


def non_finite_values(tensor: Tensor) -> int:
    """Count the values of a tensor that are NaN or infinite; takes one pass where none is."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0
    if all(map(isfinite, tensor.detach().aminmax())):  # both are NaN where any value is
        return 0
    return int((~tensor.isfinite()).sum())


NamedTensor = tuple[str, Tensor]
# One after the other, as they are read or gathered.
NamedTensors = Iterator[NamedTensor]
# By name.
StoredTensors = dict[str, StoredTensor]


def stored_in(path: Path, types: TypesByName = TYPES) -> StoredTensors:
    """Every tensor of numbers in a safetensors file, by name; of `types`, as the format has them.

    The file begins with eight bytes of length and a header in JSON, with the place of each tensor
    in what follows. Source: the format in the README of huggingface/safetensors.

    Raises:
        DataError: it is none.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length))
        except (ValueError, MemoryError, OverflowError, RecursionError) as error:
            raise DataError(f"{path} is no safetensors file: {error}") from error
    found: StoredTensors = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in types:
            continue
        dtype = types[entry["dtype"]]
        shape = torch.Size(entry["shape"])
        begin, end = entry["data_offsets"]
        if end - begin != prod(shape) * dtype.itemsize:
            raise DataError(f"{path} says of {name!r} that it has {end - begin} bytes")
        found[name] = StoredTensor(path, dtype, shape, 8 + length + begin)
    return found


def stored_in_files(paths: Iterable[Path], types: TypesByName = TYPES) -> StoredTensors:
    """Every tensor of `types` in safetensors files, by name; of several, that of the last."""
    found: StoredTensors = {}
    for path in paths:
        found |= stored_in(path, types)
    return found
