"""A run whose rewards are scored while it samples is the run that it would be without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.sample import Finished
from oxrl.errors import OxrlError
from oxrl.rollouts.overlapped_scoring import OverlappedScorer
from oxrl.runs.waiting import Patience
from oxrl.types import Group, Score
from support.small_runs import final_files, metric_lines, rl_config

SLOW = """
import time

def slow(prompt, completion):
    time.sleep(0.01)
    if sum(map(ord, completion)) % 5 == 0:
        raise ValueError("a bad sum")
    return sum(c.isdigit() for c in completion) / 6

def dies(prompt, completion):
    import os
    os._exit(3) if prompt.answer else None
    return 1.0
"""


def config(folder: Path, name: str, function: str = "slow", **sections: Any) -> Config:
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(SLOW)
    reward = {"name": f"{folder / 'slow.py'}:{function}", "max_error_rate": 1.0}
    reward |= sections.pop("reward", {"workers": 1})
    sections = {"run": {"steps": 2}, "inference_engine": {"max_rows": 5}} | sections
    return rl_config(folder, name, reward=reward, **sections)


def deterministic(cfg: Config) -> list[dict[str, Any]]:
    other = ("time/", "throughput/", "system/")
    lines = metric_lines(cfg.run.directory)
    return [{k: v for k, v in line.items() if not k.startswith(other)} for line in lines]


# A row of the table, and what it goes with.
CASES: dict[str, dict[str, Any]] = {
    "sgrpo": {"reward": {"workers": 2}},
    "dapo": {},
    "remax": {"train": {"alg_name": "remax", "lr": 1e-3, "kl_coeff": 0.0}},
    "ahead": {"rollout": {"max_staleness": 1, "rounds": 3, "force_strict_on_policy": False}},
}


def same_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> None:
    """Run twice, once with rewards that wait until all is sampled, and compare everything."""
    early: list[int] = []
    score = OverlappedScorer.score

    def counted(
        self: OverlappedScorer, groups: Sequence[Group], patience: Patience | None = None
    ) -> list[list[Score]]:
        early.append(len(self._asked))
        return score(self, groups, patience)

    def silent(self: OverlappedScorer, finished: Finished) -> None:
        """Nothing is told before it is asked for."""

    monkeypatch.setattr(OverlappedScorer, "score", counted)
    meanwhile = config(folder / "meanwhile", "run", **sections)
    run(meanwhile)
    assert max(early) > 0
    monkeypatch.setattr(OverlappedScorer, "offer", silent)
    early.clear()
    after = config(folder / "after", "run", **sections)
    run(after)
    assert max(early) == 0
    samples = [(cfg.run.directory / "samples.jsonl").read_text() for cfg in (meanwhile, after)]
    assert samples[0].replace("meanwhile", "after") == samples[1]
    assert any(json.loads(line)["status"] == "error" for line in samples[0].splitlines())
    assert deterministic(meanwhile) == deterministic(after)
    assert final_files(meanwhile.run.directory) == final_files(after.run.directory)


@pytest.mark.parametrize("case", CASES)
def test_samples_metrics_and_weights_are_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    algorithm = "sgrpo" if case == "ahead" else case
    sections = {"train": {"alg_name": algorithm, "lr": 1e-3}, **CASES[case]}
    same_run(tmp_path, monkeypatch, **sections)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("sampler", ["ray", "vllm"])
def test_they_are_where_other_processes_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: `make env-scale`")
    if sampler == "ray":
        engine = {"actors": 1, "max_rows": 5}
        same_run(tmp_path, monkeypatch, inference_engine=engine)
        return
    pytest.importorskip("vllm", reason="vLLM is not installed: `make env-scale`")
    engine = {"name": "vllm", "actors": 1, "max_rows": 5}
    same_run(tmp_path, monkeypatch, inference_engine=engine, model={"name": "builtin:small"})


def test_a_reward_that_breaks_ends_the_run_as_it_did(tmp_path: Path) -> None:
    cfg = config(tmp_path, "run", function="dies")
    with pytest.raises(OxrlError) as raised:
        run(cfg)
    assert "dies" in str(raised.value)
