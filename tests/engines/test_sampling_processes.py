"""Runs whose samplers are processes of this machine, without Ray: the samples and weights of one
process, also where a process or the run dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import pytest

from oxrl.assembly import sampler_processes
from oxrl.assembly.assembly import Assembly
from oxrl.checkpoint.model_files import save_model
from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.sample.workers import RolloutWorker, RolloutWorkers
from oxrl.errors import ConfigError
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.rollouts.continuous import ContinuousRollouts
from oxrl.usercode import worker as worker_module
from oxrl.usercode.messages import completion_of
from support.action_runs import make_data, reinforcement
from support.killed_runs import killed_until_done, run_in_child, uninterrupted
from support.sampling_processes import FORKING, gone_within, parent_of
from support.small_runs import (
    final_files,
    metric_lines,
    model_that_stops,
    rl_config,
    write_inputs,
)
from support.vision_runs import rl, write_rows

pytestmark = pytest.mark.timeout(120)
Sections = dict[str, Any]
TWO: Sections = {"processes": 2, "probe_tokens": 64}
AHEAD: Sections = {
    "max_tokens": 6,
    "n_samples": 4,
    "max_staleness": 3,
    "rounds": 3,
    "force_strict_on_policy": False,
}
# Of a checkpoint: what proved the last delivery, and what is in flight with its log-probabilities.
PROBE = "delivery/probe.json"
IN_FLIGHT = "samples/samples.json"


@pytest.fixture(autouse=True)
def _quick_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)


def base_model(folder: Path) -> None:
    write_inputs(folder)
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7)), folder / "base")
    load_tokenizer("builtin:tiny").save_pretrained(folder / "base")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a policy learns from.

    write: makes its data in a folder. make: a configuration from a folder, a name and sections.
    sections: of it. only: sections of the run that has processes.
    """

    write: Callable[[Path], object]
    make: Callable[..., Config]
    sections: Callable[[Path], Sections]
    only: Sections | None = None


def with_evaluation(folder: Path) -> Sections:
    return {
        "data": {"eval": str(folder / "prompts.jsonl"), "eval_rows": 8},
        "run": {"eval_every": 1, "checkpoint_every": 3, "threads": 1},
    }


def adapted(folder: Path) -> Sections:
    return {
        "model": {"name": str(folder / "base")},
        "lora": {"rank": 4},
        "train": {"kl_coeff": 0.05, "lr": 1e-2},
        "run": {"steps": 3, "threads": 1},
    }


def two_steps(folder: Path) -> Sections:
    return {"run": {"steps": 2, "threads": 1, "checkpoint_every": 2}}


needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft: .[lora]")
KINDS = [
    pytest.param(
        Kind(write=write_inputs, make=rl_config, sections=with_evaluation), id="evaluation"
    ),
    pytest.param(
        Kind(write=base_model, make=rl_config, sections=adapted), marks=needs_peft, id="adapter"
    ),
    pytest.param(
        Kind(
            write=base_model,
            make=rl_config,
            sections=adapted,
            only={"lora": {"rank": 4, "delivery": "merged"}},
        ),
        marks=[needs_peft, pytest.mark.full],
        id="merged-adapter",
    ),
    pytest.param(Kind(write=make_data, make=reinforcement, sections=two_steps), id="episodes"),
    pytest.param(Kind(write=write_rows, make=rl, sections=two_steps), id="images"),
]


