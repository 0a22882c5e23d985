"""The reference of preference learning: it stays, and is kept on disk, or follows the policy."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from oxrl.data.preferences import Judged, PreferenceDataset
from oxrl.engines.train import Scorer, TrainEngine
from oxrl.errors import Interrupted
from oxrl.models.fingerprints import fingerprint
from oxrl.recipes.preference_objective import PreferenceObjective
from oxrl.recipes.row_cache import RowCache, row_bytes
from oxrl.recipes.session import Session
from oxrl.types import Tensors

# Units that are kept together in a file; what a kill can cost.
UNITS_PER_PIECE = 256
FOLDER = "reference"
LOGPROBS = "logprobs"


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
        # How sums are taken counts as well.
        about = f"{weights_digest(objective.policy)} {objective.numbers.get('tail_coeff')}"
        self._cache = RowCache(run / FOLDER, about, session.ranks)
        self._session = session

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
            count = sum(map(len, units))
            started = time.monotonic()
            kept, new = self._cache.piece(_read(units), count, partial(self._compute, units))
            if new:
                computed += count
                spent += time.monotonic() - started
            found.append(kept[LOGPROBS])
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

    def _compute(self, batches: Sequence[Sequence[Judged]]) -> Tensors:
        sums: list[Tensor] = []
        for units in batches:
            batch = self._objective.batch(units, rows=len(units[0].rows))
            own = self._objective.completion_logprobs(self._reference, batch.inputs)
            sums.append(own.view(len(units), -1).float())
        return {LOGPROBS: torch.cat(sums)}


def _read(batches: Sequence[Sequence[Judged]]) -> Iterator[bytes]:
    """Yield what is read of units, and which of them are read at once."""
    for units in batches:
        yield f"batch of {len(units)}".encode()
        for example in chain.from_iterable(unit.rows for unit in units):
            yield row_bytes(example.token_ids, example.trained, example.images)


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
