"""Scripts beside the package, most of which no test runs, find what they name in it."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "docs", "experiments", "one_page")
OURS = ("oxrl.", *(path.name for path in (ROOT / "packages").iterdir()))
SCRIPTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def found(module: str, name: str) -> Any:
    """What a module of the package has under a name; None where that is nothing."""
    value = getattr(importlib.import_module(module), name, None)
    if value is None:
        try:
            value = importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return None
    return value


def missing(tree: ast.Module) -> list[str]:
    """Names of the package that a script imports, or reads of its modules, and that are not."""
    modules: dict[str, types.ModuleType] = {}
    wrong: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(OURS):
            continue
        for alias in node.names:
            value = found(str(node.module), alias.name)
            if value is None:
                wrong.append(f"line {node.lineno}: {node.module}.{alias.name}")
            elif isinstance(value, types.ModuleType):
                modules[alias.asname or alias.name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            if module is not None and not hasattr(module, node.attr):
                wrong.append(f"line {node.lineno}: {module.__name__}.{node.attr}")
    return wrong


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_finds_what_it_names(path: Path) -> None:
    assert missing(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_what_is_not_there_is_noticed() -> None:
    source = (
        "from oxrl.assembly import reward_pools\n"
        "from oxrl.types import Nothing\n"
        "reward_pools.RewardPool\n"
        "reward_pools.reward_pool\n"
    )
    wrong = ["line 2: oxrl.types.Nothing", "line 3: oxrl.assembly.reward_pools.RewardPool"]
    assert missing(ast.parse(source)) == wrong
