"""math_reward on replies in six languages, right or wrong by construction. A reward that accepts
what says another thing teaches it.

A sample of them, so that it takes seconds; all of them with `OXRL_ALL_REPLIES=1` in the
environment.
"""

from __future__ import annotations

import os

import pytest
from tongues import KINDS, Reply, replies

from oxrl.rewards import math_reward

# Of two draws, every so many replies of a kind.
STEP = 1 if os.environ.get("OXRL_ALL_REPLIES") else 4
ALL = replies(seed=0, draws=2)


@pytest.fixture(scope="module")
def scored() -> list[tuple[Reply, float | None]]:
    found: list[tuple[Reply, float | None]] = []
    for kind in KINDS:
        of_kind = [reply for reply in ALL if reply.kind == kind.__name__]
        found += [(reply, math_reward(reply.text, reply.gold).value) for reply in of_kind[::STEP]]
    return found


def test_no_reply_that_says_another_thing_is_accepted(
    scored: list[tuple[Reply, float | None]],
) -> None:
    assert len(ALL) >= 1500
    assert len({reply.kind for reply, _ in scored}) == len(KINDS)
    assert [reply for reply, value in scored if not reply.same and value == 1.0] == []


def test_at_most_one_right_reply_in_a_hundred_is_missed(
    scored: list[tuple[Reply, float | None]],
) -> None:
    right = [(reply, value) for reply, value in scored if reply.same]
    missed = [reply for reply, value in right if value != 1.0]
    assert len(right) > len(scored) / 4
    assert len(missed) <= len(right) / 100, missed
