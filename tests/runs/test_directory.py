"""Who owns a run directory, and when a run starts, continues, is done or is refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import pytest

from oxrl.checkpoint.finished import is_finished
from oxrl.config.reads import resume_rules
from oxrl.config.schema import FIELDS
from oxrl.errors import RunDirectoryError
from oxrl.flat_config import differences, flatten_config
from oxrl.runs import directory
from oxrl.runs.directory import Allowed, open_run
from oxrl.runs.environment import command_line, environment
from oxrl.runs.files import read_records
from oxrl.runs.recorder import Recorder
from support.command_line import WARM, forked
from support.whole_checkpoints import save_checkpoint

CONFIG = """\
run: {name: first, seed: 0, steps: 100, checkpoint_every: 50}
train: {alg_name: sgrpo, lr: 1.0e-06, lr_schedule: constant}
inference_engine: {name: local, max_rows: 128}
"""


def start(path: Path, config: str = CONFIG) -> None:
    open_run(path, config, resume=False).close()


def test_a_fresh_run_makes_its_tree_and_says_what_it_runs_on(tmp_path: Path) -> None:
    with open_run(tmp_path / "a" / "b", CONFIG, resume=False) as run:
        assert (run.resuming, run.finished) == (False, False)
        assert (run.path / "config.yaml").read_text() == CONFIG
        assert run.checkpoints.is_dir() and run.rollouts.is_dir()
        assert (run.metrics.name, run.samples.name) == ("metrics.jsonl", "samples.jsonl")
        facts = json.loads((run.path / "environment.json").read_text())
        assert facts["packages"]["torch"].startswith("2.")
        assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run.path == tmp_path / "a" / "b"


def test_a_directory_that_is_not_empty_is_refused_with_the_command_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["/somewhere/bin/oxrl", "train", "my config.yaml", "run.seed=3"]
    )
    with pytest.raises(
        RunDirectoryError, match=r"(?s)oxrl train 'my config.yaml' run.seed=3 --resume.*run\.dir"
    ) as error:
        open_run(tmp_path, CONFIG, resume=False)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("exists", [True, False])
def test_resuming_where_nothing_is_starts(exists: bool, tmp_path: Path) -> None:
    path = tmp_path if exists else tmp_path / "missing"
    with open_run(path, CONFIG, resume=True) as run:
        assert (run.resuming, run.finished) == (False, False)
        assert (run.path / "config.yaml").exists()


def test_a_start_that_was_killed_before_the_config_was_written_starts_again(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "config.yaml").rename(tmp_path / ".tmp-config.yaml")
    with open_run(tmp_path, CONFIG, resume=True) as run:
        assert not run.resuming


def test_a_directory_of_something_else_is_never_resumed_into(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(RunDirectoryError, match="holds 'thesis.tex' and no config.yaml"):
        open_run(tmp_path, CONFIG, resume=True)
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["thesis.tex"]


def test_a_resumed_run_continues_clears_leftovers_and_notes_each_start(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "checkpoints" / ".tmp-step_00000050").mkdir()
    with open_run(tmp_path, CONFIG, resume=True) as run:
        assert (run.resuming, run.finished) == (True, False)
    assert list(run.checkpoints.iterdir()) == []
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [(entry["resuming"], entry["pid"]) for entry in starts] == [
        (False, os.getpid()),
        (True, os.getpid()),
    ]


def finish(folder: Path) -> None:
    """A run of 100 steps, one line, one checkpoint and the result."""
    with open_run(folder, CONFIG, resume=False) as run, Recorder(run) as recorder:
        recorder.record_step(100, {"eval/reward": float("nan")})
        offsets = recorder.offsets()
        save_checkpoint(run.checkpoints, 100, lambda _: None, state={}, offsets=offsets, keep=1)
        (line,) = read_records(run.metrics)
        run.finish(100, line)


def test_a_finished_run_has_nothing_to_do_until_it_is_given_more_steps(tmp_path: Path) -> None:
    finish(tmp_path)
    with open_run(tmp_path, CONFIG, resume=True, is_finished=is_finished) as run:
        assert run.finished
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["step"], result["eval/reward"]) == (100, "nan")
    longer = CONFIG.replace("steps: 100", "steps: 150")
    with open_run(tmp_path, longer, resume=True, is_finished=is_finished) as run:
        assert (run.resuming, run.finished) == (True, False)
        assert (run.path / "config.yaml").read_text() == longer


def test_a_config_that_means_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    start(tmp_path)
    other = CONFIG.replace("seed: 0", "seed: 1").replace("lr: 1.0e-06", "lr: 1.0e-05, gamma: 0.9")
    with pytest.raises(RunDirectoryError) as error:
        open_run(tmp_path, other, resume=True, allowed=Allowed(resume_rules()))
    listed = str(error.value).partition("these may change: ")[2].removesuffix(".)").split(", ")
    of_teachers = {"model.teachers.url", "model.teachers.key_env"}
    assert "run.threads" in listed and set(listed) - of_teachers <= FIELDS.keys()
    assert "run.seed: 0 in config.yaml, 1 now" in str(error.value)
    assert "train.lr: 1e-06 in config.yaml, 1e-05 now" in str(error.value)
    assert "train.gamma: None in config.yaml, 0.9 now" in str(error.value)
    assert (tmp_path / "config.yaml").read_text() == CONFIG


def test_steps_may_grow_but_not_shrink(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"run\.steps: 100 in config\.yaml, 99 now"):
        open_run(tmp_path, CONFIG.replace("steps: 100", "steps: 99"), resume=True)


def test_how_a_run_is_carried_out_may_change_and_is_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path)
    changed = CONFIG.replace("checkpoint_every: 50", "checkpoint_every: 5, threads: 2").replace(
        "128", "32"
    )
    rules = Allowed(resume_rules())
    opened = open_run(tmp_path, changed, resume=True, allowed=rules)
    with caplog.at_level(logging.WARNING), opened as run:
        assert (run.path / "config.yaml").read_text() == changed
        run.log_remarks()
    assert "run.threads: None -> 2; floating-point sums change order" in caplog.text
    last = json.loads((tmp_path / "starts.jsonl").read_text().splitlines()[-1])
    assert last["config_changes"] == {
        "run.checkpoint_every": [50, 5],
        "run.threads": [None, 2],
        "inference_engine.max_rows": [128, 32],
    }


@pytest.mark.parametrize(
    ("name", "value", "reorders"),
    [
        ("micro_batch_tokens", "auto", False),
        ("micro_batch_tokens", 99, True),
        ("backend", "auto", True),
    ],
)
def test_what_was_settled_when_a_run_began_goes_on(
    tmp_path: Path, name: str, value: object, reorders: bool
) -> None:
    start(tmp_path)
    changed = CONFIG.replace("train: {", f"train: {{{name}: {value}, ")
    with open_run(tmp_path, changed, resume=True, allowed=Allowed(resume_rules())) as run:
        assert ["sums change order" in remark for remark in run.remarks] == [reorders]


def compared(old: str, new: str) -> dict[str, tuple[object, object]]:
    return differences(flatten_config(old), flatten_config(new))


def test_differences_compare_values_not_spelling() -> None:
    assert compared("a: {b: 1e-06, c: [1, 2]}", "a:\n  c: [1, 2]\n  b: 0.000001\n") == {}
    assert compared("a: {b: 1}", "a: {b: [1]}\nd: {e: 2}") == {"a.b": (1, [1]), "d.e": (None, 2)}


def test_the_order_of_several_data_files_is_part_of_the_run(tmp_path: Path) -> None:
    """A mixture draws ties and seeds by a file's place in the list: another order is another order
    of the data.
    """
    mixed = CONFIG + "data: {train: {a.jsonl: 0.5, b.jsonl: 0.5}}\n"
    start(tmp_path, mixed)
    with pytest.raises(RunDirectoryError, match="data.train"):
        open_run(
            tmp_path,
            mixed.replace("a.jsonl: 0.5, b.jsonl: 0.5", "b.jsonl: 0.5, a.jsonl: 0.5"),
            resume=True,
        )
    open_run(tmp_path, mixed, resume=True).close()


def test_a_config_that_was_edited_into_something_else_is_named(tmp_path: Path) -> None:
    start(tmp_path)
    for text in ("run: [1", "run: 5\n"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(RunDirectoryError, match=r"config.yaml is not the YAML written there"):
            open_run(tmp_path, CONFIG, resume=True)


def test_a_place_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/oxrl-run")):
        with pytest.raises(RunDirectoryError, match=r"cannot be written.*run\.dir=PATH"):
            open_run(path, CONFIG, resume=False)


HOLDER = """
import os, sys, time
from pathlib import Path
from oxrl.runs.directory import Allowed, open_run
run = open_run(Path(sys.argv[1]), "run: {name: x}", resume=True)
if "fork" in sys.argv and os.fork() == 0:
    Path(sys.argv[1], "begun").write_text(str(os.getpid()))
    Path(sys.argv[1], "begun").rename(Path(sys.argv[1], "worker"))
    time.sleep(60)
