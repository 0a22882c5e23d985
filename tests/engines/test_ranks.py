"""Recipes on several ranks: the run of one process, by more hands. Each rank is a process of its
own, over gloo.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from oxrl.checkpoint.model_files import save_model
from oxrl.checkpoint.verify import latest_checkpoint
from oxrl.cli.scripts import script
from oxrl.commands.export import run_export
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.errors import ConfigError
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.tables.watch import Deadlines
from support.rank_processes import exit_codes, run_ranks, start_ranks
from support.rank_runs import assert_same_lines, run_where_only_rank_0_may_write
from support.small_runs import metric_lines, preference_config, sft_config, steps_config

DOOR = Path(__file__).parents[2] / "main_sl.py"
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-scale` runs this",
)
SLOW = {"lr": 1e-3}  # so that rounding does not grow over many steps
BACKENDS: list[Any] = ["fsdp", pytest.param("deepspeed", marks=needs_deepspeed)]


def configure(
    folder: Path, name: str, algorithm: str, world: int, backend: str, **sections: dict[str, Any]
) -> Config:
    """A small run of 6 steps; the local backend where it has one rank."""
    # With the usual epsilon AdamW would blow up gradients that are zero but for rounding.
    train = {"alg_name": algorithm, "lr": 1e-2, "adam_eps": 1e-3} | sections.pop("train", {})
    train |= {"backend": backend} if backend != "local" else {}
    data: dict[str, Any] = {}
    if algorithm != "sft":
        held_out = "held_out_steps" if algorithm == "process_reward_model" else "held_out_pairs"
        data = {"eval": str(folder / f"{held_out}.jsonl"), "eval_rows": 10}
    run = {
        "training_gpus": world,
        **sections.pop("run", {}),
        **({"deadline_s": 60} if backend != "local" else {}),
    }
    run |= {"keep_best": True, "eval_every": 2} if data else {}
    build = {"sft": sft_config, "process_reward_model": steps_config}.get(
        algorithm, preference_config
    )
    return build(folder, name, data=data, run=run, train=train, **sections)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("algorithm", "world"),
    [("sft", 3), ("dpo", 2), pytest.param("bco", 2, marks=pytest.mark.full), ("tr_dpo", 2)]
    + [("reward_model", 2), ("process_reward_model", 2)],
)
def test_ranks_do_what_one_process_does(
    tmp_path: Path, algorithm: str, world: int, backend: str
) -> None:
    train = {"reference_sync_steps": 2} if algorithm == "tr_dpo" else {}
    steps = {"run": {"steps": 3}, "train": train}
    one = configure(tmp_path, "one", algorithm, 1, "local", **steps)
    run(one)
    several = configure(tmp_path, "several", algorithm, world, backend, **steps)
    run_ranks(world, run_where_only_rank_0_may_write, several)
    assert_same_lines(several.run.directory, one.run.directory)

    def files(home: Path) -> list[str]:
        written = (path for path in home.rglob("*") if path.name != "parts.json")
        found = (str(path.relative_to(home)) for path in written)
        return sorted("reference" if path.startswith("reference/") else path for path in found)

    assert files(several.run.directory) == files(one.run.directory)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_moves_from_two_ranks_to_one_and_back(tmp_path: Path, backend: str) -> None:
    whole = configure(tmp_path, "whole", "dpo", 1, "local")
    run(whole)
    for steps, world, engine in ((2, 2, backend), (4, 1, "local"), (6, 2, backend)):
        cfg = configure(tmp_path, "moved", "dpo", world, engine, run={"steps": steps})
        if engine == "local":
            run(cfg, resume=True)
        else:
            run_ranks(world, run_where_only_rank_0_may_write, cfg, True)
    assert_same_lines(cfg.run.directory, whole.run.directory)


def wait_for_lines(cfg: Config, count: int, ranks: list[Any]) -> None:
    """Until the run has recorded so many steps."""
    deadline, metrics = time.monotonic() + 120, cfg.run.directory / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, f"{metrics} did not get {count} lines in 120 s"
        assert all(rank.is_alive() for rank in ranks), "a rank ended early"
        time.sleep(0.01)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("world", "lost"),
    [
        (2, 1),
        pytest.param(2, 0, marks=pytest.mark.full),
        pytest.param(3, 1, marks=pytest.mark.full),
    ],
)
def test_the_ranks_left_name_the_one_that_was_killed_and_resume_goes_on(
    tmp_path: Path, world: int, lost: int, backend: str
) -> None:
    whole = configure(tmp_path, "whole", "sft", 1, "local", run={"steps": 16}, train=SLOW)
    run(whole)
    cfg = configure(tmp_path, "killed", "sft", world, backend, run={"steps": 16}, train=SLOW)
    ranks = start_ranks(world, tmp_path / "log", run, cfg)
    wait_for_lines(cfg, 3, ranks)
    os.kill(ranks[lost].pid or 0, signal.SIGKILL)
    began = time.monotonic()
    codes = exit_codes(ranks, timeout_s=60)
    assert time.monotonic() - began < 30  # well within run.deadline_s
    assert codes[lost] == -signal.SIGKILL
    for rank in set(range(world)) - {lost}:
        assert codes[rank] == 1
        said = (tmp_path / f"log.{rank}").read_text()
        # Rank 0 holds the store where signs of life are left; without it there is nothing to read
        # them from.
        assert re.search(
            rf"EngineError: rank {rank} of {world}: rank {lost}(, where all meet,)? went away", said
        )
    run_ranks(world, run_where_only_rank_0_may_write, cfg, True)
    assert_same_lines(cfg.run.directory, whole.run.directory)


def enter(path: Path) -> None:
    """On one rank: `python main_sl.py --config path`."""
    sys.argv = ["main_sl.py", "--config", str(path)]
    script("sl")


def test_a_signal_saves_and_every_rank_ends_with_75(tmp_path: Path) -> None:
    cfg = configure(
        tmp_path, "stopped", "sft", 2, "fsdp", run={"steps": 2000, "checkpoint_every": 0}
    )
    ranks = start_ranks(2, tmp_path / "log", enter, tmp_path / "stopped.yaml")
    wait_for_lines(cfg, 3, ranks)
    for rank in ranks:
        os.kill(rank.pid or 0, signal.SIGTERM)
    assert exit_codes(ranks, timeout_s=60) == [75, 75]
    saved = latest_checkpoint(cfg.run.directory / "checkpoints")
    assert saved is not None and saved.step == len(metric_lines(cfg.run.directory)) >= 3


@pytest.mark.full
def test_a_rank_that_hangs_is_named_when_the_deadline_is_over(tmp_path: Path) -> None:
    cfg = configure(tmp_path, "hung", "sft", 2, "fsdp", run={"steps": 1000})
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"deadline_s": 15.0})})
    ranks = start_ranks(2, tmp_path / "log", run, cfg)
    wait_for_lines(cfg, 2, ranks)
    os.kill(ranks[1].pid or 0, signal.SIGSTOP)
    began = time.monotonic()
    ranks[0].join(90)
    assert ranks[0].exitcode == 1
    assert 14 < time.monotonic() - began < 60
    exit_codes(ranks, timeout_s=0)
    # It may have been about to write a checkpoint.
    said = r"DeadlineError: rank 0 of 2 waited run\.deadlines\.(step|checkpoint)=15 s for rank 1"
    assert re.search(said, (tmp_path / "log.0").read_text())


WAITS = Deadlines({**Deadlines.alike(60.0).seconds, "sync": 0.5})


def come_late(nbytes: int) -> None:
    """On one of two ranks: the second needs 1 s for its part of the work."""
    with joined_ranks(torch.device("cpu"), WAITS) as ranks:
        for phase in ("step", "sync"):
            ranks.agree("both are here")
            with ranks.within(WAITS.of(phase, nbytes), "the second rank"):
                if not ranks.first:
                    time.sleep(1)
                ranks.agree("done")


def test_a_rank_is_waited_for_as_long_as_the_bytes_of_its_phase_take(tmp_path: Path) -> None:
    slow = start_ranks(2, tmp_path / "slow", come_late, 10**8)
    assert exit_codes(slow, timeout_s=60) == [0, 0]
    late = start_ranks(2, tmp_path / "late", come_late, 0)
    assert exit_codes(late, timeout_s=60)[0] == 1
    assert (
        "DeadlineError: rank 0 of 2 waited run.deadlines.sync=0.5 s for"
        in (tmp_path / "late.0").read_text()
    )


def test_another_number_of_processes_than_configured_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = configure(tmp_path, "run", "sft", 2, "fsdp")
    with pytest.raises(
        ConfigError, match="run.training_gpus is 2 and the launcher started 1 process"
    ):
        run(cfg)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ConfigError, match=r"run.training_gpus is 2 and the launcher started 3 .*torchrun"
    ):
        run(cfg)
    with pytest.raises(ConfigError, match="train.backend is local"):
        run(configure(tmp_path, "run", "sft", 1, "local"))
    assert not cfg.run.directory.exists()


def launcher(path: Path, log: Path, *options: str) -> subprocess.Popen[bytes]:
    program = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--redirects",
        "3",
    ]
    program += ["--log-dir", str(log), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*program, str(DOOR), "--config", str(path), *options], env=environment)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_torchrun_runs_stops_on_a_signal_and_resumes(tmp_path: Path, backend: str) -> None:
    """torchrun hands SIGTERM on to its ranks; each saves with the others and ends with 75, torchrun
    itself with 1.
    """
    whole = configure(tmp_path, "whole", "sft", 1, "local", run={"steps": 60}, train=SLOW)
    run(whole)
    cfg = configure(tmp_path, "stopped", "sft", 2, backend, run={"steps": 60}, train=SLOW)
    path = tmp_path / "stopped.yaml"
    assert yaml.safe_load(path.read_text())["run"]["training_gpus"] == 2
    started = launcher(path, tmp_path / "first")
    try:
        deadline, metrics = time.monotonic() + 120, cfg.run.directory / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 3:
            assert time.monotonic() < deadline and started.poll() is None
            time.sleep(0.01)
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) != 0
    finally:
        started.kill()
    logs = [file.read_text() for file in (tmp_path / "first").rglob("stderr.log")]
    assert len(logs) == 2
    for said in logs:
        assert "stopped by SIGTERM after step" in said and "Continue with --resume" in said
    assert len(metric_lines(cfg.run.directory)) < 60
    resumed = launcher(path, tmp_path / "second", "--resume")
    try:
        assert resumed.wait(150) == 0
    finally:
        resumed.kill()
    assert_same_lines(cfg.run.directory, whole.run.directory)


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    """Sections for an adapter on a model that lies on disk."""
    pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7)), tmp_path / "base")
    load_tokenizer("builtin:tiny").save_pretrained(tmp_path / "base")
    return {"model": {"name": str(tmp_path / "base")}, "lora": {"rank": 4}}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("algorithm", "world", "lora"),
    [
        ("sft", 3, {}),
        ("dpo", 2, {}),
        ("reward_model", 2, {}),
        pytest.param("sft", 2, {"dora": True}, marks=pytest.mark.full),
        pytest.param("dpo", 2, {"dora": True, "rslora": True}, marks=pytest.mark.full),
    ],
)
def test_adapters_train_on_ranks_as_on_one(
    tmp_path: Path,
    base: dict[str, Any],
    algorithm: str,
    world: int,
    lora: dict[str, Any],
    backend: str,
) -> None:
    base["lora"] |= lora
    base["run"] = {"steps": 2}
    one = configure(tmp_path, "one", algorithm, 1, "local", **base)
    run(one)
    stages = {"zero_stage": 2} if algorithm == "sft" else {"zero_stage": 3}
    deepspeed = {"deepspeed": stages} if backend == "deepspeed" else {}
    several = configure(tmp_path, "several", algorithm, world, backend, **base, **deepspeed)
    run_ranks(world, run_where_only_rank_0_may_write, several)
    assert_same_lines(several.run.directory, one.run.directory)
    newest, expected = (
        max((cfg.run.directory / "checkpoints").glob("step_*")) for cfg in (several, one)
    )
    # Several ranks write their shares, whose hashes a file joins.
    written = {p.name for p in newest.iterdir()} - {"parts.json"}
    assert written == {p.name for p in expected.iterdir()}
    ours, theirs = (
        load_file(folder / "adapter_model.safetensors") for folder in (newest, expected)
    )
    assert ours.keys() == theirs.keys() and len(ours) == (42 if "dora" in lora else 28)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-4)
    merged, also = (
        run_export(cfg.run.directory, tmp_path / f"merged-{cfg.run.name}") for cfg in (several, one)
    )
    for name, tensor in load_file(merged / "model.safetensors").items():
        torch.testing.assert_close(
            tensor, load_file(also / "model.safetensors")[name], rtol=1e-2, atol=1e-4
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_adapter_moves_from_two_ranks_to_one_and_back(
    tmp_path: Path, base: dict[str, Any], backend: str
) -> None:
    whole = configure(tmp_path, "whole", "dpo", 1, "local", **base)
    run(whole)
    for steps, world, engine in ((2, 2, backend), (4, 1, "local"), (6, 2, backend)):
        cfg = configure(tmp_path, "moved", "dpo", world, engine, run={"steps": steps}, **base)
        if engine == "local":
            run(cfg, resume=True)
        else:
            run_ranks(world, run_where_only_rank_0_may_write, cfg, True)
    assert_same_lines(cfg.run.directory, whole.run.directory)


@needs_deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_decays_only_what_is_asked_for(tmp_path: Path, stage: int) -> None:
    train = {"weight_decay": 0.5, "decay": "matrices"}
    one = configure(tmp_path, "one", "sft", 1, "local", run={"steps": 3}, train=train)
    run(one)
    several = configure(
        tmp_path,
        "several",
        "sft",
        2,
        "deepspeed",
        run={"steps": 3},
        train=train,
        deepspeed={"zero_stage": stage},
    )
    run_ranks(2, run_where_only_rank_0_may_write, several)
    assert_same_lines(several.run.directory, one.run.directory)
    ours, theirs, plain = (
        load_file(max((folder / "checkpoints").glob("step_*")) / "model.safetensors")
        for folder in (several.run.directory, one.run.directory, _undecayed(tmp_path))
    )
    norms = [name for name in ours if "norm" in name]
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    assert norms and any(not torch.allclose(ours[name], plain[name], rtol=1e-4) for name in ours)


def _undecayed(folder: Path) -> Path:
    cfg = configure(folder, "plain", "sft", 1, "local", run={"steps": 3})
    run(cfg)
    return cfg.run.directory
