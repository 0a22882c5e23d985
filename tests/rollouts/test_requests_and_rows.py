"""What is asked of the sampler for a step, and which rows of what it sampled are trained on."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from oxrl.errors import InvariantError
from oxrl.rollouts.batch import RowRules, sampling_metrics, scored_rewards, trainable_rows
from oxrl.rollouts.sync import PromptRequests, RolloutStep
from oxrl.types import Completion, Prompt, Rollout, Sampling, Score, Segment

RULES = RowRules(
    pad_id=0,
    stop_token_ids=(2,),
    max_tokens=4,
    strict=False,
    max_staleness=1,
    groups_of_two=True,
    images=None,
)


def prompt(draw: int) -> Prompt:
    return Prompt(uid=str(draw), messages=(), token_ids=(1, draw + 3))


class Numbered:
    """Prompts, one for each draw."""

    def at(self, position: int, *, seed: int) -> Prompt:
        return prompt(position)


def rollout(group: int, sample: int, value: float | None = 1.0, version: int = 5) -> Rollout:
    segment = Segment(token_ids=(7, 2), logprobs=(-1.0, -1.0), versions=(version, version))
    return Rollout(
        prompt=prompt(group),
        completion=Completion(segments=(segment,), text="7", finish_reason="stop"),
        score=Score(value=value, status="ok" if value is not None else "timeout"),
        group_id=group,
        sample=sample,
        seed=0,
    )


def step_of(*rollouts: Rollout) -> RolloutStep:
    step = RolloutStep(step=0, start=0, end=9, rollouts=list(rollouts))
    step.next_draw = 9
    step.groups = tuple({rollout.group_id: None for rollout in rollouts})
    return step


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
def test_every_prompt_is_asked_for_its_samples_and_for_its_baseline(
    samples: int, baseline: bool
) -> None:
    rows: Any = Numbered()
    sampling = Sampling(max_tokens=4, temperature=0.75)
    requests = PromptRequests(
        rows, samples=samples, sampling=sampling, run_seed=3, baseline=baseline
    )
    asked = requests.at([4, 8])
    assert len(asked) == 2 * requests.per_prompt
    sampled = [(draw, sample) for draw in (4, 8) for sample in range(samples)]
    greedy = [(draw, samples) for draw in (4, 8)] if baseline else []
    assert [(one.draw, one.sample) for one in asked] == sampled + greedy
    assert {one.sampling.temperature for one in asked[: 2 * samples]} == {0.75}
    assert all(one.sampling.temperature == 0 for one in asked[2 * samples :])
    assert all(one.prompt == prompt(one.draw) for one in asked)
    assert len({one.seed for one in asked}) == len(asked)


def test_a_row_that_is_left_alone_in_its_group_is_dropped_where_rows_are_compared() -> None:
    step = step_of(
        rollout(0, 0), rollout(0, 1), rollout(1, 0), rollout(1, 1, None), rollout(2, 0, None)
    )
    rows = trainable_rows(step, RULES, version=5)
    assert rows.places == [0, 1]
    assert rows.batch.group_ids.tolist() == [0, 0]
    assert (rows.dropped["unscored"], rows.dropped["alone"]) == (2, 1)
    alone = trainable_rows(step, replace_rules(groups_of_two=False), version=5)
    assert alone.places == [0, 1, 2] and "alone" not in alone.dropped


def replace_rules(**changes: Any) -> RowRules:
    return RULES._replace(**changes)


def test_every_reason_to_leave_a_row_out_is_counted_once() -> None:
    step = step_of(
        rollout(0, 0),
        rollout(0, 1),
        rollout(1, 0, version=4),
        rollout(1, 1, version=4),
        rollout(3, 0),  # of a group that was not chosen
        rollout(8, 0),  # drawn for the next step
    )
    step.groups = (0, 1, 8)
    step.next_draw = 8
    rows = trainable_rows(step, RULES, version=5)
    assert rows.places == [0, 1, 2, 3]
    assert rows.dropped == {
        "surplus": 1,
        "uninformative": 1,
        "unscored": 0,
        "alone": 0,
    }


def test_a_row_that_is_too_old_ends_the_run() -> None:
    step = step_of(rollout(0, 0), rollout(0, 1), rollout(1, 0, version=3), rollout(1, 1))
    with pytest.raises(
        InvariantError,
        match="step 5 was given tokens that lag 2 weight versions behind it, and "
        "rollout.max_staleness is 1",
    ):
        trainable_rows(step, RULES, version=5)
    assert trainable_rows(step, replace_rules(max_staleness=2), version=5).places == [0, 1, 2, 3]


def test_a_group_without_the_reward_of_its_greedy_response_has_no_baseline() -> None:
    step = step_of(rollout(0, 0), rollout(0, 1), rollout(1, 0), rollout(1, 1))
    step.baselines = [rollout(0, 2, 0.25), rollout(1, 2, None)]
    rows = trainable_rows(step, RULES, version=5)
    assert rows.places == [0, 1]
    assert rows.batch.greedy_rewards is not None
    assert rows.batch.greedy_rewards.tolist() == [0.25, 0.25]
    assert (rows.dropped["baseline"], rows.dropped["without_baseline"]) == (2, 2)


def test_rewards_are_those_of_the_rollouts_that_have_one() -> None:
    rewards, groups = scored_rewards([rollout(4, 0, 0.5), rollout(4, 1, None), rollout(6, 0, -1.0)])
    assert (rewards.tolist(), groups.tolist()) == ([0.5, -1.0], [4, 6])


def test_what_became_of_scores_is_told_of_each_part() -> None:
    """Where parts have a value, and where all that is known of them is that they failed."""
    first, second = rollout(0, 0), rollout(0, 1)
    for score in (
        Score(value=1.0, parts={"inner": 0.5}),
        Score(value=None, status="timeout", statuses={"inner": "timeout"}),
    ):
        found = sampling_metrics(step_of(replace(first, score=score), second))
        assert any("inner" in name for name in found), score
    plain = sampling_metrics(step_of(first, second))
    assert not any("inner" in name for name in plain)
    assert plain["sampling/groups"] == 1.0
    assert math.isfinite(plain["reward/mean"]) and plain["reward/failed_frac"] == 0.0
