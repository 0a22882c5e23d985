"""Whole runs that sample while a batch trains: how old samples are, their order, what is corrected,
what an evaluation changes, and what is found out of rounds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.errors import InvariantError
from oxrl.rollouts.batch import count_samples
from oxrl.rollouts.continuous import Pace, added
from oxrl.rollouts.sync import RolloutStep
from support.figures import Learned
from support.small_runs import metric_lines, rl_config


def config(folder: Path, name: str, staleness: int, **sections: dict[str, Any]) -> Config:
    rollout = {
        "max_tokens": 6,
        "n_samples": 4,
        "max_staleness": staleness,
        "force_strict_on_policy": staleness == 0,
    }
    if staleness:
        rollout["rounds"] = 3
    return rl_config(folder, name, **{"rollout": rollout, **sections})


def short(steps: int) -> dict[str, int]:
    """A run with a checkpoint at its end alone."""
    return {"steps": steps, "checkpoint_every": 0}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().split("\n") if line]


# Bound, optimizer steps per rollout step.
@pytest.mark.parametrize(("bound", "updates"), [(0, 1), (1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_no_sample_is_older_than_the_bound_and_their_order_is_that_of_the_data(
    bound: int, updates: int, tmp_path: Path
) -> None:
    train = {"alg_name": "sgrpo", "lr": 1e-3, "minibatches": updates}
    batches = 6
    cfg = config(tmp_path, "run", bound, train=train, run=short(batches * updates))
    run(cfg)
    samples, metrics = lines_of(cfg.run.directory), metric_lines(cfg.run.directory)
    for sample in samples:
        before = sample["step"] - 1
        versions = [span[0] for span in sample["versions"]]
        assert versions == sorted(versions) and before - versions[0] <= bound
        assert versions[-1] <= before
    assert max(line["data/staleness_max"] for line in metrics) <= bound
    # The data order is the same, however far ahead it is sampled.
    assert [sample["draw"] for sample in samples] == [
        draw for draw in range(4 * batches) for _ in range(4)
    ]
    assert metrics[-1]["samples/in_flight"] == 0
    assert metrics[-1]["samples/dispatched"] == len(samples)
    in_flight = [line["samples/in_flight"] for line in metrics[::updates]]
    ahead = bound // updates
    assert in_flight == [16 * min(ahead, batches - 1 - batch) for batch in range(batches)]


def test_stale_samples_are_corrected_by_default_and_the_ratio_to_the_sampler_shows(
    tmp_path: Path, learned: Learned
) -> None:
    cfg = config(tmp_path, "run", 1, train={"alg_name": "sgrpo", "lr": 1e-2}, run=short(2))
    run(cfg)
    assert cfg.train.correction == "truncate"
    lines = metric_lines(cfg.run.directory)
    assert lines[0]["mismatch/abs_logdiff_max"] < 1e-4
    stale = math.log10(lines[1]["mismatch/abs_logdiff_max"])
    learned("log10 of the mismatch of stale samples", stale, at_least=-2)
    assert abs(lines[0]["mismatch/weight_mean"] - 1) < 1e-5
    away = math.log10(abs(lines[1]["mismatch/weight_mean"] - 1))
    learned("log10 of how far their mean weight is from 1", away, at_least=-4)


@pytest.mark.parametrize("bound", [1, 5])
def test_dynamic_sampling_goes_on_where_the_batch_before_stopped(
    bound: int, tmp_path: Path
) -> None:
    train = {"alg_name": "dapo", "lr": 1e-3, "overlong_buffer": 2}
    cfg = config(tmp_path, "run", bound, train=train, run=short(4))
    run(cfg)
    samples, lines = lines_of(cfg.run.directory), metric_lines(cfg.run.directory)
    start = 0
    for line in lines:
        mine = [sample for sample in samples if sample["step"] == line["step"]]
        assert min(sample["draw"] for sample in mine) == start
        start = max(sample["draw"] for sample in mine if sample["advantage"] is not None) + 1
    books = {key: value for key, value in lines[-1].items() if key.startswith("samples/")}
    dispatched = books.pop("samples/dispatched")
    assert dispatched == sum(books.values())
    assert len(samples) == dispatched - books["samples/in_flight"]


@pytest.mark.parametrize("algorithm", ["sgrpo", "dapo"])
def test_evaluating_changes_no_sample(algorithm: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"alg_name": algorithm, "lr": 1e-3}}
    for name in ("seldom", "often"):
        data = {
            "train": str(tmp_path / "prompts.jsonl"),
            "prompts_per_step": 4,
            "eval": str(tmp_path / "prompts.jsonl"),
            "eval_rows": 4,
        }
        config(tmp_path, name, 2, **sections, data=data, run=short(5))
        every = int(name == "often")
        run(
            load_config(
                tmp_path / f"{name}.yaml",
                [f"run.eval_every={every}", "inference_engine.max_rows=6"],
            )
        )
    assert (tmp_path / "seldom/samples.jsonl").read_bytes() == (
        tmp_path / "often/samples.jsonl"
    ).read_bytes()
    evaluated = ["eval/reward" in line for line in metric_lines(tmp_path / "often")]
    assert evaluated == [True] * 5


def test_rounds_that_are_found_out_are_noted_and_repeat_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"train": {"alg_name": "sgrpo", "lr": 1e-3}, "run": short(6)}
    config(tmp_path, "found", 2, **sections)
    few = "inference_engine.max_rows=6"
    run(load_config(tmp_path / "found.yaml", ["rollout.rounds=auto", few]))
    found = json.loads((tmp_path / "found/choices.json").read_text())["rollout.rounds"]
    rounds = found["value"]
    assert rounds >= 1 and found["why"] == "measured over the first two batches"
    said = capsys.readouterr().out
    assert f"to repeat this run set rollout.rounds={rounds}" in said
    assert "tokens lag at most 2 weight versions" in said
    config(tmp_path, "written", 2, **sections)
    run(load_config(tmp_path / "written.yaml", [f"rollout.rounds={rounds}", few]))
    assert metric_lines(tmp_path / "found") == metric_lines(tmp_path / "written")
    ours, theirs = ((tmp_path / name / "samples.jsonl") for name in ("found", "written"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("pace", "rounds"),
    [
        (Pace(print, rounds=20, sampling_s=2.0, training_s=[9.0, 3.0]), 30),
        (Pace(print, rounds=20, sampling_s=2.0, training_s=[0.01, 0.02]), 1),
        (Pace(print, rounds=20, sampling_s=2.0), 1),
        (Pace(print, training_s=[1.0]), 1),
    ],
)
def test_a_batch_trains_for_as_many_rounds_as_pass_meanwhile(pace: Pace, rounds: int) -> None:
    assert pace.rounds_of_training() == rounds


def test_samples_that_nobody_accounts_for_end_the_run() -> None:
    counts: dict[str, int] = {}
    rows: Any = SimpleNamespace(dropped={"unscored": 1})
    step = RolloutStep(step=0, start=0, end=2, dispatched=8)
    found = count_samples(counts, step, rows, trained=3, in_flight=4)
    assert found["samples/in_flight"] == 4 and found["data/dropped_rows"] == 1
    rows.dropped = {}
    step.dispatched = 0
    with pytest.raises(InvariantError, match="8 samples were dispatched but 7 are accounted for"):
        count_samples(counts, step, rows, trained=3, in_flight=0)


def test_a_mean_of_two_spans_counts_their_decoding_steps() -> None:
    """Three steps of two rows and one of six are four of three; rates are those of the second."""
    steps, mean = "rollout/decode_steps", "rollout/mean_active_rows"
    before = {steps: 3.0, mean: 2.0, "throughput/tokens": 5.0}
    new = {steps: 1.0, mean: 6.0, "throughput/tokens": 7.0}
    assert added(before, new) == {steps: 4.0, mean: 3.0, "throughput/tokens": 7.0}
    # A sampler that tells no mean has none.
    assert added({steps: 3.0}, {steps: 1.0}) == {steps: 4.0}
