"""docs/code.md names files, functions and classes that exist, in the files it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "code.md").read_text()
STEPS = re.findall(r"^\d+\. (.+)$", PAGE, flags=re.MULTILINE)


def names_in(path: Path) -> set[str]:
    """Functions, classes, and methods as Class.method, that a file defines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                found |= {f"{node.name}.{inner.name}", inner.name}
    return found


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:oxrl|oxrl_proofs|packages|tests)(?:/[\w./]+)?)`", PAGE)
    assert len(paths) > 30
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_the_tour_has_a_step_for_every_stage_of_a_batch() -> None:
    assert 15 <= len(STEPS) <= 25
    files = set(re.findall(r"`([\w/]+\.py)`", "\n".join(STEPS)))
    assert 20 <= len(files) <= 25


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.split("`")[1])
def test_a_step_names_what_its_file_defines(step: str) -> None:
    path = ROOT / step.split("`")[1]
    head, _, _ = step.partition(" is ")
    names = re.findall(r"`([A-Za-z_][\w.]*)`", step)
    mentioned = [name for name in names if "/" not in name and not name.endswith(".py")]
    assert mentioned, head
    assert mentioned[0] in names_in(path)
