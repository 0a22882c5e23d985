"""Checkpoints that are whole or absent: written beside, flushed, hashed, then renamed into place.

    step_00000040/    what the trainer wrote (HF weights, masters, moments), state.json, and manifest.json, last:
                      {"format", "step", "offsets", "files": {name: {"bytes", "sha256"}}, "sha256" of all that}
    .tmp-*            a write or a removal that did not finish; never read, removed at the next start
    .old-*            a checkpoint of the same step while its replacement moves in; put back if that did not happen

Only safetensors, JSON and text belong here. Loading a pickle runs code, so a checkpoint that holds one is refused.
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
from pathlib import Path, PurePosixPath
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
    """A verified checkpoint. `offsets` are the sizes in bytes of the record files when it was taken."""

    path: Path
    step: int
    state: dict[str, Any]
    offsets: dict[str, int]


def checkpoint_name(step: int) -> str:
    return f"step_{step:08d}"


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, path) of every checkpoint directory under `root`, oldest first; says nothing of their health."""
    if not root.is_dir():
        return []
    found = [(NAME.fullmatch(path.name), path) for path in root.iterdir()]
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
    """Write one checkpoint atomically and remove old ones.

    Args:
        root: the run's `checkpoints` directory; made if missing, inside a directory that exists.
        step: optimizer steps applied.
        write: called with an empty directory, writes the engine's files there.
        state: the recipe's own state, JSON values only; becomes state.json.
        offsets: `Recorder.offsets()`, taken after everything up to `step` was recorded.
        keep: newest checkpoints to keep, this one included; at least 1. Checkpoints of later steps (left by a run
            that went back to an earlier one) are removed too.

    Returns:
        The directory, `root/step_<8 digits>`.

    Raises:
        CheckpointWriteError: the disk refused (full, quota, gone). What was written is removed and every older
            checkpoint is as it was: the run may go on and try again later.
        CheckpointError: `write` left a symlink or a pickle file.
    """
    if keep < 1:
        raise ValueError(f"a run keeps at least one checkpoint, got keep={keep}")
    final, temporary = root / checkpoint_name(step), root / f".tmp-{checkpoint_name(step)}"
    try:
        root.mkdir(exist_ok=True)  # not its parents: a run directory that vanished is an error, not a new one
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        (temporary / "state.json").write_text(pretty_json(dict(state)), encoding="utf-8")
        _seal(temporary, step, offsets)
        _move_into_place(temporary, final)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        # safetensors reports a full disk as its own error, not as an OSError.
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointWriteError(
                f"checkpoint {final} could not be written: {error}. Nothing of it was kept; "
                f"{_newest_of(root)}. Free space on that disk, or move the run directory to another and resume there."
            ) from error
        raise
    _prune(root, step, keep)
    return final


def _newest_of(root: Path) -> str:
    kept = list_checkpoints(root)
    return f"{kept[-1][1].name} is untouched" if kept else "there is no earlier checkpoint"


def _seal(directory: Path, step: int, offsets: Mapping[str, int]) -> None:
    """Flush every file, then write the manifest that makes the directory a checkpoint."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if problem := _unsafe(path):
            raise CheckpointError(f"the checkpoint of step {step} would hold {name}, {problem}; write safetensors")
        if path.is_file():
            fsync(path)
            files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    body = {"format": FORMAT, "step": step, "offsets": dict(offsets), "files": files}
    manifest = directory / "manifest.json"
    manifest.write_text(pretty_json(body | {"sha256": _digest(body)}), encoding="utf-8")
    fsync(manifest)
    for path in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
        fsync(path)


def _move_into_place(temporary: Path, final: Path) -> None:
    # A directory cannot replace a directory in one call: the old one steps aside, and is put back by
    # remove_leftovers if the process dies before the new one has its name.
    aside = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    fsync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _prune(root: Path, step: int, keep: int) -> None:
    past = [path for number, path in list_checkpoints(root) if number <= step]
    future = [path for number, path in list_checkpoints(root) if number > step]
    for path in [*past[:-keep], *future]:
        # Renamed first: a removal cut short must not look like a damaged checkpoint.
        doomed = path.with_name(f".tmp-removed-{path.name}")
        try:
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            logger.warning("the old checkpoint %s could not be removed: %s", path, error)


def remove_leftovers(root: Path) -> None:
    """Clear what a killed process left half done. Only the holder of the run's lock may call this."""
    if not root.is_dir():
        return
    for aside in root.glob(".old-*"):
        final = aside.with_name(aside.name.removeprefix(".old-"))
        if final.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, final)
    for path in root.glob(".tmp-*"):
        shutil.rmtree(path)


