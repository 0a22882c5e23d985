"""The images of a run's samples, as a page can show them without asking for anything."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

NAME = re.compile("[0-9a-f]{64}")
FOLDER = "images"
# Of the files in one report, those of the newest samples first.
MOST_BYTES = 20_000_000
# What browsers show, by how its bytes begin.
KINDS = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"RIFF": "webp",
    b"BM": "bmp",
}


def images_in(value: object) -> Iterator[str]:
    """Names of the images in a line of samples.jsonl, or in a part of it; one perhaps several
    times. What only looks like a name has no file.
    """
    if isinstance(value, str):
        if NAME.fullmatch(value):
            yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from images_in(part)


def image_pieces(directory: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, data URL) of images that the run directory holds and a browser shows.

    Args:
        directory: of the run.
        names: the most wanted first; the page is not to grow beyond all bounds.
    """
    room = MOST_BYTES
    for name in names:
        file = directory / FOLDER / name
        if not file.is_file() or file.stat().st_size > room:
            continue
        content = file.read_bytes()
        kind = next((kind for start, kind in KINDS.items() if content.startswith(start)), None)
        if kind is None or hashlib.sha256(content).hexdigest() != name:
            continue
        room -= len(content)
        yield name, f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
