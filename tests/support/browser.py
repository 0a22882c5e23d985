"""Pages of reports as a real browser has them, and what is packed in their source."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
    "--dump-dom",
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here: apt-get install chromium"
)


def pieces(page: str) -> dict[str, Any]:
    """Name -> what is packed under it in the source of a page."""
    found = re.findall(r'<script type="text/plain" id="([\w-]+)">([\w+/=]*)</script>', page)
    return {name: json.loads(gzip.decompress(base64.b64decode(text))) for name, text in found}


def opened(file: Path, *options: str, fragment: str = "") -> tuple[dict[str, str], str]:
    """The data attributes of the page as a browser has it, and its DOM; no message on the console."""
    with_profile = [*FLAGS, f"--user-data-dir={file.parent / 'profile'}", *options]
    command = [str(BROWSER), *with_profile, f"{file.as_uri()}#{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    head = re.search(r"<html[^>]*>", done.stdout)
    assert head is not None
    return dict(re.findall(r'data-([\w-]+)="([^"]*)"', head[0])), done.stdout
