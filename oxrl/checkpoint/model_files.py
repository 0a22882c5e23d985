"""The files of a model: which there are, what each holds, and what is said beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch.nn import Module
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from oxrl.checkpoint.layout import TENSORS_OF_TORCH, WEIGHT, Entry, FileLayout, FileLayouts
from oxrl.modelfiles.folder import ADAPTER_FILE, INDEX, SINGLE, VALUE_HEAD_FILE
from oxrl.models.four_bit import whole_type
from oxrl.models.meta_init import DECODER, kept_buffers
from oxrl.models.network import ValueModel
from oxrl.models.stored import NamedTensor
from oxrl.models.weights import WeightType, file_name, has_adapter, stored_names
from oxrl.types import Tensors

PATTERN = "model{suffix}.safetensors"
# As transformers cuts a model into files.
MOST_BYTES = "50GB"


def stored_types(model: Module) -> dict[str, WeightType]:
    """Shape and dtype of each parameter of a model as it is stored."""
    return {name: whole_type(p) for name, p in model.named_parameters()}


def weight_files(model: Module, stored: Mapping[str, WeightType]) -> FileLayouts:
    """The files of a model's weights: of one with an adapter, of what is trained alone.

    Args:
        model: a Hugging Face model, a ValueModel, or any module.
        stored: shape and type of each parameter as it is stored.
    """
    entries = [Entry(name, WEIGHT, name, stored[name]) for name in stored_names(model)]
    if not isinstance(model, ValueModel):
        return list(_files_of(model, "", entries))
    decoder: list[Entry] = []
    head: list[Entry] = []
    for entry in entries:
        part = decoder if entry.name.startswith(DECODER) else head
        part.append(entry._replace(key=entry.name.partition(".")[2]))
    # One entry only in what is said of it: safetensors writes several in any order.
    of_head = FileLayout(VALUE_HEAD_FILE, tuple(head), {"kind": model.kind})
    return [*_files_of(model.decoder, DECODER, decoder), of_head]


def _files_of(host: Module, prefix: str, entries: list[Entry]) -> Iterator[FileLayout]:
    """The files of a model without head of values; of a Hugging Face model in the form it is
    stored in, which may not be the one it computes with.

    Args:
        prefix: of what it is called in the whole model.
    """
    if has_adapter(host):
        named = [entry._replace(key=file_name(entry.key)) for entry in entries]
        yield FileLayout(ADAPTER_FILE, tuple(named), TENSORS_OF_TORCH)
        return
    if not isinstance(host, PreTrainedModel):
        yield FileLayout(SINGLE, tuple(entries), TENSORS_OF_TORCH)
        return
    shapes = {
        entry.key: torch.empty(entry.type.shape, dtype=entry.type.dtype, device="meta")
        for entry in entries
    }
    written = revert_weight_conversion(host, shapes | kept_buffers(host))
    cut = split_torch_state_dict_into_shards(
        written, filename_pattern=PATTERN, max_shard_size=MOST_BYTES
    )
    for file, keys in cut.filename_to_tensors.items():
        held: list[Entry] = []
        for key in keys:
            tensor = written[key]
            kind = WeightType(tensor.shape, tensor.dtype)
            # Buffers alone have memory here.
            held.append(Entry(key, WEIGHT, prefix + key, kind, finite=tensor.is_meta))
        yield FileLayout(file, tuple(held), TENSORS_OF_TORCH)


def is_stored_as_it_computes(files: FileLayouts, stored: Mapping[str, WeightType]) -> bool:
    """Tell whether files hold the parameters one by one, no experts apart, and no buffers.

    Args:
        files: of the model's weights.
        stored: as of `weight_files`.
    """
    entries = (entry for file in files for entry in file.entries)
    return all(stored.get(entry.name) == entry.type for entry in entries)


def whole_tensors(model: Module, weights: Iterable[NamedTensor]) -> Tensors:
    """The tensors of a model's files, whole, by their names in the layouts.

    Args:
        model: as of `weight_files`.
        weights: (name in `model.named_parameters()`, whole tensor) of all.
    """
    kept = set(stored_names(model))
    tensors = {name: tensor.detach().cpu() for name, tensor in weights if name in kept}
    host: Module = model
    prefix = ""
    if isinstance(model, ValueModel):
        host = model.decoder
        prefix = DECODER
    if isinstance(host, PreTrainedModel) and not has_adapter(host):
        names = [name for name in tensors if name.startswith(prefix)]
        own = {name.removeprefix(prefix): tensors.pop(name) for name in names}
        written = revert_weight_conversion(host, own | kept_buffers(host))
        tensors |= {prefix + key: tensor for key, tensor in written.items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def save_model(model: Module, directory: Path) -> None:
    """Write `model` so that `load_policy`, `load_critic` or `from_pretrained` reads it.

    Of a model with an adapter, what is trained is written and where the rest can be loaded from.

    Args:
        model: a Hugging Face model, a ValueModel, or any module.
        directory: made if missing.
    """
    stored = stored_types(model)
    files = weight_files(model, stored)
    write_description(model, directory, stored, files)
    tensors = whole_tensors(model, model.named_parameters())
    for file in files:
        held = {entry.key: tensors[entry.name] for entry in file.entries}
        save_file(held, directory / file.name, metadata=dict(file.metadata))


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
    if has_adapter(host):
        from oxrl.models.lora import describe_adapter  # models without one do without

        describe_adapter(host, directory)
        return
    disable_progress_bar()
    said = host.generation_config if host.can_generate() else None
    if said is not None:
        # Transformers refuses to write some that it reads; here they are written as they were read.
        host.generation_config = GenerationConfig()
    host.save_pretrained(directory, state_dict={})
    if said is not None:
        host.generation_config = said
        said.to_json_file(directory / "generation_config.json", keys_to_pop=["compile_config"])
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
