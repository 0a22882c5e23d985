"""`oxrl replay RUN --schedule`: a run that went by the clock is gone through without one.

pytest tests/commands/test_replay_schedule.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.commands.replay_schedule import replay_schedule
from oxrl.commands.train import run
from oxrl.errors import OxrlError
from oxrl.rollouts.free import FreeRollouts
from oxrl.rollouts.whole_samples import read_step
from oxrl.usercode import worker as worker_module
from support.sampling_processes import FORKING, parent_of
from support.small_runs import model_that_stops, rl_config

KINDS: dict[str, dict[str, Any]] = {
    "two minibatches": {"alg_name": "sgrpo", "lr": 1e-3, "minibatches": 2},
    "dapo": {"alg_name": "dapo", "lr": 1e-3, "overlong_buffer": 2},
    "remax": {"alg_name": "remax", "lr": 1e-3},
}


def free_run(folder: Path, train: dict[str, Any], **sections: dict[str, Any]) -> Path:
    """A run of six batches at a lag of two of them."""
    updates = train.get("minibatches", 1)
    cfg = rl_config(
        folder,
        "run",
        ["inference_engine.max_rows=6", "run.checkpoint_every=4"],
        model={"name": str(model_that_stops(folder / "model"))},
        run={"record": "tokens", "steps": 6 * updates},
        rollout={
            "max_tokens": 12,
            "n_samples": 4,
            "max_staleness": 2 * updates,
            "schedule": "free",
            "force_strict_on_policy": False,
        },
        train=train,
        **sections,
    )
    run(cfg)
    return cfg.run.directory


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return free_run(tmp_path_factory.mktemp("free"), KINDS["two minibatches"])


def replayed(directory: Path, *options: str) -> tuple[int, list[str]]:
    """Exit code and lines of the command; the folder is left out."""
    found = CliRunner().invoke(app, ["replay", str(directory), "--schedule", *options])
    error = found.exception
    if isinstance(error, OxrlError):  # as `oxrl` itself ends
        return error.exit_code, [str(error)]
    assert error is None or isinstance(error, SystemExit), error
    return found.exit_code, found.output.replace(f"{directory}/", "").splitlines()


def test_a_run_is_equal_and_nothing_in_it_is_changed(recorded: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    code, lines = replayed(recorded)
    assert code == 0, lines
    assert [line.split()[0] for line in lines] == ["equal", "equal"]
    assert "tokens that 6 versions sampled: log-probabilities at most" in lines[0]
    assert "6 batches and 12 updates" in lines[1]
    assert {path: path.stat().st_mtime_ns for path in recorded.rglob("*")} == before
    folder = recorded / "rollouts"
    batches = [read_step(path) for path in folder.glob("*.samples.jsonl")]
    rows = [one.completion.segments[0] for batch in batches for one in batch.rollouts]
    mixed = [row for row in rows if len({*row.versions}) > 1]
    assert len(mixed) > 2, "no response was sampled by several versions"


@pytest.mark.parametrize("kind", ["dapo", "remax"])
def test_other_rows_are_replayed_as_well(kind: str, tmp_path: Path) -> None:
    code, lines = replayed(free_run(tmp_path, KINDS[kind]))
    assert code == 0, lines


def test_a_part_of_a_run_is_replayed(recorded: Path) -> None:
    code, lines = replayed(recorded, "--step", "4")
    assert code == 0 and "2 batches and 4 updates" in lines[1], lines
    code, lines = replayed(recorded, "--step", "99")
    assert code != 0 and "has no step 99: it has 1 to 12" in " ".join(lines)


@pytest.mark.filterwarnings("ignore")  # processes are forked while threads run
def test_two_sampling_processes_are_replayed_without_their_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)
    folder = free_run(tmp_path, KINDS["two minibatches"], inference_engine={"processes": 2})
    says = [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]
    weights = [(line["weights"], line["worker"]) for line in says if "weights" in line]
    assert weights == [(step, worker) for step in range(0, 12, 2) for worker in (0, 1)]
    code, lines = replayed(folder)
    assert code == 0, lines
    assert "tokens that 6 versions sampled" in lines[0]


@pytest.mark.filterwarnings("ignore")  # as above
def test_what_a_lost_process_had_is_noted_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)
    wait_for = FreeRollouts._wait_for  # pyright: ignore[reportPrivateUsage]
    lost: list[str] = []

    def one_is_killed(self: FreeRollouts, draws: range) -> None:
        workers: Any = self.parts.sampler
        if draws.start == 8 and not lost:
            lost.extend(workers.workers[1].in_flight)
            os.kill(workers.workers[1].call(parent_of)[0], signal.SIGKILL)
        wait_for(self, draws)

    monkeypatch.setattr(FreeRollouts, "_wait_for", one_is_killed)
    folder = free_run(tmp_path, KINDS["two minibatches"], inference_engine={"processes": 2})
    says = [json.loads(line) for line in (folder / "schedule.jsonl").read_text().splitlines()]
    retries = [(line["retry"], line["worker"]) for line in says if "retry" in line]
    assert retries == [(id, 1) for id in lost] and lost
    code, lines = replayed(folder)
    assert code == 0, lines


def copied(recorded: Path, folder: Path) -> Path:
    shutil.copytree(recorded, folder / "copy")
    return folder / "copy"


def test_every_changed_line_of_the_schedule_is_named(recorded: Path, tmp_path: Path) -> None:
    copy = copied(recorded, tmp_path)
    path = copy / "schedule.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        says = json.loads(line)
        name = "weights" if "weights" in says else "batch"
        for field in [name, "round" if name == "weights" else "draws"]:
            other = dict(says)
            value = other[field]
            other[field] = [value[0], value[1] + 1] if isinstance(value, list) else value + 1
            changed = [*lines[: number - 1], json.dumps(other) + "\n", *lines[number:]]
            path.write_text("".join(changed))
            code, told = replayed(copy)
            other.pop("system/chain")
            begins = f"different  schedule.jsonl, line {number}: it says {json.dumps(other)}, the r"
            assert code == 1 and len(told) == 1 and told[0].startswith(begins), told


# What is done to schedule.jsonl -> what is said of it.
DAMAGE = {
    "missing": "schedule.jsonl is not there",
    "cut": "line 12: it ends in the middle of a line",
    "another kind": "line 2: ",
    "no object": "line 2: no JSON object",
    "out of order": "line 2: it says",
    "empty": "after line 0: it says nothing more",
    "a folder": "schedule.jsonl cannot be read",
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_an_error_and_no_traceback(what: str, recorded: Path, tmp_path: Path) -> None:
    path = copied(recorded, tmp_path) / "schedule.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.unlink()
    if what == "cut":
        path.write_text("".join(lines)[:-5])
    elif what == "another kind":
        path.write_text("".join([lines[0], '{"pause": 3}\n', *lines[2:]]))
    elif what == "no object":
        path.write_text("".join([lines[0], "[1, 2]\n", *lines[2:]]))
    elif what == "out of order":
        path.write_text("".join([lines[0], lines[3], *lines[2:3], lines[1], *lines[4:]]))
    elif what == "empty":
        path.write_text("")
    elif what == "a folder":
        path.mkdir()
    code, told = replayed(path.parent)
    assert code in (1, 2)
    assert DAMAGE[what] in " ".join(told), told


def test_another_token_and_another_number_are_named(recorded: Path, tmp_path: Path) -> None:
    copy = copied(recorded, tmp_path)
    file = copy / "rollouts" / "step_00000004.samples.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    segment = lines[1]["responses"][2]["completion"]["segments"][0]
    draw = lines[1]["draw"]
    segment["token_ids"][0] += 1
    other = lines[2]["responses"][0]["completion"]["segments"][0]
    other["logprobs"][0] -= 0.001
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, told = replayed(copy)
    assert code == 1
    sample = f"of sample 2 of draw {draw} in the batch of step 4, sampled by version"
    assert any(line.startswith(f"different  token 0 {sample}") for line in told), told
    number = f"log-probability of token 0 of sample 0 of draw {lines[2]['draw']} in the batch"
    assert any(line.startswith(f"different  {number}") for line in told), told
    assert any(line.startswith("different  batch of step 4, tokens") for line in told), told


def test_a_record_that_does_not_say_the_tokens_is_refused(recorded: Path, tmp_path: Path) -> None:
    copy = copied(recorded, tmp_path)
    shutil.rmtree(copy / "rollouts")
    code, told = replayed(copy)
    assert code == 2 and "run.record=tokens" in " ".join(told)
    code, told = replayed(tmp_path)
    assert code == 2 and "is no run directory" in " ".join(told)


def test_options_that_do_not_fit_are_refused(recorded: Path) -> None:
    code, told = replayed(recorded, "--sample", "1")
    assert code == 2 and "--sample" in " ".join(told)
    found = CliRunner().invoke(app, ["replay", str(recorded)])
    assert found.exit_code == 2 and "--step" in found.output


def test_another_run_of_the_clock_is_compared_with_its_own_record(recorded: Path) -> None:
    """The function, for whoever calls it from Python."""
    findings = replay_schedule(recorded, tolerance=1e-4)
    assert all(finding.equal for finding in findings) and len(findings) == 2
