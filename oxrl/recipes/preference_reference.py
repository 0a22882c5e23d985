"""The reference of preference learning: it stays, and is kept on disk, or follows the policy."""

from __future__ import annotations

import hashlib
import os
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oxrl.data.preferences import PreferenceDataset, to_preference_batch
from oxrl.engines.train.base import Scorer, TrainEngine
from oxrl.engines.train.ranks import Ranks
from oxrl.models.fingerprints import fingerprint
from oxrl.recipes.preference_objective import PreferenceObjective

ROWS_PER_FORWARD = 256


class ReferenceCache:
    """The log-probabilities of a reference that stays as it is, computed once per run directory.

    Args:
        objective: how a completion's log-probability is summed up.
        reference: the model, as long as nothing has been trained or restored.
        folder: the run directory. ranks: the first one reads and writes it.
    """

    def __init__(
        self, objective: PreferenceObjective, reference: Scorer, folder: Path, ranks: Ranks
    ) -> None:
        self._objective = objective
        self._reference = reference
        self._folder = folder
        self._ranks = ranks
        self._weights = weights_digest(objective.policy)

    def logprobs(self, data: PreferenceDataset) -> Tensor:
        """The reference's log-probability of every row of every unit, [units, R], in nats."""
        path = self._folder / f"reference_{self._digest(data)}.safetensors"
        found: Tensor | None = None
        if self._ranks.first and path.is_file():
            found = load_file(path)["logprobs"]
        found = self._ranks.agree(found)
        if found is None:
            found = self._compute(data)
            if self._ranks.first:
                partial = path.with_suffix(".partial")
                save_file({"logprobs": found}, partial)
                os.replace(partial, path)
        return found

    def _digest(self, data: PreferenceDataset) -> str:
        """Of the weights, the tokens, what is trained and how it is summed."""
        tail_coeff = self._objective.numbers.get("tail_coeff")
        key = hashlib.sha256(f"{self._weights} {tail_coeff}".encode())
        for units in data.batches(ROWS_PER_FORWARD):
            for example in chain.from_iterable(unit.rows for unit in units):
                numbers = [len(example.token_ids), *example.token_ids, *example.trained]
                key.update(np.array(numbers, dtype=np.int64).tobytes())
        return key.hexdigest()[:16]

    def _compute(self, data: PreferenceDataset) -> Tensor:
        pieces: list[Tensor] = []
        for units in data.batches(ROWS_PER_FORWARD):
            rows = len(units[0].rows)
            batch = to_preference_batch(units, self._objective.pad_id, rows=rows)
            sums = self._objective.completion_logprobs(self._reference, batch.inputs)
            pieces.append(sums.view(len(units), -1))
        return torch.cat(pieces).float()


def weights_digest(engine: TrainEngine) -> str:
    """A hash of all weights of an engine."""
    named = chain.from_iterable(engine.weights())
    lines = [f"{name} {fingerprint(tensor)}" for name, tensor in named]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def follow(reference: TrainEngine, policy: TrainEngine, rate: float) -> None:
    """Move the reference towards the policy.

        reference = rate * policy + (1 - rate) * reference

    Source: TR-DPO, arXiv:2404.09656, Eq. 3.
    """
    held_weights = chain.from_iterable(reference.weights())
    pairs = zip(held_weights, chain.from_iterable(policy.weights()), strict=True)
    reference.set_weights(
        (name, held.lerp(current.to(held.dtype), rate)) for (name, held), (_, current) in pairs
    )
