"""A run whose reward runs what the model wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from oxrl.commands.train import run
from oxrl.errors import OxrlError
from oxrl_datasets.published import humaneval
from oxrl_sandbox import client
from oxrl_sandbox.layers import why_not
from support.small_runs import metric_lines, rl_config

LEVEL = "strict" if not why_not("strict") else "off"


def test_a_run_on_programs_completes_and_says_what_kept_them(
    tmp_path: Path, real_data: Callable[[str], Path]
) -> None:
    lines = (real_data("humaneval") / "HumanEval.jsonl").read_text().splitlines()[:4]
    rows = [row for line in lines for row in humaneval(json.loads(line))]
    data = tmp_path / "humaneval.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = rl_config(
        tmp_path,
        "run",
        run={"steps": 1},
        data={"train": str(data), "prompts_per_step": 2},
        reward={"name": "code", "sandbox": LEVEL, "partial": True, "timeout_s": 60, "workers": 2},
        rollout={"n_samples": 3},
    )
    run(cfg)
    home = cfg.run.directory
    samples = [json.loads(line) for line in (home / "samples.jsonl").read_text().splitlines()]
    assert {(line["reward"], line["status"]) for line in samples} == {(0.0, "ok")}
    assert all(line["reason"] for line in samples)
    assert metric_lines(home)[-1]["reward/mean"] == 0.0
    environment = json.loads((home / "environment.json").read_text())
    assert set(environment["sandbox"]) == {"landlock", "seccomp", "namespaces", "bubblewrap"}


def test_a_run_is_refused_where_its_level_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The worker is another process: what it cannot have is a service that nobody runs.
    cfg = rl_config(
        tmp_path,
        "run",
        reward={"name": "code", "sandbox_url": "http://127.0.0.1:9", "timeout_s": 60},
    )
    with pytest.raises(OxrlError, match=r"reward\.sandbox_url: http://127.0.0.1:9") as caught:
        run(cfg)
    assert caught.value.exit_code == 2
    assert client.LEVELS[0] == cfg.reward.sandbox
