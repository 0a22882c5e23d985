"""The one checkpoint format of all training engines: its state, and the place of every byte.

Beside the weights, which Hugging Face reads, lie `optimizer_<kind>-*.safetensors` with what is kept
of each weight, whole and as it is held, under the names of the weights, and trainer_state.json.
Where every byte of a file belongs is known before any is written: whoever holds a piece of a weight
can write it to its place, and the file is the same whoever wrote it: that of the safetensors
library, down to the last byte.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from oxrl.models.stored import Source
from oxrl.models.weights import WeightType, buckets
from oxrl.tables.engines import Masters, Optimizer

STATE_FILE = "trainer_state.json"
STATE_FORMAT = 1
# The float32 copy of a weight that is stored in lower precision.
MASTER = "master"
# Kind -> shape and type of what is kept of a weight beside it.
KeptTypes = Mapping[str, WeightType]


class StoredWeight(NamedTuple):
    """The places of a weight and its optimizer state; without `moments` it was never stepped."""

    name: str
    weight: Source
    master: Source | None = None
    moments: Mapping[str, Source] = MappingProxyType({})
    steps: int = 0


class TrainerState(NamedTuple):
    """The content of trainer_state.json.

    step: optimizer steps begun. adam_steps: steps that AdamW took, by weight.
    fits: largest micro-batch, in tokens, where the one that was asked for did not fit into memory;
        None: it did.
    optimizer, master_weights: as of `TrainerOptions`; not written where they are the default.
    """

    step: int
    adam_steps: Mapping[str, int]
    fits: int | None = None
    optimizer: Optimizer = "adamw"
    master_weights: Masters = "float32"


def write_state(directory: Path, state: TrainerState) -> None:
    """Write trainer_state.json into the directory of a checkpoint."""
    content: dict[str, object] = {
        "format": STATE_FORMAT,
        "step": state.step,
        "adam_steps": state.adam_steps,
    }
    if state.fits is not None:
        content["micro_batch_tokens"] = state.fits
    if state.optimizer != "adamw":
        content["optimizer"] = state.optimizer
    if state.master_weights != "float32":
        content["master_weights"] = state.master_weights
    text = json.dumps(content, indent=1) + "\n"
    (directory / STATE_FILE).write_text(text, encoding="utf-8")


# (kind, name of the weight).
Key = tuple[str, str]
WEIGHT = "weight"
# What the library says in files of tensors of torch.
TENSORS_OF_TORCH = {"format": "pt"}
# What the library calls the types of tensors, in the order in which it lays them out: larger types
# first, then by the names of tensors.
NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ORDER = list(NAMES)


class Entry(NamedTuple):
    """A tensor in a file: its name there, and the weight that it is a `kind` of.

    finite: NaN or an infinite value in it is refused; of a buffer, such as a mask, it may be meant.
    """

    key: str
    kind: str
    name: str
    type: WeightType
    finite: bool = True

    @property
    def nbytes(self) -> int:
        return prod(self.type.shape) * self.type.dtype.itemsize


@dataclass(frozen=True)
class FileLayout:
    """A safetensors file: its name in the directory, its tensors, and what is said of them."""

    name: str
    entries: tuple[Entry, ...]
    metadata: Mapping[str, str]

    @cached_property
    def ordered(self) -> list[tuple[int, Entry]]:
        """The tensors as they follow each other, each with the bytes before it."""
        found: list[tuple[int, Entry]] = []
        begin = 0
        for entry in sorted(self.entries, key=_order):
            found.append((begin, entry))
            begin += entry.nbytes
        return found

    @cached_property
    def header(self) -> bytes:
        """Everything before the first tensor."""
        content: dict[str, Any] = {"__metadata__": dict(self.metadata)}
        for begin, entry in self.ordered:
            content[entry.key] = {
                "dtype": NAMES[entry.type.dtype],
                "shape": list(entry.type.shape),
                "data_offsets": [begin, begin + entry.nbytes],
            }
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def places(self) -> dict[Key, tuple[int, Entry]]:
        """(kind, weight) -> (number of its first byte in the file, what it is); in that order."""
        first = len(self.header)
        return {(entry.kind, entry.name): (first + begin, entry) for begin, entry in self.ordered}

    @cached_property
    def nbytes(self) -> int:
        """Length of the file."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def _order(entry: Entry) -> tuple[int, bytes]:
    return ORDER.index(entry.type.dtype), entry.key.encode()


FileLayouts = list[FileLayout]


def optimizer_files(kept: Mapping[str, KeptTypes], stepped: Collection[str]) -> FileLayouts:
    """The files of an optimizer's state, `optimizer_<kind>-00000.safetensors` and on.

    Args:
        kept: what is stored beside each trained weight.
        stepped: the weights that have moments; masters are there from the start.
    """
    kinds: dict[str, list[Entry]] = {MASTER: []}
    for name, types in kept.items():
        for kind, kept_type in types.items():
            if kind == MASTER or name in stepped:
                kinds.setdefault(kind, []).append(Entry(name, kind, name, kept_type))
    files: FileLayouts = []
    for kind, entries in kinds.items():
        named = [(entry.name, entry) for entry in entries]
        for index, bucket in enumerate(buckets(named)):
            file = f"optimizer_{kind}-{index:05d}.safetensors"
            held = tuple(entry for _, entry in bucket)
            files.append(FileLayout(file, held, TENSORS_OF_TORCH))
    return files


def create_files(directory: Path, files: Iterable[FileLayout]) -> None:
    """Make every file in its full length, with its header.

    Raises:
        OSError: the disk refused.
    """
    for file in files:
        with (directory / file.name).open("wb") as stream:
            stream.write(file.header)
            stream.truncate(file.nbytes)
