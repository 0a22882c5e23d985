"""Where every byte of a model's files belongs, known before any of them is written.

Whoever holds a piece of a weight can then write it to its place, and the file is the same whoever
wrote it: that of the safetensors library, down to the last byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from oxrl.models.adapters import has_adapter
from oxrl.models.load import VALUE_HEAD_FILE
from oxrl.models.meta_init import DECODER
from oxrl.models.network import ValueModel
from oxrl.models.stored import KEPT_TYPES
from oxrl.models.weights import WeightType, buckets, kept_buffers
from oxrl.types import TensorMap

# (kind, name of the weight).
Key = tuple[str, str]
WEIGHT = "weight"
SINGLE = "model.safetensors"
PATTERN = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"
# As transformers cuts a model into files.
MOST_BYTES = "50GB"
NAMES = {dtype: name for name, dtype in KEPT_TYPES.items()}
# In which order the library lays tensors out: larger types first, then by name.
ORDER = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)


class Entry(NamedTuple):
    """A tensor in a file: its name there, and the weight that it is a `kind` of."""

    key: str
    kind: str
    name: str
    type: WeightType

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
    def ordered(self) -> list[Entry]:
        """The tensors as they follow each other."""
        return sorted(self.entries, key=_order)

    @cached_property
    def header(self) -> bytes:
        """Everything before the first tensor."""
        content: dict[str, Any] = {"__metadata__": dict(self.metadata)}
        begin = 0
        for entry in self.ordered:
            end = begin + entry.nbytes
            content[entry.key] = {
                "dtype": NAMES[entry.type.dtype],
                "shape": list(entry.type.shape),
                "data_offsets": [begin, end],
            }
            begin = end
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def places(self) -> dict[Key, tuple[int, Entry]]:
        """(kind, weight) -> (number of its first byte in the file, what it is); in that order."""
        found: dict[Key, tuple[int, Entry]] = {}
        begin = len(self.header)
        for entry in self.ordered:
            found[entry.kind, entry.name] = (begin, entry)
            begin += entry.nbytes
        return found

    @cached_property
    def nbytes(self) -> int:
        """Length of the file."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)


def _order(entry: Entry) -> tuple[int, bytes]:
    return ORDER.index(entry.type.dtype), entry.key.encode()


FileLayouts = list[FileLayout]


def weight_files(model: Module, stored: Mapping[str, WeightType]) -> FileLayouts | None:
    """The files that `save_model` writes.

    Args:
        model: whose parameters they hold.
        stored: shape and type of each parameter as it is stored.

    Returns:
        None where they hold something else than the parameters one by one: of an adapter, or of a
        model that transformers stores otherwise than it computes with.
    """
    if has_adapter(model):
        return None
    entries = [Entry(name, WEIGHT, name, kind) for name, kind in stored.items()]
    if isinstance(model, ValueModel):
        decoder: list[Entry] = []
        head: list[Entry] = []
        for entry in entries:
            part = decoder if entry.name.startswith(DECODER) else head
            part.append(entry._replace(key=entry.name.partition(".")[2]))
        files = _hugging_face_files(model.decoder, decoder)
        # One entry only in what is said of it, see `save_model`.
        of_head = FileLayout(VALUE_HEAD_FILE, tuple(head), {"kind": model.kind})
        return None if files is None else [*files, of_head]
    if isinstance(model, PreTrainedModel):
        return _hugging_face_files(model, entries)
    return [FileLayout(SINGLE, tuple(entries), {"format": "pt"})]


def _hugging_face_files(host: PreTrainedModel, entries: list[Entry]) -> FileLayouts | None:
    """The files of a Hugging Face model, None where it is stored in another form."""
    if kept_buffers(host):
        return None
    shapes = {entry.key: _without_memory(entry.type) for entry in entries}
    written = revert_weight_conversion(host, dict(shapes))
    if {key: value.shape for key, value in written.items()} != {
        key: value.shape for key, value in shapes.items()
    }:
        return None
    by_key = {entry.key: entry for entry in entries}
    return [
        FileLayout(file, tuple(by_key[key] for key in keys), {"format": "pt"})
        for file, keys in _split(shapes).filename_to_tensors.items()
    ]


def _split(shapes: TensorMap) -> Any:
    return split_torch_state_dict_into_shards(
        dict(shapes), filename_pattern=PATTERN, max_shard_size=MOST_BYTES
    )


def _without_memory(kind: WeightType) -> Tensor:
    return torch.empty(kind.shape, dtype=kind.dtype, device="meta")


def optimizer_files(kind: str, names: Iterable[tuple[str, WeightType]]) -> FileLayouts:
    """The files of one kind of optimizer state, `optimizer_<kind>-00000.safetensors` and on.

    Args:
        kind: of the state.
        names: the weights that have it, with the shape and type of what is kept of each.
    """
    held = [(name, _without_memory(kept)) for name, kept in names]
    files: FileLayouts = []
    for index, bucket in enumerate(buckets(held)):
        entries = [
            Entry(name, kind, name, WeightType(tensor.shape, tensor.dtype))
            for name, tensor in bucket
        ]
        file = f"optimizer_{kind}-{index:05d}.safetensors"
        files.append(FileLayout(file, tuple(entries), {"format": "pt"}))
    return files


def write_description(
    model: Module, directory: Path, stored: Mapping[str, WeightType], files: FileLayouts
) -> None:
    """Write what is said of a model beside its weights: config, generation, code, index.

    Args:
        stored: as of `weight_files`.
        files: those of its weights.
    """
    directory.mkdir(parents=True, exist_ok=True)
    host = model.decoder if isinstance(model, ValueModel) else model
    if not isinstance(host, PreTrainedModel):
        return
    disable_progress_bar()
    host.save_pretrained(directory, state_dict={})
    (directory / SINGLE).unlink(missing_ok=True)  # it holds no tensor
    # That describes the parameters in memory, which FSDP holds in float32 whatever is stored.
    host.config.dtype = next(iter(stored.values())).dtype
    host.config.save_pretrained(directory)
    weights = {entry.key: file.name for file in files for entry in file.entries}
    sizes = sum(entry.nbytes for file in files for entry in file.entries)
    if SINGLE not in weights.values():
        said = {"total_parameters": host.num_parameters(), "total_size": sizes}
        index = {"metadata": said, "weight_map": weights}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX).write_text(text, encoding="utf-8")
