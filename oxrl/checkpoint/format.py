"""Checkpoints that are whole or absent: written beside, flushed, hashed, then renamed into place.

    step_00000040/
        what the trainer wrote (HF weights, masters, moments), state.json, and manifest.json, last:
                      {"format", "step", "offsets", "files": {name: {"bytes", "sha256"}}, "sha256"
                      of all that}; without a hash of what several processes wrote, see parts.py
    .tmp-*
        a write or a removal that did not finish; never read, removed at the next start

Only safetensors, JSON and text belong here. Loading a pickle runs code, so a checkpoint that holds
one is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from shutil import rmtree

from safetensors import SafetensorError

from oxrl.checkpoint.shard_hashes import PARTS_FILE, part_problems, read_parts, whole_hash
from oxrl.errors import (
    CheckpointError,
    CheckpointWriteError,
    NoCheckpointError,
    NonFiniteError,
    RunDirectoryError,
)
from oxrl.runs.files import (
    Json,
    clear,
    fsync,
    json_object,
    make_folder,
    pretty_json,
    read_records,
)

logger = logging.getLogger(__name__)

FORMAT = "oxrl-checkpoint-1"
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz"})
NAME = re.compile(r"step_(\d{8,})")
# A lock that nobody gets, or waits for, while somebody reads there.
UNREAD = fcntl.LOCK_EX | fcntl.LOCK_NB


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `offsets` are what `Recorder.offsets()` said when it was taken."""

    path: Path
    step: int
    state: Json
    offsets: dict[str, int]


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint directory, healthy or not, oldest first."""
    found = [(NAME.fullmatch(path.name), path) for path in root.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint, or what a training engine wrote, healthy or not."""
    if (folder / "trainer_state.json").is_file():
        return True
    return (folder / "manifest.json").is_file() and (folder / "state.json").is_file()


