"""The tool behind `make mutants`: what it changes, what it chooses, and what it accepts."""

from __future__ import annotations

import gc
import tomllib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="`make mutants` installs it")

from cosmic_ray.mutating import mutate_code

from mutants.mutation_copies import once_more
from mutants.mutation_points import Mutant, by_hand, drawn, make, points, sample, segments
from mutants.mutation_report import judge, read_arguments
from mutants.mutation_runs import Live, Outcome, named
from mutants.tensor_operators import OURS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCE = '''"""A formula."""

LIMIT = 2.0


def loss(x: float, scale: float = 1.0) -> float:
    """Its docstring: 3 - 2."""
    if x < 0:
        raise ValueError(f"{x - 1} is below {0}")
    return x * scale - LIMIT
'''


def write(root: Path, source: str) -> list[Mutant]:
    (root / "formula.py").write_text(source)
    return sample(root, ["formula.py"], seed=1, size=None)


@pytest.mark.parametrize("name", OURS)
def test_an_operator_does_what_its_examples_say(name: str) -> None:
    for example in OURS[name].examples():
        found = mutate_code(example.pre_mutation_code, OURS[name](), example.occurrence)
        assert found is not None and found.split() == example.post_mutation_code.split()


def test_formulas_defaults_and_constants_are_changed_and_words_are_not(tmp_path: Path) -> None:
    changed = {(mutant.before, mutant.after) for mutant in write(tmp_path, SOURCE)}
    assert ("return x * scale - LIMIT", "return x / scale - LIMIT") in changed
    assert ("LIMIT = 2.0", "LIMIT = 3.0") in changed
    assert any(before.startswith("def loss") for before, _ in changed)
    assert not any("docstring" in before or "raise" in before for before, _ in changed)


def test_a_function_has_the_same_mutants_wherever_it_stands(tmp_path: Path) -> None:
    here = write(tmp_path, SOURCE)
    below = write(
        tmp_path,
        SOURCE.replace("LIMIT = 2.0", "LIMIT = 2.0\n\n\ndef more() -> int:\n    return 1 + 1"),
    )
    keys = [m.key for m in here if m.key[1] == "loss"]
    assert keys == [m.key for m in below if m.key[1] == "loss"]
    few = sample(tmp_path, ["formula.py"], seed=1, size=4)
    assert {m.key[1] for m in few} == {"<module>", "loss", "more"}
    assert [m.key for m in few] == [m.key for m in sample(tmp_path, ["formula.py"], seed=1, size=4)]


def test_given_files_are_drawn_from_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "formula.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text("def more() -> int:\n    return 1 + 1\n")
    files = ["formula.py", "other.py"]
    everything = drawn(tmp_path, files, seed=1, size=None)
    assert {m.key for m in everything} == {
        m.key for m in sample(tmp_path, files, seed=1, size=None)
    }
    few = drawn(tmp_path, files, seed=1, size=3)
    assert [m.key for m in few] == [m.key for m in everything[:3]]
    assert [m.key for m in drawn(tmp_path, files, seed=2, size=3)] != [m.key for m in few]
    alone = drawn(tmp_path, files, seed=1, size=None, only=["other.py:more"])
    assert {m.key[0] for m in alone} == {"other.py"}


def test_defaults_are_found_behind_what_wraps_a_function() -> None:
    class Wrapped:
        @cached_property
        def late(self) -> int:
            return 1

        @property
        def now(self) -> int:
            return 1

        @staticmethod
        @cache
        def kept(x: int = 1) -> int:
            return x

        @contextmanager
        def held(self, x: int = 1) -> Iterator[int]:
            yield x

    module = types.ModuleType("m")
    vars(module)["Wrapped"] = Wrapped
    for name in ("late", "now", "kept", "held"):
        found = named(module, f"Wrapped.{name}")
        assert type(found) is types.FunctionType and found.__name__ == name


def test_functions_that_were_frozen_before_a_mutant_are_changed_too() -> None:
    gc.freeze()
    live = Live.of([__file__])
    assert test_defaults_are_found_behind_what_wraps_a_function in live.functions[__file__]


def test_survivors_need_an_argument_and_arguments_a_survivor(tmp_path: Path) -> None:
    mutants = write(tmp_path, SOURCE)

    def verdict(alive: int, argued: int) -> bool:
        outcomes = [
            Outcome(m, "survived" if i < alive else "killed", "", 1, 0.0)
            for i, m in enumerate((mutants * 40)[:200])
        ]
        distinct = {m.key: "why" for m in (mutants * 40)[:argued]}
        return judge(outcomes, distinct).passed

    assert verdict(0, 0) and not verdict(1, 0) and not verdict(0, 1)


def test_arguments_and_mutants_by_hand_are_about_code_that_stands() -> None:
    assert len(by_hand(ROOT, HERE / "by_hand.toml")) >= 25
    for file, function, before, after in read_arguments(HERE / "argued.toml"):
        found = [x for x in segments(ROOT, file) if x.function == function]
        lines = [" ".join(line.split()) for x in found for line in x.lines]
        assert set(before.split("\n")) <= set(lines), (file, function, before)
        assert before != after


def test_a_change_without_a_meaning_is_no_mutant(tmp_path: Path) -> None:
    (tmp_path / "formula.py").write_text("def one(x: int = 1) -> int:\n    return x\n")
    (segment,) = segments(tmp_path, "formula.py")
    made = [make(tmp_path, point) for point in points(segment, 1)]
    assert all(mutant is None or mutant.before != mutant.after for mutant in made)


CALLED = '''"""A formula."""


def twice(x: float) -> float:
    return x * 2


def thrice(x: float) -> float:
    return x * 3
'''
PROCESSES = '''"""Starts the formula in a process of its own."""
import subprocess
import sys


def test_twice() -> None:
    command = [sys.executable, "-c", "from oxrl.formula import twice; assert twice(3) == 6"]
    assert subprocess.run(command, check=False).returncode == 0
'''
BROKEN = "from oxrl.formula import thrice\n\n\ndef test_of_formula() -> None:\n    assert False\n"


def test_a_survivor_is_tried_by_tests_that_start_processes_and_pass_without_it(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    for name, text in {
        "oxrl/formula.py": CALLED,
        "tests/test_formula.py": PROCESSES,
        "tests/test_broken.py": BROKEN,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = [
        Outcome(x, "survived", "", 0, 0.0)
        for x in sample(root, ["oxrl/formula.py"], seed=1, size=None)
    ]
    said: list[str] = []
    again = once_more(root, found, workers=2, tell=said.append)
    status = {(x.mutant.point.segment.function, x.status) for x in again}
    assert status == {("twice", "killed"), ("thrice", "survived")}
    assert all("formula.py" in line for line in said)
    assert len(said) == sum(x.status == "survived" for x in again)
    assert (root / "oxrl/formula.py").read_text() == CALLED


def test_the_table_of_whole_tests_names_files_that_are_there() -> None:
    table = tomllib.loads((HERE / "whole_tests.toml").read_text())
    for beginning, names in table.items():
        assert list(ROOT.glob(f"{beginning}*")), beginning
        assert [name for name in names if not (ROOT / name).is_file()] == []
