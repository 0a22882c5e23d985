"""Published word problems with names for their numbers, and formulas for their solutions.

"Each pack costs 76 dollars, with 25 off ..." becomes "Each pack costs n1 dollars, with n2 off ...",
and its solution n1-n2; a second step may use the first one's result: "n1*n2 m1+n3". A problem is
kept if every number that its solution uses stands in its text, once, or is such a result.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formulas import value

NUMBER = re.compile(r"(?<![\w.,$/])\d{1,3}(?![\w,/]|\.\d)")
STEP = re.compile(r"<<(\d+)([+\-*/])(\d+)=(\d+)>>")
EQUATION = re.compile(r"\( (\d+)\.0 ([+\-*/]) (\d+)\.0 \)")
# Words that are numbers of the solution: they would have no name.
HIDDEN = re.compile(
    r"\b(half|twice|double|triple|third|quarter|dozen|thrice|one|two|three|four|five|six|seven|eight"
    r"|nine|ten)\w*|[%/]",
    re.IGNORECASE,
)
LONGEST = 220  # characters of a text
MOST_NUMBERS = 6
# Problems of the test part, and as many of the validation part.
TESTS = {"svamp": 80, "gsm8k": 64}


@dataclass(frozen=True)
class Problem:
    """text: with n1, n2 in place of its numbers. answer: what the formula gives of the numbers."""

    text: str
    numbers: tuple[int, ...]
    formula: str
    answer: str

    def row(self) -> dict[str, str]:
        """As a line of a data file; what the reward compares with is all in `answer`."""
        given = {"numbers": self.numbers, "answer": self.answer}
        return {"prompt": self.text, "answer": json.dumps(given), "completion": self.formula}


@dataclass(frozen=True)
class Parts:
    """No text is in two of them.

    told: problems with solutions, that the first model learns from. asked: those that families
    learn from. validation: to choose settings on. test: what is reported.
    """

    told: Sequence[Problem]
    asked: Sequence[Problem]
    validation: Sequence[Problem]
    test: Sequence[Problem]


def named(text: str, steps: Sequence[tuple[str, str, str]], answer: str) -> Problem | None:
    """A problem, if all of its solution can be found in its text.

    Args:
        text: as published. steps: (number, operator, number), each with its own result. answer: as
            published, a whole number.
    """
    text = " ".join(text.split())
    found = [int(number) for number in NUMBER.findall(text)]
    if len(text) > LONGEST or HIDDEN.search(text) or not steps or len(found) > MOST_NUMBERS:
        return None
    if len(set(found)) < len(found):
        return None
    places = iter(range(1, len(found) + 1))
    marked = NUMBER.sub(lambda match: f"n{next(places)}", text)
    results: list[int] = []
    formula: list[str] = []
    for left, operator, right in steps:
        names = [name_of(int(number), found, results) for number in (left, right)]
        result = value(f"n1{operator}n2", [int(left), int(right)])
        # A result that stands in the text as well would leave open which of the two is meant.
        if None in names or names[0] == names[1] or result is None or result in found:
            return None
        if result.denominator != 1:
            return None
        results.append(int(result))
        formula.append(f"{names[0]}{operator}{names[1]}")
    if str(results[-1]) != answer:
        return None
    return Problem(marked, tuple(found), " ".join(formula), answer)


def name_of(number: int, found: Sequence[int], results: Sequence[int]) -> str | None:
    """Of a number of a solution: in the text, or as the result of an earlier step."""
    if number in results:
        return f"m{results.index(number) + 1}"
    if number in found:
        return f"n{found.index(number) + 1}"
    return None


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def svamp(folder: Path) -> list[Problem]:
    """SVAMP's problems that can be kept."""
    found: list[Problem | None] = []
    for row in lines_of(folder / "svamp" / "svamp.jsonl"):
        match = EQUATION.fullmatch(row["Equation"])
        if match is not None:
            text = f"{row['Body'].rstrip('. ')}. {row['Question']}"
            found.append(named(text, [match.groups()], str(int(row["Answer"]))))
    return [problem for problem in found if problem is not None]


def gsm8k(folder: Path) -> list[Problem]:
    """GSM8K's problems of one or two steps that can be kept, of both of its files."""
    found: list[Problem | None] = []
    for part in ("train", "test"):
        for row in lines_of(folder / "gsm8k" / f"{part}.jsonl"):
            steps = [(one, sign, other) for one, sign, other, _ in STEP.findall(row["answer"])]
            if len(steps) in (1, 2) and row["answer"].count("<<") == len(steps):
                answer = row["answer"].rpartition("####")[2].strip()
                found.append(named(row["question"], steps, answer))
    return [problem for problem in found if problem is not None]


def parts(name: str, folder: Path) -> Parts:
    """The problems of a dataset, always cut alike.

    Args:
        name: svamp or gsm8k. folder: of both, as they were published.
    """
    problems = svamp(folder) if name == "svamp" else gsm8k(folder)
    problems = [*{problem.text: problem for problem in problems}.values()]
    random.Random(0).shuffle(problems)
    tests = TESTS[name]
    learned = problems[2 * tests :]
    half = len(learned) // 2
    return Parts(learned[:half], learned[half:], problems[tests : 2 * tests], problems[:tests])


def floors(learned: Sequence[Problem], test: Sequence[Problem]) -> dict[str, float]:
    """What can be had without reading: shares of right answers on the test part.

    most_frequent: always the formula that most of the learned have. shuffled: the right formula of
    another question.
    """
    frequent = Counter(problem.formula for problem in learned).most_common(1)[0][0]
    right: Counter[str] = Counter()
    for place, problem in enumerate(test):
        answer = int(problem.answer)
        right["most_frequent"] += value(frequent, problem.numbers) == answer
        right["shuffled"] += value(test[place - 1].formula, problem.numbers) == answer
    return {name: count / len(test) for name, count in right.items()}
