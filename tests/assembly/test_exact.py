"""Runs with `run.exact`: the contract in their checkpoints, and whoever computes otherwise is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.sampler_processes import sampler_of
from oxrl.commands.evaluate import run_eval
from oxrl.commands.replay import replay
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import CheckpointError, ConfigError, EngineError
from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer
from oxrl.models.exact_contract import Contract
from oxrl.report.facts import run_facts
from oxrl.runs.checkpoints import list_checkpoints
from oxrl.usercode import worker as worker_module
from support.killed_runs import killed_until_done, run_in_child, uninterrupted
from support.sampling_processes import FORKING
from support.small_runs import check_same, final_files, metric_lines, model_that_stops, rl_config

Sections = dict[str, Any]
AHEAD: Sections = {
    "max_tokens": 12,
    "n_samples": 4,
    "max_staleness": 2,
    "rounds": 4,
    "force_strict_on_policy": False,
}


def exact_config(folder: Path, name: str, **sections: Any) -> Config:
    section = {"exact": True, "steps": 4, "threads": 1} | sections.pop("run", {})
    return rl_config(folder, name, run=section, **sections)


def contract_here(folder: Path) -> Contract:
    found = Assembly(exact_config(folder, "asked")).contract
    assert found is not None
    return found


def stored(cfg: Config) -> list[dict[str, Any]]:
    """exact.json of every checkpoint of a run."""
    paths = [path for _, path in list_checkpoints(cfg.run.directory / "checkpoints")]
    return [json.loads((path / "exact.json").read_text()) for path in paths]


def told_instructions(patch: pytest.MonkeyPatch, name: str = "AVX9") -> None:
    """As on a machine whose vectors are others."""
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)


# --- Where it is, and who says it.
def test_every_checkpoint_console_and_report_say_the_contract(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = exact_config(tmp_path, "run", run={"keep_checkpoints": 9})
    run(cfg)
    here = contract_here(tmp_path)
    found = stored(cfg)
    assert len(found) == 3  # before the first step, after two and four
    assert {entry["digest"] for entry in found} == {here.digest}
    assert f"exact: {here.line}" in capfd.readouterr().out
    rows = dict(run_facts(cfg.run.directory)["environment"])
    assert rows["exact.digest"] == here.digest
    assert rows["exact.instructions"] == found[0]["instructions"]
    assert rows["exact.versions.torch"] == torch.__version__


def test_a_run_that_promises_nothing_has_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cfg = rl_config(tmp_path, "run", run={"steps": 1})
    run(cfg)
    for _, path in list_checkpoints(cfg.run.directory / "checkpoints"):
        assert not (path / "exact.json").exists()
    assert "exact" not in capfd.readouterr().out
    rows = dict(run_facts(cfg.run.directory)["environment"])
    assert [name for name in rows if name.startswith("exact")] == []


# --- A run that goes on.
def longer(cfg: Config, steps: int, **changed: Any) -> Config:
    return cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": steps, **changed})})


@pytest.mark.parametrize("first", ["whole", "reference"])
def test_a_run_goes_on_only_where_the_same_bits_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    run_section = {"first_checkpoint": first, "checkpoint_every": 0, "steps": 2}
    cfg = exact_config(tmp_path, "run", run=run_section)
    run(cfg)
    here = contract_here(tmp_path)
    before = final_files(cfg.run.directory)
    with monkeypatch.context() as patch:
        told_instructions(patch)
        with pytest.raises(CheckpointError) as refused:
            run(longer(cfg, 4), resume=True)
    text = str(refused.value)
    assert "another run" in text
    assert f"then  {here.line}" in text
    assert "AVX9" in text.split("now  ")[1]
    assert final_files(cfg.run.directory) == before
    assert len(metric_lines(cfg.run.directory)) == 2
    run(longer(cfg, 4), resume=True)
    lines = metric_lines(cfg.run.directory)
    assert [line["mismatch/bits"] for line in lines] == [0.0] * 4


def test_without_the_promise_it_goes_on_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = exact_config(tmp_path, "run", run={"steps": 2})
    run(cfg)
    told_instructions(monkeypatch)
    run(longer(cfg, 4, exact=False), resume=True)
    lines = metric_lines(cfg.run.directory)
    assert ["mismatch/bits" in line for line in lines] == [True, True, False, False]
    assert not (list_checkpoints(cfg.run.directory / "checkpoints")[-1][1] / "exact.json").exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "places", [pytest.param("one process", marks=pytest.mark.full), "two processes ahead"]
)
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(disk_path: Path, places: str) -> None:
    sections: Sections = {"run": {"steps": 12, "checkpoint_every": 3}}
    body = run_in_child
    kills = 6
    if places != "one process":
        sections |= {"rollout": AHEAD, "inference_engine": {"processes": 2}}
        sections["model"] = {"name": str(model_that_stops(disk_path / "model"))}
        body = forking_in_child
        kills = 3
    whole, killed = (exact_config(disk_path, name, **sections) for name in ("whole", "killed"))
    uninterrupted(whole, body)
    hits = killed_until_done(killed, kills=kills, seed=5, body=body)
    assert len(hits) == kills
    check_same(whole.run.directory, killed.run.directory)
    lines = metric_lines(killed.run.directory)
    assert [line["mismatch/bits"] for line in lines] == [0.0] * 12
    assert stored(killed) == stored(whole) != []


def forking_in_child(cfg: Config) -> None:
    """Body of a process that is killed: its sampling processes are quick to start."""
    worker_module.subprocess = FORKING  # pyright: ignore[reportAttributeAccessIssue]
    run_in_child(cfg)


# --- Other processes that sample.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "ahead", [pytest.param(False, marks=pytest.mark.full), True], ids=["in turns", "ahead"]
)
def test_sampling_processes_say_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)
    sections: Sections = {
        "model": {"name": str(model_that_stops(tmp_path / "model"))},
        "run": {"steps": 6, "record": "tokens"},
        "rollout": AHEAD if ahead else {"max_tokens": 12, "n_samples": 4},
    }
    one = exact_config(tmp_path, "one", **sections)
    two = exact_config(tmp_path, "two", **sections, inference_engine={"processes": 2})
    run(one)
    run(two)
    compared: list[float] = []
    for ours, theirs in zip(
        metric_lines(one.run.directory), metric_lines(two.run.directory), strict=True
    ):
        assert ours["mismatch/bits"] == theirs["mismatch/bits"] == 0.0
        assert ours["update/loss"] == theirs["update/loss"]
        assert ours["mismatch/bits_compared"] == theirs["mismatch/bits_compared"]
        compared.append(theirs["mismatch/bits_compared"] / theirs["data/tokens"])
    # Of samples ahead few tokens are of the newest weights, and only those can be compared.
    assert min(compared) < 1.0 if ahead else min(compared) == 1.0
    assert compared[0] == 1.0
    for file in ("step_00000003.samples.jsonl", "step_00000005.samples.jsonl"):
        said = [(run.run.directory / "rollouts" / file).read_bytes() for run in (one, two)]
        assert said[0] == said[1] != b""


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_sampling_process_with_fewer_instructions_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process has looked at the variable already, those that it starts have not."""
    here = contract_here(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    cfg = exact_config(tmp_path, "run", inference_engine={"processes": 1})
    with pytest.raises(EngineError) as refused:
        run(cfg)
    text = str(refused.value)
    assert f"first  {here.line}" in text
    assert "DEFAULT" in text.split("other  ")[1]
    assert not (cfg.run.directory / "metrics.jsonl").read_bytes()


def test_whoever_builds_a_sampler_elsewhere_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling processes and Ray actors call this."""
    cfg = exact_config(tmp_path, "run")
    here = contract_here(tmp_path)
    assert sampler_of(cfg, here).version == 0
    told_instructions(monkeypatch)
    with pytest.raises(EngineError, match="AVX9"):
        sampler_of(cfg, here)


# --- What has no exact form.
def test_a_teacher_needs_none(tmp_path: Path) -> None:
    """Nobody samples from it, so there is nothing that it has to agree with."""
    place = tmp_path / "teacher"
    teacher: Any = builtin_policy("builtin:tiny", seed=3)
    teacher.save_pretrained(place)
    builtin_tokenizer().save_pretrained(place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"hidden_act": "mish"}))
    model = {"name": "builtin:tiny", "teachers": {"other": {"name": str(place)}}}
    cfg = exact_config(tmp_path, "run", model=model, train={"alg_name": "kdrl"})
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert [line["mismatch/bits"] for line in lines] == [0.0] * 4
    assert min(line["mismatch/bits_compared"] for line in lines) > 0


def test_a_device_that_turns_out_to_be_a_gpu_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(*_: object, **__: object) -> torch.device:
        return torch.device("cuda")

    monkeypatch.setattr("oxrl.assembly.assembly.chosen_device", seen)
    with pytest.raises(ConfigError, match=r"run.exact: run.device auto is cuda here.*to cpu"):
        Assembly(exact_config(tmp_path, "run")).contract  # noqa: B018


# --- What comes after a run.
def test_a_replay_gives_the_same_bits_and_is_refused_where_others_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = exact_config(tmp_path, "run", run={"record": "tokens"})
    run(cfg)
    found = replay(cfg.run.directory, 4, tolerance=0.0)
    assert found
    assert [str(entry) for entry in found if not entry.equal] == []
    told_instructions(monkeypatch)
    with pytest.raises(CheckpointError, match="another run"):
        replay(cfg.run.directory, 4)


@pytest.mark.timeout(300)
def test_an_evaluation_in_processes_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "subprocess", FORKING)
    cfg = exact_config(tmp_path, "run")
    config = cfg.run.directory.with_suffix(".yaml")
    written: list[bytes] = []
    for name, more in (("one", []), ("two", ["inference_engine.processes=2"])):
        out = tmp_path / f"{name}.jsonl"
        run_eval(config, more, samples=2, temperature=0.7, out=out)
        written.append(out.read_bytes())
    assert written[0] == written[1] != b""
