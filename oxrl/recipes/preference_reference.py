"""The reference of preference learning: it stays, and is kept on disk, or follows the policy."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oxrl.data.preferences import Judged, PreferenceDataset
from oxrl.engines.train import Scorer, TrainEngine
from oxrl.errors import Interrupted, OxrlError
from oxrl.models.fingerprints import fingerprint
from oxrl.recipes.preference_objective import PreferenceObjective
from oxrl.recipes.session import Session
from oxrl.runs.files import make_folder
from oxrl.runs.recorder import save_tensors

log = logging.getLogger(__name__)
# Units that are kept together in a file; what a kill can cost.
UNITS_PER_PIECE = 256
FOLDER = "reference"


class ReferenceCache:
    """The log-probabilities of a reference that stays as it is, computed once per run directory.

    They are computed for the rows that are drawn, batch by batch in the order of their first use,
    and kept in pieces as they come: a run that is killed meanwhile goes on behind the last piece,
    and one that is made longer adds some. What is said of a row does not depend on either.

    Args:
        objective: how a completion's log-probability is summed up.
        reference: the model, as long as nothing has been trained or restored.
        run: the run directory, which holds the pieces; the first rank reads and writes them.
        session: of the run.
    """

    def __init__(
        self, objective: PreferenceObjective, reference: Scorer, run: Path, session: Session
    ) -> None:
        self._objective = objective
        self._reference = reference
        self._folder = run / FOLDER
        self._session = session
        self._weights = weights_digest(objective.policy)

    def logprobs(
        self, data: PreferenceDataset, batches: Iterable[Sequence[int]]
    ) -> tuple[Tensor, list[int]]:
        """The reference's log-probabilities of the rows of units.

        Args:
            data: whose units they are.
            batches: of indices of units; each is read at once.

        Returns:
            [units, R], in nats, and the units' indices.

        Raises:
            Interrupted: a signal asked to stop; what is done is kept.
        """
        pieces = in_pieces(batches)
        indices = [index for piece in pieces for batch in piece for index in batch]
        found: list[Tensor] = []
        done = 0
        computed = 0
        spent = 0.0
        for piece in pieces:
            units = [data.chosen(batch) for batch in piece]
            path = self._folder / f"{self._digest(units)}.safetensors"
            count = sum(map(len, units))
            ranks = self._session.ranks
            sums = ranks.agree(read_piece(path, count) if ranks.first else None)
            if sums is None:
                started = time.monotonic()
                sums = torch.cat([self._compute(batch) for batch in units])
                if ranks.first:
                    write_piece(path, sums)
                computed += count
                spent += time.monotonic() - started
            found.append(sums)
            done += count
            rate = computed / spent if spent else 0.0
            if computed:
                self._session.work("reference", done, len(indices), unit="rows", rate=rate)
            self._look(done, len(indices))
        return torch.cat(found), indices

    def _look(self, done: int, total: int) -> None:
        if done == total or not self._session.ranks.agree(self._session.stopping()):
            return
        raise Interrupted(
            f"stopped by {self._session.stop.requested} while the reference read rows, "
            f"{done} of {total} are kept. Continue with --resume"
        )

    def _digest(self, batches: Sequence[Sequence[Judged]]) -> str:
        """Hash the weights, the tokens, what is trained and read at once, and how it is summed."""
        tail_coeff = self._objective.numbers.get("tail_coeff")
        key = hashlib.sha256(f"{self._weights} {tail_coeff}".encode())
        for units in batches:
            key.update(f"batch of {len(units)}".encode())
            for example in chain.from_iterable(unit.rows for unit in units):
                numbers = [len(example.token_ids), *example.token_ids, *example.trained]
                key.update(np.array(numbers, dtype=np.int64).tobytes())
                key.update("".join(example.images).encode())
        return key.hexdigest()[:16]

    def _compute(self, units: Sequence[Judged]) -> Tensor:
        batch = self._objective.batch(units, rows=len(units[0].rows))
        sums = self._objective.completion_logprobs(self._reference, batch.inputs)
        return sums.view(len(units), -1).float()


def in_pieces(batches: Iterable[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Batches in order, as many in a piece as it takes to have UNITS_PER_PIECE units."""
    pieces: list[list[Sequence[int]]] = []
    room = 0
    for batch in batches:
        if not batch:
            continue
        if room <= 0:
            pieces.append([])
            room = UNITS_PER_PIECE
        pieces[-1].append(batch)
        room -= len(batch)
    return pieces


def write_piece(path: Path, sums: Tensor) -> None:
    """Write a piece with a hash of what it holds, whole or not at all.

    Raises:
        OxrlError: the disk refuses, or the folder is a link that leads elsewhere.
    """
    try:
        make_folder(path.parent)
        save_tensors({"logprobs": sums}, path, {"sha256": _hash(sums)})
    except OSError as error:
        raise OxrlError(
            f"{path} cannot be written: {error}. Free space on that disk, or give the run another "
            "directory; --resume goes on behind the last piece of the reference"
        ) from error


def read_piece(path: Path, count: int) -> Tensor | None:
    """Read what a piece holds of `count` units; None where it is damaged, which is warned of."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            sums = file.get_tensor("logprobs")
            written = (file.metadata() or {}).get("sha256")
    except (OSError, SafetensorError) as error:
        log.warning("%s is damaged and computed again: %s", path, error)
        return None
    if sums.ndim != 2 or len(sums) != count or _hash(sums) != written:
        log.warning("%s is damaged and computed again: it is not what was written there", path)
        return None
    return sums


def _hash(sums: Tensor) -> str:
    return hashlib.sha256(sums.contiguous().numpy().tobytes()).hexdigest()


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
