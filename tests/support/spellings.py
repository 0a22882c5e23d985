"""Answers by meaning, and the ways in which models write them: two are the same answer exactly if
they share the meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

SPACES = (" ", "\u00a0", "\u202f", "\u2009", "~", "\\,", "\\ ", "\\;", "{,}", ",")


def grouped(*digits: str) -> list[str]:
    """A number with every spelling of what stands between its thousands."""
    return ["".join(digits), *(space.join(digits) for space in SPACES)]


# Meaning -> its spellings, within one topic: only meanings of a topic are held against each other.
NUMBERS = {
    "1": ["1", "1.0", "+1"],
    "0": ["0", "0.0"],
    "42": ["42", "42.0", "42.00", "\\$42", "\\$42.00", "42 \\text{ km}", "42\\%"],
    "43": ["43", "43.0", "\\$43"],
    "-42": ["-42", "−42", "-\\$42", "- 42"],
    "1000": [*grouped("1", "000"), "1000.0", "\\$1 000", "1 000 \\text{ km}", "10^3"],
    "-1000": ["-1000", "-1 000", "-1,000", "−1 000"],
    "1001": grouped("1", "001"),
    "1000.5": ["1000.5", "1 000.5", "1,000.5", "1\u202f000.5", "1\\,000.5"],
    "12000": grouped("12", "000"),
    "1234567": [*grouped("1", "234", "567"), "1234567.0"],
    "1234568": grouped("1", "234", "568"),
    "half": ["\\frac{1}{2}", "1/2", "0.5", "\\dfrac12", "0.50", "\\tfrac{2}{4}"],
    "root": ["2\\sqrt{3}", "\\sqrt{12}", "2 \\sqrt 3"],
}
SOLUTIONS = {
    "1, 2": [
        "x = 1 \\text{ or } x = 2",
        "x = 2 \\text{ or } x = 1",
        "x = 1, x = 2",
        "x = 1, 2",
        "x=1 \\text{ or } 2",
        "1, 2",
        "2, 1",
        "\\{1, 2\\}",
        "x \\in \\{1, 2\\}",
        "x = 1 \\lor x = 2",
        "x = 1 \\vee x = 2",
        "x_1 = 1, x_2 = 2",
        "x_1 = 2, x_2 = 1",
        "x_{1} = 1 \\text{ and } x_{2} = 2",
        "1 \\text{ and } 2",
        "1 \\text{ or } 2",
        "x = 1; x = 2",
        "x = 2 \\quad \\text{or} \\quad x = 1",
    ],
    "1, 3": ["x = 1 \\text{ or } x = 3", "x_1 = 1, x_2 = 3", "1, 3", "x=3, x=1"],
    "1": ["x = 1", "1"],
    "2": ["x = 2", "2"],
    "-2, 2": ["x = \\pm 2", "\\pm 2", "x = 2, x = -2", "-2, 2", "x = -2 \\text{ or } x = 2"],
    "1, 2, 3": ["x = 1, 2, 3", "x = 1, x = 2, x = 3", "1, 2 \\text{ and } 3", "\\{3, 2, 1\\}"],
    "roots": [
        "x = \\sqrt{2} \\text{ or } x = -\\sqrt{2}",
        "x = \\pm\\sqrt{2}",
        "\\sqrt{2}, -\\sqrt{2}",
        "x_1 = -\\sqrt{2}, x_2 = \\sqrt{2}",
    ],
    "halves": ["x = \\frac{1}{2} \\text{ or } x = -3", "x = 0.5, x = -3", "-3, \\frac12"],
}
POINTS = {
    "(1, 2), (3, 4)": [
        "(1, 2), (3, 4)",
        "(3, 4), (1, 2)",
        "(1, 2) \\text{ and } (3, 4)",
        "(1, 2) \\text{ or } (3, 4)",
        "(x, y) = (1, 2) \\text{ or } (x, y) = (3, 4)",
        "(x, y) = (3, 4), (x, y) = (1, 2)",
        "(x, y) = (1, 2), (3, 4)",
        "\\{(1, 2), (3, 4)\\}",
        "(x, y) \\in \\{(1, 2), (3, 4)\\}",
    ],
    "(2, 1), (3, 4)": ["(2, 1), (3, 4)", "(x, y) = (2, 1) \\text{ or } (x, y) = (3, 4)"],
    "(1, 2), (4, 3)": ["(1, 2), (4, 3)", "(1, 2) \\text{ and } (4, 3)"],
    "(1, 2)": ["(1, 2)", "(x, y) = (1, 2)", "x = 1, y = 2", "x = 1 \\text{ and } y = 2"],
    "(2, 1)": ["(2, 1)", "(x, y) = (2, 1)", "x = 2, y = 1"],
    "(3, 4)": ["(3, 4)"],
    "(1, 2), (2, 1) by name": [
        "x = 1, y = 2 \\text{ or } x = 2, y = 1",
        "(x, y) = (2, 1) \\text{ or } (x, y) = (1, 2)",
        "(1, 2), (2, 1)",
    ],
}
INEQUALITIES = {
    "x < 1": ["x < 1", "1 > x", "-x > -1", "-1 < -x", "x - 1 < 0", "2x < 2", "(-\\infty, 1)"],
    "x <= 1": ["x \\le 1", "1 \\ge x", "-x \\ge -1", "x - 1 \\leq 0", "(-\\infty, 1]"],
    "x > 1": ["x > 1", "1 < x", "-x < -1", "-1 > -x", "0 < x - 1", "(1, \\infty)"],
    "x > -1": ["x > -1", "-1 < x", "-x < 1", "x + 1 > 0", "(-1, \\infty)"],
    "x < -1": ["x < -1", "-x > 1", "-1 > x", "x + 1 < 0"],
}
POLYNOMIALS = {
    "cubic": ["x^3+2x^2+3x+4", "x^3 + 2 x^2 + 3 x + 4", "4 + 3x + 2x^2 + x^3"],
    "cubic, 5": ["x^3+2x^2+3x+5", "5 + 3 x + 2 x^2 + x^3"],
    "fifth": [
        "x^5 - 3x^4 + 2x^3 - 7x^2 + x - 1",
        "x^5 - 3 x^4 + 2 x^3 - 7 x^2 + x - 1",
        "-1 + x - 7x^2 + 2x^3 - 3x^4 + x^5",
        "x^{5} - 3x^{4} + 2x^{3} - 7x^{2} + x - 1",
    ],
    "fifth, sign": ["x^5 - 3x^4 + 2x^3 + 7x^2 + x - 1", "-1 + x + 7x^2 + 2x^3 - 3x^4 + x^5"],
    "tenth": [
        "x^{10}+x^9+x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1",
        "x^{10} + x^9 + x^8 + x^7 + x^6 + x^5 + x^4 + x^3 + x^2 + x + 1",
        "1 + x + x^2 + x^3 + x^4 + x^5 + x^6 + x^7 + x^8 + x^9 + x^{10}",
    ],
    "two": ["x^2 + 2xy + y^2", "(x + y)^2", "y^2 + 2 x y + x^2"],
    "two, 3": ["x^2 + 3xy + y^2"],
    "factors": ["(x-1)(x-2)", "x^2 - 3x + 2", "x^2-3x+2", "(x - 2)(x - 1)"],
    "2x": ["2x", "2 x"],
    "1": ["1"],
    "2": ["2"],
    "4": ["4"],
}
TOPICS = {
    "numbers": NUMBERS,
    "solutions": SOLUTIONS,
    "points": POINTS,
    "inequalities": INEQUALITIES,
    "polynomials": POLYNOMIALS,
}
WRITTEN = (
    "{}",
    "${}$",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "<answer>${}$</answer>",
    "#### {}",
    "The answer is ${}$.",
    "The answer is {}",
    "So after all of that, we get \\[ \\boxed{{{}}} \\]",
    "**Final Answer:** ${}$",
)
PLAIN = {"\\text{ or }": " or ", "\\text{ and }": " and ", "\\text{ km}": "km", "\\quad": " "}


def plain(text: str) -> str:
    """A spelling without the commands for words, as it stands outside of formulas."""
    for command, word in PLAIN.items():
        text = text.replace(command, word)
    return text


def table(topic: str, step: int = 1) -> Iterator[tuple[str, str, bool]]:
    """Ground truth, response, and whether it is right.

    Args:
        topic: a key of TOPICS.
        step: take every so many of them; the ways of writing come round.
    """
    meanings = TOPICS[topic]
    place = 0
    ways = itertools.cycle(WRITTEN)
    for meant, said in itertools.product(meanings, repeat=2):
        for gold, answer in itertools.product(meanings[meant], meanings[said]):
            way = next(ways)
            place += 1
            if place % step:
                continue
            text = answer if "$" in way or "boxed" in way else plain(answer)
            yield gold, way.format(text), meant == said
