"""Reads the weights of a model back from its files, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch.nn import Module
from transformers import PreTrainedModel

from oxrl.errors import CheckpointError, DataError
from oxrl.modelfiles.folder import ADAPTER_FILE, SINGLE, VALUE_HEAD_FILE, weight_files
from oxrl.models.load import DEFAULTS, read_weights
from oxrl.models.meta_init import DECODER, kept_buffers
from oxrl.models.network import ValueModel
from oxrl.models.stored import GivenTensor, Source, stored_in_files
from oxrl.models.weights import WeightType, has_adapter, model_name, stored_names

# Prefix of a ValueModel's other parameters, which are in a file of their own.
VALUE_HEAD = "value_head."
Sources = Iterator[tuple[str, Source]]


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
    files = weight_files(directory) or [directory / SINGLE]
    if has_adapter(model):
        files = [directory / ADAPTER_FILE]
    if not isinstance(model, ValueModel):
        yield from _read_part(model, directory, files)
        return
    for name, source in _read_part(model.decoder, directory, files):
        yield DECODER + name, source
    for name, source in _read_part(model.value_head, directory, [directory / VALUE_HEAD_FILE]):
        yield VALUE_HEAD + name, source


def _read_part(host: Module, directory: Path, files: Sequence[Path]) -> Sources:
    """(name in `host`, where to read it) of everything in files."""
    if not files[0].is_file():
        raise CheckpointError(f"no file {files[0]}")
    tensors = stored_in_files(files)
    for name in kept_buffers(host):  # nothing changes them: the model has them already
        tensors.pop(name, None)
    if files[0].name == ADAPTER_FILE:
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
        whole = read_weights(type(host), str(directory), DEFAULTS, as_stored=True)
    except DataError as error:
        raise CheckpointError(f"{directory} holds no {type(host).__name__}: {error}") from error
    for name, parameter in whole.named_parameters():
        yield name, GivenTensor(parameter.detach())