Path(sys.argv[1], "ready").write_text("")
time.sleep(60)
"""


def hold(path: Path, *options: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), *options])
    deadline = time.monotonic() + 60
    while not (path / "ready").exists() or ("fork" in options and not (path / "worker").exists()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


def test_two_processes_cannot_write_one_run_and_a_kill_frees_it(tmp_path: Path) -> None:
    with hold(tmp_path) as process:
        with pytest.raises(RunDirectoryError, match=f"in use by process {process.pid} on "):
            open_run(tmp_path, "run: {name: x}", resume=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
    open_run(tmp_path, "run: {name: x}", resume=True).close()


def test_a_worker_that_outlives_its_killed_run_does_not_keep_it_locked(tmp_path: Path) -> None:
    with hold(tmp_path, "fork") as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    worker = int((tmp_path / "worker").read_text())
    try:
        os.kill(worker, 0)
        open_run(tmp_path, "run: {name: x}", resume=True).close()
    finally:
        os.kill(worker, signal.SIGKILL)


def open_and_report(
    path: Path, queue: multiprocessing.Queue[str], together: threading.Barrier
) -> None:
    together.wait(60)
    try:
        run = open_run(path, CONFIG, resume=True)
    except RunDirectoryError:
        queue.put("refused")
        together.wait(60)
    else:
        queue.put("opened")
        together.wait(60)
        run.close()


def test_of_several_processes_that_start_at_once_one_wins(tmp_path: Path) -> None:
    queue, together = WARM.Queue(), WARM.Barrier(3)
    processes = [forked(open_and_report, tmp_path, queue, together) for _ in range(3)]
    for process in processes:
        process.start()
    answers = sorted(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert answers == ["opened", "refused", "refused"]


def refused_elsewhere(path: Path) -> bool:
    """Whether another process is refused there."""
    queue, alone = WARM.Queue(), WARM.Barrier(1)
    process = forked(open_and_report, path, queue, alone)
    process.start()
    answer = queue.get(timeout=60)
    process.join()
    return answer == "refused"


def in_a_fork(does: Callable[[], bool]) -> bool:
    """Whether something is true in a process that is forked from this one."""
    child = os.fork()
    if child == 0:
        os._exit(0 if does() else 1)
    return os.waitpid(child, 0)[1] == 0


def refused(path: Path) -> bool:
    try:
        open_run(path, CONFIG, resume=True).close()
    except RunDirectoryError as error:
        return "is in use by" in str(error)
    return False


def test_one_process_owns_a_directory_once_and_only_the_owner_lets_go(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG, resume=True) as run:
        with pytest.raises(RunDirectoryError, match=f"is in use by process {os.getpid()} on "):
            open_run(tmp_path, CONFIG, resume=True)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(refused, tmp_path).result()
        assert in_a_fork(lambda: refused(tmp_path))
        # What reads every file of the directory, such as a copy of it, closes the lock's too.
        (tmp_path / ".lock").read_bytes()
        assert in_a_fork(lambda: run.close() is None)
        assert refused_elsewhere(tmp_path)
    assert len((tmp_path / "starts.jsonl").read_text().splitlines()) == 1
    assert not refused_elsewhere(tmp_path)


def test_a_start_that_was_overtaken_finds_the_run_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one starts and ends between the first look at the directory and the lock."""
    path = tmp_path / "run"
    lock = directory.lock_file

    def overtaken(place: Path, how: int) -> IO[bytes]:
        monkeypatch.setattr(directory, "lock_file", lock)
        start(path)
        return lock(place, how)

    monkeypatch.setattr(directory, "lock_file", overtaken)
    with pytest.raises(RunDirectoryError, match="is not empty"):
        open_run(path, CONFIG, resume=False)
    assert len((path / "starts.jsonl").read_text().splitlines()) == 1
    assert not refused_elsewhere(path)


