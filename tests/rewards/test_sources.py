"""Which files a user's function is made of, told without running any."""

from __future__ import annotations

from pathlib import Path

import pytest

from oxrl.rewards.sources import code_digest, python_sources


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / (name.replace("__in__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("line", "also"),
    [
        ("import json, torch, os.path", []),
        ("import beside", ["beside.py"]),
        ("import beside as other, json", ["beside.py"]),
        ("from beside import *", ["beside.py"]),
        ("def f():\n    import beside", ["beside.py"]),
        ("try:\n    import beside\nexcept ImportError:\n    beside = None", ["beside.py"]),
        ("import pack", ["pack/__init__.py"]),
        ("import pack.low", ["pack/__init__.py", "pack/low.py"]),
        ("from pack import low", ["pack/__init__.py", "pack/low.py"]),
        ("from pack import near", ["pack/__init__.py", "pack/low.py", "pack/near.py"]),
        ("from pack.near import low", ["pack/__init__.py", "pack/low.py", "pack/near.py"]),
        ("import plain.leaf", ["plain/leaf.py"]),
        ("import chain", ["beside.py", "chain.py"]),
        ("import importlib; importlib.import_module('beside')", ["beside.py"]),
        ("beside = __import__('beside')", ["beside.py"]),
        ("import ring", ["ring.py"]),
        ("import broken", ["broken.py"]),
        ("'import beside'", []),
    ],
)
def test_a_file_and_what_it_imports_from_its_folder(
    tmp_path: Path, line: str, also: list[str]
) -> None:
    write(
        tmp_path,
        beside="",
        chain="import beside",
        ring="import mine",
        broken="def (:",
        unused="",
        pack__in____init__="",
        pack__in__low="",
        pack__in__near="from . import low",
        plain__in__leaf="",
        mine=line,
    )
    found = python_sources(tmp_path / "mine.py")
    assert list(found) == sorted(["mine.py", *also])
    assert all(found[name] == tmp_path / name for name in found)


def test_the_digest_is_of_every_byte_of_it_and_of_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, mine="import beside", beside="A = 1", unused="")
    first = code_digest(tmp_path / "mine.py")
    write(tmp_path, unused="B = 1")
    assert code_digest(tmp_path / "mine.py") == first
    write(tmp_path, beside="A = 2")
    assert code_digest(tmp_path / "mine.py") != first
