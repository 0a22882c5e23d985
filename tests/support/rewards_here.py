"""The reward of small runs in this process: a worker costs more than such a run's rewards.

Workers are tested in tests/rewards, and with every reward that is another one than this.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oxrl.rewards import workers
from oxrl.rewards.base import find_reward
from oxrl.rewards.pools import SinglePool
from oxrl.rewards.workers import OwnFunctionPool
from oxrl.types import Objects

HARMLESS = '''
def digits(prompt, completion):
    """Share of digits among the first characters: a random model scores a little, so groups differ."""
    text = completion[:6]
    return sum(character.isdigit() for character in text) / 6
'''
in_workers = workers.pool_of


class PoolHere(OwnFunctionPool):
    """Used as the workers are, which are never asked to score inline."""

    inline = False


def pool_of(
    name: str, *, workers: int, timeout_s: float, options: Objects | None, field: str
) -> SinglePool:
    """In the place of that of `oxrl.rewards.workers`: workers for every reward but HARMLESS."""
    file = Path(name.removesuffix(":digits"))
    if name.endswith(":digits") and file.is_file() and file.read_text() == HARMLESS:
        paths = [*sys.path]  # of a file that is loaded, the folder is added
        try:
            return PoolHere(find_reward(name, options), field)
        finally:
            sys.path[:] = paths
    return in_workers(name, workers=workers, timeout_s=timeout_s, options=options, field=field)


workers.pool_of = pool_of
