"""Parts of a reward that advantages compare one by one: equal sums do not make equal responses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import ConfigError
from oxrl.functional.part_advantages import group_normalize_parts
from oxrl.recipes.features.dynamic_sampling import TeachingGroups
from oxrl.rollouts.batch import sampling_metrics
from oxrl.rollouts.sync import RolloutStep
from oxrl.runs.health_checks import SIGNS, History
from oxrl.types import Completion, Prompt, Rollout, Score
from support.small_runs import metric_lines, rl_config

# The sum of the two parts is 1 whatever the response; each of them is not.
PARTS = """
def digits(prompt, completion):
    return float(sum(c.isdigit() for c in completion) >= 1)

def others(prompt, completion):
    return 1.0 - digits(prompt, completion)
"""


def rollout(group: int, sample: int, **parts: float) -> Rollout:
    prompt = Prompt(uid=str(group), messages=(), token_ids=(1,))
    completion = Completion(segments=(), text="", finish_reason="stop")
    value = sum(parts.values())
    score = Score(value=value, parts=parts, statuses=dict.fromkeys(parts, "ok"))
    return Rollout(
        prompt=prompt, completion=completion, score=score, group_id=group, sample=sample, seed=0
    )


def step_of(rollouts: Sequence[Rollout], compared: tuple[str, ...] = ()) -> RolloutStep:
    step = RolloutStep(step=0, start=0, end=2, rollouts=list(rollouts))
    step.compared_parts = compared
    return step


# Of three groups, the first has equal sums of parts that differ, the second nothing that differs.
ROLLOUTS = [
    rollout(0, 0, a=1.0, b=0.0),
    rollout(0, 1, a=0.0, b=1.0),
    rollout(1, 0, a=1.0, b=0.0),
    rollout(1, 1, a=1.0, b=0.0),
    rollout(2, 0, a=1.0, b=1.0),
    rollout(2, 1, a=0.0, b=1.0),
]


def test_a_group_whose_parts_differ_is_sampled_for_although_its_sums_are_equal() -> None:
    by_sum = TeachingGroups(4)
    by_parts = TeachingGroups(4, ("a", "b"))
    assert by_sum.groups(ROLLOUTS, wanted=3) == (2,)
    assert by_parts.groups(ROLLOUTS, wanted=3) == (0, 2)
    assert by_sum.missing(ROLLOUTS, wanted=2, rounds=1) > 0
    assert by_parts.missing(ROLLOUTS, wanted=2, rounds=1) == 0


def test_a_part_of_weight_0_makes_no_group_worth_its_while() -> None:
    assert TeachingGroups(4, ("b",)).groups(ROLLOUTS[:4], wanted=3) == (0,)
    assert TeachingGroups(4, ("b",)).groups(ROLLOUTS[4:], wanted=3) == (2,)  # the only one there


def test_groups_that_teach_nothing_are_counted_by_what_is_compared() -> None:
    name = "reward/zero_variance_groups"
    assert sampling_metrics(step_of(ROLLOUTS))[name] == pytest.approx(2 / 3)
    assert sampling_metrics(step_of(ROLLOUTS, ("a", "b")))[name] == pytest.approx(1 / 3)


def test_equal_sums_of_parts_that_differ_are_no_constant_reward() -> None:
    constant = next(sign for sign in SIGNS if sign.name == "constant-reward")

    def holds(step: RolloutStep) -> bool:
        seen = History(0)
        seen.add(sampling_metrics(step))
        return constant.holds(seen)

    assert holds(step_of(ROLLOUTS[:2]))
    assert not holds(step_of(ROLLOUTS[:2], ("a", "b")))
    assert holds(step_of(ROLLOUTS[2:4], ("a", "b")))


def test_a_missing_part_compares_the_others_and_what_cancels_is_nothing() -> None:
    nan = float("nan")
    ids = torch.tensor([0, 0, 0, 1, 1])
    parts = torch.tensor([[1.0, 0.0], [nan, 1.0], [0.0, nan], [1.0, -1.0], [0.0, 1.0]]).double()
    weights = torch.tensor([1.0, 1.0]).double()
    found = group_normalize_parts(parts, weights, ids)
    # Part a compares rows 0 and 2, part b rows 0 and 1: each of them +- 1 / sqrt(2).
    half = 0.5**0.5
    sums = torch.tensor([half - half, half, -half, 0.0, 0.0]).double()
    torch.testing.assert_close(found, sums / sums.std())
    assert found[3:].tolist() == [0.0, 0.0]
    assert group_normalize_parts(parts[:1], weights, ids[:1]).tolist() == [0.0]
    with pytest.raises(ValueError, match=r"\[B, K\] and \[K\]"):
        group_normalize_parts(parts, weights[:1], ids)


def two_parts(folder: Path, algorithm: str, overrides: Sequence[str] = (), **train: Any) -> Config:
    file = folder / "parts.py"
    file.write_text(PARTS)
    names = {"digits": 1.0, "others": 1.0}
    parts = {name: {"name": f"{file}:{name}", "weight": w} for name, w in names.items()}
    return rl_config(
        folder,
        algorithm,
        ["~reward.name", *overrides],
        run={"steps": 2},
        reward={"parts": parts},
        rollout={"max_tokens": 6, "n_samples": 4},
        train={"alg_name": algorithm, "lr": 1e-3} | train,
    )


def test_a_run_learns_from_parts_whose_sum_is_constant(tmp_path: Path) -> None:
    unequal = ["reward.parts.others.weight=0.5"]
    cfg = two_parts(tmp_path, "gdpo", unequal)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    samples = [
        json.loads(line) for line in (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    ]
    rows = [line for line in samples if line["step"] == 1]
    parts = [[line["parts"]["digits"], line["parts"]["others"]] for line in rows]
    ids = torch.tensor([line["draw"] for line in rows])
    weights = torch.tensor([1.0, 0.5]).double()
    expected = group_normalize_parts(torch.tensor(parts).double(), weights, ids)
    found = torch.tensor([line["advantage"] for line in rows]).double()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert expected.abs().max() > 0 and lines[0]["update/grad_norm"] > 0


def test_dynamic_sampling_with_parts_draws_no_more_than_it_has_to(tmp_path: Path) -> None:
    by_sum = two_parts(tmp_path, "dapo", ["train.advantage=group_center"], sampling_rounds=3)
    run(by_sum)
    assert metric_lines(by_sum.run.directory)[0]["sampling/rounds"] == 3.0
    (tmp_path / "other").mkdir()
    # An overlong penalty is no part of the reward, so DAPO's row as it stands is refused.
    with pytest.raises(ConfigError, match="overlong penalty"):
        two_parts(tmp_path / "other", "dapo", ["train.advantage=group_normalize_parts"])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["~reward.parts", "reward.name=math"], "write reward.parts, not reward.name"),
        (["train.kl=reward_k1", "train.kl_coeff=0.1"], "is subtracted from the sum"),
        (["rollout.n_samples=1"], "2 or more"),
    ],
)
def test_what_a_row_of_parts_cannot_do_is_refused(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        two_parts(tmp_path, "gdpo", overrides)


def test_failed_rewards_are_counted_and_sources_told_apart() -> None:
    def of(source: str, value: float | None, status: str) -> Rollout:
        prompt = Prompt(uid="0", messages=(), token_ids=(1,), source=source)
        completion = Completion(segments=(), text="", finish_reason="stop")
        score = Score(value=value, status=status)  # pyright: ignore
        return Rollout(
            prompt=prompt, completion=completion, score=score, group_id=0, sample=0, seed=0
        )

    rollouts = [
        of("sums", 1.0, "ok"),
        of("sums", 0.5, "ok"),
        of("sums", None, "timeout"),
        of("words", 0.25, "ok"),
        of("words", 0.0, "ok"),
        of("none", None, "error"),
        of("none", None, "invalid"),
        of("none", None, "invalid"),
    ]
    found = sampling_metrics(step_of(rollouts))
    assert found["reward/failed_frac"] == 4 / 8
    assert [found[f"reward/{name}"] for name in ("timeout", "error", "invalid")] == [1, 1, 2]
    assert (found["reward/mean/sums"], found["reward/mean/words"]) == (0.75, 0.125)
    assert math.isnan(found["reward/mean/none"])
    alone = sampling_metrics(step_of(rollouts[:3]))
    assert alone["reward/failed_frac"] == pytest.approx(1 / 3)
    assert "reward/mean/sums" not in alone
    assert sampling_metrics(step_of(rollouts[2:4]))["reward/mean/words"] == 0.25
