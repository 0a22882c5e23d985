"""Checkpoints that are whole or absent: written beside, flushed, hashed, then renamed into place.

    step_00000040/
        what the trainer wrote (HF weights, masters, moments), state.json, and manifest.json, last:
                      {"format", "step", "offsets", "files": {name: {"bytes", "sha256"}}, "sha256"
                      of all that}; without a hash of what several processes wrote
        parts.json    beside what they wrote: file -> [{"sha256", "ranges": [[begin, end], ...]},
                      ...], a part per process: bytes `begin` to `end` of each range, one after the
                      other. All ranges together are the file. Who resumes looks at some parts each,
                      so that nobody has to read everything
    .tmp-*
        a write or a removal that did not finish; never read, removed at the next start

Only safetensors, JSON and text belong here. Loading a pickle runs code, so a checkpoint that holds
one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oxrl.runs.files import Json

FORMAT = "oxrl-checkpoint-1"
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz"})
PARTS_FILE = "parts.json"

Part = dict[str, Any]
# File in the directory -> the parts of it.
Parts = dict[str, list[Part]]


def contents(directory: Path) -> dict[str, Path]:
    """Everything in a directory, by its path from there."""
    return {path.relative_to(directory).as_posix(): path for path in sorted(directory.rglob("*"))}


def unsafe(path: Path) -> str | None:
    """Say why a path inside a checkpoint must not be there; None where it may."""
    if path.is_symlink():
        return "a symbolic link"
    if path.suffix.lower() in PICKLES:
        return "a file of a kind that can run code when it is loaded"
    return None if path.is_file() or path.is_dir() else "neither a file nor a directory"


def manifest_hash(body: Json) -> str:
    """The sha256 of what a manifest says besides its own hash."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_parts(directory: Path, shares: Sequence[Mapping[str, Part]]) -> None:
    """Note who wrote what in `directory`: of each process, its part of each file."""
    parts: Parts = {}
    for share in shares:
        for file, part in share.items():
            parts.setdefault(file, []).append(part)
    text = json.dumps(parts, separators=(",", ":")) + "\n"
    (directory / PARTS_FILE).write_text(text, encoding="utf-8")


def read_parts(directory: Path) -> Parts:
    """Read what `write_parts` noted in `directory`; nothing where one process wrote everything."""
    path = directory / PARTS_FILE
    return json.loads(path.read_bytes()) if path.is_file() else {}


def whole_hash(parts: Sequence[Part], size: int) -> str | None:
    """The hash of a file that one process wrote from its first byte to its last."""
    [first, *others] = parts
    return first["sha256"] if not others and first["ranges"] == [[0, size]] else None