def learned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of a run but for those of deliveries and of samplers that were replaced."""
    return [
        {
            name: value
            for name, value in line.items()
            if not name.startswith(("sync/", "rollout/replaced"))
        }
        for line in lines
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_give_the_samples_and_weights_of_one(kind: Kind, tmp_path: Path) -> None:
    kind.write(tmp_path)
    sections = kind.sections(tmp_path)
    one = kind.make(tmp_path, "one", **sections)
    merged = sections | (kind.only or {})
    other = kind.make(tmp_path, "other", **merged, inference_engine=TWO)
    run(one)
    run(other)
    ours, theirs = one.run.directory, other.run.directory
    samples = (ours / "samples.jsonl").read_bytes()
    assert samples
    assert (theirs / "samples.jsonl").read_bytes() == samples
    whole, apart = final_files(ours), final_files(theirs)
    assert apart.pop(PROBE)
    assert [name for name in whole.keys() | apart if whole.get(name) != apart.get(name)] == []
    lines = metric_lines(theirs)
    for line, expected in zip(learned(lines), learned(metric_lines(ours)), strict=True):
        told = {n: v for n, v in line.items() if n.startswith(("reward/", "update/", "eval/"))}
        assert told == {name: expected[name] for name in told}
        assert line["mismatch/abs_logdiff_max"] < 1e-5
    for line in lines:
        assert line["sync/probe_max"] < 1e-4 and line["sync/retries"] == 0
        assert line["sync/sent_bytes"] > 0 and line["rollout/replaced_actors"] == 0
    assert any(line["update/grad_norm"] > 0 for line in lines)


def kill_when_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A process dies as soon as something is sampled in the background; its id, once it has."""
    begin = ContinuousRollouts._begin
    killed: list[int] = []

    def beginning(source: ContinuousRollouts) -> None:
        engine: Any = source.parts.sampler
        process, _ = engine.workers[0].call(parent_of)
        begin(source)
        if not killed and source._working is not None:
            killed.append(process)
            os.kill(process, signal.SIGKILL)

    monkeypatch.setattr(ContinuousRollouts, "_begin", beginning)
    return killed


def tokens_in_flight(directory: Path) -> Any:
    """What a checkpoint holds of samples ahead, without how likely they are."""
    found = json.loads((directory / "checkpoints" / "step_00000006" / IN_FLIGHT).read_text())
    done = {id: completion_of(stored) for id, stored in found["completions"].items()}
    assert done
    said = {id: (c.token_ids, [s.versions for s in c.segments]) for id, c in done.items()}
    return found["end"], found["draws"], said


def test_processes_sample_ahead_what_one_process_does_also_when_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: Sections = {
        "run": {"steps": 8, "checkpoint_every": 3, "keep_checkpoints": 9, "threads": 1},
        "rollout": AHEAD,
    }
    one = rl_config(tmp_path, "one", **sections)
    other = rl_config(tmp_path, "other", **sections, inference_engine={"processes": 2})
    run(one)
    killed = kill_when_ahead(monkeypatch)
    polling_in: set[str] = set()
    poll = RolloutWorkers.poll

    def polling(engine: Any, deadline_s: float, until: float = inf) -> Any:
        polling_in.add(threading.current_thread().name.partition("_")[0])
        return poll(engine, deadline_s, until)

    monkeypatch.setattr(RolloutWorkers, "poll", polling)
    run(other)
    assert "sampling" in polling_in  # in the background
    ours, theirs = one.run.directory, other.run.directory
    assert (ours / "samples.jsonl").read_bytes() == (theirs / "samples.jsonl").read_bytes()
    assert tokens_in_flight(ours) == tokens_in_flight(theirs)
    lines, expected = metric_lines(theirs), metric_lines(ours)
    for key in ("reward/mean", "data/staleness_max", "samples/in_flight"):
        assert [line[key] for line in lines] == [line[key] for line in expected], key
    for key in ("update/loss", "update/grad_norm", "update/param_norm"):
        # Weights of truncate come from log-probabilities, which shapes of batches round.
        for line, before in zip(lines, expected, strict=True):
            assert line[key] == pytest.approx(before[key], rel=1e-4, abs=1e-7), key
    assert max(line["data/staleness_max"] for line in lines) == 3
    assert len(killed) == 1
    assert sum(line["rollout/replaced_actors"] for line in lines) == 1
    assert gone_within(killed, 10)


