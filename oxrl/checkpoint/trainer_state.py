"""The one checkpoint format of all training engines: weights, masters, moments and step counts.

Beside the weights, which Hugging Face reads, lie `optimizer_<kind>-*.safetensors` with what is kept
of each weight, whole and as it is held, under the names of the weights, and trainer_state.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch.nn import Module

from oxrl.engines.train.ranks import Ranks
from oxrl.engines.train.rules import KEPT, LOW_PRECISION
from oxrl.errors import CheckpointError, NonFiniteError
from oxrl.models.stored import (
    KEPT_TYPES,
    NamedTensors,
    Source,
    StoredTensor,
    non_finite_values,
    stored_in_folder,
)
from oxrl.models.weights import WeightType, stored_weights
from oxrl.tables.engines import Masters, Optimizer

STATE_FILE = "trainer_state.json"
STATE_FORMAT = 1
# The float32 copy of a weight that is stored in lower precision.
MASTER = "master"


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

    def write(self, write: Callable[[NamedTensors], None], named: NamedTensors, of: str) -> None:
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

    def _seen(self, named: NamedTensors, of: str) -> NamedTensors:
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
    return TrainerState(
        content["step"],
        content["adam_steps"],
        content.get("micro_batch_tokens"),
        content.get("optimizer", "adamw"),
        content.get("master_weights", "float32"),
    )


def read_weights_and_moments(
    directory: Path,
    model: Module,
    expected: Mapping[str, WeightType],
    state: TrainerState,
    rules: Mapping[str, Optimizer],
) -> Iterator[StoredWeight]:
    """Every weight of `model` with its optimizer state, told one by one; nothing is read yet.

    Args:
        directory: of the checkpoint.
        model: whose weights they are.
        expected: shape and dtype of each weight as it is stored.
        state: what trainer_state.json says.
        rules: what steps each weight.

    Raises:
        CheckpointError: something is missing, unknown, or of another shape or dtype.
    """
    every = {kept.kind for rule in set(rules.values()) for kept in KEPT[rule]}
    found = {
        kind: stored_in_folder(directory, f"optimizer_{kind}-*.safetensors", KEPT_TYPES)
        for kind in (MASTER, *every)
    }
    for name in state.adam_steps:
        if name not in expected or not _is_complete(name, expected[name], state, rules, found):
            raise CheckpointError(f"{directory} has an incomplete optimizer state for {name!r}")
    for name, weight in stored_weights(model, directory, expected):
        kinds = [kept.kind for kept in KEPT[rules[name]] if name in found[kept.kind]]
        moments = {kind: found[kind][name] for kind in kinds}
        master = found[MASTER].get(name)
        yield StoredWeight(name, weight, master, moments, state.adam_steps.get(name, 0))


def _is_complete(
    name: str,
    weight: WeightType,
    state: TrainerState,
    rules: Mapping[str, Optimizer],
    found: Mapping[str, Mapping[str, StoredTensor]],
) -> bool:
    """Whether all that is kept of a weight is there, in its shape and type.

    Args:
        weight: as it is stored. found: kind -> weight -> where it is.
    """
    needed = {kept.kind: kept.stored_as(weight) for kept in KEPT[rules[name]]}
    if has_master(weight.dtype, state.master_weights):
        needed[MASTER] = WeightType(weight.shape, torch.float32)
    for kind, kept in needed.items():
        stored = found[kind].get(name)
        if stored is None or WeightType(stored.shape, stored.dtype) != kept:
            return False
    return True


def has_master(dtype: torch.dtype, masters: Masters) -> bool:
    """Whether a weight that is stored as `dtype` is stepped as a float32 copy."""
    return masters == "float32" and dtype in LOW_PRECISION


def require_same_optimizer(
    directory: Path, state: TrainerState, optimizer: Optimizer, masters: Masters
) -> None:
    """Refuse state that another optimizer kept.

    Raises:
        CheckpointError: it did; says how to go on.
    """
    stored = {"optimizer": state.optimizer, "master_weights": state.master_weights}
    asked = {"optimizer": optimizer, "master_weights": masters}
    for field, value in asked.items():
        if stored[field] != value:
            raise CheckpointError(
                f"{directory} was written with train.{field}: {stored[field]}, and this run has "
                f"{value}: what one keeps between steps is of no use to the other. Go on with "
                f"train.{field}: {stored[field]}, or begin a new run with model.name: {directory}"
            )
