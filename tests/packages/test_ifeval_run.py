"""A run whose reward checks instructions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from oxrl.commands.train import run
from oxrl_datasets.published import ifeval
from support.small_runs import metric_lines, rl_config


def test_a_run_on_instructions_completes(tmp_path: Path, real_data: Callable[[str], Path]) -> None:
    lines = (real_data("ifeval") / "input_data.jsonl").read_text().splitlines()[:4]
    rows = [row for line in lines for row in ifeval(json.loads(line))]
    data = tmp_path / "ifeval.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = rl_config(
        tmp_path,
        "run",
        run={"steps": 1},
        data={"train": str(data), "prompts_per_step": 2},
        reward={"name": "ifeval", "options": {"share": True}},
    )
    run(cfg)
    samples = [
        json.loads(line) for line in (cfg.run.directory / "samples.jsonl").read_text().splitlines()
    ]
    assert {line["status"] for line in samples} == {"ok"}
    assert all(0.0 <= line["reward"] <= 1.0 for line in samples)
    assert 0.0 <= metric_lines(cfg.run.directory)[-1]["reward/mean"] <= 1.0
