"""Which files a user's function is made of, told without running any."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from oxrl.tables.user_code import REWARD
from oxrl.usercode.code_pins import code_inputs
from oxrl.usercode.locate import Place
from oxrl.usercode.sources import code_digest, python_sources, sources_of


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
        pytest.param("import beside\n''" + 900 * ".strip(' ')", ["beside.py"], id="long chain"),
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


def test_a_file_of_an_installed_package_and_what_it_imports_of_that_package(
    tmp_path: Path,
) -> None:
    write(
        tmp_path,
        other="",
        tools__in____init__="",
        tools__in__far="",
        tools__in__near="",
        tools__in__inner__in____init__="from . import low; import tools.near, other",
        tools__in__inner__in__low="from .. import far; from ..near import x; import other",
    )
    inner = tmp_path / "tools" / "inner"
    files = ["inner/__init__.py", "inner/low.py", "__init__.py", "far.py", "near.py"]
    expected = {f"tools/{name}": tmp_path / "tools" / name for name in sorted(files)}
    for path, module in (
        (inner / "__init__.py", "tools.inner"),
        (inner / "low.py", "tools.inner.low"),
    ):
        found = python_sources(path, module)
        assert {**expected, **found} == expected
        assert {path, tmp_path / "tools" / "far.py"} <= {*found.values()}


def test_the_digest_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1")
    first = code_digest(Place(tmp_path / "model"))
    assert code_digest(Place(tmp_path / "model")) == first
    (tmp_path / "model" / "more").write_bytes(b"1")
    assert code_digest(Place(tmp_path / "model")) != first


def test_the_digest_is_of_every_byte_of_it_and_of_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, mine="import beside", beside="A = 1", unused="")
    first = code_digest(Place(tmp_path / "mine.py"))
    write(tmp_path, unused="B = 1")
    assert code_digest(Place(tmp_path / "mine.py")) == first
    write(tmp_path, beside="A = 2")
    assert code_digest(Place(tmp_path / "mine.py")) != first


def worth(weight: object) -> Callable[..., Any]:
    """A reward with a closure."""

    def score(prompt: Any, completion: Any) -> Any:
        return [weight for _ in completion]

    return score


def through_a_helper(weight: object) -> Callable[..., Any]:
    def helper() -> object:
        return weight

    def score(prompt: Any, completion: Any) -> Any:
        return helper()

    return score


def by_default(weight: object) -> Callable[..., Any]:
    def score(prompt: Any, completion: Any, weight: object = weight) -> Any:
        return weight

    return score


def plain(prompt: Any, completion: Any, weight: object = None) -> Any:
    return weight


def of_module(weight: object) -> Callable[..., Any]:
    """A reward as a notebook or a script has it, with a global that a comprehension uses."""
    names: dict[str, Any] = {"__name__": "__main__", "WEIGHT": weight}
    text = (
        "def helper(): return [WEIGHT for _ in range(2)]\n"
        "def score(prompt, completion): return helper()\n"
    )
    exec(text, names)
    return names["score"]


def with_field(weight: object) -> Callable[..., Any]:
    def score(prompt: Any, completion: Any) -> Any:
        return 1.0

    score.weight = weight  # pyright: ignore[reportFunctionMemberAccess]
    return score


class Holds:
    def __init__(self, weight: object) -> None:
        self.weight = weight

    def __call__(self, prompt: Any, completion: Any) -> Any:
        return self.weight

    def score(self, prompt: Any, completion: Any) -> Any:
        return self.weight


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "closure": worth,
    "closure of a helper": through_a_helper,
    "default": by_default,
    "partial, by name": lambda weight: partial(plain, weight=weight),
    "partial, by place": lambda weight: partial(plain, weight),
    "partial of a closure": lambda weight: partial(worth(weight), 1),
    "global": of_module,
    "field of a function": with_field,
    "object": Holds,
    "method": lambda weight: Holds(weight).score,
}
VALUES: tuple[tuple[Any, Any], ...] = (
    (1.0, 2.0),
    ({"a": [1, {"b": None}]}, {"a": [1, {"b": 0}]}),
    ("x", "y"),
    (True, None),
    ((1, 2), (2, 1)),
)


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("values", VALUES, ids=str)
def test_a_value_that_code_uses_is_part_of_it(kind: str, values: tuple[Any, Any]) -> None:
    first, second = values
    make = HOLDERS[kind]
    assert sources_of(make(first)) == sources_of(make(first))
    assert sources_of(make(first)) != sources_of(make(second))


def assigned_later(weight: object) -> Callable[..., Any]:
    """A reward that uses what its maker assigns only on one way."""
    if weight is None:
        later = 1.0

    def score(prompt: Any, completion: Any) -> Any:
        return weight or later

    return score


def test_a_closure_may_hold_a_name_that_nothing_is_assigned_to() -> None:
    one, same, other = (sources_of(assigned_later(weight)) for weight in (1.0, 1.0, 2.0))
    assert one == same != other


def test_the_order_of_a_mapping_is_no_change() -> None:
    assert sources_of(worth({"a": 1, "b": 2})) == sources_of(worth({"b": 2, "a": 1}))


@pytest.mark.parametrize("kind", ["closure", "partial, by name", "global", "object"])
def test_what_is_no_plain_value_is_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = sources_of(HOLDERS[kind](threading.Lock()))
    assert "a resume will not see changes" in caplog.text
    assert not any("lock" in text and "value of" in name for name, text in found.items())
    caplog.clear()
    sources_of(HOLDERS[kind](1.0))
    assert "which code uses" not in caplog.text


# What a reward reads of other modules, and one without source: compared, or told.


def module_of(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (folder / "settings_of_mine.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "settings_of_mine", raising=False)
    importlib.invalidate_caches()
    return importlib.import_module("settings_of_mine")


def reads(settings: ModuleType) -> Callable[..., float]:
    def score(prompt: Any, completion: Any) -> float:
        return settings.SCALE * len(completion)

    return score


def calls(settings: ModuleType) -> Callable[..., float]:
    def score(prompt: Any, completion: Any) -> float:
        return settings.worth(completion)

    return score


@pytest.mark.parametrize("make", [reads, calls])
def test_what_code_reads_of_a_module_is_part_of_it(
    make: Callable[[ModuleType], Callable[..., float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source = "SCALE = 2.0\n\n\ndef worth(text):\n    return SCALE * len(text)\n"
    module = module_of(tmp_path, source, monkeypatch)
    before = sources_of(make(module))
    assert sources_of(make(module)) == before
    monkeypatch.setattr(module, "SCALE", 3.0)
    assert (sources_of(make(module)) != before) == (make is reads)
    other = module_of(tmp_path, source.replace("SCALE *", "7 *"), monkeypatch)
    assert sources_of(make(other)) != before
    assert "will not see" not in caplog.text


def test_a_function_of_a_module_is_its_file() -> None:
    here = Path(__file__)
    assert sources_of(worth)[here.name] == here.read_text(encoding="utf-8")


def test_libraries_are_no_files_of_a_users(caplog: pytest.LogCaptureFixture) -> None:
    def score(prompt: Any, completion: Any) -> float:
        return math.pi * len(json.dumps(completion)) + torch.float32.itemsize

    assert list(sources_of(score)) == [Path(__file__).name] or len(sources_of(score)) == 1
    assert "will not see" not in caplog.text


def test_code_without_source_is_told(caplog: pytest.LogCaptureFixture) -> None:
    there: dict[str, Any] = {"__name__": "nowhere"}
    exec("def score(prompt, completion):\n    return 1.0\n", there)
    assert sources_of(there["score"]) == {}
    assert "a resume will not see changes of score, which has no source here" in caplog.text


def typed(name: str) -> Callable[..., float]:
    """A function that was typed behind `python -c`."""
    there: dict[str, Any] = {"__name__": "nowhere"}
    exec(compile("def score(prompt, completion):\n    return 1.0\n", "<string>", "exec"), there)
    function = there["score"]
    function.__name__ = name
    return function


@pytest.mark.parametrize(
    ("function", "seen"),
    [(typed("score"), True), (typed("another"), False), (typed("<score>"), True)],
)
def test_a_source_that_python_guesses_is_believed_where_it_holds_the_name(
    function: Callable[..., float],
    seen: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = "def score(prompt, completion):\n    return 1.0\n"
    monkeypatch.setattr(inspect, "getsource", lambda value: program)
    assert sources_of(function) == ({function.__name__: program} if seen else {})
    assert ("has no source here" in caplog.text) != seen


def test_a_source_from_a_file_need_not_hold_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def score(prompt: Any, completion: Any) -> float:
        return 1.0

    score.__name__ = "renamed"
    (text,) = sources_of(score).values()
    assert text.startswith("def score(")


def test_files_of_several_rewards_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, first__in__score="def f(): 1", second__in__score="def f(): 2")
    names = [f"{tmp_path / folder}/score.py:f" for folder in ("first", "second")]
    (both,) = code_inputs(REWARD, names, "reward.parts")
    assert both.files == {f"score.py of {name}": Path(name.partition(":")[0]) for name in names}
    (one,) = code_inputs(REWARD, names[:1], "reward.name")
    assert one.files == {"score.py": tmp_path / "first" / "score.py"}
    assert list(code_inputs(REWARD, ["math"], "reward.name")) == []
