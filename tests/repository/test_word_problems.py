"""The word problems of experiments/word_problems: numbers with names, solutions as formulas."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "experiments" / "word_problems"
DATA = Path(os.environ.get("OXRL_TEST_DATA", ROOT.parent / "shared" / "data"))
sys.path.insert(0, str(FOLDER))
try:
    MADE: dict[str, Any] = runpy.run_path(str(FOLDER / "problems.py"), run_name="problems")
    FORMULAS: dict[str, Any] = runpy.run_path(str(FOLDER / "formulas.py"), run_name="formulas")
finally:
    sys.path.pop(0)
needs_data = pytest.mark.skipif(
    not (DATA / "svamp").is_dir(), reason=f"no SVAMP in {DATA}: set OXRL_TEST_DATA"
)


def test_a_problem_gets_names_for_its_numbers_and_a_formula() -> None:
    text = "Ann has 12 apples and buys 5 more bags of 3.  How many has she?"
    problem = MADE["named"](text, [("5", "*", "3"), ("12", "+", "15")], "27")
    row = problem.row()
    assert row["prompt"] == "Ann has n1 apples and buys n2 more bags of n3. How many has she?"
    assert row["completion"] == "n2*n3 n1+m1"
    assert json.loads(row["answer"]) == {"numbers": [12, 5, 3], "answer": "27"}
    assert FORMULAS["right"](SimpleNamespace(**row), row["completion"]) == 1.0
    assert FORMULAS["right"](SimpleNamespace(**row), "n3*n2 m1+n1") == 1.0
    assert FORMULAS["right"](SimpleNamespace(**row), "n1+n2") == 0.0


@pytest.mark.parametrize(
    ("text", "steps", "answer"),
    [
        ("He has 5 and then half of them.", [("5", "/", "2")], "2"),  # 2 is no number of the text
        ("Two men and 2 dogs.", [("2", "+", "2")], "4"),
        ("5 hens and 5 cocks.", [("5", "+", "5")], "10"),  # which 5?
        ("10 eggs, 4 hens, 14 nests.", [("10", "+", "4"), ("14", "-", "4")], "10"),  # which 14?
        ("3 of 4.5 litres", [("3", "*", "4")], "12"),
        ("7 eggs for 2 men", [("7", "/", "2")], "3"),  # no whole number
        ("7 eggs for 2 men", [("7", "-", "2")], "6"),  # not what the solution says
        ("No numbers.", [], "0"),
    ],
)
def test_problems_that_leave_something_open_are_left_out(
    text: str, steps: list[tuple[str, str, str]], answer: str
) -> None:
    assert MADE["named"](text, steps, answer) is None


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("n1-n2", 8),
        ("n2 / n1", Fraction(1, 5)),
        ("n1*n2m1+n1", 30),
        ("m1+n1", None),  # there is no result yet
        ("n1+n3", None),
        ("n1/n3", None),
        ("n1+n1 m1-m1 n1+n2", None),
        ("n1-", None),
        ("n1--n2", None),
        ("10-2", None),
        ("", None),
        ("n2-n2 n1/m1", None),
    ],
)
def test_formulas_have_a_value_or_none(formula: str, value: int | Fraction | None) -> None:
    assert FORMULAS["value"](formula, [10, 2]) == value


def test_floors_are_counted_on_the_test_part() -> None:
    def problem(numbers: tuple[int, ...], formula: str, answer: int) -> Any:
        return MADE["Problem"]("n1 n2", numbers, formula, str(answer))

    learned = [problem((1, 2), "n1+n2", 3), problem((2, 1), "n1+n2", 3)]
    test = [problem((1, 4), "n1+n2", 5), problem((9, 2), "n1-n2", 7), problem((4, 2), "n2*n1", 8)]
    shares = MADE["floors"]([*learned, test[1]], test)
    assert shares == {"most_frequent": 1 / 3, "shuffled": 0.0}


@needs_data
@pytest.mark.parametrize(("name", "steps"), [("svamp", {0}), ("gsm8k", {1})])
def test_the_parts_of_a_dataset_share_no_words(name: str, steps: set[int]) -> None:
    found = vars(MADE["parts"](name, DATA))
    texts = [problem.text for part in found.values() for problem in part]
    assert len(texts) == len({*texts}) and min(map(len, found.values())) >= 60
    assert {problem.formula.count(" ") for problem in found["test"]} == steps
    for problem in found["test"]:
        row = problem.row()
        assert FORMULAS["right"](SimpleNamespace(**row), row["completion"]) == 1.0, row


def test_results_are_told_with_every_seed() -> None:
    made = runpy.run_path(str(FOLDER / "page.py"), run_name="page")
    ks = {f"pass@{k}": 0.5 for k in made["KS"][1:]}
    lines = [
        {"dataset": "svamp", "family": "dpo", "seed": seed, "pass@1": share, "cpu_s": 9.6, **ks}
        for seed, share in ((1, 0.25), (0, 0.125))
    ]
    table = made["table"](lines)
    told = "12.5 [7, 22], 25.0 [17, 36] | 18.8 [12, 29]"
    assert table[2] == f"| svamp | dpo | {told} |{' 50.0 [39, 61] |' * 7} 10 |"
    assert table[0].count("|") == table[1].count("|") == table[2].count("|")
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    kept = made["read"](FOLDER / "results.jsonl")
    assert readme == made["page"](readme, kept), "run experiments/word_problems/page.py"


@pytest.mark.full
@needs_data
@pytest.mark.timeout(900)
def test_word_problems_go_through_every_family(tmp_path: Path) -> None:
    given = ["--data", str(DATA), "--datasets", "svamp", "--dry-run"]
    given += ["--out", str(tmp_path), "--work", str(tmp_path / "work")]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *given],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["family"] for line in lines] == ["warm", "sft", "dpo", "sgrpo", "ppo"]
    assert all("pass@4" in line for line in lines)
    assert len(lines[3]["curve"]) == len(lines[4]["curve"]) == 2
