"""math_reward on inequalities, intervals, sets and tuples: every spelling of every meaning against
every other meaning. One wrong acceptance teaches a policy the wrong sign.
"""

from __future__ import annotations

import itertools

import pytest

from oxrl.rewards import math_reward

# Meaning -> its spellings. Two spellings are the same answer exactly if they share the meaning.
MEANINGS = {
    "x < 5": ["x < 5", "5 > x", "x \\lt 5", "(-\\infty, 5)", "x \\in (-\\infty, 5)", "2x < 10"],
    "x <= 5": ["x <= 5", "x ≤ 5", "x \\le 5", "x\\leq5", "5 \\geqslant x", "(-\\infty, 5]"],
    "x > 5": ["x>5", "5 < x", "x \\gt 5", "(5, \\infty)", "x \\in (5, +\\infty)", "-x < -5"],
    "x >= 5": ["x >= 5", "x ≥ 5", "x \\ge 5", "x \\geqslant 5", "5 <= x", "[5, \\infty)"],
    "x = 5 or 5": ["x = 5", "5", "5.0", "\\frac{10}{2}"],
    "x != 5": ["x != 5", "x ≠ 5", "x \\ne 5", "5 \\neq x", "(-\\infty, 5) \\cup (5, \\infty)"],
    "-5": ["-5", "x = -5"],
    "x < -5": ["x < -5", "-5 > x", "-x > 5"],
    "x < 3": ["x < 3", "3 > x"],
    "x > 1": ["x > 1", "1 < x"],
    "1 < x < 3": ["1 < x < 3", "3 > x > 1", "(1, 3)", "x \\in (1, 3)", "x > 1 \\text{ and } x < 3"],
    "1 <= x < 3": ["1 \\le x < 3", "1 <= x < 3", "3 > x ≥ 1", "[1, 3)", "x \\in [1,3)"],
    "1 < x <= 3": ["1 < x \\le 3", "1<x<=3", "3 \\ge x > 1", "\\left(1, 3\\right]", "]1, 3]"],
    "1 <= x <= 3": ["1 \\le x \\leq 3", "1≤x≤3", "3 >= x >= 1", "[1, 3]", "x \\in [1, 3]"],
    "x < 1 or x > 3": ["x<1 or x>3", "x > 3 \\text{ or } x < 1", "(-\\infty,1)\\cup(3,\\infty)"],
    "x <= 1 or x >= 3": ["x \\le 1 \\text{ or } x \\ge 3", "(-\\infty, 1] \\cup [3, \\infty)"],
    "1 and 3": ["\\{1, 3\\}", "\\{3, 1\\}", "x = 1, 3", "x=1 \\text{ or } x=3", "3, 1"],
    "the point (3, 1)": ["(3, 1)"],
    "-5 and 5": ["\\pm 5", "±5", "x = \\pm 5", "5, -5", "\\{-5, 5\\}"],
    "-5 < x < 5": ["-5 < x < 5", "|x| < 5", "5 > x > -5", "x^2 < 25"],
    "-5 <= x <= 5": ["[-5, 5]", "|x| \\le 5"],
    "1 < y < 3": ["1 < y < 3", "3 > y > 1"],
    "x + y < 5": ["x + y < 5", "5 > y + x", "y < 5 - x", "2x + 2y < 10"],
    "x + y <= 5": ["x + y \\le 5"],
    "x + y > 5": ["x + y > 5"],
    "a < b < c": ["a < b < c", "c > b > a"],
    "a < c < b": ["a < c < b"],
}
# An interval names no variable, so it is whichever the other names.
NAMELESS = {("1 < x < 3", "1 < y < 3"), ("1 < y < 3", "1 < x < 3")}
WRITTEN = ["so it is \\boxed{{{}}}", "The answer is ${}$.", "done\n#### {}", "{}"]


@pytest.mark.parametrize("meant", MEANINGS)
def test_an_answer_is_accepted_exactly_if_it_means_the_same(meant: str) -> None:
    wrong: list[tuple[str, str, float | None]] = []
    ways = itertools.cycle(WRITTEN)
    for said, answers in MEANINGS.items():
        if (meant, said) in NAMELESS:
            continue
        for gold, answer in itertools.product(MEANINGS[meant], answers):
            response = next(ways).format(answer)
            value = math_reward(response, gold).value
            if value != float(said == meant):
                wrong.append((gold, response, value))
    assert wrong == []


