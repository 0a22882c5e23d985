"""The one checkpoint format of all training engines: weights, masters, moments and step counts.

Beside the weights, which Hugging Face reads, lie `optimizer_<kind>-*.safetensors` with whole
float32 tensors under the names of the weights, and trainer_state.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn

from oxrl.engines.train.adamw import LOW_PRECISION, MOMENTS
from oxrl.engines.train.ranks import Ranks
from oxrl.errors import CheckpointError, NonFiniteError
from oxrl.models.stored import Source, non_finite_values, stored_in_folder
from oxrl.models.weights import (
    NamedTensor,
    WeightType,
    stored_weights,
)

STATE_FILE = "trainer_state.json"
STATE_FORMAT = 1
# "master": the float32 copy of a weight that is stored in lower precision.
OPTIMIZER_KINDS = ("master", *MOMENTS)


class StoredWeight(NamedTuple):
    """Where a weight and its optimizer state are read; without `moments` it was never stepped."""

    name: str
    weight: Source
    master: Source | None = None
    moments: Mapping[str, Source] = MappingProxyType({})
    steps: int = 0


class CollectiveWriter:
    """Writes on rank 0 what all ranks gather together, and sees whether it is finite.

    Every rank takes part in every gather even when the disk refuses, so that nobody waits for ever.

    Args:
        ranks: that gather.
        stored: the weights that belong in the files; others may be read on the way.
    """

    def __init__(self, ranks: Ranks, stored: Collection[str]) -> None:
        self._ranks = ranks
        self._stored = stored
        self._refused: OSError | SafetensorError | None = None
        self._not_finite: str | None = None

    def write(
        self, write: Callable[[Iterator[NamedTensor]], None], named: Iterator[NamedTensor], of: str
    ) -> None:
        """Call `write` on rank 0 with tensors that are gathered one by one as it reads them.

        Args:
            of: what the tensors are of the weights that they are named after, for the error.
        """
        seen = self._seen(named, of)
        if self._ranks.first and self._refused is None:
            try:
                write(seen)
            except (OSError, SafetensorError) as error:
                self._refused = error
        for _ in seen:
            pass

    def _seen(self, named: Iterator[NamedTensor], of: str) -> Iterator[NamedTensor]:
        """The same tensors; the first that is not finite is remembered."""
        for name, tensor in named:
            if self._not_finite is None and name in self._stored:
                wrong = non_finite_values(tensor)
                if wrong:
                    count = f"{wrong} of {tensor.numel()} values are NaN or infinite"
                    self._not_finite = f"{of} {name}: {count}"
            yield name, tensor

    def finish(self) -> OSError | SafetensorError | None:
        """Tell whether what was written is a checkpoint; collective.

        Returns:
            What the disk said, where it refused; on rank 0.

        Raises:
            NonFiniteError: something in it is not finite; on every rank.
        """
        not_finite = self._ranks.agree(None if self._refused else self._not_finite)
        if not_finite is not None:
            raise NonFiniteError(not_finite)
        return self._refused


class TrainerState(NamedTuple):
    """What trainer_state.json says.

    step: optimizer steps begun. adam_steps: steps that AdamW took, by weight.
    fits: largest micro-batch, in tokens, where the one that was asked for did not fit into memory;
        None: it did.
    """

    step: int
    adam_steps: Mapping[str, int]
    fits: int | None = None


def write_state(directory: Path, state: TrainerState) -> None:
    """Write trainer_state.json into the directory of a checkpoint."""
    content: dict[str, object] = {
        "format": STATE_FORMAT,
        "step": state.step,
        "adam_steps": state.adam_steps,
    }
    if state.fits is not None:
        content["micro_batch_tokens"] = state.fits
    text = json.dumps(content, indent=1) + "\n"
    (directory / STATE_FILE).write_text(text, encoding="utf-8")


def read_state(directory: Path) -> TrainerState:
    """Read trainer_state.json.

    Raises:
        CheckpointError: there is none, or one of another format.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {STATE_FILE}: it is not a training checkpoint")
    content = json.loads(path.read_text(encoding="utf-8"))
    if content.get("format") != STATE_FORMAT:
        raise CheckpointError(
            f"{path} has format {content.get('format')!r}; this version reads {STATE_FORMAT}"
        )
    return TrainerState(content["step"], content["adam_steps"], content.get("micro_batch_tokens"))


def read_weights_and_moments(
    directory: Path,
    model: nn.Module,
    expected: Mapping[str, WeightType],
    adam_steps: Mapping[str, int],
) -> Iterator[StoredWeight]:
    """Every weight of `model` with its optimizer state, told one by one; nothing is read yet.

    Args:
        directory: of the checkpoint.
        model: whose weights they are.
        expected: shape and dtype of each weight as it is stored.
        adam_steps: steps that AdamW took, by weight.

    Raises:
        CheckpointError: something is missing, unknown, or of another shape or dtype.
    """
    kinds = {
        kind: stored_in_folder(directory, f"optimizer_{kind}-*.safetensors")
        for kind in OPTIMIZER_KINDS
    }
    for name in adam_steps:
        needed = _needed_kinds(expected[name].dtype) if name in expected else None
        if needed is None or any(name not in kinds[kind] for kind in needed):
            raise CheckpointError(f"{directory} has an incomplete optimizer state for {name!r}")
    for name, weight in stored_weights(model, directory, expected):
        moments = {moment: kinds[moment][name] for moment in MOMENTS if name in kinds[moment]}
        master = kinds["master"].get(name)
        yield StoredWeight(name, weight, master, moments, adam_steps.get(name, 0))


def _needed_kinds(dtype: torch.dtype) -> tuple[str, ...]:
    return OPTIMIZER_KINDS if dtype in LOW_PRECISION else MOMENTS
