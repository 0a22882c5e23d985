"""Responses that repeat themselves, or one another."""

from __future__ import annotations

import random

import pytest

from oxrl.data.samples import is_loop, repetition_metrics
from oxrl.types import Completion, Prompt, Rollout, Score

PROSE = (
    "Let x be the number of apples that Tom had on Monday. He gave a third of them to his sister, "
    "so 2x/3 were left, and then bought 12 more on Tuesday. We are told that he now has 40, "
    "therefore 2x/3 + 12 = 40, 2x/3 = 28, and x = 42. Check: 42 / 3 = 14, 42 - 14 = 28, 28 + 12 = 40."
)
random.seed(0)
WORDS = " ".join(random.choice("ab abc bcd cde xyz the of and sum is".split()) for _ in range(300))


@pytest.mark.parametrize("text", ["", "ha " * 20, PROSE, f"{PROSE} {PROSE}", WORDS, "\ud800" * 9])
def test_prose_and_short_texts_are_no_loops(text: str) -> None:
    assert not is_loop(text)


@pytest.mark.parametrize(
    "text", ["1" * 400, "So the answer is 4. " * 30, f"{PROSE} " * 12, "无限" * 99]
)
def test_a_passage_that_comes_again_and_again_is_a_loop(text: str) -> None:
    assert is_loop(text)


def rollout(group: int, sample: int, text: str) -> Rollout:
    message = {"role": "user", "content": "1+1"}
    prompt = Prompt(uid=str(group), messages=(message,), token_ids=(1,), answer="2")
    completion = Completion(segments=(), text=text, finish_reason="stop")
    return Rollout(
        prompt=prompt,
        completion=completion,
        score=Score(value=0.0),
        group_id=group,
        sample=sample,
        seed=0,
    )


def test_equal_texts_are_counted_in_pairs_within_a_group() -> None:
    texts = {0: ["a", "a", "a", "b"], 1: ["a", "c"], 2: ["d" * 300]}
    rollouts: list[Rollout] = []
    for group, found in texts.items():
        rollouts += [rollout(group, sample, text) for sample, text in enumerate(found)]
    random.shuffle(rollouts)
    metrics = repetition_metrics(rollouts)
    assert metrics == {"data/looping_frac": 1 / 7, "data/duplicate_frac": 3 / 7}
    assert repetition_metrics(rollouts[:1]) == {
        "data/looping_frac": float(rollouts[0].group_id == 2)
    }
    assert repetition_metrics([]) == {}
