"""The record is append-only, valid JSON whatever the numbers, and is cut back to exactly what a
checkpoint covers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oxrl.errors import OxrlError, RunDirectoryError
from oxrl.runs.directory import RunDirectory, open_run
from oxrl.runs.files import read_records
from oxrl.runs.recorder import Recorder
from support.command_line import forked


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with open_run(tmp_path, "run: {name: x}", resume=False) as run:
        yield run


def test_a_step_is_one_line_with_the_step_first_and_the_keys_sorted(run: RunDirectory) -> None:
    with Recorder(run) as recorder:
        recorder.record_step(1, {"update/lr": 1e-6, "reward/mean": 0.1 + 0.2, "data/rows": 4})
        recorder.record_step(2, {})
    first = '{"step": 1, "data/rows": 4, "reward/mean": 0.30000000000000004, "update/lr": 1e-06'
    assert run.metrics.read_text() == (
        f'{first}, "system/chain": {chain_of(first)}}}\n'
        '{"step": 2, "system/chain": 3603442691562215}\n'
    )


def chain_of(text: str) -> int:
    """The definition of docs/run_directory.md."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:13], 16)


def test_a_number_that_is_not_finite_stays_visible_in_valid_json(run: RunDirectory) -> None:
    with Recorder(run) as recorder:
        recorder.record_step(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
        recorder.record_samples(
            [{"uid": "x", "reward": None, "parts": {"p": math.nan}, "versions": ((0, 0, 3),)}]
        )

    def no_constant(name: str) -> float:
        raise AssertionError(f"bare {name} is not JSON")

    line = json.loads(run.metrics.read_text(), parse_constant=no_constant)
    del line["system/chain"]
    assert line == {"step": 1, "a": "nan", "b": "inf", "c": "-inf"}
    assert math.isnan(float(line["a"])) and float(line["c"]) == -math.inf
    assert json.loads(run.samples.read_text()) == {
        "uid": "x", "reward": None, "parts": {"p": "nan"}, "versions": [[0, 0, 3]],
    }  # fmt: skip


def test_any_text_a_model_can_produce_is_one_readable_line(run: RunDirectory) -> None:
    texts = ["两个苹果", "a\nb\r\u2028c", "lone \ud800 surrogate", "\x00"]
    with Recorder(run) as recorder:
        recorder.record_samples([{"response": text} for text in texts])
    assert [record["response"] for record in read_records(run.samples)] == texts
    assert "两个苹果" in run.samples.read_text(encoding="utf-8")


def test_what_json_cannot_hold_is_refused_by_name(run: RunDirectory) -> None:
    with Recorder(run) as recorder, pytest.raises(TypeError, match="got Tensor"):
        recorder.record_samples([{"reward": torch.zeros(1)}])


def test_rollouts_are_readable_safetensors_named_by_step(run: RunDirectory) -> None:
    tokens = torch.arange(6).reshape(2, 3)
    with Recorder(run) as recorder:
        recorder.record_rollouts(7, {"tokens": tokens.T, "logprobs": torch.zeros(2)})
    path = run.rollouts / "step_00000007.safetensors"
    assert torch.equal(load_file(path)["tokens"], tokens.T)


def fill(recorder: Recorder, steps: range) -> None:
    for step in steps:
        recorder.record_step(step, {"reward/mean": step / 7})
        recorder.record_samples(
            [{"uid": f"{step}/{sample}", "response": "é" * step} for sample in range(3)]
        )
        recorder.record_rollouts(step, {"tokens": torch.tensor([step])})


def test_truncation_gives_back_exactly_what_was_there_when_the_offsets_were_taken(
    run: RunDirectory,
) -> None:
    with Recorder(run) as recorder:
        fill(recorder, range(1, 4))
        offsets = recorder.offsets()
        kept = {path: path.read_bytes() for path in (run.metrics, run.samples)}
        assert offsets == {
            "metrics.jsonl": len(kept[run.metrics]),
            "samples.jsonl": len(kept[run.samples]),
            "chain": chain_of(kept[run.metrics].decode()),
            "rollouts": 3,
        }
        fill(recorder, range(4, 8))
    # What a kill in the middle of a write leaves.
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 8, "rew')
    (run.rollouts / ".tmp-step_00000008.safetensors").write_bytes(b"half")
    with Recorder(run) as recorder:
        recorder.truncate(offsets)
        assert {path: path.read_bytes() for path in kept} == kept
        assert sorted(path.name for path in run.rollouts.iterdir()) == [
            f"step_{n:08d}.safetensors" for n in (1, 2, 3)
        ]
        assert recorder.offsets() == offsets
        fill(recorder, range(4, 6))
    assert [record["step"] for record in read_records(run.metrics)] == [1, 2, 3, 4, 5]


def test_truncation_to_nothing_forgets_everything(run: RunDirectory) -> None:
    with Recorder(run) as recorder:
        fill(recorder, range(1, 3))
        recorder.truncate({})
        nothing = {"metrics.jsonl": 0, "samples.jsonl": 0, "chain": chain_of(""), "rollouts": -1}
        assert recorder.offsets() == nothing
    assert list(run.rollouts.iterdir()) == []


def test_a_metrics_file_that_lost_lines_is_not_continued(run: RunDirectory) -> None:
    with Recorder(run) as recorder:
        fill(recorder, range(1, 4))
        offsets = recorder.offsets()
        os.truncate(run.metrics, offsets["metrics.jsonl"] - 10)
        with pytest.raises(RunDirectoryError, match="lines are missing"):
            recorder.truncate(offsets)


def test_a_metrics_file_that_was_edited_is_not_continued(run: RunDirectory) -> None:
    with Recorder(run) as recorder:
        fill(recorder, range(1, 4))
        offsets = recorder.offsets()
        run.metrics.write_bytes(b" " + run.metrics.read_bytes())
        with pytest.raises(RunDirectoryError, match="it was edited"):
            recorder.truncate(offsets)


def test_samples_deleted_to_save_space_do_not_stop_a_resume(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(run) as recorder:
        fill(recorder, range(1, 4))
        offsets = recorder.offsets()
    os.truncate(run.samples, 10)
    with Recorder(run) as recorder, caplog.at_level(logging.WARNING):
        recorder.truncate(offsets)
        fill(recorder, range(4, 5))
    assert "samples.jsonl is" in caplog.text
    assert [record["uid"] for record in read_records(run.samples)] == ["4/0", "4/1", "4/2"]


def test_a_full_disk_says_which_file_and_what_to_do(run: RunDirectory) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(run) as recorder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(OxrlError, match=r"(?s)samples\.jsonl cannot be written.*--resume"):
                recorder.record_samples([{"response": "x" * 2000}])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        # The half line is what a resume cuts away; a reader already leaves it out.
        assert list(read_records(run.samples)) == []


def record_for_ever(folder: Path) -> None:
    recorder = Recorder(open_run(folder, "run: {name: x}", resume=True))
    for step in range(1, 10**9):
        recorder.record_step(step, {"reward/mean": 1 / step})
        recorder.record_samples([{"uid": str(step), "response": "x" * 500}])


def test_a_killed_process_loses_no_line_it_recorded(tmp_path: Path) -> None:
    process = forked(record_for_ever, tmp_path)
    process.start()
    deadline = time.monotonic() + 60
    while (
        not (tmp_path / "samples.jsonl").exists()
        or (tmp_path / "samples.jsonl").stat().st_size < 100_000
    ):
        assert process.exitcode is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.join()
    metrics = list(read_records(tmp_path / "metrics.jsonl"))
    samples = list(read_records(tmp_path / "samples.jsonl"))
    assert [record["step"] for record in metrics] == list(range(1, len(metrics) + 1))
    assert len(metrics) - len(samples) in (0, 1)
