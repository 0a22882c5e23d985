"""Checkpoints found and looked through: which is the newest that is whole, and what is wrong with
the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path

from oxrl.checkpoint.format import (
    FORMAT,
    PARTS_FILE,
    contents,
    manifest_hash,
    read_parts,
    unsafe,
)
from oxrl.errors import NoCheckpointError
from oxrl.modelfiles.hub import file_hash
from oxrl.runs.checkpoints import MANIFEST_FILE, list_checkpoints
from oxrl.runs.files import Json, json_object

logger = logging.getLogger(__name__)

# What a manifest says beside its own hash.
MANIFEST_TYPES = {"format": str, "step": int, "offsets": dict, "files": dict}
READ_BYTES = 16 * 2**20
# Looks at what several processes wrote in a checkpoint; a line per problem.
PartsLook = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint; `offsets` are what `Recorder.offsets()` said when it was taken."""

    path: Path
    step: int
    state: Json
    offsets: dict[str, int]


def every_part(path: Path) -> list[str]:
    """List the faults of files with parts in the checkpoint at `path`, all looked at here."""
    found: list[str] = []
    for noted in path.rglob(PARTS_FILE):
        found += part_problems(noted.parent)
    return found


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
            manifest = json.loads((path / MANIFEST_FILE).read_bytes())
            state = json.loads((path / "state.json").read_bytes())
            return Checkpoint(path, step, state, manifest["offsets"])
        damaged += [f"  {path.name}: {problem}" for problem in problems]
    if damaged:
        advice = "Restore one from a copy, or start the run again in another directory"
        lines = [f"no checkpoint under {root} is usable:", *damaged, f"{advice} (run.dir=...)."]
        raise NoCheckpointError("\n".join(lines))
    return None


def verify_checkpoint(path: Path, look_at_parts: PartsLook = every_part) -> list[str]:
    """List the faults of the checkpoint at `path`, one line each; empty if it is intact."""
    if path.is_symlink() or not path.is_dir():
        return [f"{path.name} is not a directory"]
    # Nothing is opened that was not found inside: a name in the manifest may lead elsewhere, and so
    # may a link.
    inside = contents(path)
    reasons = {name: unsafe(file) for name, file in inside.items()}
    problems = [f"{name} is there, {reason}" for name, reason in reasons.items() if reason]
    if problems:
        return problems
    if MANIFEST_FILE not in inside:
        why = "the write never finished, or this is not an oxRL checkpoint"
        return [f"manifest.json is missing: {why}"]
    manifest = _read_manifest(inside[MANIFEST_FILE])
    if manifest is None:
        return ["manifest.json is damaged: it does not match its own sha256"]
    if manifest["format"] != FORMAT:
        return [f"manifest.json is of format {manifest['format']!r}, this oxRL reads {FORMAT!r}"]
    step = manifest["step"]
    if path.name != f"step_{step:08d}":
        problems.append(f"manifest.json says step {step}, the directory is named {path.name}")
    problems += _changed_files(inside, {"state.json": {}, **manifest["files"]})
    return problems or look_at_parts(path)


def why_not_best(run: Path, step: int) -> str:
    """Say why `run/best` is not the best of the steps up to `step`; empty if it is, or may be."""
    best = run / "best"
    if not best.is_dir() or best.is_symlink():
        return "it is gone"
    manifest = _read_manifest(best / MANIFEST_FILE)
    if manifest is None:
        return "its manifest.json is missing or damaged"
    if manifest["step"] > step:
        return f"it is of step {manifest['step']}, after the checkpoint that is gone back to"
    problems = _changed_files(contents(best), manifest["files"]) or every_part(best)
    return problems[0] if problems else ""


def _changed_files(inside: Mapping[str, Path], expected: Mapping[str, Json]) -> list[str]:
    """List what became of the files in a manifest since it was written."""
    problems: list[str] = []
    for name, entry in expected.items():
        problem = _difference(inside.get(name), entry)
        if problem:
            problems.append(f"{name} {problem}")
    return problems


def _read_manifest(path: Path) -> Json | None:
    """The manifest without its own hash; None if it is none, or that hash is of something else."""
    manifest: Json = {}
    if path.is_file():
        manifest = json_object(path.read_bytes()) or {}
    body: Json = {name: manifest.get(name) for name in MANIFEST_TYPES}
    types = {name: type(value) for name, value in body.items()}
    if types != MANIFEST_TYPES or {type(entry) for entry in body["files"].values()} - {dict}:
        return None
    return body if manifest.get("sha256") == manifest_hash(body) else None


def _difference(file: Path | None, entry: Json) -> str | None:
    """Say what became of a file since the manifest noted `entry` of it."""
    if file is None or not entry or not file.is_file():
        return "is missing"
    size = file.stat().st_size
    noted = entry.get("bytes")
    if size != noted:
        return f"is {size} bytes, the manifest says {noted}: it was cut or overwritten"
    if "sha256" in entry and file_hash(file) != entry["sha256"]:
        return "has the right size but other contents than were written (sha256 differs)"
    return None


def part_problems(directory: Path, *, rank: int = 0, world: int = 1) -> Iterator[str]:
    """List the faults of the files in `directory` that have parts.

    Args:
        rank: of this process. Of `world` processes each looks at other parts.
    """
    number = 0
    for file, parts in read_parts(directory).items():
        path = directory / file
        ranges = sorted(bounds for part in parts for bounds in part["ranges"])
        ends = [0, *(end for _, end in ranges)]
        whole = all(begin == before for (begin, _), before in zip(ranges, ends, strict=False))
        if not path.is_file() or not whole or ends[-1] != path.stat().st_size:
            yield f"{file} is missing, was cut, or is not what its parts are of"
            continue
        for part in parts:
            own = number % world == rank
            number += 1
            if own and _hash_of(path, part["ranges"]) != part["sha256"]:
                yield f"{file} has the right size but other contents than were written (sha256)"


def _hash_of(path: Path, ranges: Sequence[Sequence[int]]) -> str:
    digest = sha256()
    with path.open("rb") as file:
        for begin, end in ranges:
            file.seek(begin)
            for at in range(begin, end, READ_BYTES):
                digest.update(file.read(min(READ_BYTES, end - at)))
    return digest.hexdigest()
