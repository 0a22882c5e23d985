"""Pairs of a ground truth and a response, right or wrong by construction.

A family draws numbers and builds meanings from them, each with several spellings: two spellings are
the same answer exactly if they share the meaning. What says something about a number, and not that
the answer is this number, is a meaning of its own.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import comb, factorial

Meanings = dict[str, list[str]]

# Spellings that hold LaTeX or symbols stand in formulas; those of words alone in sentences.
IN_FORMULAS = (
    "so it is \\boxed{{{}}}",
    "The answer is ${}$.",
    "Hence\n#### ${}$",
    "<answer>\\({}\\)</answer>",
    "**Final Answer:** $${}$$",
    "First 1 + 1 = 2. Then \\[ \\boxed{{{}}} \\]",
)
IN_SENTENCES = (
    "The answer is {}.",
    "After 2 steps:\n#### {}",
    "<answer>{}</answer>",
    "So the answer is: **{}**",
    "Final answer: {}",
    "so it is \\boxed{{\\text{{{}}}}}",
)


@dataclass(frozen=True)
class Pair:
    """One question to the reward.

    Args:
        family: name of the function that built it.
        gold: the ground truth.
        response: of a model.
        same: whether it is right.
    """

    family: str
    gold: str
    response: str
    same: bool


def number(rng: random.Random) -> Meanings:
    """A plain number, and statements that hold it and mean another thing."""
    n = rng.randrange(13, 60)
    m = n + rng.randrange(1, 9)
    x = rng.choice("nikxyabcpqrtz")
    greek = rng.choice(("\\pi", "π", "\\alpha", "θ", "\\lambda"))
    meanings = {
        "n": [
            f"{n}",
            f"{n}.0",
            f"\\${n}",
            f"{n} apples",
            f"{n} \\text{{ apples}}",
            f"{n}\\text{{ km}}",
            f"{n} dollars",
            f"{n}\\%",
            f"x = {n}",
            f"{n} \\text{{ km}}^2",
            f"{n} times",
            f"{n} units in total",
        ],
        "-n": [f"-{n}", f"−{n}", f"-{n}.00", f"negative {n}", f"minus {n}", f"- {n} \\text{{ m}}"],
        "m": [f"{m}", f"{m} apples"],
        "letter": [f"{n}{x}", f"{n} {x}"],
        "greek": [f"{n}{greek}", f"{n} {greek}"],
        "n squared": [f"{n}²", f"{n}^2", f"{n**2}"],
        "cubed": [f"{n}³", f"{n}^{{3}}", f"{n**3}"],
        "million": [f"{n} million", f"{n},000,000", f"{n} \\text{{ million}}", f"{n}000000"],
        "thousand": [f"{n} thousand", f"{n}000", f"{n},000", f"{n} \\times 10^3"],
        "dozen": [f"{n} dozen", f"{12 * n}"],
        "sum": [f"{n} + {x}", f"{x} + {n}"],
        "root": [f"\\sqrt{{{n}}}", f"√{n}"],
        "product": [f"{n * m}", f"{n} \\times {m}", f"{n} \\cdot {m}"],
        "difference": [f"{m} - {n}", f"{m - n}"],
        "power": [f"{n}^{{{x}}}"],
        "place": [f"{x}_{n}"],
    }
    for phrase in rng.sample(UNSAID, 12):
        text = phrase.format(n=n, m=m)
        meanings[text] = [text]
    return meanings


UNSAID = (
    "not {n}",
    "not equal to {n}",
    "never {n}",
    "less than {n}",
    "more than {n}",
    "fewer than {n}",
    "greater than {n}",
    "at most {n}",
    "at least {n}",
    "no more than {n}",
    "up to {n}",
    "under {n}",
    "over {n}",
    "below {n}",
    "{n} to {m}",
    "{n} or {m}",
    "{n} and {m}",
    "{n} - {m}",
    "{n}–{m}",
    "{n}:{m}",
    "from {n} to {m}",
    "between {n} and {m}",
    "either {n} or {m}",
    "{n} or more",
    "{n} at most",
    "{n} at least",
    "{n} or less",
    "{n} plus {m}",
    "{n} times 2",
    "{n} divided by {m}",
    "{n} over {m}",
    "{n} out of {m}",
    "{n} factorial",
    "{n} squared",
    "twice {n}",
    "double {n}",
    "half of {n}",
    "half {n}",
    "the square root of {n}",
    "the square of {n}",
    "{n} choose 2",
    "{n} mod {m}",
    "{n} remainder 2",
    "{n} is wrong",
    "{n} is not the answer",
    "{n} and a half",
    "{n} percent of {m}",
    "{n} more than {m}",
    "{n} less than {m}",
    "\\text{{at least }}{n}",
    "\\text{{not }}{n}",
    "\\text{{less than }}{n}",
    "{n} \\text{{ is wrong}}",
    "{n} \\text{{ or }} {m}",
    "{n} \\text{{ to }} {m}",
    "\\text{{twice }}{n}",
    "{n}!",
    "{n}\\,!",
    "{n} ± 1",
    "≤ {n}",
)


def unsaid_alone(rng: random.Random) -> Meanings:
    """Whole sentences that deny a number, or bound it."""
    n = rng.randrange(4, 60)
    sentences = [
        f"The answer is not {n}",
        f"The answer isn't {n}",
        f"The answer cannot be {n}",
        f"It is false that the answer is {n}",
        f"The answer is less than {n}",
        f"The answer is at most {n} apples",
        f"{n} is not the answer",
        f"{n} is wrong",
        f"The answer is {n} or {n + 1}",
        f"She does not have {n}",
        f"So there are between {n} and {n + 2} of them",
        f"The answer is {n} times 2",
    ]
    return {"n": [f"{n}"]} | {text: [text] for text in rng.sample(sentences, 6)}


def factorials(rng: random.Random) -> Meanings:
    n = rng.randrange(4, 9)
    k = rng.randrange(2, n - 1)
    return {
        "n": [f"{n}"],
        "n!": [
            f"{n}!",
            f"{factorial(n)}",
            f"{n} \\cdot {n - 1}!",
            f"{factorial(n)} \\text{{ ways}}",
        ],
        "choose": [f"\\binom{n}{k}", f"\\binom{{{n}}}{{{k}}}", f"{comb(n, k)}"],
        "other": [f"\\binom{{{n + 1}}}{{{k}}}", f"{comb(n + 1, k)}"],
        "quotient": [f"\\frac{{{n + 3}!}}{{{n}!}}", f"{factorial(n + 3) // factorial(n)}"],
    }


def fractions(rng: random.Random) -> Meanings:
    whole = rng.randrange(2, 9)
    bottom = rng.choice((3, 7, 9, 11, 13))
    top = rng.randrange(1, bottom)
    mixed = whole * bottom + top
    return {
        "mixed": [
            f"{mixed}/{bottom}",
            f"{whole} {top}/{bottom}",
            f"{whole}\\frac{{{top}}}{{{bottom}}}",
            f"\\frac{{{mixed}}}{{{bottom}}}",
            f"\\dfrac{{{2 * mixed}}}{{{2 * bottom}}}",
            f"**{mixed}/{bottom}**",
            f"{mixed}/{bottom} hours",
            f"\\frac{{{mixed}}}{{{bottom}}} \\text{{ hours}}",
            f"{whole} {top}/{bottom} hours",
            f"{whole} + \\frac{{{top}}}{{{bottom}}}",
            f"\\frac{{{mixed}}}{{{bottom}}}.",
        ],
        "-mixed": [
            f"-{mixed}/{bottom}",
            f"-{whole} {top}/{bottom}",
            f"-\\frac{{{mixed}}}{{{bottom}}}",
        ],
        "product": [f"{whole} \\cdot \\frac{{{top}}}{{{bottom}}}", f"{whole * top}/{bottom}"],
        "whole": [f"{whole}", f"{whole} hours"],
        "top": [f"{mixed}"],
        "upside down": [f"{bottom}/{mixed}", f"\\frac{{{bottom}}}{{{mixed}}}"],
    }


def scientific(rng: random.Random) -> Meanings:
    digits = rng.choice(("3.2", "1.05", "6.7", "9.11"))
    power = rng.randrange(2, 7)
    value = Fraction(digits) * 10**power
    small = f"0.{'0' * (power - 1)}{digits.replace('.', '')}"
    raised = "".join("⁰¹²³⁴⁵⁶⁷⁸⁹"[int(digit)] for digit in str(power))
    ups = [
        f"{digits}e{power}",
        f"{digits}E+{power}",
        f"{digits} \\times 10^{power}",
        f"{digits}×10^{power}",
        f"{digits} \\cdot 10^{{{power}}}",
        f"{digits} × 10{raised}",
        f"{digits}*10^{power}",
    ]
    if value.denominator == 1:
        ups += [f"{value.numerator}", f"{value.numerator:,}"]
    return {
        "up": ups,
        "down": [
            f"{digits}e-{power}",
            f"{digits}×10^-{power}",
            f"{digits} \\times 10^{{-{power}}}",
            f"{digits} × 10⁻{raised}",
            small,
        ],
        "next": [f"{digits}e{power + 1}", f"{digits} \\times 10^{{{power + 1}}}"],
        "digits": [digits],
    }


def recurring(rng: random.Random) -> Meanings:
    digit = rng.randrange(1, 9)
    pair = rng.choice((12, 27, 45, 63))
    return {
        "one": [
            f"0.\\overline{digit}",
            f"0.\\overline{{{digit}}}",
            f"\\frac{{{digit}}}{{9}}",
            f"{digit}/9",
            f"0.\\bar{{{digit}}}",
            f"0.\\dot{{{digit}}}",
        ],
        "two": [f"0.\\overline{{{pair}}}", f"\\frac{{{pair}}}{{99}}", f"{pair}/99"],
        "later": [f"2.5\\overline{{{digit}}}", f"\\frac{{{225 + digit}}}{{90}}"],
        "short": [f"0.{digit}"],
        "short two": [f"0.{pair}"],
    }


def complex_numbers(rng: random.Random) -> Meanings:
    a = rng.randrange(2, 9)
    b = rng.randrange(2, 9)
    return {
        "-1": ["i^2", "-1", "e^{i\\pi}", "i \\cdot i"],
        "-i": ["\\frac1i", "-i", "\\frac{1}{i}", "i^3"],
        "ai": [f"\\sqrt{{-{a * a}}}", f"{a}i", f"{a} i"],
        "a": [f"{a}", f"\\sqrt{{{a * a}}}"],
        "-a": [f"-{a}", f"{a}i^2"],
        "sum": [f"{a}+{b}i", f"{b}i + {a}", f"{a} + {b}i"],
        "conjugate": [f"{a}-{b}i", f"-{b}i + {a}"],
        "turned": [f"{b + 20}+{a}i"],
    }


def sets_by_name(rng: random.Random) -> Meanings:
    n = rng.randrange(1, 9)
    return {
        "none": [
            "\\emptyset",
            "\\varnothing",
            "∅",
            "\\{\\}",
            "no solution",
            "no solutions",
            "the empty set",
            "\\text{no solution}",
            "There is no solution",
        ],
        "all": [
            "\\mathbb{R}",
            "(-\\infty, \\infty)",
            "all real numbers",
            "\\text{all real numbers}",
            "x \\in \\mathbb{R}",
            "ℝ",
        ],
        "0": ["0", "\\{0\\}"],
        "n": [f"{n}", f"\\{{{n}\\}}"],
        "half": ["(0, \\infty)", "x > 0"],
    }


def logarithms(rng: random.Random) -> Meanings:
    n = rng.choice((2, 3, 5, 7))
    return {
        "ln": [f"\\ln {n}", f"\\log_e {n}", f"\\log_{{e}}({n})", f"\\ln({n})", f"\\log_e({n})"],
        "two": [f"\\log_2 {n + 1}", f"\\log_{{2}}({n + 1})"],
        "n": [f"{n}"],
        "double": [f"2\\ln {n}", f"\\ln {n * n}", f"\\log_e {n * n}"],
    }


def angles(rng: random.Random) -> Meanings:
    n = rng.choice((30, 45, 60, 90, 120))
    return {
        "n": [f"{n}^\\circ", f"{n}°", f"{n} degrees", f"{n}^{{\\circ}}", f"{n} \\text{{ degrees}}"],
        "m": [f"{n + 15}^\\circ", f"{n + 15} degrees"],
        "radians": [f"{n}\\pi"],
    }


def points(rng: random.Random) -> Meanings:
    a, b = rng.sample(range(1, 20), 2)
    return {
        "(a, b)": [
            f"({a},{b})",
            f"({a}, {b})",
            f"\\langle {a},{b} \\rangle",
            f"\\langle{a}, {b}\\rangle",
            f"\\begin{{pmatrix}}{a}\\\\{b}\\end{{pmatrix}}",
            f"\\begin{{bmatrix}} {a} \\\\ {b} \\end{{bmatrix}}",
            f"\\left({a}, {b}\\right)",
        ],
        "(b, a)": [
            f"({b},{a})",
            f"\\langle {b},{a} \\rangle",
            f"\\begin{{pmatrix}}{b}\\\\{a}\\end{{pmatrix}}",
        ],
        "(a, b, a)": [f"({a},{b},{a})", f"\\langle {a},{b},{a}\\rangle"],
        "a": [f"{a}"],
        "b": [f"{b}"],
        "(a, -b)": [f"({a},-{b})", f"\\langle {a},-{b} \\rangle"],
    }


def bare_points(rng: random.Random) -> list[tuple[str, str, bool]]:
    """Points without their brackets: in their order."""
    a, b = rng.sample(range(1, 20), 2)
    return [
        (f"({a},{b})", f"{a},{b}", True),
        (f"({a}, {b})", f"{a}, {b}", True),
        (f"({a},{b})", f"{b},{a}", False),
        (f"({a},{b},{a})", f"{a},{b},{a}", True),
        (f"({a},{b},{a})", f"{b},{a},{a}", False),
        (f"({a},{b})", f"{a}", False),
        (f"({a},{b})", f"{a},{b},{b}", False),
        (f"({a},{b})", f"x={a}, y={b}", True),
        (f"({a},{b})", f"x={b}, y={a}", False),
    ]


def basis(rng: random.Random) -> Meanings:
    a, b = rng.sample(range(2, 9), 2)
    return {
        "+": [f"{a}\\mathbf{{i}}+{b}\\mathbf{{j}}", f"{b}\\mathbf{{j}} + {a}\\mathbf{{i}}"],
        "-": [f"{a}\\mathbf{{i}}-{b}\\mathbf{{j}}", f"-{b}\\mathbf{{j}}+{a}\\mathbf{{i}}"],
        "turned": [f"{b}\\mathbf{{i}}+{a}\\mathbf{{j}}"],
        "a": [f"{a}"],
        "one": [f"{a}\\mathbf{{i}}"],
        "other": [f"{a}\\mathbf{{j}}"],
    }


def transposes(rng: random.Random) -> Meanings:
    one, other = rng.sample("ABCMPQ", 2)
    a, b, c, d = rng.sample(range(1, 20), 4)
    return {
        "A": [one, f"\\mathbf{{{one}}}"],
        "A^T": [f"{one}^T", f"{one}^{{T}}"],
        "A^-1": [f"{one}^{{-1}}"],
        "B": [other],
        "B^T": [f"{other}^T"],
        "rows": [f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&{d}\\end{{pmatrix}}"],
        "columns": [f"\\begin{{pmatrix}}{a}&{c}\\\\{b}&{d}\\end{{pmatrix}}"],
        "row": [f"\\begin{{pmatrix}}{a}&{b}\\end{{pmatrix}}"],
        "column": [f"\\begin{{pmatrix}}{a}\\\\{b}\\end{{pmatrix}}"],
    }


def assignments(rng: random.Random) -> Meanings:
    a, b = rng.sample(range(1, 20), 2)
    return {
        "xy": [
            f"x={a},y={b}",
            f"y={b}, x={a}",
            f"x = {a}, y = {b}",
            f"x={a} \\text{{ and }} y={b}",
        ],
        "ab": [f"a={a},b={b}"],
        "yx": [f"x={b},y={a}"],
        "x": [f"x={a}"],
        "y": [f"y={a}"],
        "sum": [f"x+y={a}", f"y + x = {a}", f"{a} = x+y"],
        "double": [f"2x+y={a}"],
    }


def equations(rng: random.Random) -> Meanings:
    a = rng.randrange(2, 20)
    return {
        "a": [f"{a}"],
        "sum": [f"x+y={a}"],
        "product": [f"xy={a}"],
        "square": [f"x^2={a}"],
        "line": [f"y=x+{a}", f"y - x = {a}"],
        "side": [f"{a}=p+q"],
    }


def ratios(rng: random.Random) -> Meanings:
    a, b, c = rng.sample((2, 3, 5, 7, 11, 13), 3)
    return {
        "abc": [f"{a}:{b}:{c}", f"{a} : {b} : {c}", f"{a}\\colon{b}\\colon{c}"],
        "acb": [f"{a}:{c}:{b}"],
        "bac": [f"{b}:{a}:{c}"],
        "ab": [
            f"{a}:{b}",
            f"{a} : {b}",
            f"{a} \\text{{ to }} {b}",
            f"\\frac{{{a}}}{{{b}}}",
            f"{a}/{b}",
        ],
        "ba": [f"{b}:{a}", f"\\frac{{{b}}}{{{a}}}"],
        "a": [f"{a}"],
        "b": [f"{b}"],
    }


def bases(rng: random.Random) -> Meanings:
    n = rng.randrange(20, 90)
    eight = f"{n:o}"
    two = f"{n:b}"
    return {
        "2": [f"{two}_2", f"{two}_{{2}}", f"{two}_{{\\text{{two}}}}"],
        "8": [f"{eight}_8", f"{eight}_{{8}}", f"({eight})_8"],
        "9": [f"{eight}_9"],
        "3": [f"{two}_3"],
        "digits": [eight],
        "ones": [two],
        "next": [f"{n + 1:b}_2"],
    }


def times(rng: random.Random) -> Meanings:
    hour = rng.randrange(1, 11)
    minute = rng.randrange(10, 59)
    morning = [f"{hour}:{minute} a.m.", f"{hour}:{minute} am", f"{hour}:{minute} AM"]
    evening = [
        f"{hour}:{minute} p.m.",
        f"{hour}:{minute} PM",
        f"{hour}:{minute} \\text{{ p.m.}}",
        f"{hour + 12}:{minute}",
    ]
    return {
        "am": morning,
        "pm": evening,
        "later": [f"{hour}:{minute + 1} p.m."],
        "hour am": [f"{hour} a.m.", f"{hour} am", f"{hour}:00 AM"],
        "hour pm": [f"{hour} p.m.", f"{hour} pm", f"{hour}:00 PM"],
        "turned": [f"{minute}:{hour + 30}"],
    }


def families(rng: random.Random) -> Meanings:
    """The same values for every integer, whatever the integer is called."""
    a = rng.randrange(2, 7)
    return {
        "k": [
            "k\\pi, k\\in\\mathbb Z",
            "n\\pi, n \\in \\mathbb{Z}",
            "x = k\\pi, k \\in \\mathbb{Z}",
            "\\pi k, k \\in \\mathbb{Z}",
            "k\\pi \\text{ where } k \\text{ is an integer}",
            "m\\pi + \\pi, m \\in \\mathbb{Z}",
        ],
        "2k": ["2k\\pi, k\\in\\mathbb Z", "2\\pi n, n \\in \\mathbb{Z}"],
        "half": [
            "\\frac{\\pi}{2} + k\\pi, k \\in \\mathbb{Z}",
            "n\\pi - \\frac{\\pi}{2}, n \\in \\mathbb{Z}",
        ],
        "a": [f"\\frac{{\\pi}}{{{a + 2}}} + k\\pi, k \\in \\mathbb{{Z}}"],
        "pi": ["\\pi"],
        "0": ["0"],
    }


def units(rng: random.Random) -> Meanings:
    n = rng.randrange(2, 60)
    return {
        "km": [f"{n} km", f"{n} \\text{{ km}}", f"{n} kilometers"],
        "m": [f"{n} \\text{{ m}}", f"{n} meters"],
        "cm": [f"{n} cm", f"{n} \\text{{ centimeters}}"],
        "hours": [f"{n} hours", f"{n} \\text{{ h}}"],
        "minutes": [f"{n} minutes", f"{n} \\text{{ min}}"],
    }


def glued_units(rng: random.Random) -> Meanings:
    """A unit at its number, and variables, functions and operations there."""
    n = rng.randrange(13, 60)
    m = n + rng.randrange(1, 9)
    x = rng.choice("nikxyabcpqrtz")
    units = ("Mb", "GB", "USD", "bits", "dB", "apples", "kcal", "g")
    others = [f"{n}{x}", f"{n}AB", f"{n}mod{m}", f"{n}to{m}", f"{n}C2", f"{n} theta", f"{n} log 3"]
    others += [rng.choice((f"{n}pi", f"{n} pi")), rng.choice((f"{n}xy", f"{n} xy"))]
    others += [rng.choice((f"{n}sin({x})", f"{n} sin {x}"))]
    meanings = {"n": [f"{n}", *(f"{n}{unit}" for unit in units)], "m": [f"{m}", f"{m}bits"]}
    return meanings | {text: [text] for text in others}


def temperatures(rng: random.Random) -> list[tuple[str, str, bool]]:
    """Celsius in LaTeX; a degree of neither scale may be of both."""
    n = rng.randrange(13, 60)
    celsius = f"{n}^\\circ\\text{{C}}"
    fahrenheit = f"{n}^\\circ \\mathrm{{F}}"
    return [
        (f"{n}", celsius, True),
        (celsius, f"{n}", True),
        (celsius, f"{n}^{{\\circ}}\\mathrm{{C}}", True),
        (celsius, f"{n}^\\circ", True),
        (f"{n}^\\circ", fahrenheit, True),
        (celsius, fahrenheit, False),
        (fahrenheit, celsius, False),
        (f"{n + 1}", celsius, False),
        (f"{n}", f"{n}\\text{{ K}}", True),
        (f"{n}\\text{{ K}}", f"{n}", True),
        (f"{n}\\text{{ K}}", celsius, False),
    ]


def labels(rng: random.Random) -> list[tuple[str, str, bool]]:
    """A value that words name, and what words deny, bound or join."""
    n = rng.randrange(3, 12)
    value = rng.choice((f"{n}\\pi", f"\\frac{{\\pi}}{{{n}}}", f"\\sqrt{{{n * n + 1}}}"))
    names = ["\\text{Area}", "\\text{The volume}", "S_{\\triangle ABC}", "\\mathrm{Var}(X)"]
    names += ["\\angle ABC", "m\\angle ABC", "\\det A"]
    name, other = rng.sample(names, 2)
    said = f"{name} = {value}"
    return [
        (value, said, True),
        (said, value, True),
        (f"{n}", f"m\\angle ABC = {n}^\\circ", True),
        (f"{n}", f"\\det A = {n}", True),
        (f"{value} + 1", said, False),
        (said, f"{other} = {value}", False),
        (value, f"\\text{{not equal to }} = {value}", False),
        (value, f"\\text{{at least the area}} = {value}", False),
        (value, f"\\text{{Area}} = {value} \\text{{ or Perimeter}} = {n + 1}\\pi", False),
        (value, f"\\text{{Area}} = {n + 1}e, \\text{{ Perimeter}} = {value}", False),
    ]


TRIPLES = (bare_points, temperatures, labels)
FAMILIES: dict[Callable[[random.Random], Meanings], tuple[int, int]] = {
    # right and wrong pairs to take of each draw
    number: (14, 40),
    unsaid_alone: (0, 6),
    factorials: (6, 6),
    fractions: (14, 8),
    scientific: (12, 8),
    recurring: (10, 8),
    complex_numbers: (8, 8),
    sets_by_name: (16, 10),
    logarithms: (8, 6),
    angles: (6, 4),
    points: (12, 14),
    basis: (3, 6),
    transposes: (3, 8),
    assignments: (5, 10),
    equations: (2, 8),
    ratios: (4, 8),
    bases: (5, 8),
    times: (8, 10),
    families: (10, 10),
    units: (5, 8),
    glued_units: (10, 30),
}


def is_formula(text: str) -> bool:
    named = len(text) == 1 or text.startswith("-")
    return named or any(sign in text for sign in "\\^_=+<>{}") or not any(map(str.isalpha, text))


def build(seed: int, draws: int) -> list[Pair]:
    """Pairs of every family.

    Args:
        seed: of the numbers drawn and of the pairs taken.
        draws: how often each family draws its numbers.
    """
    rng = random.Random(seed)
    formula = itertools.cycle(IN_FORMULAS)
    sentence = itertools.cycle(IN_SENTENCES)
    pairs: dict[Pair, None] = {}

    def add(family: str, gold: str, answer: str, same: bool) -> None:
        way = next(formula if is_formula(answer) else sentence)
        stated = f"${gold}$" if is_formula(gold) and rng.random() < 0.5 else gold
        whole = answer[0].isupper() and " " in answer  # A sentence stands for itself.
        response = f"{answer}." if whole else way.format(answer)
        pairs[Pair(family, stated, response, same)] = None

    for _ in range(draws):
        for family, (rights, wrongs) in FAMILIES.items():
            meanings = family(rng)
            groups = list(meanings.values())
            right = [pair for group in groups for pair in itertools.permutations(group, 2)]
            wrong = [
                pair
                for one, other in itertools.permutations(groups, 2)
                for pair in itertools.product(one, other)
            ]
            for gold, answer in rng.sample(right, min(rights, len(right))):
                add(family.__name__, gold, answer, True)
            for gold, answer in rng.sample(wrong, min(wrongs, len(wrong))):
                add(family.__name__, gold, answer, False)
        for triples in TRIPLES:
            for gold, answer, same in triples(rng):
                add(triples.__name__, gold, answer, same)
    return list(pairs)
