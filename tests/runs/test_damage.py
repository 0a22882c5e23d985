"""What happens to a run directory from outside: full disks, damaged files, links, removed files.

Each is named, with exit code 2 where an input is wrong and 1 where the machine refused, or put right
with a notice. What was saved stays, and nothing outside of the directory is touched.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch

from oxrl.checkpoint.finished import is_finished
from oxrl.checkpoint.verify import why_not_best
from oxrl.checkpoint.writer import save_best
from oxrl.commands.evaluate import evaluation_config
from oxrl.errors import (
    CheckpointWriteError,
    DataError,
    MachineError,
    NoCheckpointError,
    OxrlError,
    RunDirectoryError,
)
from oxrl.runs.console import Console, run_logging
from oxrl.runs.directory import FILES, FOLDERS, RunDirectory, open_run
from oxrl.runs.files import append_line, read_records, write_atomically
from oxrl.runs.os_errors import explained
from oxrl.runs.recorder import Recorder, save_tensors
from support.command_line import oxrl
from support.whole_checkpoints import save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "run: {name: first, steps: 4}\ntrain: {lr: 1.0e-06}\n"


def write_model(directory: Path) -> None:
    (directory / "config.json").write_text("{}")


def fill(folder: Path, steps: int) -> None:
    """A run of `steps` steps, a checkpoint after each; finished where it is given all 4."""
    with open_run(folder, CONFIG, resume=False) as run, Recorder(run) as recorder:
        for step in range(steps + 1):
            if step:
                recorder.record_step(step, {"reward/mean": step / 7, "time/step_s": 0.5})
            offsets = recorder.offsets()
            save_checkpoint(run.checkpoints, step, write_model, state={}, offsets=offsets, keep=3)
        if steps == 4:
            run.finish(4, list(read_records(run.metrics))[-1])


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a disk that fills up: no file grows beyond `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def resume(folder: Path) -> RunDirectory:
    return open_run(folder, CONFIG, resume=True, is_finished=is_finished)


def recorded(folder: Path) -> None:
    """Resume the record from the newest checkpoint."""
    from oxrl.checkpoint.verify import latest_checkpoint

    with resume(folder) as run, Recorder(run) as recorder:
        found = latest_checkpoint(run.checkpoints)
        recorder.begin() if found is None else recorder.truncate(found.offsets)


# --- the running hash of metrics.jsonl


def edited(lines: list[bytes]) -> list[bytes]:
    return [lines[0].replace(b"reward/mean", b"reward/best"), *lines[1:]]


def a_time_edited(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b"0.5", b"0.4"), *lines[2:]]


def removed(lines: list[bytes]) -> list[bytes]:
    return [lines[0], *lines[2:], b'{"step": 9, "reward/mean": 0.2857142857142857}\n' + b" " * 40]


def inserted(lines: list[bytes]) -> list[bytes]:
    return [lines[0], b'{"step": 9}\n', *lines[1:]]


def swapped(lines: list[bytes]) -> list[bytes]:
    return [lines[1], lines[0], lines[2]]


def not_json(lines: list[bytes]) -> list[bytes]:
    return [b"\xff\x00" * (len(lines[0]) // 2 - 1) + b"\n", *lines[1:]]


@pytest.mark.parametrize(
    "change",
    [edited, a_time_edited, removed, inserted, swapped, not_json],
    ids=lambda f: f.__name__,
)
def test_a_change_of_recorded_lines_is_seen(
    change: Callable[[list[bytes]], list[bytes]], tmp_path: Path
) -> None:
    fill(tmp_path, 3)
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    changed = b"".join(change(lines))
    metrics.write_bytes(changed)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl.*(edited|not the JSON)"):
        recorded(tmp_path)
    assert metrics.read_bytes() == changed


def test_lines_that_somebody_hashed_again_do_not_fit_the_checkpoint(tmp_path: Path) -> None:
    from oxrl.runs.files import Chain

    fill(tmp_path, 3)
    metrics = tmp_path / "metrics.jsonl"
    chain = Chain()
    forged = b""
    for record in read_records(metrics):
        del record["system/chain"]
        line = json.dumps(record | {"reward/mean": 0.1}).encode() + b"\n"
        forged += chain.seal(line)
    size = metrics.stat().st_size
    metrics.write_bytes(forged.ljust(size - 1) + b"\n" if len(forged) < size else forged)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl"):
        recorded(tmp_path)


def test_lines_without_a_checkpoint_are_not_thrown_away(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(RunDirectoryError, match="tells of 3 steps, and there is no checkpoint"):
        recorded(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# --- result.json


def test_a_finished_run_is_finished(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    with resume(tmp_path) as run:
        assert run.finished


@pytest.mark.parametrize(
    "content",
    ['{"step": 4}', '{"step": 400}', '{"step": true}', '{"step": "4"}', "[4]", "", "[" * 100_000],
)
def test_a_result_is_not_believed_against_checkpoints_and_metrics(
    content: str, tmp_path: Path
) -> None:
    fill(tmp_path, 3)
    (tmp_path / "result.json").write_text(content)
    with resume(tmp_path) as run:
        assert not run.finished
        assert any("result.json is ignored" in remark for remark in run.remarks)


def test_a_result_whose_last_checkpoint_is_damaged_is_not_believed(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    (tmp_path / "checkpoints" / "step_00000004" / "config.json").write_text("[]")
    with resume(tmp_path) as run:
        assert not run.finished
        assert "the newest is step_00000003" in run.remarks[0]


def test_a_result_that_was_edited_is_written_anew(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    result = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps(result | {"reward/mean": 1.0}))
    with resume(tmp_path) as run:
        assert not run.finished
        assert "not the last line of metrics.jsonl" in run.remarks[0]


# --- best/


def test_a_best_that_is_not_what_was_written_is_said(tmp_path: Path) -> None:
    assert why_not_best(tmp_path, 4) == "it is gone"
    save_best(tmp_path, 3, write_model)
    assert why_not_best(tmp_path, 4) == ""
    assert "is of step 3, after the checkpoint" in why_not_best(tmp_path, 2)
    (tmp_path / "best" / "config.json").write_text("[]")
    assert why_not_best(tmp_path, 4).startswith("config.json has the right size but")
    (tmp_path / "best" / "manifest.json").write_text("")
    assert why_not_best(tmp_path, 4) == "its manifest.json is missing or damaged"


def test_a_full_disk_leaves_best_as_it_was(tmp_path: Path) -> None:
    save_best(tmp_path, 1, write_model)

    def write(directory: Path) -> None:
        (directory / "config.json").write_bytes(b"x" * 5000)

    with files_of_at_most(1000), pytest.raises(CheckpointWriteError, match="go on with --resume"):
        save_best(tmp_path, 2, write)
    assert why_not_best(tmp_path, 1) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]


# --- damaged files


TERRIBLE = [
    b"",
    b"\xff\xfe\x00",
    b"[1, 2",
    b"[\n" * 5_000,
    b"7",
    b'{"a": 3}',
    b'{"run": {"steps": "x"}}',
]


@pytest.mark.parametrize("name", ["config.yaml", "data.json", "inputs.json", "code.json"])
@pytest.mark.parametrize("content", TERRIBLE)
def test_a_damaged_file_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    from oxrl.runs.pins import read_noted

    fill(tmp_path, 2)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RunDirectoryError, match=f"{name} is not the (YAML|JSON) written there"):
        if name == "config.yaml":
            resume(tmp_path)
        else:
            read_noted(tmp_path, name)


def test_a_run_that_lost_its_config_is_told_so(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    (tmp_path / "config.yaml").unlink()
    with pytest.raises(RunDirectoryError, match="lost that file: restore it"):
        resume(tmp_path)


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_stands_in_place_of_a_checkpoint_is_named_and_removed_in_time(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from oxrl.checkpoint.verify import latest_checkpoint

    fill(tmp_path, 2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "checkpoints"
    for name in ("step_00000003", ".tmp-step_00000003", ".tmp-removed-step_00000003"):
        plant(kind, root / name, outside)
    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(root)
    assert found is not None and found.step == 2
    assert "step_00000003" in caplog.text
    save_checkpoint(root, 3, write_model, state={}, offsets={}, keep=3)
    found = latest_checkpoint(root)
    assert found is not None and found.step == 3
    assert (outside / "precious").read_text() == "x"
    assert not list(root.glob(".tmp-*"))


def plant(kind: str, path: Path, outside: Path) -> None:
    if kind == "file":
        path.write_text("planted")
    elif kind == "link":
        path.symlink_to(outside)
    else:
        path.mkdir()
        (path / "planted").write_text("")


def test_without_a_whole_checkpoint_the_exit_code_is_that_of_a_wrong_input(tmp_path: Path) -> None:
    from oxrl.checkpoint.verify import latest_checkpoint

    fill(tmp_path, 0)
    (tmp_path / "checkpoints" / "step_00000000" / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(NoCheckpointError) as raised:
        latest_checkpoint(tmp_path / "checkpoints")
    assert raised.value.exit_code == 2


# --- links


@pytest.mark.parametrize("name", sorted(FILES | FOLDERS))
@pytest.mark.parametrize("kind", ["file", "folder", "nothing"])
def test_a_link_in_place_of_a_file_or_folder_is_refused_and_not_followed(
    name: str, kind: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fill(run, 1)
    outside = tmp_path / "outside"
    if kind == "file":
        outside.write_text("precious")
    elif kind == "folder":
        outside.mkdir()
        (outside / "precious").write_text("x")
    place = run / name
    shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
    place.symlink_to(outside)
    with pytest.raises(RunDirectoryError, match=f"{name} is a symbolic link to"):
        resume(run)
    assert not outside.exists() or [outside.stat().st_size] != [0]
    if kind == "folder":
        assert [path.name for path in outside.iterdir()] == ["precious"]
    if kind == "nothing":
        assert not outside.exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "run.log", "starts.jsonl"])
def test_a_file_with_a_second_name_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    fill(tmp_path / "run", 1)
    place = tmp_path / "run" / name
    place.unlink(missing_ok=True)
    (tmp_path / "precious").write_text("x\n")
    os.link(tmp_path / "precious", place)
    with pytest.raises(RunDirectoryError, match=r"2 names \(hard links\)"):
        resume(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "x\n"


def test_a_pipe_in_place_of_a_file_does_not_make_a_run_wait(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    os.mkfifo(tmp_path / "result.json")
    with pytest.raises(RunDirectoryError, match="neither a file nor a folder"):
        resume(tmp_path)


def test_a_pipe_in_place_of_its_config_does_not_make_an_evaluation_wait(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / "config.yaml").unlink()
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(RunDirectoryError, match=r"config\.yaml, .* is gone or no file"):
        evaluation_config(tmp_path, [], ExitStack())


def test_names_that_a_write_passes_through_are_no_way_out(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("x")
    for name in (".tmp-a.json", ".tmp-b.safetensors"):
        (tmp_path / name).symlink_to(precious)
    (tmp_path / "a.json").symlink_to(precious)
    write_atomically(tmp_path / "a.json", "{}")
    save_tensors({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    (tmp_path / "log").symlink_to(precious)
    with pytest.raises(RunDirectoryError, match="symbolic link"):
        append_line(tmp_path / "log", b"y\n")
    with pytest.raises(RunDirectoryError, match="symbolic link"), run_logging(tmp_path / "log"):
        pass
    assert precious.read_text() == "x"
    assert not (tmp_path / "a.json").is_symlink()


# --- files that are taken away while the run goes on


def test_a_record_that_is_removed_while_the_run_goes_on_is_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_run(tmp_path, CONFIG, resume=False) as run, Recorder(run) as recorder:
        recorder.record_step(1, {"a": 1.0})
        run.metrics.unlink()
        with caplog.at_level(logging.WARNING):
            recorder.record_step(2, {"a": 2.0})
        assert "put back as it was" in caplog.text
        run.metrics.unlink()
        run.metrics.write_text("something else\n")
        recorder.record_step(3, {"a": 3.0})
        run.samples.unlink()
        recorder.record_samples([{"uid": "x"}])
        offsets = recorder.offsets()
        recorder.truncate(offsets)
    assert [record["step"] for record in read_records(run.metrics)] == [1, 2, 3]
    assert [record["uid"] for record in read_records(run.samples)] == ["x"]


def test_a_run_whose_directory_is_taken_away_ends_at_its_next_line(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with open_run(folder, CONFIG, resume=False) as run, Recorder(run) as recorder:
        recorder.record_step(1, {})
        folder.rename(tmp_path / "moved")
        with pytest.raises(OxrlError, match=r"(?s)removed or moved away.*run\.dir=PATH") as raised:
            recorder.record_step(2, {})
        assert raised.value.exit_code == 1
        folder.mkdir()
        with pytest.raises(OxrlError, match="removed or moved away"):
            recorder.record_step(2, {})
    assert list(folder.iterdir()) == []


# --- full disks


def test_a_full_disk_at_the_end_is_told_and_leaves_no_half_result(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with resume(tmp_path) as run:
        with files_of_at_most(100), pytest.raises(CheckpointWriteError, match="--resume writes it"):
            run.finish(4, {"text": "x" * 500})
        assert not (tmp_path / "result.json").exists()
        assert not list(tmp_path.glob(".tmp-*"))


def test_a_full_disk_at_a_start_is_told_and_the_next_start_is_a_line_of_its_own(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 3)
    starts = tmp_path / "starts.jsonl"
    with (
        files_of_at_most(starts.stat().st_size + 20),
        pytest.raises(RunDirectoryError, match="run.dir"),
    ):
        resume(tmp_path)
    # What a crash leaves in the middle of a line.
    with starts.open("ab") as file:
        file.write(b'{"time": "20')
    resume(tmp_path).close()
    assert [record["resuming"] for record in read_records(starts)] == [False, True]


def test_a_full_disk_silences_the_log_and_prints_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(10), run_logging(tmp_path / "run.log"):
        logging.getLogger("oxrl.test").warning("a message that is longer than that")
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "memory ran out"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), "memory ran out"),
        (OSError(12, "Cannot allocate memory"), "memory ran out"),
        (OSError(28, "No space left on device"), "the disk refused"),
        (OSError(24, "Too many open files"), "too many files"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk refused"),
    ],
)
def test_what_the_machine_refuses_is_an_error_that_teaches(error: Exception, said: str) -> None:
    with pytest.raises(MachineError, match=rf"(?s){said}.*--resume") as raised, explained():
        raise error
    assert raised.value.exit_code == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (FileNotFoundError(2, "No such file or directory", "x"), "x: No such file or directory"),
        (HTTPError("http://x/y", 500, "boom", Message(), None), "http://x/y: HTTP Error 500: boom"),
    ],
)
def test_an_error_of_a_file_or_an_address_says_which_and_why(error: Exception, said: str) -> None:
    with pytest.raises(DataError) as raised, explained():
        raise error
    assert str(raised.value) == said


def test_a_bug_stays_a_bug() -> None:
    with pytest.raises(KeyError), explained():
        raise KeyError("x")


# --- closed streams


def test_a_console_without_a_standard_output_shows_nothing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with run_logging(tmp_path / "run.log"), Console(2, "closed") as console:
        logging.getLogger("oxrl.test").warning("kept")
        console.step(1, {"loss": 1.0})
    assert "kept" in (tmp_path / "run.log").read_text()


# `oxrl ... <&- >&- 2>&-`
WITHOUT_STREAMS = """\
import os, sys
from oxrl.cli import main
os.closerange(0, 3)
sys.stdin = sys.stdout = sys.stderr = None
main()
"""


def to_a_full_disk(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"{sys.executable} -m oxrl train c.yaml > /dev/full"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def without_streams(folder: Path) -> subprocess.CompletedProcess[str]:
    begun = [sys.executable, "-m", "oxrl", "--version"]  # with no streams from its first line on
    subprocess.run(["bash", "-c", f"{shlex.join(begun)} <&- >&- 2>&-"], cwd=ROOT, check=True)
    (folder / "closed.py").write_text(WITHOUT_STREAMS)
    return oxrl("train", "c.yaml", folder=folder, script=folder / "closed.py")


@pytest.mark.parametrize(
    "trained", [without_streams, pytest.param(to_a_full_disk, marks=pytest.mark.full)]
)
def test_a_command_without_standard_streams_writes_into_no_file_of_its_own(
    trained: Callable[[Path], subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 4)
    (tmp_path / "c.yaml").write_text(
        "run: {name: x, steps: 1, mlflow: false, device: cpu, threads: 1}\n"
        "model: {name: 'builtin:tiny'}\n"
        "data: {train: rows.jsonl, rows_per_step: 2}\ntrain: {alg_name: sft}\n"
    )
    done = trained(tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    (line,) = read_records(tmp_path / "runs" / "x" / "metrics.jsonl")
    assert line["step"] == 1
    assert (tmp_path / "runs" / "x" / "result.json").is_file()


@pytest.mark.parametrize("step", [3, 5])
def test_a_result_is_that_of_the_newest_checkpoint_and_of_no_other_step(
    step: int, tmp_path: Path
) -> None:
    fill(tmp_path, 4)
    newest = tmp_path / "checkpoints" / "step_00000004"
    if step == 3:
        shutil.rmtree(newest)
    else:
        offsets = {"metrics.jsonl": 0}
        save_checkpoint(newest.parent, 5, write_model, state={}, offsets=offsets, keep=3)
    with resume(tmp_path) as run:
        assert not run.finished
        told = f"it says that step 4 was reached, and the newest is step_0000000{step}"
        assert told in run.remarks[0]
