"""Checkpoints and best weights, written: whole or not at all, see format.py."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from shutil import rmtree

from safetensors import SafetensorError

from oxrl.checkpoint.format import (
    FORMAT,
    PARTS_FILE,
    contents,
    manifest_hash,
    read_parts,
    unsafe,
    whole_hash,
)
from oxrl.errors import (
    CheckpointError,
    CheckpointWriteError,
    NonFiniteError,
    RunDirectoryError,
)
from oxrl.modelfiles.hub import file_hash
from oxrl.runs.checkpoints import MANIFEST_FILE, list_checkpoints, locked
from oxrl.runs.files import Json, clear, fsync, make_folder, pretty_json, read_records

logger = logging.getLogger(__name__)

# A lock that nobody gets, or waits for, while somebody reads there.
UNREAD = fcntl.LOCK_EX | fcntl.LOCK_NB


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
        self._offsets = offsets
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

    def complete(self, finish: Callable[[], None]) -> None:
        """Call `finish`, which returns once every file is there; give the checkpoint its name."""
        with self._removed_if_refused():
            finish()
            (self._temporary / "state.json").write_text(self._state, encoding="utf-8")
            _seal(self._temporary, self._step, self._offsets)
            _remove(self._final)
            os.rename(self._temporary, self._final)
            fsync(self._root)
        remove_old(self._root, self._step, self._keep)

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


def _remove(path: Path) -> None:
    """Remove a checkpoint, or what stands in its place; nothing where there is nothing."""
    if not os.path.lexists(path):
        return
    # Renamed first: a removal cut short must not look like a damaged checkpoint.
    doomed = path.with_name(f".tmp-removed-{path.name}")
    clear(doomed)
    os.rename(path, doomed)
    clear(doomed)


def _seal(directory: Path, step: int, offsets: Mapping[str, int]) -> None:
    """Flush every file, then write the manifest that makes the directory a checkpoint."""
    files = _hashed_by_writers(directory)
    for name, path in contents(directory).items():
        problem = unsafe(path)
        if problem:
            raise CheckpointError(
                f"the checkpoint of step {step} would hold {name}, {problem}; write safetensors"
            )
        if path.is_file() and name not in files:
            fsync(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": file_hash(path)}
    files = dict(sorted(files.items()))
    body = {
        "format": FORMAT,
        "step": step,
        "offsets": dict(offsets),
        "files": files,
    }
    manifest = directory / MANIFEST_FILE
    manifest.write_text(pretty_json(body | {"sha256": manifest_hash(body)}), encoding="utf-8")
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
