"""Whole runs whose cluster fails, as `benchmarks/cluster_faults.py` makes it fail."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def imported(name: str) -> ModuleType:
    """A file of benchmarks/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


FAULTS = imported("cluster_faults")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="faults_", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_the_page_of_benchmarks_has_a_row_for_every_fault() -> None:
    shown = imported("suite").BENCHMARKS["cluster_faults"]
    assert list(shown.cases) == list(FAULTS.CASES)


# Seen on a busy machine; until they are gone for sure.
LEFT = {
    "gcs": "without a GCS an actor may stay until its raylet ends, a minute later",
    "own gcs": "without a GCS Ray's own agents may stay a while",
    "SIGKILL": "Ray's own agents may stay a while",
}


def marked(name: str) -> Any:
    """A case; those that may leave a process say so."""
    why = LEFT.get(name)
    return pytest.param(name, marks=pytest.mark.xfail(reason=why, strict=False)) if why else name


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [marked(name) for name in FAULTS.CASES])
def test_a_fault_ends_as_it_should_says_why_and_leaves_no_process(name: str, folder: Path) -> None:
    pytest.importorskip(
        "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
    )
    found = FAULTS.outcome_of(name, folder)
    print(found)  # noqa: T201
    assert found["exit_code"] == FAULTS.CASES[name].code
    assert found["left_commands"] == []
    assert not found["traceback"]
    assert found["as_expected"], (folder / "out.txt").read_text()[-2000:]
