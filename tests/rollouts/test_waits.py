"""What is measured of sampling that goes on while a batch trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oxrl.assembly.continuous_wiring import who_waits
from oxrl.plan.plan import plan_text
from oxrl.rollouts.waits import Waits, busy_metrics, lag_metrics, tokens_read_again
from oxrl.tables.engines import KEPT_CACHES
from oxrl.types import Completion, Prompt, Request, Rollout, Sampling, Score, Segment
from support.small_runs import rl_config


def rollout(group: int, versions: tuple[int, ...], score: Score | None = None) -> Rollout:
    count = len(versions)
    run = Segment(
        origin="policy", token_ids=(7,) * count, logprobs=(0.0,) * count, versions=versions
    )
    return Rollout(
        prompt=Prompt(uid=str(group), messages=(), token_ids=(5, 6, 7)),
        completion=Completion(segments=(run,), text="", finish_reason="length"),
        score=score or Score(value=1.0),
        group_id=group,
        sample=0,
        seed=1,
    )


def test_the_lag_of_a_row_is_that_of_its_oldest_token() -> None:
    rollouts = [
        rollout(3, (4, 5, 5)),
        rollout(3, (5, 5)),
        rollout(4, (6,)),
        rollout(4, (2, 6), Score(value=None, status="timeout")),
        rollout(9, (1,)),
    ]
    assert lag_metrics(rollouts, (3, 4), version=6) == {
        "data/lag_0_frac": 1 / 3,
        "data/lag_1_frac": 1 / 3,
        "data/lag_2_frac": 1 / 3,
        "data/version_oldest": 4.0,
        "data/version_newest": 6.0,
        "data/mixed_versions_frac": 1 / 3,
    }
    assert lag_metrics(rollouts, (), version=6) == {}


def test_slots_are_busy_in_the_rounds_in_which_they_have_rows() -> None:
    counters = {
        "rollout/rounds": 10.0,
        "rollout/decode_steps": 8.0,
        "rollout/mean_active_rows": 3.0,
    }
    assert busy_metrics(counters, slots=4) == {"rollout/busy_frac": 24 / 40}
    assert busy_metrics(counters, slots=0) == {}
    assert busy_metrics({"rollout/rounds": 0.0}, slots=4) == {}


def test_rows_in_slots_are_read_again_but_for_their_last_tokens() -> None:
    request = Request(
        id="0/0",
        prompt=Prompt(uid="0", messages=(), token_ids=(1, 2, 3)),
        draw=0,
        sample=0,
        sampling=Sampling(max_tokens=9),
        seed=1,
    )
    requests = {id: replace(request, id=id) for id in ("0/0", "0/1", "0/2")}
    one = {"rows": [[{"id": "0/0", "token_ids": [9]}]], "waiting": ["0/2"], "round": 3}
    other = {"rows": [[{"id": "0/1", "token_ids": [9, 9, 9]}]], "waiting": [], "round": 3}
    assert tokens_read_again(one, requests) == 3
    assert tokens_read_again({"workers": [one, other]}, requests) == 8
    assert tokens_read_again({"workers": [one, {**other, "kept": True}]}, requests) == 3
    assert tokens_read_again({"round": 3}, requests) == 0


def test_who_waits_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("oxrl.rollouts.waits.monotonic", lambda: now)
    waits = Waits()
    with waits.of_trainer(), waits.sampling():
        now += 3.0
    now += 5.0
    with waits.sampling():
        now += 1.0
    expected = {"time/trainer_wait_s": 3.0, "time/samplers_wait_s": 5.0}
    assert waits.counters() == expected
    assert waits.counters() == dict.fromkeys(expected, 0.0)


@pytest.mark.parametrize("kept", [True, False])
def test_plan_and_console_say_what_is_unproved_of_kept_caches(kept: bool, tmp_path: Path) -> None:
    sampler = {"name": "vllm", "processes": 1}
    rollout = {
        "max_tokens": 4,
        "n_samples": 2,
        "max_staleness": 1,
        "force_strict_on_policy": False,
        "schedule": "free",
        "swap": "keep" if kept else "recompute",
    }
    cfg = rl_config(tmp_path, "run", rollout=rollout, inference_engine=sampler)
    for said in (plan_text(cfg), who_waits(cfg, background=True)):
        assert ("; " + KEPT_CACHES in said) == kept
