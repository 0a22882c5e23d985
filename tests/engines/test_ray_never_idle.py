"""Rollout actors that go on while a batch trains, at a lag of two versions: the bytes of sampling
processes of this machine, also where the whole run is killed in the middle and resumed. Runs where
Ray is installed (`make test-scale`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.config import Config
from support.killed_runs import killed_until_done, uninterrupted
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config

pytest.importorskip(
    "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
)

pytestmark = pytest.mark.timeout(600)


def ahead(folder: Path, model: Path, **samplers: int) -> Config:
    """Eight batches, of which rows are in flight whenever weights come."""
    [name] = samplers
    return rl_config(
        folder,
        name,
        ["inference_engine.max_rows=3", "run.checkpoint_every=3"],
        model={"name": str(model)},
        run={"steps": 8, "threads": 1},
        rollout={
            "max_tokens": 12,
            "n_samples": 4,
            "max_staleness": 2,
            "rounds": 4,
            "force_strict_on_policy": False,
        },
        inference_engine=samplers,
    )


def learned(run: Path) -> list[dict[str, Any]]:
    """Metrics, but for those of deliveries, and of samplers that were replaced."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("sync/", "rollout/replaced"))
        }
        for line in metric_lines(run)
    ]


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.full)])
def test_actors_at_a_lag_give_the_bytes_of_processes_also_when_the_run_is_killed(
    kills: int, tmp_path: Path
) -> None:
    model = model_that_stops(tmp_path / "model")
    processes, actors = ahead(tmp_path, model, processes=2), ahead(tmp_path, model, actors=2)
    uninterrupted(processes)
    assert len(killed_until_done(actors, kills=kills, seed=kills)) == kills
    ours, theirs = actors.run.directory, processes.run.directory
    written = (theirs / "samples.jsonl").read_text().splitlines()
    assert any(len(json.loads(line)["versions"]) > 1 for line in written)
    assert max(line["data/staleness_max"] for line in metric_lines(theirs)) == 2
    assert (ours / "samples.jsonl").read_bytes() == (theirs / "samples.jsonl").read_bytes()
    assert learned(ours) == learned(theirs)
    left, right = final_files(ours), final_files(theirs)
    assert [name for name in left.keys() | right if left.get(name) != right.get(name)] == []
