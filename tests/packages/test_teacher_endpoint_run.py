"""Runs that learn from a teacher behind a server: like those of a local one, killed and resumed."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.errors import ConfigError, EngineError
from oxrl.models.load import load_policy
from oxrl.types import TokenIds
from oxrl_graders.judge import endpoint as transport
from oxrl_teachers.endpoint import EndpointTeacher
from support.command_line import Command, oxrl
from support.judge_server import Answer, Json, JudgeServer, refused
from support.small_runs import final_files, metric_lines, model_that_stops, rl_config
from support.teacher_server import completion, teacher_server

TWO_STEPS = "run.steps=2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher's weights."""
    return model_that_stops(tmp_path_factory.mktemp("teacher") / "big")


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JudgeServer]:
    monkeypatch.setattr(transport, "FIRST_WAIT_S", 0.01)
    with teacher_server(load_policy(str(folder))) as server:
        yield server


def taught(folder: Path, name: str, teacher: Json, *overrides: str, **sections: Any) -> Config:
    """A run of 4 steps from a teacher, 4 prompts x 4 samples x 6 tokens; only kdrl has a reward."""
    model = {"name": "builtin:tiny", "teachers": {"big": teacher}}
    train = {"alg_name": "opd_topk", "lr": 1e-3} | sections.pop("train", {})
    sections["run"] = {"steps": 4} | sections.get("run", {})
    lines = [*overrides] if train["alg_name"] == "kdrl" else ["~reward.name", *overrides]
    return rl_config(folder, name, lines, model=model, train=train, **sections)


def served(server: JudgeServer, **more: str) -> Json:
    return {"name": "tiny", "engine": "endpoint", "url": server.url, **more}


