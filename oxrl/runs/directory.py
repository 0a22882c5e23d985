"""The run directory: who owns it, what is in it, whether a run starts, goes on or is done.

config.yaml         the resolved config; a run starts to exist when this file does
environment.json    of the first start
data.json           the sha256, or the hub's commit, of every data file
inputs.json         the same of models, rewards, templates and losses
code.json           the files of oxRL and the versions of libraries that the numbers come from
choices.json        what fields that say auto were taken for, and why; see pins.py
starts.jsonl        one line per start: when, by which process, what changed since the first, and
                    which of these changes were accepted by name
metrics.jsonl       samples.jsonl  rollouts/  checkpoints/      see recorder.py and checkpoints.py
schedule.jsonl      with rollout.schedule: free; see rollouts/schedule.py
result.json         written last: the run is finished
git.diff            how oxRL's own files differed from their commit at the first start
run.log  .lock      and of every tracker NAME.json, NAME.log and a folder or file that is its own
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from oxrl.errors import CheckpointWriteError, OxrlError, RunDirectoryError, did_you_mean
from oxrl.flat_config import PARTS, Changes, differences, flatten_config, named_in, written_config
from oxrl.runs.checkpoints import list_checkpoints, remove_leftovers
from oxrl.runs.environment import command_line, environment, git_diff
from oxrl.runs.files import (
    Json,
    Record,
    append_line,
    clear,
    encode_line,
    json_safe,
    lock_file,
    make_folder,
    pretty_json,
    require_kind,
    write_atomically,
)
from oxrl.runs.pins import (
    CHOICES_FILE,
    CODE_FILE,
    DATA_FILE,
    INPUTS_FILE,
    InputChange,
    write_noted,
)
from oxrl.tables.watch import TRACKERS

logger = logging.getLogger(__name__)

# Of errors by which the user's input is refused, see errors.py.
BAD_INPUT = 2
ROLLOUTS = "rollouts"
# Every sample of a rollout step, as it was drawn and scored; the step is in the name.
WHOLE_SAMPLES = re.compile(r"step_(\d{8,})\.samples\.jsonl")
# Rows that Python gave, written before the run begins: it reads them there.
GIVEN = "given"
# What a start writes before it has done anything; the records are empty then.
FILES_OF_A_START = {
    "config.yaml",
    "environment.json",
    DATA_FILE,
    INPUTS_FILE,
    CHOICES_FILE,
    CODE_FILE,
    "starts.jsonl",
    "metrics.jsonl",
    "samples.jsonl",
    "run.log",
    "git.diff",
    "mlflow.db",
    *(f"{name}.json" for name in TRACKERS),
    *(f"{name}.log" for name in TRACKERS),
}
FOLDERS_OF_A_START = {
    "rollouts",
    "checkpoints",
    "artifacts",
    "tensorboard",
    "wandb",
    "trackio",
    GIVEN,
}

# What oxRL writes in a run directory, and must find as it left it: nothing is written through a
# link, nor into what something else put there.
FOLDERS = FOLDERS_OF_A_START | {"dumps", "best", "reference"}
LOCK = ".lock"
LOCKS = {LOCK, *(f".{name}.json.lock" for name in TRACKERS)}
FILES = FILES_OF_A_START | LOCKS | {"result.json", "kept.jsonl"}

FIXED = "fixed"
ROUNDING = (
    "; floating-point sums change order, so numbers equal those of an uninterrupted run only up to "
    "rounding"
)
# What a start may leave that was killed before it wrote config.yaml.
BEFORE_CONFIG = {
    "environment.json",
    "starts.jsonl",
    "rollouts",
    "checkpoints",
    DATA_FILE,
    INPUTS_FILE,
    CODE_FILE,
    GIVEN,
    "git.diff",
}


@dataclass(frozen=True)
class Allowed:
    """The differences from config.yaml that a run may be resumed with.

    rules: what becomes of the run where a field differs, as the line of the field says (see
    `Resume` in config/field.py): by dotted path, or by section; what is not there is fixed.
    accepted: fields that may differ all the same, in value or in what they stand for.
    """

    rules: Mapping[str, str]
    accepted: frozenset[str] = frozenset()

    def rule(self, path: str) -> str:
        """Look up what becomes of the run by the change of a field."""
        section, _, _ = path.partition(".")
        field = named_in(path)
        if field:
            path = f"{'reward' if field == PARTS else field}.{path.rpartition('.')[2]}"
        return self.rules.get(path) or self.rules.get(section, FIXED)


NOTHING = Allowed({})


@dataclass
class Review:
    """A comparison of what a run reads with what it read when it started.

    changes: of inputs. new: names of inputs that nothing was noted of. noted: file of the run
    directory -> what to note there.
    """

    changes: list[InputChange] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    noted: dict[str, Json] = field(default_factory=dict)


# Looks at the inputs of the run in a directory, and writes nothing.
Reviewer = Callable[[Path], Review]
# Tells whether the run in a directory has so many steps and nothing is left to do, and why
# result.json is not believed where it says so.
DoneCheck = Callable[[Path, int], tuple[bool, str]]


class RunDirectory(AbstractContextManager["RunDirectory"]):
    """An opened run: `resuming` if it was started before, `finished` if nothing is left to do.

    `noted` is what its inputs are, `remarks` what to tell the user about this start, `changes`
    field -> (value in config.yaml, value now). Close it to let go of it.
    """

    def __init__(self, path: Path, lock: IO[bytes], start: Start) -> None:
        self.path = path
        self.resuming = start.resuming
        self.finished = start.finished
        self.noted = start.review.noted
        self.remarks = list(start.remarks())
        self.changes = start.changes
        self._lock = lock
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.rollouts = path / "rollouts"
        self.checkpoints = path / "checkpoints"

    def log_remarks(self) -> None:
        """Warn of what differs from the first start."""
        for remark in self.remarks:
            logger.warning("%s", remark)

    def finish(self, step: int, result: Record) -> None:
        """Say in result.json that the run is done.

        Args:
            step: the optimizer step that was reached.
            result: the final evaluation and the like.

        Raises:
            CheckpointWriteError: the disk refused.
        """
        path = self.path / "result.json"
        try:
            write_atomically(path, pretty_json(json_safe({"step": step, **result})))
        except OSError as error:
            raise CheckpointWriteError(
                f"{path} cannot be written: {error}. All {step} steps are done and saved; free "
                "space on that disk, and --resume writes it"
            ) from error

    def close(self) -> None:
        """Let go of the directory; closing twice is harmless."""
        self._lock.close()

    def __exit__(self, *exception: object) -> None:
        error = exception[1]
        if isinstance(error, OxrlError) and error.exit_code == BAD_INPUT:
            self._forget_start()
        self.close()

    def _forget_start(self) -> None:
        """Leave the directory empty again, where this start did nothing but write that it began.

        The input that was refused will be mended: then this is not another run, but the first.
        """
        entries = _entries(self.path)
        worked = any(self.checkpoints.iterdir()) or entries - FILES_OF_A_START - FOLDERS_OF_A_START
        records = (self.metrics, self.samples)
        recorded = any(file.exists() and file.stat().st_size for file in records)
        if self.resuming or worked or recorded or self._lock.closed:
            return
        for name in entries:
            clear(self.path / name)


def open_run(
    directory: Path,
    config_yaml: str,
    *,
    resume: bool,
    allowed: Allowed = NOTHING,
    review: Reviewer | None = None,
    noted: Record | None = None,
    is_finished: DoneCheck = lambda run, steps: (False, ""),
) -> RunDirectory:
    """Create the run directory, or open it again, and own it until it is closed.

    Without `resume` the directory must be missing or empty. With it: missing or empty starts; a
    finished run comes back with `.finished`; otherwise `.resuming`, after what a killed process
    left half written is removed. A config that differs from config.yaml in anything that is fixed
    is refused, and so are inputs that changed, unless they are accepted; differences that remain
    are written to starts.jsonl, and config.yaml then holds the new values. Nothing is written where
    anything is refused.

    A directory that is made is readable by its owner alone: samples hold what the data say.

    Args:
        allowed: fields of the config that may differ from those of the run.
        review: looks at the inputs of the run; None: it has none.
        noted: what environment.json says of the machine beside what it says of every run.
        is_finished: asked of a run that was started before.

    Raises:
        RunDirectoryError: not writable; not empty and no `resume`; not a run directory; another
            process holds it; config or inputs are another run's; something accepted did not
            change. Always says what to do.
    """
    directory = Path(directory).absolute()
    again = "" if resume else command_line(["--resume"])
    with _writing(directory):
        handed = _handed.get()
        lock = _own(directory, again)
        try:
            start = _look(directory, config_yaml, allowed, review, is_finished)
            _write_start(directory, config_yaml, start, dict(noted or {}) | environment())
        except BaseException:
            if lock is not handed:
                lock.close()
            raise
    _handed.set(None)
    return RunDirectory(directory, lock, start)


# Of a run that is about to be opened: its directory is owned already.
_handed: ContextVar[IO[bytes] | None] = ContextVar("handed", default=None)


@contextmanager
def owning(directory: Path, again: str) -> Iterator[IO[bytes]]:
    """Own a run directory before its run is opened in here, for what is written there first.

    A run that is opened takes the lock over. Without one, what was made of the directory goes.

    Args:
        again: as of `refuse_what_is_there`; empty: a run may be there.

    Raises:
        RunDirectoryError: as of `open_run`.
    """
    directory = directory.absolute()
    made = [place for place in (directory, *directory.parents) if not place.exists()]
    with _writing(directory):
        lock = _own(directory, again)
    before = _handed.set(lock)
    try:
        yield lock
    finally:
        _handed.reset(before)
        with suppress(OSError):  # something else is there by now
            if made and not lock.closed and not _entries(directory):
                (directory / LOCK).unlink()
                for place in made:
                    place.rmdir()
        lock.close()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"the run directory {directory} cannot be written: {error}"
        raise RunDirectoryError(f"{problem}. Choose another place with run.dir=PATH.") from error


def refuse_what_is_there(directory: Path, again: str) -> None:
    """Refuse to start where something is, unless that is only what Python gave this start.

    Args:
        again: how to go on with the run there, for the error.

    Raises:
        RunDirectoryError: something is there.
    """
    if is_begun(directory):
        raise RunDirectoryError(
            f"{directory} is not empty. To continue the run in it:\n  {again}\nTo start a new "
            "one, choose another directory: add run.dir=PATH (or another run.name)."
        )


def is_begun(directory: Path) -> bool:
    """True if something is in a directory that a start did not find there, or was given."""
    return directory.is_dir() and bool(_entries(directory) - {GIVEN})


def _look(
    directory: Path,
    config_yaml: str,
    allowed: Allowed,
    review: Reviewer | None,
    is_finished: DoneCheck,
) -> Start:
    """Find out what starts here: nothing is written before it is known to be allowed."""
    entries = _entries(directory)
    started = "config.yaml" in entries
    foreign = sorted(entries - BEFORE_CONFIG)
    if foreign and not started:
        lost = "starts.jsonl" in entries and bool(list_checkpoints(directory / "checkpoints"))
        what = "the run in it lost that file: restore it" if lost else "it is not an oxRL run"
        raise RunDirectoryError(
            f"{directory} holds {foreign[0]!r} and no config.yaml: {what}. Choose another run.dir."
        )
    new: Json = {}
    changes: Changes = {}
    finished, doubt = False, ""
    if started:
        new = flatten_config(config_yaml)
        changes = _config_changes(directory, new)
        finished, doubt = is_finished(directory, new.get("run.steps") or 0)
    start = Start(
        directory=directory,
        resuming=started,
        finished=finished,
        doubt=doubt,
        changes=changes,
        schedule=new.get("train.lr_schedule", "constant"),
        allowed=allowed,
        # A finished run reads nothing any more.
        review=Review() if review is None or finished else review(directory),
    )
    start.refuse()
    return start


def _write_start(directory: Path, config_yaml: str, start: Start, here: Json) -> None:
    """Note a start that is allowed, with what it runs on; config.yaml last."""
    make_folder(directory / "checkpoints")
    make_folder(directory / "rollouts")
    if start.resuming:
        remove_leftovers(directory / "checkpoints")
    else:
        write_atomically(directory / "environment.json", pretty_json(here))
        git = here["git"]
        if git is not None and git["dirty"]:
            changed = git_diff(Path(__file__).resolve().parent)
            write_atomically(directory / "git.diff", changed)
    for name, pins in start.review.noted.items():
        write_noted(directory, name, pins)
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pid": os.getpid(),
        "resuming": start.resuming,
        "config_changes": start.changes,
        "input_changes": start.input_changes(),
        "accepted": sorted(start.allowed.accepted),
        "environment": here,
    }
    append_line(directory / "starts.jsonl", encode_line(line))
    if not start.resuming or start.changes:
        write_atomically(directory / "config.yaml", config_yaml)


def require_own_kinds(directory: Path) -> None:
    """Refuse a run directory in which something stands where oxRL keeps a file or a folder.

    Raises:
        RunDirectoryError: for one a link; says what to do.
    """
    for name in sorted(FILES | FOLDERS):
        require_kind(directory / name, folder=name in FOLDERS)


def _entries(directory: Path) -> set[str]:
    """List the names in `directory`, apart from the lock and from files that never got theirs."""
    names = {entry.name for entry in directory.iterdir()}
    return {name for name in names if name != LOCK and not name.startswith(".tmp-")}


def _own(directory: Path, again: str) -> IO[bytes]:
    """Make a directory and own it, until what is returned is closed or the process ends.

    Args:
        again: as of `owning`.

    Raises:
        RunDirectoryError: another run has it, and is named; or something is there.
    """
    path = directory / LOCK
    handed = _handed.get()
    if handed is not None and handed.name == str(path) and not handed.closed:
        return handed
    if again:
        refuse_what_is_there(directory, again)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own_kinds(directory)
    try:
        lock = lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = path.read_bytes().decode(errors="replace") or "another process"
        raise RunDirectoryError(
            f"{directory} is in use by {holder:.200}: two runs would overwrite each other's "
            "records. Wait for it, stop it, or choose another run.dir."
        ) from error
    # What another start did since the first look: a run, or a file that it removed again.
    removed = os.fstat(lock.fileno()).st_nlink == 0
    if removed or (again and is_begun(directory)):
        lock.close()
        return _own(directory, again)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
    return lock


def _config_changes(directory: Path, new: Json) -> Changes:
    """Return (value in config.yaml, value now) of every field that differs.

    Raises:
        RunDirectoryError: config.yaml is not what was written there.
    """
    file = directory / "config.yaml"
    try:
        old = written_config(file.read_bytes())
        if "run.steps" in new and not isinstance(old.get("run.steps"), int):
            raise ValueError("it does not say how many run.steps")
    except ValueError as error:
        raise RunDirectoryError(
            f"{file} is not the YAML written there: {error}. Restore it; config.yaml is what "
            "`oxrl config show` prints for the config that the run was started with"
        ) from error
    return differences(old, new)


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run, and how it differs from the first.

    changes: field -> (value in config.yaml, value now). schedule: of the learning rate, now.
    allowed: what may differ. review: of the inputs. doubt: why result.json is not believed; empty
    where it is, or where there is none.
    """

    directory: Path
    resuming: bool
    finished: bool
    doubt: str
    changes: Changes
    schedule: str
    allowed: Allowed
    review: Review

    def input_changes(self) -> dict[str, list[tuple[str, str]]]:
        """Field -> (then, now) of everything that it stands for and that changed."""
        found: dict[str, list[tuple[str, str]]] = {}
        for change in self.review.changes:
            found.setdefault(change.name, []).append((change.then, change.now))
        return found

    def refuse(self) -> None:
        """Raise unless everything that changed may change, or was accepted.

        Raises:
            RunDirectoryError: lists what may not, and what was accepted in vain.
        """
        config = [path for path in self.changes if not self._allowed(path)]
        inputs = [
            change for change in self.review.changes if change.name not in self.allowed.accepted
        ]
        lines: list[str] = []
        if config:
            lines.append(f"the config is not the one that {self.directory} was started with:")
        for path in config:
            before, now = self.changes[path]
            lines.append(f"  {path}: {before!r} in config.yaml, {now!r} now")
        if inputs:
            lines.append(f"what the run in {self.directory} reads has changed since it started:")
        lines += [f"  {change.name}: {change.then} then, {change.now} now" for change in inputs]
        if not lines:
            self._refuse_vain()
            return
        names = dict.fromkeys([*config, *(change.name for change in inputs)])
        again = command_line(["--resume", *(f"--accept-changes={name}" for name in names)])
        free = {path for path, rule in self.allowed.rules.items() if rule != FIXED}
        free.discard("run.steps")
        may_change = ", ".join(sorted(path for path in free if "." in path))
        raise RunDirectoryError(
            "\n".join(lines)
            + "\nResuming would mix two runs. Set these back to resume, or start a new run: add "
            "run.dir=PATH and leave --resume out. If the change is meant, go on with it:\n"
            f"  {again}\n(On resume run.steps may grow, and these may change: {may_change}.)"
        )

    def _allowed(self, path: str) -> bool:
        if path in self.allowed.accepted:
            return True
        if path == "run.steps":
            before, now = self.changes[path]
            return now >= before
        return self.allowed.rule(path) != FIXED

    def _refuse_vain(self) -> None:
        """Refuse to accept a change that is none: another may have been meant."""
        changed = {*self.changes, *(change.name for change in self.review.changes)}
        vain = sorted(self.allowed.accepted - changed)
        if vain and not self.finished:
            listed = ", ".join(sorted(changed)) or "nothing"
            hint = did_you_mean(vain[0], changed)
            raise RunDirectoryError(
                f"--accept-changes {vain[0]}: it is as it was when the run in {self.directory} "
                f"started; {listed} changed{hint}. Leave it out"
            )

    def remarks(self) -> Iterator[str]:
        """Yield what the user should know of the differences of this start."""
        if self.doubt:
            path = self.directory / "result.json"
            yield f"{path} is ignored: {self.doubt}. It is written anew at the end"
        for path, (before, now) in self.changes.items():
            rule = self.allowed.rule(path)
            # A settled auto goes on with what it had.
            reorders = rule == "reorders" or (rule == "settled" and now != "auto")
            yield f"{self._how(path)} {path}: {before!r} -> {now!r}{ROUNDING if reorders else ''}"
        if "run.steps" in self.changes and self.schedule != "constant":
            yield (
                f"run.steps grew and train.lr_schedule is {self.schedule}: the learning rate jumps "
                "to where the longer schedule would be"
            )
        for change in self.review.changes:
            yield f"{self._how(change.name)} {change.name}: {change.then} -> {change.now}"
        unnoted = dict.fromkeys(name for name in self.review.new if name not in self.changes)
        if self.resuming and unnoted:
            yield (
                "nothing in the run directory says what these were when the run began: "
                f"{', '.join(unnoted)}; they are taken, and noted, as they are now"
            )

    def _how(self, name: str) -> str:
        accepted = " (accepted by --accept-changes)" if name in self.allowed.accepted else ""
        return f"resuming{accepted} with"