def test_a_process_that_is_killed_in_a_window_changes_no_byte_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anything else: two runs are equal, with rows in flight whenever weights come."""
    model = model_that_stops(tmp_path / "model")
    whole, again, hurt = (
        rl_config(
            tmp_path,
            name,
            ["inference_engine.max_rows=3", "run.checkpoint_every=3"],
            model={"name": str(model)},
            run={"steps": 8, "threads": 1},
            rollout={**AHEAD, "max_tokens": 12, "max_staleness": 2, "rounds": 4},
            inference_engine={"processes": 2},
        )
        for name in ("whole", "again", "hurt")
    )
    run(whole)
    run(again)
    killed = kill_when_ahead(monkeypatch)
    run(hurt)
    assert len(killed) == 1
    ours = whole.run.directory
    expected = metric_lines(ours)
    written = (ours / "samples.jsonl").read_text().splitlines()
    assert any(len(json.loads(line)["versions"]) > 1 for line in written)
    assert max(line["data/staleness_max"] for line in expected) == 2
    for cfg, replaced in ((again, 0), (hurt, 1)):
        theirs = cfg.run.directory
        lines = metric_lines(theirs)
        assert sum(line["rollout/replaced_actors"] for line in lines) == replaced
        assert learned(lines) == learned(expected)
        assert (theirs / "samples.jsonl").read_bytes() == (ours / "samples.jsonl").read_bytes()
        left, right = final_files(theirs), final_files(ours)
        assert [name for name in left.keys() | right if left.get(name) != right.get(name)] == []


def noted_in_child(cfg: Config) -> None:
    """Body of a process that is killed: each sampling process leaves its id in a folder."""
    folder = cfg.run.directory.parent / "pids"
    wait_loaded = RolloutWorker.wait_loaded

    def noting(self: RolloutWorker) -> int:
        version = wait_loaded(self)
        process, keeper = self.call(parent_of)
        (folder / f"{process}-{keeper}").touch()
        return version

    worker_module.subprocess = FORKING  # pyright: ignore[reportAttributeAccessIssue]
    RolloutWorker.wait_loaded = noting
    run_in_child(cfg)


@pytest.mark.parametrize("rollout", [{}, AHEAD], ids=["in-turns", "ahead"])
def test_a_run_that_is_killed_leaves_no_process_and_resumes_to_the_byte(
    rollout: Sections, tmp_path: Path
) -> None:
    (tmp_path / "pids").mkdir()
    whole, killed = (
        rl_config(
            tmp_path,
            name,
            run={"name": name, "steps": 12, "checkpoint_every": 3, "threads": 1},
            rollout=rollout,
            inference_engine={"processes": 2},
        )
        for name in ("whole", "killed")
    )
    uninterrupted(whole, noted_in_child)
    assert killed_until_done(killed, kills=2, seed=3, body=noted_in_child)
    left, right = killed.run.directory, whole.run.directory
    assert (left / "samples.jsonl").read_bytes() == (right / "samples.jsonl").read_bytes()
    assert learned(metric_lines(left)) == learned(metric_lines(right))
    ours, theirs = final_files(left), final_files(right)
    assert [name for name in ours.keys() | theirs if ours.get(name) != theirs.get(name)] == []
    pids = [int(pid) for path in (tmp_path / "pids").iterdir() for pid in path.name.split("-")]
    assert len(pids) == 2 * 2 * (2 + 2)  # a run and three starts of the other, each with two
    assert gone_within(pids, 15)


def test_an_evaluation_is_answered_by_processes_as_by_one(tmp_path: Path) -> None:
    cfg = rl_config(tmp_path, "evaluated")
    config = cfg.run.directory.with_suffix(".yaml")
    outs: list[bytes] = []
    for name, more in (("one", []), ("two", ["inference_engine.processes=2"])):
        out = tmp_path / f"{name}.jsonl"
        run_eval(config, more, samples=2, temperature=0.7, out=out)
        outs.append(out.read_bytes())
    assert outs[0] == outs[1] != b""


def test_processes_are_refused_where_the_device_turns_out_to_be_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Assembly, "device_type", "cuda")
    cfg = rl_config(tmp_path, "run", inference_engine={"processes": 2})
    with pytest.raises(ConfigError, match=r"processes is 2: .*on the CPU.*inference_engine.actors"):
        sampler_processes.hosted_sampler(Assembly(cfg), lambda close: None)


def test_threads_are_shared_out_where_nobody_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def machine(threads: int) -> Any:
        asked.append(threads)
        raise InterruptedError

    monkeypatch.setattr(sampler_processes, "ThisMachine", machine)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    for threads, processes in ((None, 2), (None, 9), (5, 2)):
        cfg = rl_config(
            tmp_path, "run", run={"threads": threads}, inference_engine={"processes": processes}
        )
        with pytest.raises(InterruptedError):
            sampler_processes.hosted_sampler(Assembly(cfg), lambda close: None)
    assert asked == [3, 1, 5]


def test_a_process_that_samples_imports_no_models_before_it_does_so_in_its_own_way() -> None:
    """Else each of them holds SciPy, which transformers imports for what no sampler does."""
    code = (
        "import sys; import oxrl.engines.sample.host as host; "
        "early = [name for name in sys.modules if name.startswith('transformers.m')]; "
        "host.import_model_classes(); print(early, 'scipy.optimize' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[] False\n"