@pytest.mark.parametrize(
    "algorithm", ["opd", "opd_topk", pytest.param("kdrl", marks=pytest.mark.full)]
)
def test_a_run_is_that_of_a_local_teacher_with_the_same_weights(
    tmp_path: Path,
    folder: Path,
    server: JudgeServer,
    algorithm: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[TokenIds] = []
    begin = EndpointTeacher.begin

    def counted(self: EndpointTeacher, row: TokenIds) -> None:
        begun.append(row)
        begin(self, row)

    monkeypatch.setattr(EndpointTeacher, "begin", counted)
    numbers = {"teacher_candidates": 5} if algorithm == "opd_topk" else {}
    train = {"alg_name": algorithm, **numbers}
    local = taught(tmp_path / "local", "run", {"name": str(folder)}, TWO_STEPS, train=train)
    other = taught(tmp_path / "other", "run", served(server), TWO_STEPS, train=train)
    run(local)
    run(other)
    pairs = zip(metric_lines(local.run.directory), metric_lines(other.run.directory), strict=True)
    for ours, theirs in pairs:
        assert ours["teacher/left_out"] == theirs["teacher/left_out"] == 0
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            expected = pytest.approx(float(value), rel=1e-3, abs=1e-5, nan_ok=True)
            assert float(theirs[name]) == expected, name
    assert {request["prompt_logprobs"] for request in server.requests[1:]} == {
        0,  # of the comparison with itself
        *numbers.values(),
    }
    tried, *others = server.requests
    assert tried["prompt_logprobs"] == numbers.get("teacher_candidates", 0)
    # Every sample is asked for once, while others are sampled: alone, in a batch and twice before.
    assert len(begun) == 2 * 16
    assert len(others) <= 3 * 3 + 2 * 16


def test_rows_that_fail_are_left_out_and_counted_and_too_many_end_the_run(
    tmp_path: Path, server: JudgeServer
) -> None:
    right = server.answer
    numbers = itertools.count(1)

    def answer(request: Json) -> Answer:
        # The first ten try it out and compare it with itself. A number of its own for each: many
        # are asked at the same time.
        number = next(numbers)
        fails = number > 10 and (number % 4 == 0 or fails_always)
        return refused(400, "not this one") if fails else right(request)

    server.answer = answer
    fails_always = False
    cfg = taught(tmp_path / "some", "run", served(server), TWO_STEPS)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert all(1 <= line["teacher/left_out"] <= 8 for line in lines)
    assert all(line["update/skipped"] == 0 for line in lines)
    assert "400 not this one" in (cfg.run.directory / "run.log").read_text()
    fails_always = True
    numbers = itertools.count(1)
    cfg = taught(tmp_path / "all", "run", served(server), TWO_STEPS)
    with pytest.raises(EngineError, match="16 of 16 rows of a step have no answer of their"):
        run(cfg)


def test_a_server_that_dies_ends_the_run_which_goes_on_at_another(
    tmp_path: Path, folder: Path, server: JudgeServer
) -> None:
    whole = taught(tmp_path / "whole", "run", served(server))
    run(whole)
    right = server.answer
    left = [len(server.requests) - 20]

    def answer(request: Json) -> Answer:
        left[0] -= 1
        return right(request) if left[0] > 0 else refused(503, "gone")

    server.answer = answer
    cfg = taught(tmp_path / "killed", "run", served(server))
    with pytest.raises(EngineError) as ended:
        run(cfg)
    assert ended.value.exit_code == 1
    assert 0 < len(metric_lines(cfg.run.directory)) < 4
    with teacher_server(load_policy(str(folder))) as another:
        again = taught(tmp_path / "killed", "run", served(another))
        run(again, resume=True)
        assert len(another.requests) > 16
    assert metric_lines(cfg.run.directory) == metric_lines(whole.run.directory)
    ours, theirs = final_files(cfg.run.directory), final_files(whole.run.directory)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


@pytest.mark.full
def test_a_signal_ends_the_wait_for_a_server_that_hangs(
    tmp_path: Path, server: JudgeServer
) -> None:
    right = server.answer
    over = threading.Event()

    def hangs(request: Json) -> Answer:
        if len(server.requests) > 10 + 16:
            over.wait(100)
        return right(request)

    server.answer = hangs
    cfg = taught(tmp_path, "run", served(server))
    process = Command("train", tmp_path / "run.yaml", "~reward.name", folder=tmp_path)
    deadline = time.monotonic() + 120
    while len(server.requests) <= 10 + 16:
        assert process.returncode is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    over.set()
    run(cfg, resume=True)
    assert len(metric_lines(cfg.run.directory)) == 4


def test_a_key_is_in_no_file_of_a_run(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-very-secret-key"
    monkeypatch.setenv("BIG_KEY", key)
    cfg = taught(tmp_path, "run", served(server, key_env="BIG_KEY"), "run.steps=1")
    run(cfg)
    assert set(server.keys) == {f"Bearer {key}"}
    for path in cfg.run.directory.rglob("*"):
        assert path.is_dir() or key.encode() not in path.read_bytes(), path


@pytest.mark.full
def test_the_command_says_what_a_server_lacks(tmp_path: Path, server: JudgeServer) -> None:
    server.answer = lambda request: completion(None)
    taught(tmp_path, "lacks", served(server))
    ended = oxrl("train", tmp_path / "lacks.yaml", "~reward.name", folder=tmp_path)
    assert ended.returncode == 2
    assert "model.teachers.big.url" in ended.stderr
    assert "answers without prompt_logprobs" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, server: JudgeServer) -> None:
    def refusal(*overrides: str, **more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            taught(tmp_path, "run", served(server) | more, *overrides)
        return str(caught.value)

    assert "must be 1 with model.teachers.big.engine" in refusal("rollout.temperature=0.7")
    for url in ("http://me:hunter2@h/v1", "http://h/v1?key=hunter2", "http://h:hunter2/v1"):
        told = refusal(url=url)
        assert "model.teachers.big.url" in told and "hunter2" not in told
    assert "prompt_logprobs" in refusal(url="https://api.openai.com/v1")
    told = refusal(key_env="sk-hunter2")
    assert "model.teachers.big.key_env" in told and "hunter2" not in told
