"""Rewards of small runs in this process: a worker costs more than all else in such a run.

Workers are tested in tests/rewards, and with every reward whose file is not noted here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from oxrl.assembly import reward_pools
from oxrl.rewards.own_function import OwnFunctionPool
from oxrl.rewards.pool_choice import reward_pool
from oxrl.rewards.pools import SinglePool
from oxrl.types import Objects

DIGITS = '''
def digits(prompt, completion):
    """Share of digits among the first characters: a random model scores a little, so groups differ."""
    text = completion[:6]
    return sum(character.isdigit() for character in text) / 6
'''
CODES = '''
def codes(prompt, completion):
    """Says something else of every other text: rewards of a group differ, whatever the weights."""
    return sum(map(ord, completion)) / 1000
'''
# Texts of files; tests add those of rewards that are not what they test.
HARMLESS = {DIGITS, CODES}


class PoolHere(OwnFunctionPool):
    """Used as the workers are, which are never asked to score inline."""

    inline = False


def pool_of(name: str, *, options: Objects | None, field: str, **further: Any) -> SinglePool:
    """In the place of `reward_pool`: the same for every reward that is not HARMLESS."""
    file = Path(name.rpartition(":")[0])
    if file.is_file() and file.read_text() in HARMLESS:
        paths = [*sys.path]  # of a file that is loaded, the folder is added
        try:
            return PoolHere(name, options, field)
        finally:
            sys.path[:] = paths
    return reward_pool(name, options=options, field=field, **further)


reward_pools.reward_pool = pool_of
