"""The website: every page is built, no link is broken, and the API reference tells of every name."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
API: dict[str, Any] = runpy.run_path(str(ROOT / "docs" / "make_api.py"))


@pytest.mark.parametrize("module", API["MODULES"])
def test_the_api_reference_explains_every_public_name(module: str) -> None:
    page: str = API["page"](module)
    found = API["import_module"](module)
    names = API["names_of"](found, API["MODULES"][module][1])
    assert names
    unexplained: list[str] = []
    for name in names:
        assert f"## `{name}`\n" in page
        if callable(getattr(found, name)) and not getattr(found, name).__doc__:
            unexplained.append(name)
    assert unexplained == []
    assert "'Mapping" not in page and "'str'" not in page


def test_losses_are_told_with_arguments_and_sources() -> None:
    page: str = API["page"]("oxrl.functional")
    told = page[page.index("## `ppo_clip`") :].split("\n## ")[0]
    assert "clip_low: float" in told and "**Args**" in told and "**Source**" in told


@pytest.mark.skipif(
    find_spec("mkdocs") is None, reason='no mkdocs here: pip install -e ".[docs]" brings it'
)
def test_the_site_is_built_without_a_broken_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.setattr(sys, "argv", ["make_site.py", str(tmp_path / "site")])
    monkeypatch.syspath_prepend(str(ROOT))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(ROOT / "docs" / "make_site.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert left.value.code == 0, said
    assert "0 broken links" in said
    assert (tmp_path / "site" / "docs" / "api" / "oxrl.functional.html").is_file()
    assert (tmp_path / "site" / "docs" / "config.html").is_file()