class CheckpointWriter:
    """One checkpoint, `root/step_<8 digits>`, from its first file until it has its name.

    Args:
        root: the run's `checkpoints` directory; made if missing, inside a directory that exists.
        step: optimizer steps applied. A checkpoint of this step that is there already was found
            damaged: it goes.
        state: the recipe's own state, JSON values only.
        offsets: `Recorder.offsets()`, taken after everything up to `step` was recorded.
        keep: newest checkpoints to keep, this one included; at least 1. Those of later steps, left
            by a run that went back to an earlier one, are removed too.

    Raises:
        CheckpointWriteError: the disk refused (full, quota, gone). What was written is removed and
            every older checkpoint is as it was: the run may go on and try again later.
        CheckpointError: a symlink or a pickle file was written.
        NonFiniteError: what was called raised it; says of which step, and what is left. Older
            checkpoints are as they were.
    """

    def __init__(
        self,
        root: Path,
        step: int,
        *,
        state: Mapping[str, object],
        offsets: Mapping[str, int],
        keep: int,
    ) -> None:
        self._root = root
        self._step = step
        # As it is now: training may go on before this is written.
        self._state = pretty_json(dict(state))
        self._offsets = dict(offsets)
        self._keep = keep
        self._final = root / f"step_{step:08d}"
        self._temporary = root / f".tmp-{self._final.name}"

    def fill(self, write: Callable[[Path], None]) -> None:
        """Call `write` with an empty directory, where it begins to write the engine's files."""
        with self._removed_if_refused():
            # Not its parents: a run directory that vanished is an error, not a new one.
            make_folder(self._root)
            clear(self._temporary)
            self._temporary.mkdir()
            write(self._temporary)

    def complete(self, finish: Callable[[], None] | None = None) -> Path:
        """Call `finish`, which returns once every file is there; give the checkpoint its name."""
        with self._removed_if_refused():
            if finish is not None:
                finish()
            (self._temporary / "state.json").write_text(self._state, encoding="utf-8")
            _seal(self._temporary, self._step, self._offsets)
            _remove(self._final)
            os.rename(self._temporary, self._final)
            fsync(self._root)
        remove_old(self._root, self._step, self._keep)
        return self._final

    def drop(self) -> None:
        """Remove what was written; it never was a checkpoint."""
        rmtree(self._temporary, ignore_errors=True)

    @contextmanager
    def _removed_if_refused(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.drop()
            # safetensors reports a full disk as its own error, not as an OSError.
            if isinstance(error, OSError | SafetensorError | RunDirectoryError):
                raise _not_written(self._final, error) from error
            if isinstance(error, NonFiniteError):
                what = f"checkpoint of step {self._step}"
                raise _not_finite(self._root, what, error) from error
            raise


def save_best(run: Path, step: int, write: Callable[[Path], None]) -> None:
    """Write weights to `run/best`, which appears whole or not at all.

    Args:
        step: optimizer steps applied; noted in its manifest.

    Raises:
        CheckpointWriteError: the disk refused; `best` is as it was.
        NonFiniteError: `write` raised it; says what is left. `best` is as it was.
    """
    partial = run / ".best.partial"
    best = run / "best"
    try:
        clear(partial)
        partial.mkdir()
        write(partial)
        _seal(partial, step, {})
        # Not before the next one is written: there should always be one.
        clear(best)
        partial.rename(best)
    except BaseException as error:
        rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointWriteError(
                f"the weights of step {step}, the best so far, could not be written to {best}: "
                f"{error}. Free space on that disk and go on with --resume: it evaluates these "
                "weights again"
            ) from error
        if isinstance(error, NonFiniteError):
            raise _not_finite(run / "checkpoints", "copy in best/", error) from error
        raise


def why_not_best(run: Path, step: int) -> str:
    """Why `run/best` is not the best of the steps up to `step`; empty where it is, or may be."""
    best = run / "best"
    if not best.is_dir() or best.is_symlink():
        return "it is gone"
    inside = _contents(best)
    manifest = _read_manifest(best / "manifest.json")
    if manifest is None:
        return "its manifest.json is missing or damaged"
    if manifest["step"] > step:
        return f"it is of step {manifest['step']}, after the checkpoint that is gone back to"
    problems = _changed_files(inside, manifest["files"]) or every_part(best)
    return problems[0] if problems else ""


def _not_finite(root: Path, what: str, error: NonFiniteError) -> NonFiniteError:
    """The same error, with where the run stands and how to go on."""
    older = list_checkpoints(root)
    if not older:
        return NonFiniteError(
            f"no {what} was written, because the weights are not finite ({error}). Nothing has "
            "been trained: look at the files that model.name stands for"
        )
    since = first_step_not_finite(root.parent / "metrics.jsonl")
    at = "" if since is None else f"; update/param_norm says so since step {since}"
    return NonFiniteError(
        f"no {what} was written, because the weights are not finite ({error}{at}). The newest good "
        f"one is {older[-1][1]}: --resume goes on from there, after a change of what led here, for "
        "one a lower train.lr with --accept-changes train.lr"
    )


def first_step_not_finite(metrics: Path) -> int | None:
    """The first step in metrics.jsonl after which a trained model's norm was no number."""
    for record in read_records(metrics):
        norms = [record.get(name, 0.0) for name in ("update/param_norm", "value/param_norm")]
        if not all(isfinite(float(norm)) for norm in norms):
            return record["step"]
    return None


def _not_written(final: Path, error: Exception) -> CheckpointWriteError:
    older = list_checkpoints(final.parent)
    kept = f"{older[-1][1].name} is untouched" if older else "there is no earlier checkpoint"
    return CheckpointWriteError(
        f"checkpoint {final} could not be written: {error}. Nothing of it was kept; {kept}. "
        "Free space on that disk, or move the run directory to another and resume there."
    )


def remove_old(root: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` checkpoints up to `step`; the others go, but for those in use."""
    found = list_checkpoints(root)
    kept = [path for number, path in found if number <= step][-keep:]
    with suppress(BlockingIOError), locked(root.parent, UNREAD):
        for _, path in found:
            try:
                if path not in kept:
                    with suppress(BlockingIOError), locked(path, UNREAD):
                        _remove(path)
            except OSError as error:
                logger.warning("the old checkpoint %s could not be removed: %s", path, error)


@contextmanager
def locked(path: Path, how: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Inside, no run that goes on removes the checkpoint at `path`, or any of the run there.

    The kernel lets go of it with the process, however that ends; nothing is written.

    Args:
        path: a checkpoint, or a run directory.
        how: as of `fcntl.flock`; by default for reading, beside others who read.

    Raises:
        BlockingIOError: another process has it, and `how` says not to wait.
        FileNotFoundError: it is not there.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise
        except OSError:
            pass  # a disk without locks: nobody has one there
        yield
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a checkpoint, or what stands in its place; nothing where there is nothing."""
    if not os.path.lexists(path):
        return
    # Renamed first: a removal cut short must not look like a damaged checkpoint.
    doomed = path.with_name(f".tmp-removed-{path.name}")
    clear(doomed)
    os.rename(path, doomed)
    clear(doomed)


def remove_leftovers(root: Path) -> None:
    """Clear what a killed process left half done; only the holder of the run's lock may call it."""
    for path in root.glob(".tmp-*"):
        clear(path)


def _seal(directory: Path, step: int, offsets: Mapping[str, int]) -> None:
    """Flush every file, then write the manifest that makes the directory a checkpoint."""
    files = _hashed_by_writers(directory)
    for name, path in _contents(directory).items():
        problem = _unsafe(path)
        if problem:
            raise CheckpointError(
                f"the checkpoint of step {step} would hold {name}, {problem}; write safetensors"
            )
        if path.is_file() and name not in files:
            fsync(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    files = dict(sorted(files.items()))
    body = {
        "format": FORMAT,
        "step": step,
        "offsets": dict(offsets),
        "files": files,
    }
    manifest = directory / "manifest.json"
    manifest.write_text(pretty_json(body | {"sha256": _digest(body)}), encoding="utf-8")
    folders = [path for path in directory.rglob("*") if path.is_dir()]
    for path in [manifest, directory, *folders]:
        fsync(path)


def _hashed_by_writers(directory: Path) -> dict[str, Json]:
    """Entries of files that were hashed as they were written, by one process or by several."""
    found: dict[str, Json] = {}
    for noted in directory.rglob(PARTS_FILE):
        folder = noted.parent
        several = False
        for file, parts in read_parts(folder).items():
            path = folder / file
            size = path.stat().st_size
            digest = whole_hash(parts, size)
            name = path.relative_to(directory).as_posix()
            found[name] = {"bytes": size} if digest is None else {"bytes": size, "sha256": digest}
            several |= digest is None
        if not several:
            noted.unlink()
    return found


# Looks at what several processes wrote in a checkpoint; a line per problem.
PartsLook = Callable[[Path], list[str]]


def every_part(path: Path) -> list[str]:
    """What is wrong with the parts of files in the checkpoint at `path`, all looked at here."""
    found: list[str] = []
    for noted in path.rglob(PARTS_FILE):
        found += part_problems(noted.parent)
    return found


def verify_checkpoint(path: Path, look_at_parts: PartsLook = every_part) -> list[str]:
    """What is wrong with the checkpoint at `path`, one line per problem, empty if it is intact."""
    if path.is_symlink() or not path.is_dir():
        return [f"{path.name} is not a directory"]
    # Nothing is opened that was not found inside: a name in the manifest may lead elsewhere, and so
    # may a link.
    inside = _contents(path)
    reasons = {name: _unsafe(file) for name, file in inside.items()}
    problems = [f"{name} is there, {reason}" for name, reason in reasons.items() if reason]
    if problems:
        return problems
    if "manifest.json" not in inside:
        why = "the write never finished, or this is not an oxRL checkpoint"
        return [f"manifest.json is missing: {why}"]
    manifest = _read_manifest(inside["manifest.json"])
    if manifest is None:
        return ["manifest.json is damaged: it does not match its own sha256"]
    if manifest["format"] != FORMAT:
        return [f"manifest.json is of format {manifest['format']!r}, this oxRL reads {FORMAT!r}"]
    step = manifest["step"]
    if path.name != f"step_{step:08d}":
        problems.append(f"manifest.json says step {step}, the directory is named {path.name}")
    problems += _changed_files(inside, {"state.json": {}, **manifest["files"]})
    return problems or look_at_parts(path)


def _changed_files(inside: Mapping[str, Path], expected: Mapping[str, Json]) -> list[str]:
    """What became of the files that a manifest lists."""
    problems: list[str] = []
    for name, entry in expected.items():
        problem = _difference(inside.get(name), entry)
        if problem:
            problems.append(f"{name} {problem}")
    return problems


def _read_manifest(path: Path) -> Json | None:
    """The manifest without its own hash; None if that hash is of something else."""
    manifest = json_object(path.read_bytes()) if path.is_file() else None
    if manifest is None or not manifest.keys() >= {"format", "step", "offsets", "files", "sha256"}:
        return None
    body = {key: manifest[key] for key in ("format", "step", "offsets", "files")}
    kinds = [isinstance(body["step"], int), isinstance(body["offsets"], dict)]
    kinds.append(isinstance(body["files"], dict))
    if not all(kinds) or not all(isinstance(entry, dict) for entry in body["files"].values()):
        return None
    return body if manifest["sha256"] == _digest(body) else None


def _difference(file: Path | None, entry: Json) -> str | None:
    """What became of a file since the manifest noted `entry` of it."""
    if file is None or not entry or not file.is_file():
        return "is missing"
    size = file.stat().st_size
    if size != entry.get("bytes"):
        noted = entry.get("bytes")
        return f"is {size} bytes, the manifest says {noted}: it was cut or overwritten"
    if "sha256" in entry and _sha256(file) != entry.get("sha256"):
        return "has the right size but other contents than were written (sha256 differs)"
    return None


def latest_checkpoint(
    root: Path, *, until: float = inf, look_at_parts: PartsLook = every_part
) -> Checkpoint | None:
    """The newest intact checkpoint; a warning says what is wrong with newer ones.

    Args:
        until: most optimizer steps that it may have.
        look_at_parts: of files that several processes wrote; other processes may help.

    Raises:
        NoCheckpointError: there are checkpoints and not one is usable; lists the problems of each.
    """
    damaged: list[str] = []
    for step, path in reversed(list_checkpoints(root)):
        if step > until:
            continue
        problems = verify_checkpoint(path, look_at_parts)
        if not problems:
            if damaged:
                text = "using %s: newer checkpoints are damaged and skipped:\n%s"
                logger.warning(text, path, "\n".join(damaged))
            manifest = json.loads((path / "manifest.json").read_bytes())
            state = json.loads((path / "state.json").read_bytes())
            return Checkpoint(path, step, state, manifest["offsets"])
        damaged += [f"  {path.name}: {problem}" for problem in problems]
    if damaged:
        advice = "Restore one from a copy, or start the run again in another directory"
        lines = [f"no checkpoint under {root} is usable:", *damaged, f"{advice} (run.dir=...)."]
        raise NoCheckpointError("\n".join(lines))
    return None


def _contents(directory: Path) -> dict[str, Path]:
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*"))}


def _unsafe(path: Path) -> str | None:
    """Why a path inside a checkpoint must not be there."""
    if path.is_symlink():
        return "a symbolic link"
    if path.suffix.lower() in PICKLES:
        return "a file of a kind that can run code when it is loaded"
    return None if path.is_file() or path.is_dir() else "neither a file nor a directory"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(body: Json) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
