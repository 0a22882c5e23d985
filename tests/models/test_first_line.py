"""Functions whose modules are imported when they are called; tests/cli/test_cli.py looks at whole runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oxrl.models.lazy_transformers import called_later


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
