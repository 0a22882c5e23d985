"""The type checker as a test: it computes on one core, and other tests run beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def wrong_types(*places: str) -> str:
    """What the checker finds in `places` of the checkout, read with what is installed; nothing where
    all is right. Skips the test where the checker is not installed.
    """
    checker = shutil.which("basedpyright", path=Path(sys.executable).parent)
    if checker is None:
        pytest.skip("basedpyright is not installed beside this Python")
    command = [checker, "--pythonpath", sys.executable, *places]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return said.stdout + said.stderr if said.returncode else ""
