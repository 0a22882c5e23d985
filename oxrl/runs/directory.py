"""The run directory: who owns it, what is in it, whether a run starts, goes on or is done.

config.yaml         the resolved config; a run starts to exist when this file does
environment.json    of the first start
data.json           the sha256, or the hub's commit, of every data file
starts.jsonl        one line per start: when, by which process, and what changed since the first
metrics.jsonl       samples.jsonl  rollouts/  checkpoints/      see recorder.py and checkpoint.py
result.json         written last: the run is finished
run.log  mlflow.db  mlflow.json  mlflow.log  .lock
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from oxrl.errors import RunDirectoryError
from oxrl.runs.checkpoint import is_checkpoint, list_checkpoints, remove_leftovers
from oxrl.runs.environment import command_line, environment
from oxrl.runs.files import Json, encode_line, json_safe, pretty_json, write_atomically

logger = logging.getLogger(__name__)

# What moves the last digits of floating-point sums: a run resumed with a change here is right, not
# byte-identical.
REORDER_SUMS = {
    "run.device",
    "run.threads",
    "run.training_gpus",
    "train.micro_batch_tokens",
    "train.backend",
    "model.gradient_checkpointing",
}
# What may differ from config.yaml when a run is resumed: how it is carried out and watched, not
# what it computes. `run.steps` may only grow. Everything else names another run.
MAY_CHANGE = REORDER_SUMS | {
    "run.name",
    "run.dir",
    "run.steps",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.eval_every",
    "run.record",
    "run.mlflow",
    "run.deadline_s",
    "run.ray_address",
    "run.max_restarts",
    "reward.workers",
    "reward.timeout_s",
    "reward.max_error_rate",
    "train.max_skipped_steps",
}
# Every field of these sections may change, and reorders sums.
ENGINE_SECTIONS = ("inference_engine.", "deepspeed.", "deepspeed_ref.")
ROUNDING = (
    "; sums are added in another order, so results equal those of an uninterrupted run only to "
    "rounding"
)
# What a start may leave that was killed before it wrote config.yaml.
BEFORE_CONFIG = {"environment.json", "starts.jsonl", "rollouts", "checkpoints"}


class RunDirectory(AbstractContextManager["RunDirectory"]):
    """An opened run: `resuming` if it was started before, `finished` if nothing is left to do.

    Close it to let go of it.
    """

    def __init__(self, path: Path, lock: IO[str], *, resuming: bool, finished: bool) -> None:
        self.path = path
        self.resuming = resuming
        self.finished = finished
        self._lock = lock
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"

    def finish(self, step: int, result: Mapping[str, object]) -> None:
        """Say in result.json that the run is done.

        Args:
            step: the optimizer step that was reached.
            result: the final evaluation and the like.
        """
        text = pretty_json(json_safe({"step": step, **result}))
        write_atomically(self.path / "result.json", text)

    def close(self) -> None:
        """Release the lock; closing twice is harmless."""
        self._lock.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def is_run(folder: Path) -> bool:
    """Whether a run was started in `folder`, healthy or not."""
    started = (folder / "config.yaml").is_file() and (folder / "starts.jsonl").is_file()
    saved = list_checkpoints(folder / "checkpoints")
    return started or any(is_checkpoint(path) for _, path in saved)


def open_run(directory: Path, config_yaml: str, *, resume: bool) -> RunDirectory:
    """Create the run directory, or open it again, and hold it until the process ends.

    Without `resume` the directory must be missing or empty. With it: missing or empty starts; a
    finished run comes back with `.finished`; otherwise `.resuming`, after what a killed process
    left half written is removed. A config that differs from config.yaml in anything outside
    MAY_CHANGE is refused; allowed differences are logged, written to starts.jsonl, and config.yaml
    then holds the new values.

    Raises:
        RunDirectoryError: not writable; not empty and no `resume`; not a run directory; another
            process holds it; the config is another run's. Always says what to do.
    """
    directory = Path(directory).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not resume and _entries(directory):
            again = command_line(["--resume"])
            raise RunDirectoryError(
                f"{directory} is not empty. To continue the run in it:\n  {again}\nTo start a new "
                "one, choose another directory: add run.dir=PATH (or another run.name)."
            )
        lock = _lock(directory)
        try:
            return _open_locked(directory, config_yaml, lock)
        except BaseException:
            lock.close()
            raise
    except OSError as error:
        problem = f"the run directory {directory} cannot be written: {error}"
        raise RunDirectoryError(f"{problem}. Choose another place with run.dir=PATH.") from error


def _open_locked(directory: Path, config_yaml: str, lock: IO[str]) -> RunDirectory:
    entries = _entries(directory)
    started = "config.yaml" in entries
    foreign = sorted(entries - BEFORE_CONFIG)
    if foreign and not started:
        raise RunDirectoryError(
            f"{directory} holds {foreign[0]!r} and no config.yaml: it is not an oxRL run. "
            "Choose another run.dir."
        )
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "rollouts").mkdir(exist_ok=True)
    here = environment()
    changes: Json = {}
    if started:
        remove_leftovers(directory / "checkpoints")
        changes = _allowed_changes(directory, config_yaml)
    else:
        write_atomically(directory / "environment.json", pretty_json(here))
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pid": os.getpid(),
        "resuming": started,
        "config_changes": changes,
        "environment": here,
    }
    with (directory / "starts.jsonl").open("ab") as file:
        file.write(encode_line(start))
    if not started or changes:
        write_atomically(directory / "config.yaml", config_yaml)
    result = directory / "result.json"
    finished = False
    if started and result.exists():
        steps = flatten_config(config_yaml).get("run.steps") or 0
        finished = json.loads(result.read_bytes())["step"] >= steps
    return RunDirectory(directory, lock, resuming=started, finished=finished)


def _entries(directory: Path) -> set[str]:
    """Names in `directory`, apart from the lock and from files that never got their name."""
    names = {entry.name for entry in directory.iterdir()}
    return {name for name in names if name != ".lock" and not name.startswith(".tmp-")}


def _lock(directory: Path) -> IO[str]:
    """Own the directory until the file is closed or the process dies, however it dies.

    A record lock (lockf), not flock: worker processes forked from the run would inherit an flock
    and keep holding it after the run itself was killed.

    Raises:
        RunDirectoryError: another process has it; names the process.
    """
    file = (directory / ".lock").open("a+", encoding="utf-8")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunDirectoryError(
            f"{directory} is in use by {holder}: two processes would overwrite each other's "
            "records. Wait for it, stop it, or choose another run.dir."
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


def flatten_config(config_yaml: str) -> Json:
    """Dotted path -> value of every field of a resolved config."""
    sections: Json = YAML(typ="safe").load(config_yaml) or {}
    flat: Json = {}
    for section, fields in sections.items():
        for name, value in fields.items():
            flat[f"{section}.{name}"] = value
    return flat


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], absent: str | None = None
) -> dict[str, tuple[Any, Any]]:
    """Dotted path -> (old value, new value) wherever two flat configs differ.

    Args:
        old: dotted path -> value.
        new: dotted path -> value.
        absent: stands for a field that one of them does not have.
    """

    def ordered(value: object) -> object:  # the files of data.train draw by their place among them
        return list(value.items()) if isinstance(value, Mapping) else value

    found: dict[str, tuple[Any, Any]] = {}
    for path in {**old, **new}:
        before = old.get(path, absent)
        now = new.get(path, absent)
        if ordered(before) != ordered(now):
            found[path] = (before, now)
    return found


def _allowed_changes(directory: Path, config_yaml: str) -> Json:
    """What `config_yaml` changes of the run in `directory`.

    Raises:
        RunDirectoryError: with these changes it would be another run.
    """
    file = directory / "config.yaml"
    new = flatten_config(config_yaml)
    try:
        changed = differences(flatten_config(file.read_text(encoding="utf-8")), new)
    except (YAMLError, AttributeError) as error:
        raise RunDirectoryError(f"{file} is not the YAML written there: {error}") from error
    refused: list[str] = []
    for path, (before, now) in changed.items():
        allowed = path in MAY_CHANGE or path.startswith(ENGINE_SECTIONS)
        if not allowed or (path == "run.steps" and now < before):
            refused.append(f"  {path}: {before!r} in config.yaml, {now!r} now\n")
    if refused:
        may_change = ", ".join(sorted(MAY_CHANGE - {"run.steps"}))
        raise RunDirectoryError(
            f"the config is not the one that {directory} was started with; resuming would mix two "
            f"runs:\n{''.join(refused)}Set these back to resume, or start a new run: add "
            "run.dir=PATH and leave --resume out.\n"
            f"(On resume run.steps may grow, and these may change: {may_change}.)"
        )
    for path, (before, now) in changed.items():
        reorders = path in REORDER_SUMS or path.startswith(ENGINE_SECTIONS)
        text = "resuming with %s: %r -> %r%s"
        logger.warning(text, path, before, now, ROUNDING if reorders else "")
    schedule = new.get("train.lr_schedule", "constant")
    if "run.steps" in changed and schedule != "constant":
        jump = "the learning rate jumps to where the longer schedule would be"
        logger.warning("run.steps grew and train.lr_schedule is %s: %s", schedule, jump)
    return changed
