"""The type checker finds nothing in what is installed. It is a test among others since it computes on
one core: `make test` needs not wait for it first. `make check` gives it alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.timeout(900)
def test_no_type_is_wrong() -> None:
    checker = shutil.which("basedpyright", path=Path(sys.executable).parent)
    if checker is None:
        pytest.skip("basedpyright is not installed beside this Python")
    command = [checker, "--pythonpath", sys.executable]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
