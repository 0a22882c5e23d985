"""A teacher on vLLM in a process of its own (`make test-scale`); skipped where vLLM is not
installed.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from oxrl.checkpoint.model_files import save_model
from oxrl.commands.train import run
from oxrl.config.sections.model import Teacher
from oxrl.data.batching import to_token_batch
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import EngineError, LostActorError
from oxrl.runs.waiting import no_stop
from oxrl.tables.watch import Deadlines
from oxrl_teachers.vllm_teacher import VllmTeacher, vllm
from support.command_line import forked
from support.samplers import TOKENIZER, lively
from support.small_runs import metric_lines, rl_config

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: `make env-scale`"
    ),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(580),
]
ROWS = [[40, 41, 42, 43, 44, 45, 46], [100, 7, 90, 33, 61, 62, 15, 80], [61, 61, 62]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("teacher")
    save_model(lively(), found)
    TOKENIZER.save_pretrained(found)
    return found


def started(folder: Path, stack: ExitStack, *, context: int, candidates: int = 8) -> VllmTeacher:
    asked = Teacher(name=str(folder), engine="vllm", dtype="float32").model_dump()
    of_run = {
        "candidates": candidates,
        "only": [],
        "max_model_len": context,
        "trust_remote_code": False,
        "threads": 1,
        "directory": folder,
    }
    return vllm(
        "model.teachers.big",
        asked | of_run,
        tokenizer=TOKENIZER,
        waits=Deadlines.alike(300),
        stop=no_stop,
        closing=stack.callback,
    )


@pytest.fixture(scope="module")
def teacher(folder: Path) -> Iterator[VllmTeacher]:
    with ExitStack() as stack:
        yield started(folder, stack, context=16)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_it_says_what_the_model_says(teacher: VllmTeacher, count: int) -> None:
    rows = ROWS * 30  # more than are handed over at once
    inputs = to_token_batch(rows, [[place > 1 for place in range(len(row))] for row in rows], 0)
    want = frozenset({"logprobs", f"top_k={count}"} if count else {"logprobs"})
    ours = LocalTrainer(lively(), TrainerOptions(lr=1e-3)).forward(inputs, want)
    said = teacher.forward(inputs, want)
    assert said.logprobs is not None and ours.logprobs is not None
    torch.testing.assert_close(said.logprobs, ours.logprobs, atol=1e-3, rtol=0)
    if count:
        assert said.top_ids is not None and ours.top_ids is not None
        assert torch.equal(said.top_ids, ours.top_ids)
        torch.testing.assert_close(said.top_logprobs, ours.top_logprobs, atol=1e-3, rtol=0)


def test_a_row_that_is_too_long_is_left_out_and_no_other(
    teacher: VllmTeacher, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [[1, 2, 3], [5] * 16, [5] * 15]
    inputs = to_token_batch(rows, [[place > 0 for place in range(len(row))] for row in rows], 0)
    said = teacher.forward(inputs, frozenset({"logprobs", "top_k=2"}))
    assert said.logprobs is not None and said.top_ids is not None
    assert said.logprobs.isnan().any(1).tolist() == [False, True, False]
    assert (said.top_ids[1, 1:] == -1).all()
    assert "no answer on 1 of 3 rows: they are as long as" in caplog.text


@pytest.mark.full
def test_a_process_that_dies_is_told_and_one_that_cannot_start_says_why(folder: Path) -> None:
    inputs = to_token_batch(ROWS, [[place > 0 for place in range(len(row))] for row in ROWS], 0)
    with ExitStack() as stack:
        dies = started(folder, stack, context=16)
        os.kill(dies._process._worker.process.pid, signal.SIGKILL)
        with pytest.raises(LostActorError, match="killed by signal 9"):
            dies.forward(inputs, frozenset({"logprobs"}))
    with ExitStack() as stack, pytest.raises(EngineError, match="vLLM does not start"):
        started(folder, stack, context=1 << 20)


def train(folder: str, teacher: str, engine: str) -> None:
    """Two steps in a process of its own, which vLLM's process has to end with."""
    teachers = {"big": {"name": teacher, "engine": engine}}
    lines = ["~reward.name", "run.steps=2"]
    model = {"name": "builtin:tiny", "teachers": teachers}
    numbers = {"alg_name": "opd_topk", "lr": 1e-3, "teacher_candidates": 5}
    run(rl_config(Path(folder), "run", lines, model=model, train=numbers))


def test_a_run_is_that_of_a_local_teacher(tmp_path: Path, folder: Path) -> None:
    lines = []
    for engine in ("local", "vllm"):
        process = forked(train, str(tmp_path / engine), str(folder), engine)
        process.start()
        process.join(400)
        assert process.exitcode == 0
        lines.append(metric_lines(tmp_path / engine / "run"))
    for ours, theirs in zip(*lines, strict=True):
        assert theirs["teacher/left_out"] == 0
        for name in ("teacher/gap_mean", "teacher/overlap", "update/grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-2, abs=1e-3)
    assert list((tmp_path / "vllm" / "run").glob("vllm_teachers.big_*.log"))
