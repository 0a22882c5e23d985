"""A model's files: what `from_pretrained` reads, written and read back bit for bit. No pickle anywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from oxrl.errors import CheckpointError
from oxrl.models.load import VALUE_HEAD_FILE
from oxrl.models.network import ValueModel

BUCKET_BYTES = 512 * 2**20


def buckets(named: Iterable[tuple[str, Tensor]], *, limit: int = BUCKET_BYTES) -> Iterator[list[tuple[str, Tensor]]]:
    """Group named tensors, in order, into lists of at most `limit` bytes; a larger tensor gets a list of its own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def fingerprint(tensor: Tensor) -> str:
    """16 hexadecimal digits of a SHA-256 over the tensor's bytes; equal exactly when the bytes are."""
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:16]


def write_sharded(directory: Path, stem: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Write `stem-00000.safetensors`, `stem-00001...`, with `named` tensors under their names."""
    for index, bucket in enumerate(buckets(named)):
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        save_file(tensors, directory / f"{stem}-{index:05d}.safetensors", metadata={"format": "pt"})


def read_sharded(directory: Path, stem: str) -> Iterator[tuple[str, Tensor]]:
    """What `write_sharded` wrote, one tensor at a time, on the CPU."""
    for path in sorted(directory.glob(f"{stem}-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def save_model(model: nn.Module, directory: Path) -> None:
    """Write `model` so that `load_policy`, `load_critic` or `from_pretrained` reads it from `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()
    if isinstance(model, PreTrainedModel):
        model.save_pretrained(directory)
    elif isinstance(model, ValueModel):
        model.decoder.save_pretrained(directory)
        save_file(model.value_head.state_dict(), directory / VALUE_HEAD_FILE, metadata={"format": "pt"})
    else:
        save_file(
            {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()},
            directory / "model.safetensors",
            metadata={"format": "pt"},
        )


def restore_model(model: nn.Module, directory: Path) -> None:
    """Copy the weights in `directory` into `model`, in place.

    Raises:
        CheckpointError: a weight is missing, unknown, or of another shape or dtype.
    """
    if isinstance(model, ValueModel):
        _copy_into(model.decoder, sorted(directory.glob("model*.safetensors")), directory)
        _copy_into(model.value_head, [directory / VALUE_HEAD_FILE], directory)
    else:
        _copy_into(model, sorted(directory.glob("model*.safetensors")), directory)


@torch.no_grad()
def _copy_into(model: nn.Module, files: list[Path], directory: Path) -> None:
    wanted = dict(model.named_parameters())
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"no file {path}")
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                parameter = wanted.pop(name, None)
                tensor = file.get_tensor(name)
                if parameter is None or parameter.shape != tensor.shape or parameter.dtype != tensor.dtype:
                    held = "no such weight" if parameter is None else f"{parameter.dtype} {tuple(parameter.shape)}"
                    raise CheckpointError(
                        f"{path.name} holds {name!r} as {tensor.dtype} {tuple(tensor.shape)}, the model has {held}"
                    )
                parameter.copy_(tensor)
    if wanted:
        raise CheckpointError(f"{directory} lacks {len(wanted)} weights of the model, such as {next(iter(wanted))!r}")
