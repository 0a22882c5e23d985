"""The page itself: a frame, uPlot, our script and style, and data in packed pieces.

Nothing of a run is ever markup or script: it is gzipped JSON in base64, in elements that no browser
runs, and the script writes it as text. What may run or style the page is said by hash, and nothing
may be loaded (Content-Security-Policy).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from oxrl.errors import RunDirectoryError, why_no_file
from oxrl.report.facts import run_facts
from oxrl.report.images import image_pieces
from oxrl.report.samples import Samples, token_pieces
from oxrl.runs.files import Json, write_atomically

HERE = Path(__file__).parent
REPORT = "report.html"
SCRIPTS = ("uPlot.iife.min.js", "report.js")
STYLES = ("uPlot.min.css", "report.css")


def write_report(runs: Sequence[Path], out: str | Path | None = None) -> Path:
    """Write the report of one or several runs.

    Args:
        runs: their directories.
        out: the file; None: report.html in the first of them.

    Returns:
        The file.

    Raises:
        RunDirectoryError: one is no run, or the file cannot be written.
    """
    target = runs[0] / REPORT if out is None else Path(out)
    page = "".join(page_parts(runs))
    try:
        write_atomically(target, page)
    except OSError as error:
        why = error.strerror if target.parent.is_dir() else why_no_file(target)
        raise RunDirectoryError(f"{target} cannot be written: {why}") from error
    return target


def page_parts(
    runs: Sequence[Path], *, live: bool = False, curves: Sequence[str] | None = None
) -> Iterator[str]:
    """The page, a part at a time.

    Args:
        runs: directories of runs.
        live: the page can be asked for again, and shows how.
        curves: metrics of which nothing but the curve is shown; empty: nothing but what a run came
            to, its health and main curves. None: everything, samples too.
    """
    facts = [run_facts(run) for run in runs]
    styles = [(HERE / name).read_text(encoding="utf-8") for name in STYLES]
    scripts = [(HERE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    yield (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name=viewport content="width=device-width,initial-scale=1">\n'
        "<title>oxRL report</title>\n"
    )
    for style in styles:
        yield f"<style>{style}</style>\n"
    yield "</head><body><main id=report></main>\n"
    described: list[Json] = []
    shown: set[str] = set()
    for number, (run, found) in enumerate(zip(runs, facts, strict=True)):
        yield packed(f"metrics-{number}", found.pop("metrics"))
        if curves is not None:
            described.append(found)
            continue
        samples = Samples(run)
        for place, piece in enumerate(samples.pieces()):
            yield packed(f"samples-{number}-{place}", piece)
        yield packed(f"index-{number}", samples.columns)
        for image, url in image_pieces(run, reversed(samples.images)):
            if image not in shown:
                yield packed(f"image-{image}", url)
                shown.add(image)
        steps: list[int] = []
        for step, tokens in token_pieces(run, samples.columns):
            yield packed(f"tokens-{number}-{step}", tokens)
            steps.append(step)
        known = {"count": samples.count, "words": samples.words, "token_steps": steps}
        described.append(found | known)
    yield packed("runs", {"live": live, "curves": curves, "runs": described})
    for script in scripts:
        yield f"<script>{script}</script>\n"
    yield "</body></html>\n"


def packed(name: str, value: object) -> str:
    """A value as an element that no browser runs: gzipped JSON in base64."""
    data = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    text = base64.b64encode(gzip.compress(data, 6, mtime=0)).decode("ascii")
    return f'<script type="text/plain" id="{name}">{text}</script>\n'


def _hashes(texts: Sequence[str]) -> str:
    digests = [hashlib.sha256(text.encode("utf-8")).digest() for text in texts]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
