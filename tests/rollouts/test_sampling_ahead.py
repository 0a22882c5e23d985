"""Sampling ahead of the update: who samples with which weights, the books, and what a resume
keeps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config, load_config
from oxrl.engines.sample.local import LocalSampler
from oxrl.errors import CheckpointError, InvariantError, Stopped
from oxrl.models.load import load_policy, load_tokenizer
from oxrl.rollouts import async_rollouts
from oxrl.rollouts.async_rollouts import AheadRollouts, added
from oxrl.rollouts.batch import count_samples
from oxrl.rollouts.sync import PromptRequests, RolloutParts, RolloutStep
from oxrl.runs.clock import Clock
from oxrl.runs.waiting import no_stop
from oxrl.types import Completion, Prompt, Rollouts, Sampling, Score
from support.figures import Learned
from support.small_runs import final_files, metric_lines, rl_config, stop_after_three_steps

ROOT = Path(__file__).parents[2]


def config(folder: Path, name: str, staleness: int, **sections: dict[str, Any]) -> Config:
    rollout = {
        "max_tokens": 6,
        "n_samples": 4,
        "max_staleness": staleness,
        "force_strict_on_policy": staleness == 0,
    }
    return rl_config(folder, name, **{"rollout": rollout, **sections})


def short(steps: int) -> dict[str, int]:
    """A run with a checkpoint at its end alone."""
    return {"steps": steps, "checkpoint_every": 0}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().split("\n") if line]


def test_each_batch_is_sampled_whole_by_the_weights_its_wave_began_with(tmp_path: Path) -> None:
    one = {"alg_name": "sgrpo", "lr": 1e-3}
    two = one | {"minibatches": 2}
    # (bound, optimizer steps per rollout step) -> weight version of every rollout step's samples
    expected = {
        (0, 1): [0, 1, 2],
        (1, 1): [0, 0, 1, 2],
        (2, 1): [0, 0, 1, 2],
        (3, 1): [0, 0, 0, 0, 2, 2],
        (5, 1): [0, 0, 0, 0, 0, 0],
        (2, 2): [0, 0, 2],
    }
    for (bound, updates), versions in expected.items():
        train = one if updates == 1 else two
        steps = len(versions) * updates
        cfg = config(tmp_path, f"run_{bound}_{updates}", bound, train=train, run=short(steps))
        run(cfg)
        samples, metrics = lines_of(cfg.run.directory), metric_lines(cfg.run.directory)
        found = [
            {span[0] for sample in samples if sample["step"] == step for span in sample["versions"]}
            for step in range(1, steps + 1, updates)
        ]
        assert found == [{version} for version in versions], (bound, updates)
        assert [line["data/staleness_max"] for line in metrics[::updates]] == [
            index * updates - version for index, version in enumerate(versions)
        ]
        assert max(line["data/staleness_max"] for line in metrics) <= bound
        # The data order is the same, however far ahead it is sampled.
        assert [sample["draw"] for sample in samples] == [
            draw for draw in range(4 * len(versions)) for _ in range(4)
        ]
        assert metrics[-1]["samples/in_flight"] == 0 and metrics[-1]["samples/dispatched"] == len(
            samples
        )
        in_flight = [line["samples/in_flight"] for line in metrics[::updates]]
        assert in_flight[0] == {0: 0, 1: 16, 2: 16, 3: 48, 5: 80}[bound]


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


def test_dynamic_sampling_goes_on_where_the_batch_before_stopped(tmp_path: Path) -> None:
    train = {"alg_name": "dapo", "lr": 1e-3, "overlong_buffer": 2}
    cfg = config(tmp_path, "run", 1, train=train, run=short(4))
    run(cfg)
    samples, lines = lines_of(cfg.run.directory), metric_lines(cfg.run.directory)
    start = 0
    for line in lines:
        mine = [sample for sample in samples if sample["step"] == line["step"]]
        assert min(sample["draw"] for sample in mine) == start
        start = max(sample["draw"] for sample in mine if sample["advantage"] is not None) + 1
        # More prompts, where the first ones do not suffice, are sampled by the newest weights.
        now = line["step"] - 1
        expected = [
            max(0, now - 1) if sample["draw"] < mine[0]["draw"] + 4 else now for sample in mine
        ]
        assert [span[0] for sample in mine for span in sample["versions"]] == expected
    books = {key: value for key, value in lines[-1].items() if key.startswith("samples/")}
    assert (
        books["samples/dispatched"]
        == len(samples)
        == sum(books.values()) - books["samples/dispatched"]
    )


@pytest.mark.parametrize("algorithm", ["sgrpo", "dapo"])
def test_evaluating_changes_no_sample(algorithm: str, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"train": {"alg_name": algorithm, "lr": 1e-3}}
    for name, every in (("seldom", 0), ("often", 1)):
        data = {
            "train": str(tmp_path / "prompts.jsonl"),
            "prompts_per_step": 4,
            "eval": str(tmp_path / "prompts.jsonl"),
            "eval_rows": 4,
        }
        cfg = config(tmp_path, name, 1, **sections, data=data, run=short(3))
        run(load_config(tmp_path / f"{name}.yaml", [f"run.eval_every={every}"]))
    assert (tmp_path / "seldom/samples.jsonl").read_bytes() == (
        tmp_path / "often/samples.jsonl"
    ).read_bytes()
    evaluated = ["eval/reward" in line for line in metric_lines(cfg.run.directory)]
    assert evaluated == [True] * 3


def test_a_signal_in_the_middle_saves_what_is_in_flight_and_resume_completes_the_same_run(
    tmp_path: Path,
) -> None:
    sections = {"run": short(14)}
    whole, cfg = (config(tmp_path / name, "run", 3, **sections) for name in ("whole", "stopped"))
    run(whole)
    stop_after_three_steps(cfg, tmp_path / "stopped" / "run.yaml")
    newest = max((cfg.run.directory / "checkpoints").glob("step_*"))
    kept = json.loads((newest / "samples" / "samples.json").read_text())
    assert len(kept["completions"]) == 16 * len(kept["batches"]) > 0
    run(cfg, resume=True)
    assert metric_lines(cfg.run.directory) == metric_lines(whole.run.directory)
    assert (cfg.run.directory / "samples.jsonl").read_bytes() == (
        whole.run.directory / "samples.jsonl"
    ).read_bytes()
    assert final_files(cfg.run.directory) == final_files(whole.run.directory)


@pytest.fixture
def sampler() -> LocalSampler:
    return LocalSampler(load_policy("builtin:tiny"), load_tokenizer("builtin:tiny"))


class LengthPool:
    """A reward without processes: the length of a response."""

    def score(
        self, groups: Sequence[tuple[Prompt, Sequence[Completion]]], patience: object
    ) -> list[list[Score]]:
        return [
            [Score(value=float(len(completion.token_ids))) for completion in completions]
            for _, completions in groups
        ]


class Prompts:
    def __len__(self) -> int:
        return 8

    def at(self, draw: int, *, seed: int) -> Prompt:
        return Prompt(uid=str(draw), messages=(), token_ids=(5 + draw, 7, 9))


class NoDelivery:
    """The sampler keeps the weights it has."""

    def deliver(self, version: int) -> None: ...

    def remember(self, rollouts: Rollouts) -> dict[str, float]:
        return {}


def source_of(
    sampler: LocalSampler,
    capacity: int,
    *,
    block: int = 1,
    background: bool = False,
    rollout_steps: int = 4,
    max_tokens: int = 5,
) -> AheadRollouts:
    pool: Any = LengthPool()
    delivery: Any = NoDelivery()
    requests = PromptRequests(
        Prompts(),
        samples=2,
        sampling=Sampling(max_tokens=max_tokens, stop_token_ids=()),
        run_seed=1,
        baseline=False,
    )
    parts = RolloutParts(
        sampler=sampler,
        delivery=delivery,
        scorer=pool,
        requests=requests,
        clock=Clock(),
        prompts_per_step=2,
        stop=no_stop,
        deadline_s=60,
        max_error_rate=0.5,
    )
    return AheadRollouts(
        parts,
        block=block,
        capacity=capacity,
        rollout_steps=rollout_steps,
        updates=1,
        background=background,
    )


def test_no_more_is_dispatched_than_the_capacity(sampler: LocalSampler) -> None:
    source = source_of(sampler, 7, block=2)
    with pytest.raises(
        InvariantError,
        match="4 samples are dispatched while 4 are in flight, and the buffer holds 7",
    ):
        source.next(0, step=0)


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


def test_background_and_saved_samples_are_those_sampled_while_waiting(tmp_path: Path) -> None:
    patient, busy, restored = (
        source_of(
            LocalSampler(load_policy("builtin:tiny"), load_tokenizer("builtin:tiny")),
            16,
            block=2,
            background=flag,
        )
        for flag in (False, True, False)
    )
    steps = [source.next(0, step=0) for source in (patient, busy)]
    busy.save(tmp_path)
    restored.load(tmp_path)
    busy.close()
    assert steps[0] is not None and steps[1] is not None
    assert steps[0].rollouts == steps[1].rollouts and len(steps[0].rollouts) == 4
    assert patient.batches == restored.batches and restored.in_flight == 12
    for step in (1, 2):
        waited = patient.next(2 * step, step=step)
        resumed = restored.next(2 * step, step=step)
        assert waited is not None and resumed is not None
        assert waited.rollouts == resumed.rollouts
        assert [rollout.group_id for rollout in waited.rollouts] == [2 * step] * 2 + [
            2 * step + 1
        ] * 2


def test_saved_samples_that_cannot_be_read_are_told_with_their_file(
    sampler: LocalSampler, tmp_path: Path
) -> None:
    source = source_of(sampler, 16, block=2)
    source.next(0, step=0)
    source.save(tmp_path)
    path = tmp_path / "samples.json"
    content = json.loads(path.read_text())
    assert content["completions"]
    for done in content["completions"].values():
        [segment] = done["segments"]
        segment["columns"] = {"trace": ["!"] * len(segment["token_ids"])}
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"^{path}: .*'trace' is no base64"):
        source_of(sampler, 16, block=2).load(tmp_path)


@pytest.mark.parametrize("polls", range(9))
def test_a_stop_anywhere_in_a_wave_leaves_what_was_there_before_it(
    tmp_path: Path, polls: int
) -> None:
    def fresh() -> AheadRollouts:
        model = load_policy("builtin:tiny")
        sampler = LocalSampler(model, load_tokenizer("builtin:tiny"), max_rows=1)
        return source_of(sampler, 16, block=2, rollout_steps=8, max_tokens=2)

    whole, stopped, restored = fresh(), fresh(), fresh()
    first, again = (source.next(0, step=0) for source in (whole, stopped))
    assert first.rollouts == again.rollouts
    looks: list[int] = []

    def stop() -> bool:
        looks.append(1)
        return len(looks) > polls

    stopped.parts = dataclasses.replace(stopped.parts, stop=stop)
    # The second step scores what is there and hands it over; the third samples a wave, one
    # response after the other.
    step = 1
    try:
        for step in (1, 2):
            stopped.next(2 * step, step=step)
            whole.next(2 * step, step=step)
    except Stopped:
        began = time.monotonic()
        stopped.save(tmp_path)
        assert time.monotonic() - began < 5
        restored.load(tmp_path)
        resumed = restored.next(2 * step, step=step)
        waited = whole.next(2 * step, step=step)
        assert resumed.rollouts == waited.rollouts
        assert resumed.dispatched == waited.dispatched
        counted = [
            {name: n for name, n in found.sampler.items() if not name.startswith("throughput/")}
            for found in (resumed, waited)
        ]
        assert counted[0] == counted[1]
        assert restored.batches == whole.batches and restored.in_flight == whole.in_flight
    else:
        assert polls == 8


def test_a_checkpoint_after_a_signal_waits_for_what_is_in_flight_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: LocalSampler
) -> None:
    source = source_of(sampler, 16, block=2, background=True)
    asked: list[int] = []
    source.parts = dataclasses.replace(source.parts, stop=lambda: asked)
    source.next(0, step=0)
    never_done: Any = Future()
    source.lend(0)
    monkeypatch.setattr(source, "_working", never_done)
    monkeypatch.setattr(async_rollouts, "SETTLE_S", 0.5)
    asked.append(1)
    began = time.monotonic()
    with pytest.raises(Stopped):
        source.save(tmp_path)
    assert 0.4 < time.monotonic() - began < 10
    source.close()


class OneMore:
    """A GroupChoice that asks for one prompt more after the first round, and notes when."""

    rounds = 3

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def missing(self, rollouts: Rollouts, *, wanted: int, rounds: int) -> int:
        self.asked.append((len(rollouts), rounds))
        return 1 if rounds == 1 else 0

    def groups(self, rollouts: Rollouts, *, wanted: int) -> tuple[int, ...]:
        return (0, 2)


def test_what_a_round_leaves_missing_is_sampled_in_the_next_one(sampler: LocalSampler) -> None:
    source = source_of(sampler, 16, rollout_steps=1)
    choice = OneMore()
    source.parts = dataclasses.replace(source.parts, choice=choice)
    found = source.next(0, step=0)
    # Two prompts of two samples, then one more.
    assert choice.asked == [(4, 1), (6, 2)]
    assert [rollout.group_id for rollout in found.rollouts] == [0, 0, 1, 1, 2, 2]
    assert (found.rounds, found.dispatched, found.groups) == (2, 6, (0, 2))
    assert (found.end, found.next_draw) == (3, 3)


def test_a_mean_of_two_spans_counts_their_decoding_steps() -> None:
    """Three steps of two rows and one of six are four of three; rates are those of the second."""
    steps, mean = "rollout/decode_steps", "rollout/mean_active_rows"
    before = {steps: 3.0, mean: 2.0, "throughput/tokens": 5.0}
    new = {steps: 1.0, mean: 6.0, "throughput/tokens": 7.0}
    assert added(before, new) == {steps: 4.0, mean: 3.0, "throughput/tokens": 7.0}
    # A sampler that tells no mean has none.
    assert added({steps: 3.0}, {steps: 1.0}) == {steps: 4.0}
