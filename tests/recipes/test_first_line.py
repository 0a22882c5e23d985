"""What a run does before its first line of metrics: as little as it can, whatever is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import rl_config

from oxrl.models.lazy_transformers import called_later

# Seconds of imports that a default run has no use for; all of them come with the dependencies.
OTHER_USES = ("mlflow", "sklearn", "scipy", "pandas", "pyarrow", "matplotlib", "sqlalchemy")
FIRST_LINE = """
import os, sys
from oxrl.config import load_config
from oxrl.commands.train import run
from oxrl.runs.recorder import Recorder

def record_step(self, step, line):
    heavy = sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:]))
    print("step", step, "with", heavy, flush=True)
    os._exit(0)

Recorder.record_step = record_step
run(load_config(sys.argv[1]))
"""


def test_nothing_heavy_is_imported_before_the_first_line_of_metrics(tmp_path: Path) -> None:
    rl_config(tmp_path, "first", run={"mlflow": True})
    [config] = tmp_path.glob("*.yaml")
    found = subprocess.run(
        [sys.executable, "-c", FIRST_LINE, str(config), *OTHER_USES, "torch"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.stdout.splitlines()[-1:] == ["step 1 with ['torch']"], found.stderr


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that is not imported yet."""
    name = "big_library_of_a_test"
    (tmp_path / f"{name}.py").write_text("def useful(x):\n    return x + 1\n\nother = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_function_waits_for_its_module_until_it_is_called(big: str) -> None:
    with called_later({big: "useful"}):
        from big_library_of_a_test import useful  # pyright: ignore[reportMissingImports]
    assert big not in sys.modules
    assert useful(1) == 2
    assert sys.modules[big].other == 7
    with called_later({big: "useful"}):  # it is there by now
        assert sys.modules[big].useful(2) == 3
    del sys.modules[big]


def test_what_else_is_asked_of_a_waiting_module_is_its_own(big: str) -> None:
    with called_later({big: "useful"}):
        from big_library_of_a_test import other  # pyright: ignore[reportMissingImports]
    assert other == 7
    assert sys.modules[big].other == 7
    with pytest.raises(ImportError), called_later({"big_library_of_no_test": "useful"}):
        from big_library_of_no_test import other  # pyright: ignore[reportMissingImports]
    assert "big_library_of_no_test" not in sys.modules
    del sys.modules[big]
