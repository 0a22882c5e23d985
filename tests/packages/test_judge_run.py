"""Runs whose reward is a judge: killed and resumed, without a key, as a part."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import ConfigError, RewardDefinitionError, RewardError
from oxrl.plan.preflight import CHECKS, Prepared, examine
from support.command_line import forked
from support.judge_server import JudgeServer, judge_server, refused, said, verdict
from support.small_runs import final_files, metric_lines, rl_config

DEADLINE_S = 120.0


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as judge:
        yield judge


def judged(folder: Path, server: JudgeServer, name: str, **options: Any) -> Config:
    reward: dict[str, Any] = {
        "name": "judge",
        "options": {"url": server.url, "model": "m", **options},
        "timeout_s": 20.0,
        "workers": 4,
    }
    return rl_config(folder, name, reward=reward)


def lines_of(cfg: Config, name: str) -> list[dict[str, Any]]:
    return list(map(json.loads, (cfg.run.directory / name).read_text().splitlines()))


def go_on(cfg: Config) -> None:
    """Body of the process that is going to be killed."""
    run(cfg, resume=True)


def run_until(cfg: Config, server: JudgeServer, kill_at: int | None) -> None:
    """Start or resume a run, and kill it when the judge has had so many requests; None: never."""
    process = forked(go_on, cfg)
    process.start()
    deadline = time.monotonic() + DEADLINE_S
    while process.is_alive() and time.monotonic() < deadline:
        if kill_at is not None and len(server.requests) >= kill_at:
            os.kill(process.pid or 0, signal.SIGKILL)
            break
        time.sleep(0.005)
    process.join(DEADLINE_S)
    assert process.exitcode == (0 if kill_at is None else -signal.SIGKILL)


def test_a_run_that_is_killed_and_resumed_writes_the_same_bytes_and_asks_nothing_twice(
    tmp_path: Path, server: JudgeServer
) -> None:
    whole = judged(tmp_path / "whole", server, "run")
    run(whole)
    once = server.questions
    assert set(once.values()) == {1}
    server.requests.clear()
    server.delay_s = 0.03  # so that a kill hits the middle of a batch
    cfg = judged(tmp_path / "killed", server, "run")
    for kill_at in (22, 60, None):
        run_until(cfg, server, kill_at)
    assert metric_lines(cfg.run.directory) == metric_lines(whole.run.directory)
    assert final_files(cfg.run.directory) == final_files(whole.run.directory)
    recorded = lines_of(cfg, "judgements.jsonl")
    assert len({line["key"] for line in recorded}) == len(recorded) == len(once)
    # What was under way at a kill was not recorded: at most four requests each time.
    asked = server.questions
    assert set(asked) == set(once) and sum(asked.values()) <= sum(once.values()) + 2 * 4


def test_a_judge_is_a_part_like_any_other_and_its_verdicts_are_in_samples_and_metrics(
    tmp_path: Path, server: JudgeServer
) -> None:
    parts = {
        "quality": {"name": "judge", "options": {"url": server.url, "model": "m"}, "workers": 3},
        "digits": {"name": f"{tmp_path / 'reward.py'}:digits", "weight": 0.5},
    }
    rl_config(tmp_path, "run")  # writes the file that holds digits
    cfg = rl_config(tmp_path, "run", ["~reward.name"], reward={"parts": parts})
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert {"reward/part/quality", "reward/part/quality.verdict"} <= set(lines[-1])
    whole = lines_of(cfg, "metrics.jsonl")
    assert whole[0]["system/judge/questions"] == 16.0
    assert sum(line["system/judge/requests"] for line in whole) == len(server.requests)


def test_a_judge_that_fails_stops_the_run_and_is_never_the_number_0(
    tmp_path: Path, server: JudgeServer
) -> None:
    server.answer = lambda request: said("I would rather not say.")
    cfg = judged(tmp_path, server, "run", retries=0)
    with pytest.raises(RewardError, match="failed on 16 of 16 samples.*holds no JSON object"):
        run(cfg)


def test_a_key_is_asked_for_before_anything_is_made_and_is_in_no_file(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = judged(tmp_path, server, "run", key_env="TEST_JUDGE_KEY")
    monkeypatch.delenv("TEST_JUDGE_KEY", raising=False)
    with pytest.raises(RewardDefinitionError, match="TEST_JUDGE_KEY is not set"):
        run(cfg)
    assert not (cfg.run.directory / "metrics.jsonl").exists()
    monkeypatch.setenv("TEST_JUDGE_KEY", "sk-very-secret")
    answered = iter([refused(503, "bad key sk-very-secret")])
    server.answer = lambda request: next(answered, said(verdict(request)))
    run(cfg)
    assert "Bearer sk-very-secret" in server.keys
    for path in cfg.run.directory.rglob("*"):
        assert path.is_dir() or b"sk-very-secret" not in path.read_bytes(), path


def test_plan_says_whether_the_judge_answers_and_asks_it_nothing(
    tmp_path: Path, server: JudgeServer
) -> None:
    def told(cfg: Config) -> tuple[str, str]:
        with closing(Prepared()) as prepared:
            found = [examine(cfg, prepared, subject) for subject in CHECKS]
        (reward,) = [one for one in found if one.subject == "reward"]
        return reward.state, reward.text

    assert told(judged(tmp_path, server, "a"))[0] == "ok"
    assert not server.requests
    away = judged(tmp_path, server, "b", url="http://127.0.0.1:9/v1")
    state, text = told(away)
    assert state == "unknown" and "does not answer" in text


def test_a_group_of_one_cannot_be_compared(tmp_path: Path, server: JudgeServer) -> None:
    options = {"url": server.url, "model": "m", "compare": "group"}
    with pytest.raises(ConfigError, match="rollout.n_samples"):
        rl_config(
            tmp_path,
            "run",
            ["train.alg_name=reinforce", "rollout.n_samples=1"],
            reward={"name": "judge", "options": options},
        )
