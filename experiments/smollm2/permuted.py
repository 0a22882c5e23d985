"""The control: every score goes to an answer that it does not belong to."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oxrl.assembly import reward_pools
from oxrl.rewards.pool_choice import reward_pool
from oxrl.rewards.pools import SinglePool
from oxrl.runs.waiting import Patience
from oxrl.seeds import stable_seed
from oxrl.types import Group, Score


def permuted_pool(*given: Any, **named: Any) -> SinglePool:
    """A pool whose means stay, and whose signal is gone."""
    pool = reward_pool(*given, **named)
    right = pool.score
    calls = itertools.count(1)

    def score(groups: Sequence[Group], patience: Patience | None = None) -> list[list[Score]]:
        scored = right(groups, patience)
        flat = [score for group in scored for score in group]
        random.Random(stable_seed("control", next(calls))).shuffle(flat)
        shuffled = iter(flat)
        return [[next(shuffled) for _ in group] for group in scored]

    pool.score = score
    return pool


@contextmanager
def scores_permuted() -> Iterator[None]:
    """Runs that begin inside have the control's rewards."""
    reward_pools.reward_pool = permuted_pool
    try:
        yield
    finally:
        reward_pools.reward_pool = reward_pool
