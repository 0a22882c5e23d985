"""Writing that survives a crash: what is renamed into place was on the disk first."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def fsync(path: Path) -> None:
    """Force a file's contents, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text`: a reader, or a crash at any moment, finds the old file or the new one."""
    temporary = path.with_name(f".tmp-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def pretty_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