def test_a_lock_on_a_file_that_was_removed_owns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner removed it, and let go, after another one had opened it."""
    lock = directory.lock_file
    taken: list[IO[bytes]] = []

    def removed(place: Path, how: int) -> IO[bytes]:
        taken.append(lock(place, how))
        if len(taken) == 1:
            place.unlink()
        return taken[-1]

    monkeypatch.setattr(directory, "lock_file", removed)
    with open_run(tmp_path, CONFIG, resume=False):
        assert [file.closed for file in taken] == [True, False]
        assert refused_elsewhere(tmp_path)


def test_what_is_written_before_a_run_is_opened_is_owned_already(tmp_path: Path) -> None:
    path = tmp_path / "a" / "run"
    with directory.owning(path, "again"):
        assert refused_elsewhere(path)
        for _ in range(2):  # a run begins again where a rank was lost
            with open_run(path, CONFIG, resume=True):
                assert refused(path)
                assert refused_elsewhere(path)
    assert not refused_elsewhere(path)
    with pytest.raises(KeyError), directory.owning(tmp_path / "b" / "run", "again"):
        raise KeyError
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a"]


def test_what_is_installed_between_two_runs_is_in_the_record_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    assert environment()["packages"].get("vllm") != "9.8.7"
    installed = tmp_path / "vllm-9.8.7.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.8.7\n")
    assert environment()["packages"]["vllm"] == "9.8.7"


def test_no_secret_reaches_the_environment_record(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sw0rdfish"
    monkeypatch.setenv("HF_TOKEN", secret)
    arguments = [
        f"reward.api_key={secret}",
        f"--hub-token={secret}",
        "rollout.max_tokens=512",
        f"db.password={secret}",
    ]
    monkeypatch.setattr(sys, "argv", ["main_rl.py", "--config", "a.yaml", *arguments])
    assert secret not in json.dumps(environment())
    line = command_line(["--resume"])
    assert line.startswith("python main_rl.py --config a.yaml") and line.endswith("--resume")
    assert "rollout.max_tokens=512" in line and line.count("=***") == 3


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/usr/lib/oxrl/__main__.py", "python -m oxrl"),
        ("main_rl.py", "python main_rl.py"),
        ("/usr/bin/oxrl", "oxrl"),
    ],
)
def test_a_program_is_named_as_a_user_calls_it(
    program: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "train", "config.yaml"])
    assert command_line(["--resume"]) == f"{said} train config.yaml --resume"
