"""Features of rows beyond their cells: each trains, does its particular thing, and resumes exactly."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_runs import final_files, metric_lines, rl_config

from oxrl.config import Config
from oxrl.errors import InvariantError
from oxrl.recipes import run
from oxrl.recipes.collect import Harvest, account
from oxrl.recipes.session import Session

# 0 or 1, and mostly 0 for a random model: some groups teach nothing.
SPARSE = "def sparse(prompt, completion):\n    return float(sum(c.isdigit() for c in completion) >= 2)\n"
NEVER = "def never(prompt, completion):\n    return 0.0\n"


def config(
    folder: Path, algorithm: str, *, reward: str = SPARSE, name: str = "run", max_tokens: int = 6, **train: Any
) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.py").write_text(reward)
    function = reward.partition("(")[0].removeprefix("def ")
    return rl_config(
        folder,
        name,
        run={"name": name, "steps": 6, "checkpoint_every": 2},
        reward={"name": f"{folder / 'scores.py'}:{function}"},
        rollout={"max_tokens": max_tokens, "n_samples": 4},
        train={"alg_name": algorithm, "lr": 1e-3} | train,
    )


def samples_of(run_directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_directory / "samples.jsonl").read_text().split("\n") if line]


# Every row with state or choices of its own, and numbers that make the feature act within six small steps.
RESUMED: dict[str, dict[str, Any]] = {"dapo": {}}


@pytest.mark.parametrize("algorithm", RESUMED)
def test_a_run_that_dies_between_checkpoints_resumes_exactly(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = config(tmp_path, algorithm, name="whole", **RESUMED[algorithm])
    run(whole)
    died = config(tmp_path, algorithm, name="died", **RESUMED[algorithm])
    original = Session.record

    def die_in_step_4(session: Session, step: int, metrics: dict[str, float], *, tokens: float) -> None:
        if step == 4:
            raise OSError("the machine is gone")
        original(session, step, metrics, tokens=tokens)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="the machine is gone"):
        patch.setattr(Session, "record", die_in_step_4)
        run(died)
    run(died, resume=True)
    assert metric_lines(died.run.directory) == metric_lines(whole.run.directory)
    assert samples_of(died.run.directory) == samples_of(whole.run.directory)
    assert final_files(died.run.directory) == final_files(whole.run.directory)


def test_dynamic_sampling_trains_on_full_batches_of_groups_whose_rewards_differ(tmp_path: Path) -> None:
    cfg = config(tmp_path, "dapo")
    run(cfg)
    lines, samples = metric_lines(cfg.run.directory), samples_of(cfg.run.directory)
    assert max(line["sampling/rounds"] for line in lines) > 1
    drawn = 0
    for line in lines:
        mine = [sample for sample in samples if sample["step"] == line["step"] - 1]
        rewards: dict[int, set[float]] = {}
        for sample in mine:
            rewards.setdefault(sample["draw"], set()).add(sample["reward"])
        differ = sorted(draw for draw, values in rewards.items() if len(values) > 1)
        trained = sorted({sample["draw"] for sample in mine if sample["advantage"] is not None})
        # The first four that differ, in the order of the data, which goes on right behind the last of them.
        assert trained == differ[:4]
        assert min(rewards) == drawn
        drawn = trained[-1] + 1
        assert line["reward/mean"] == pytest.approx(sum(sample["reward"] for sample in mine) / len(mine))


def test_every_sample_is_trained_on_or_dropped_for_a_reason(tmp_path: Path) -> None:
    cfg = config(tmp_path, "dapo")
    run(cfg)
    last, samples = metric_lines(cfg.run.directory)[-1], samples_of(cfg.run.directory)
    books = {key.removeprefix("samples/"): value for key, value in last.items() if key.startswith("samples/")}
    assert books["dispatched"] == len(samples) == sum(books.values()) - books["dispatched"]
    fates = Counter(sample["advantage"] is not None for sample in samples)
    assert books["trained"] == fates[True] == 6 * 16
    assert books["dropped_uninformative"] > 0
    harvest = Harvest(rollouts=[], groups=(), end=0, rounds=1)
    with pytest.raises(InvariantError, match="0 samples were dispatched but 1 are accounted for"):
        account({"samples": {}}, harvest, {"uninformative": 1}, trained=0)


def test_sampling_stops_after_its_rounds_and_trains_on_what_it_found(tmp_path: Path) -> None:
    rare = config(tmp_path / "rare", "dapo", sampling_rounds=1)
    run(rare)
    assert {line["sampling/rounds"] for line in metric_lines(rare.run.directory)} == {1.0}
    assert {line["data/rows"] for line in metric_lines(rare.run.directory)} & {4.0, 8.0, 12.0}
    never = config(tmp_path / "never", "dapo", reward=NEVER, sampling_rounds=2)
    run(never)
    for line in metric_lines(never.run.directory):
        assert (line["sampling/rounds"], line["sampling/groups"], line["data/rows"]) == (2.0, 8.0, 16.0)
        assert line["update/skipped"] == line["reward/mean"] == 0.0


def test_the_length_penalty_shapes_advantages_and_never_the_choice_of_groups(tmp_path: Path) -> None:
    cfg = config(tmp_path, "dapo", reward=NEVER, sampling_rounds=1, overlong_buffer=50, max_tokens=60)
    run(cfg)
    line = metric_lines(cfg.run.directory)[0]
    samples = [sample for sample in samples_of(cfg.run.directory) if sample["step"] == 0]
    lengths = [sum(end - start for _, start, end in sample["versions"]) for sample in samples]
    penalties = [max(-1.0, min(0.0, (10 - length) / 50)) for length in lengths]
    assert line["reward/zero_variance_groups"] == 1.0 and len(set(lengths)) > 1
    assert line["reward/shaping"] == pytest.approx(sum(penalties) / 16)
    for sample, penalty in zip(samples, penalties, strict=True):
        group = [other for s, other in zip(samples, penalties, strict=True) if s["draw"] == sample["draw"]]
        assert (sample["advantage"] > 0) == (penalty > sum(group) / len(group) + 1e-9)
