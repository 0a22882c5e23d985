"""Checkpoints that are whole or absent: written beside, flushed, hashed, then renamed into place.

    step_00000040/
        what the trainer wrote (HF weights, masters, moments), state.json, and manifest.json, last:
                      {"format", "step", "offsets", "files": {name: {"bytes", "sha256"}}, "sha256"
                      of all that}
    .tmp-*
        a write or a removal that did not finish; never read, removed at the next start

Only safetensors, JSON and text belong here. Loading a pickle runs code, so a checkpoint that holds
one is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from oxrl.errors import CheckpointError, CheckpointWriteError
from oxrl.runs.files import fsync, pretty_json

logger = logging.getLogger(__name__)

FORMAT = "oxrl-checkpoint-1"
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz"})
NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. `offsets` are the sizes in bytes of the record files when it was
    taken.
    """

    path: Path
    step: int
    state: dict[str, Any]
    offsets: dict[str, int]


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint directory under `root`, oldest first; says nothing of their
    health.
    """
    found = [(NAME.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match)


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    state: Mapping[str, Any],
    offsets: Mapping[str, int],
    keep: int,
) -> Path:
    """Write `root/step_<8 digits>` atomically and remove old ones.

    Args:
        root: the run's `checkpoints` directory; made if missing, inside a directory that exists.
        step: optimizer steps applied. A checkpoint of this step that is there already was found
            damaged: it goes.
        write: called with an empty directory, writes the engine's files there.
        state: the recipe's own state, JSON values only.
        offsets: `Recorder.offsets()`, taken after everything up to `step` was recorded.
        keep: newest checkpoints to keep, this one included; at least 1. Those of later steps, left
            by a run that went back to an earlier one, are removed too.

    Raises:
        CheckpointWriteError: the disk refused (full, quota, gone). What was written is removed and
            every older checkpoint is as it was: the run may go on and try again later.
        CheckpointError: `write` left a symlink or a pickle file.
    """
    final = root / f"step_{step:08d}"
    temporary = root / f".tmp-{final.name}"
    try:
        root.mkdir(
            exist_ok=True
        )  # not its parents: a run directory that vanished is an error, not a new one
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        (temporary / "state.json").write_text(pretty_json(dict(state)), encoding="utf-8")
        _seal(temporary, step, offsets)
        if final.exists():
            _remove(final)
        os.rename(temporary, final)
        fsync(root)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors reports a full disk as its own error, not as an OSError.
        if isinstance(error, OSError | SafetensorError):
            older = list_checkpoints(root)
            kept = (
                f"{older[-1][1].name} is untouched" if older else "there is no earlier checkpoint"
            )
            raise CheckpointWriteError(
                f"checkpoint {final} could not be written: {error}. Nothing of it was kept; {kept}. "
                "Free space on that disk, or move the run directory to another and resume there."
            ) from error
        raise
    found = list_checkpoints(root)
    kept = [path for number, path in found if number <= step][-keep:]
    for path in [path for _, path in found if path not in kept]:
        try:
            _remove(path)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path, error)
    return final


def _remove(path: Path) -> None:
    # Renamed first: a removal cut short must not look like a damaged checkpoint.
    doomed = path.with_name(f".tmp-removed-{path.name}")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def remove_leftovers(root: Path) -> None:
    """Clear what a killed process left half done. Only the holder of the run's lock may call
    this.
    """
    for path in root.glob(".tmp-*"):
        shutil.rmtree(path)


def _seal(directory: Path, step: int, offsets: Mapping[str, int]) -> None:
    """Flush every file, then write the manifest that makes the directory a checkpoint."""
    files: dict[str, dict[str, Any]] = {}
    for name, path in _contents(directory).items():
        if problem := _unsafe(path):
            raise CheckpointError(
                f"the checkpoint of step {step} would hold {name}, {problem}; write safetensors"
            )
        if path.is_file():
            fsync(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    body = {"format": FORMAT, "step": step, "offsets": dict(offsets), "files": files}
    manifest = directory / "manifest.json"
    manifest.write_text(pretty_json(body | {"sha256": _digest(body)}), encoding="utf-8")
    for path in (manifest, directory, *(path for path in directory.rglob("*") if path.is_dir())):
        fsync(path)


def verify_checkpoint(path: Path) -> list[str]:
    """What is wrong with the checkpoint at `path`, one line per problem that names the file; empty
    if intact.
    """
    if path.is_symlink() or not path.is_dir():
        return [f"{path.name} is not a directory"]
    # Nothing is opened that was not found inside: a name in the manifest may lead elsewhere, and so
    # may a link.
    inside = _contents(path)
    if problems := [
        f"{name} is there, {problem}" for name, file in inside.items() if (problem := _unsafe(file))
    ]:
        return problems
    if "manifest.json" not in inside:
        return [
            "manifest.json is missing: the write never finished, or this is not an oxRL checkpoint"
        ]
    try:
        manifest = json.loads(inside["manifest.json"].read_bytes())
        body = {key: manifest[key] for key in ("format", "step", "offsets", "files")}
        if manifest["sha256"] != _digest(body):
            raise ValueError(path)
    except (ValueError, KeyError, TypeError):
        return ["manifest.json is damaged: it does not match its own sha256"]
    if body["format"] != FORMAT:
        return [f"manifest.json is of format {body['format']!r}, this oxRL reads {FORMAT!r}"]
    if path.name != f"step_{body['step']:08d}":
        problems.append(
            f"manifest.json says step {body['step']}, the directory is named {path.name}"
        )
    for name, entry in {"state.json": {}, **body["files"]}.items():
        if name not in inside or not entry:
            problems.append(f"{name} is missing")
        elif (size := inside[name].stat().st_size) != entry["bytes"]:
            problems.append(
                f"{name} is {size} bytes, the manifest says {entry['bytes']}: it was cut or overwritten"
            )
        elif _sha256(inside[name]) != entry["sha256"]:
            problems.append(
                f"{name} has the right size but other contents than were written (sha256 differs)"
            )
    return problems


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest checkpoint that is intact; damaged ones are skipped with a warning that names what
    is wrong.

    Raises:
        CheckpointError: there are checkpoints and not one is usable; lists the problems of each.
    """
    damaged: list[str] = []
    for step, path in reversed(list_checkpoints(root)):
        problems = verify_checkpoint(path)
        if not problems:
            if damaged:
                logger.warning(
                    "using %s: newer checkpoints are damaged and skipped:\n%s",
                    path,
                    "\n".join(damaged),
                )
            offsets = json.loads((path / "manifest.json").read_bytes())["offsets"]
            return Checkpoint(path, step, json.loads((path / "state.json").read_bytes()), offsets)
        damaged += [f"  {path.name}: {problem}" for problem in problems]
    if damaged:
        raise CheckpointError(
            f"no checkpoint under {root} is usable:\n" + "\n".join(damaged) + "\n"
            "Restore one from a copy, or start the run again in another directory (run.dir=...)."
        )
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


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
