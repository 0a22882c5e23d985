"""The control: every score goes to an answer that it does not belong to."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from oxrl.assembly import assembly
from oxrl.rewards.workers import RewardPool
from oxrl.runs.waiting import Patience
from oxrl.seeds import stable_seed
from oxrl.types import Completion, Prompt, Score


class PermutedRewards(RewardPool):
    """Means stay, the signal is gone."""

    calls = 0

    def score(
        self,
        groups: Sequence[tuple[Prompt, Sequence[Completion]]],
        patience: Patience | None = None,
    ) -> list[list[Score]]:
        """See RewardPool."""
        scored = super().score(groups, patience)
        flat = [score for group in scored for score in group]
        PermutedRewards.calls += 1
        random.Random(stable_seed("control", self.calls)).shuffle(flat)
        shuffled = iter(flat)
        return [[next(shuffled) for _ in group] for group in scored]


@contextmanager
def scores_permuted() -> Iterator[None]:
    """Runs that begin inside have the control's rewards."""
    original = assembly.RewardPool
    assembly.RewardPool = PermutedRewards
    try:
        yield
    finally:
        assembly.RewardPool = original
