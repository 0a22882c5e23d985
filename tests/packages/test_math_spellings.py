"""math_reward on a table of some thousand spellings of known meanings: every answer against every
other of its topic, in every way in which models state one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from oxrl.rewards import math_reward
from support.spellings import TOPICS, table

# Every so many pairs: numbers are many, and sympy takes its time over polynomials that differ.
STEPS = {"numbers": 11, "solutions": 7, "points": 3, "inequalities": 7, "polynomials": 11}


def assert_told_apart(topic: str, step: int) -> None:
    """No wrong answer is accepted, and at most one right one in a hundred missed."""
    right, missed, accepted = 0, [], []
    for gold, response, is_right in table(topic, step):
        value = math_reward(response, gold).value
        right += is_right
        if is_right and value != 1.0:
            missed.append((gold, response, value))
        if not is_right and value != 0.0:
            accepted.append((gold, response, value))
    assert right >= 5
    assert accepted == []
    assert len(missed) <= right / 100, missed


@pytest.mark.parametrize("topic", TOPICS)
def test_spellings_are_read_and_meanings_told_apart(topic: str) -> None:
    assert_told_apart(topic, STEPS[topic])


@pytest.mark.full
@pytest.mark.parametrize("topic", TOPICS)
def test_all_spellings_are_read_and_all_meanings_told_apart(topic: str) -> None:
    assert_told_apart(topic, 1)


def test_the_answers_of_theoremqa_are_read_and_told_apart(
    real_data: Callable[[str], Path],
) -> None:
    """Integers, floats, lists, truth values and letters, each against the next."""
    file = real_data("theoremqa") / "self_authored.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    answers = sorted({str(row["Answer"]) for row in rows})
    assert len(answers) > 60
    for answer, other in pairwise(answers):
        assert math_reward(f"Hence\n\\boxed{{{answer}}}", answer).value == 1.0, answer
        assert math_reward(f"Hence\n#### {answer}", answer).value == 1.0, answer
        # A list of one number is that number.
        if other.strip("[]") != answer.strip("[]"):
            assert math_reward(f"\\boxed{{{other}}}", answer).value == 0.0, (answer, other)