SAME = [
    ("x>5 or x<-5", "|x|>5"),
    ("x < \\frac{1}{2}", "x<0.5"),
    ("x > -\\sqrt{2}", "-\\sqrt2 < x"),
    ("\\frac{3\\pi}{2} \\le x", "x \\geq \\frac{3\\pi}{2}"),
    ("1/2 < x < 3/4", "(\\frac12, \\frac34)"),
    ("x<10\\%", "x<0.1"),
    ("x<1,000", "x<1000"),
    ("x < 1{,}000", "1000>x"),
    ("f(2)<f(1)<f(4)", "f(4)>f(1)>f(2)"),
    ("x_1 < x_2", "x_2 > x_1"),
    ("\\theta > 3", "3 < \\theta"),
    ("x \\in (1,3) \\cup (5,7)", "1<x<3 or 5<x<7"),
    ("x<1, x>3", "x>3, x<1"),
    ("x \\in \\mathbb{R}, x \\ne 5", "x \\ne 5"),
    ("x \\in \\mathbb{R} \\setminus \\{5\\}", "x\\not=5"),
    ("\\{x \\mid 1<x<3\\}", "(1,3)"),
    ("x \\not> 5", "x \\le 5"),
    ("x > 5 \\text{ cm}", "x>5 \\text{ cm}"),
    ("x=2, y=3", "(2, 3)"),
    ("[a, 2)", "[a,2)"),
    ("1/x < 1", "x > 1 or x < 0"),
    ("x = 5", "5 = x"),
]
DIFFERENT = [
    ("x<1 and x>3", "x<2 and x>5"),  # nothing fulfils either
    ("x<1, x>3", "x<1, x>4"),
    ("x<5", "x<5 or x>7"),
    ("x \\in (1,3) \\cup (5,7)", "(1,7)"),
    ("f(2)<f(1)<f(4)", "f(1)<f(2)<f(4)"),
    ("0<a<b", "0<b<a"),
    ("x + y < 5", "x - y < 5"),
    ("(2,3)", "x=3, y=2"),
    ("x=2, y=3", "\\{2, 3\\}"),
    ("x=2, y=3", "x=3, y=2"),
    ("(1,2,3)", "(1,3,2)"),
    ("(1,2,3)", "\\{1,2,3\\}"),
    ("[1,2]", "\\{1,2\\}"),
    ("[1,2]", "1, 2"),
    ("[5,5]", "(5,5)"),
    ("1 \\pm 2", "3"),
    ("5, 6", "5"),
    ("5", "5 or 6"),
    ("6", "5 and 6"),
    ("5", "<5"),
    ("5", "\\ge 5"),
    ("5", "x => 5"),
    ("5", "(5, \\infty)"),
    ("3 < 5", "3 < 7"),
    ("5", "3 < 5"),
    ("x>5", "\\mathbb{R}"),
    ("x>0", "x"),
    ("x \\notin (1,3)", "x \\in (1,3)"),
    ("x<5", "\\lnot (x<5)"),
    ("x \\gg 5", "x \\ll 5"),
    ("x=5", "x \\equiv 5"),
    ("y = 5", "x = 5"),
    ("x^2 = 25", "x = 5"),
    ("x < 1,000", "x < 1"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_another_spelling_of_the_same_answer_is_accepted(one: str, other: str) -> None:
    for gold, answer in ((one, other), (other, one)):
        for written in WRITTEN:
            score = math_reward(written.format(answer), gold)
            assert score.value == 1.0, (gold, written.format(answer), score.reason)


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_another_answer_is_not_accepted(one: str, other: str) -> None:
    for gold, answer in ((one, other), (other, one)):
        for written in WRITTEN:
            assert math_reward(written.format(answer), gold).value == 0.0, (gold, answer)


@pytest.mark.parametrize(
    "response",
    [
        "He has 3*4=<<3*4=12>>12 apples",
        "so the total => 12",
        "3 + 9 -> 12",
        "\\boxed{12}<|im_end|>",
        "<b>12</b>",
        "4 < 5, so it is 12",
        "> quoted\n> 12",
        "The answer is 12, since 4 < 5.",
    ],
)
def test_an_arrow_a_tag_or_a_comparison_elsewhere_does_not_hide_a_number(response: str) -> None:
    assert math_reward(response, "12").value == 1.0


@pytest.mark.parametrize(
    "answer", ["1/0 < x", "x < 1/0", "x << 5", "< < <", "\\{1/0", "x \\in (", "<"]
)
def test_a_malformed_relation_is_a_wrong_answer(answer: str) -> None:
    assert math_reward(f"\\boxed{{{answer}}}", "x < 5").value == 0.0