def verify_checkpoint(path: Path) -> list[str]:
    """What is wrong with the checkpoint at `path`, one line per problem that names the file; empty if intact."""
    if path.is_symlink() or not path.is_dir():
        return [f"{path.name} is not a directory"]
    manifest = _read_manifest(path)
    if isinstance(manifest, str):
        return [manifest]
    problems = [
        f"{found.relative_to(path).as_posix()} is there, {problem}"
        for found in sorted(path.rglob("*"))
        if (problem := _unsafe(found))
    ]
    match = NAME.fullmatch(path.name)
    if match and int(match[1]) != manifest["step"]:
        problems.append(f"manifest.json says step {manifest['step']}, the directory is named {path.name}")
    if "state.json" not in manifest["files"]:
        problems.append("manifest.json does not list state.json")
    # Nothing is opened through a name that leads outside, or a link.
    unsafe_names = [name for name in manifest["files"] if not _plain_name(name)]
    problems += [f"manifest.json lists {name!r}, which leads out of the checkpoint" for name in unsafe_names]
    if not problems:
        problems = [text for name, entry in manifest["files"].items() if (text := _compare(path / name, name, entry))]
    return problems


def _compare(path: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    if (size := path.stat().st_size) != entry["bytes"]:
        return f"{name} is {size} bytes, the manifest says {entry['bytes']}: it was cut or overwritten"
    if _sha256(path) != entry["sha256"]:
        return f"{name} has the right size but other contents than were written (sha256 differs): the disk damaged it"
    return None


def _read_manifest(path: Path) -> dict[str, Any] | str:
    """The manifest, or what is wrong with it."""
    file = path / "manifest.json"
    if file.is_symlink() or not file.is_file():
        return "manifest.json is missing: the write never finished, or this is not an oxRL checkpoint"
    try:
        manifest = json.loads(file.read_bytes())
        body = {key: value for key, value in manifest.items() if key != "sha256"}
        if body["format"] != FORMAT:
            return f"manifest.json is of format {body['format']!r}, this oxRL reads {FORMAT!r}"
        entries_whole = all({"bytes", "sha256"} <= entry.keys() for entry in body["files"].values())
        intact = entries_whole and manifest["sha256"] == _digest(body) and "step" in body and "offsets" in body
    except (ValueError, KeyError, TypeError, AttributeError):
        manifest, intact = {}, False
    return manifest if intact else "manifest.json is damaged: it does not match its own sha256"


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest checkpoint that is intact; damaged ones are skipped with a warning that names what is wrong.

    Raises:
        CheckpointError: there are checkpoints and not one is usable; lists the problems of each.
    """
    damaged: list[str] = []
    for step, path in reversed(list_checkpoints(root)):
        problems = verify_checkpoint(path)
        if not problems:
            if damaged:
                logger.warning("using %s: newer checkpoints are damaged and skipped:\n%s", path, "\n".join(damaged))
            manifest = json.loads((path / "manifest.json").read_bytes())
            state = json.loads((path / "state.json").read_bytes())
            return Checkpoint(path=path, step=step, state=state, offsets=manifest["offsets"])
        damaged += [f"  {path.name}: {problem}" for problem in problems]
    if damaged:
        raise CheckpointError(
            f"no checkpoint under {root} is usable:\n" + "\n".join(damaged) + "\n"
            "Restore one from a copy, or start the run again in another directory (run.dir=...)."
        )
    return None


def _plain_name(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name


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
