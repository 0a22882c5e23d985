"""Reads what a training engine stored: its state, weights and what was kept of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch.nn import Module

from oxrl.checkpoint.layout import (
    MASTER,
    STATE_FILE,
    STATE_FORMAT,
    KeptTypes,
    StoredWeight,
    TrainerState,
)
from oxrl.errors import CheckpointError
from oxrl.models.saved_weights import stored_weights
from oxrl.models.stored import KEPT_TYPES, StoredTensor, stored_in_files
from oxrl.models.weights import WeightType
from oxrl.tables.engines import Masters, Optimizer


def read_state(directory: Path) -> TrainerState:
    """Read trainer_state.json.

    Raises:
        CheckpointError: there is none, or it has another format.
    """
    path = directory / STATE_FILE
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {STATE_FILE}: it is not a training checkpoint")
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["format"] != STATE_FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']!r}; this version reads {STATE_FORMAT}"
        )
    return TrainerState(
        content["step"],
        content["adam_steps"],
        content.get("micro_batch_tokens"),
        content.get("optimizer", "adamw"),
        content.get("master_weights", "float32"),
    )


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
                f"{value}: the kept optimizer state does not fit. Go on with "
                f"train.{field}: {stored[field]}, or begin a new run with model.name: {directory}"
            )


def read_weights_and_moments(
    directory: Path,
    model: Module,
    expected: Mapping[str, WeightType],
    kept: Mapping[str, KeptTypes],
    state: TrainerState,
) -> Iterator[StoredWeight]:
    """Every weight of `model` with its optimizer state, told one by one; nothing is read yet.

    Args:
        directory: of the checkpoint.
        model: whose weights they are.
        expected: shape and dtype of each weight as it is stored.
        kept: what is stored beside each trained weight.
        state: what trainer_state.json says.

    Raises:
        CheckpointError: something is missing, unknown, or of another shape or dtype.
    """
    kinds = {kind for types in kept.values() for kind in types}
    found: defaultdict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for kind in kinds:
        files = sorted(directory.glob(f"optimizer_{kind}-*.safetensors"))
        for name, tensor in stored_in_files(files, KEPT_TYPES).items():
            found[name][kind] = tensor
    for name in state.adam_steps:
        held = {
            kind: WeightType(tensor.shape, tensor.dtype) for kind, tensor in found[name].items()
        }
        # A weight that is no longer trained needs nothing but itself.
        needed = kept.get(name, {})
        if name not in expected or not needed.items() <= held.items():
            raise CheckpointError(f"{directory} has an incomplete optimizer state for {name!r}")
    for name, weight in stored_weights(model, directory, expected):
        moments = found[name]
        master = moments.pop(MASTER, None)
        yield StoredWeight(name, weight, master, moments, state.adam_steps.get(name, 0))
