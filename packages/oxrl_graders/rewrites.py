"""Spellings of expressions that math-verify does not read, as ones that it reads.

Recurring decimals and mixed numbers become quotients, `3.2e5` a product, angle brackets and columns
a tuple, words for the empty set and for all real numbers their symbols, and what is no part of an
expression (units, bold type, a full stop) goes.
"""

from __future__ import annotations

import re
from fractions import Fraction

from oxrl_graders.quantities import TEXT_COMMAND, compiled, folded, remembered, rewrite

_RECURRING = re.compile(
    r"(?<![\w.])(\d{,99})\.(\d{,99})"
    r"(?:\\(?:overline|bar|dot)\s*\{?|\()(\d{1,99})[})]?"
)
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_REWRITES = compiled(
    # 1 234 567 as LaTeX has it, which math-verify reads as several numbers.
    (r"(?<!\d{4})(?<=\d)(?:[ ~]|\\[,;:! ])(?=\d{3}(?!\d))", ""),
    (r"[“”\"*`]{2,}", " "),
    (r"(?<=[a-zA-Z)]\s)–|–(?=\s?\d*[a-zA-Z(])", "-"),
    (r"×", r"\\times "),
    (r"[·⋅]", r"\\cdot "),
    (r"π", r"\\pi "),
    (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"°", r"^\\circ "),
    (r"∅|\\varnothing(?![a-zA-Z])", r"\\emptyset "),
    # A ratio of two parts.
    (
        r"^\$?(\d{1,99}(?:\.\d{1,99})?)\s*(?:\\colon|(?:\\text\s*\{)?\s*to\b\s*\}?)\s*"
        r"(\d{1,99}(?:\.\d{1,99})?)\$?$",
        r"\1:\2",
    ),
    (r"\\[dtc]?frac\s*(\\[a-zA-Z]+|[a-zA-Z\d])(?!\w*\})", r"\\frac{\1}"),
    (rf"(\\[dtc]?frac\s*{_GROUP})\s*(\\[a-zA-Z]+|[a-zA-Z\d])", r"\1{\2}"),
    (r"\\sqrt\s*(\\[a-zA-Z]+|[a-zA-Z]|\d+)", r"\\sqrt{\1}"),
    (
        r"\\left\s*[\[(]\s*\\begin\{(?:array|matrix)\}(?:\{[clr|\s]*\})?((?s:.*?))"
        r"\\end\{(?:array|matrix)\}\s*\\right\s*[\])]",
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    # Systems of equations.
    (
        r"(?s)(?:\\left\s*)?(?:\\\{\s*)?\\begin\{(cases|array|aligned|matrix)\}(?:\{[clr|\s]*\})?"
        r"((?:(?!\\begin|\\end|\\\\).)+=(?:(?!\\begin|\\end).)*?)\\end\{\1\}(?:\s*\\right\s*\.?)?",
        r"\2",
    ),
    (r"(?s)\\\\(?!.*\\end)", ", "),
    (r"&\s*=\s*&?", "="),
    # Degrees that a function is taken of.
    (
        r"(?<!arc)\\?(sin|cos|tan|cot|sec|csc)(\s*\^\s*\{?\d\}?)?\s*(?:\\left)?\s*(?P<open>[({])?\s*(\d+(?:\.\d+)?)\s*"
        r"\^\s*\{?\s*\\circ\s*\}?\s*(?(open)(?:\\right)?\s*[)}])",
        r"\\\1\2(\\frac{\4\\pi}{180})",
    ),
    # A set of one value is that value.
    (
        r"^(\$?)\\\{((?:[^{},:|<>=≤≥≠\\]|\\(?!mid|vert|in\b|[gl]e|[gl]t|ne)[a-zA-Z]+|(?<!\\)\{[^{}]*\})+)\\\}(\$?)$",
        r"\1\2\3",
    ),
    # Functions that it does not know, as names.
    (r"\\(det|dim|Pr)(?![a-zA-Z])", r"\\mathrm{\1}"),
    (r"\\binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
    (r"\\log\s*_\s*(?:e(?![a-zA-Z])|\{\s*e\s*\})", r"\\ln "),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w)", r"\1\\times 10^{\2}"),
    (r"10\^([-−]\d{1,3})(?!\d)", r"10^{\1}"),
    (r"(?<![\w.])(\d+)\s+(\d+)\s?/\s?(\d+)(?![\w/])", r"(\1+\\frac{\2}{\3})"),
    (r"(?:\\langle|⟨)(.*?)(?:\\rangle|⟩)", r"(\1)"),
    (r"\\(?:mathbf|boldsymbol|bm|vec|hat|mathit)\s*\{([^{}]*)\}", r"\1"),
    (r"(?<=[A-Z)])\s*\^\s*\{?\s*(?:T|\\top|\\mathsf\{T\}|\\intercal)\s*\}?(?!\w)", r"^{\\tau}"),
    # The unit that an expression ends in.
    (
        r"(?<=[\w})])(?:\s|~|\\[,;: ])*\\(?:text|mathrm|textnormal|mbox)\s*\{\s*"
        r"(?![^{}]*\b(?:or|and|is|are|was|not|if|for|where|to|in|than|at|with|when|wrong|mod|base"
        r"|most|least|times|more|less|[ap]\.?\s?m|(?i:PM|AM)|million|thousand|hundred|billion"
        r"|trillion|dozen|integers?|squared|cubed|factorial)\b)"
        r"(?:[a-zA-Z][^{}\d]+|[smhgLVWNJA])\}(?:\^\{?[1-3]\}?)?\.?\s*$",
        "",
    ),
    (
        r"(?<=[\w})])\s+(?:[kcmd]m|k?mph|[km]g|lbs?|ft|feet|in(?:ches)?|miles?|(?:kilo|centi|milli)?"
        r"met(?:er|re)s?|hours?|minutes?|seconds?|days?|degrees?|units?|k?m/h?s?)(?:\^\{?[1-3]\}?)?\s*$",
        "",
    ),
)
_COLUMN = re.compile(
    r"\\begin\{([pbv]?)matrix\}((?:(?!\\begin|\\end|&).)*?\\\\(?:(?!\\begin|\\end|&).)*?)"
    r"(?:\\\\)?\s*\\end\{\1matrix\}",
    re.DOTALL,
)
_WORDS = compiled(
    (
        r"(?i)^(?:(?:there (?:is|are)|it has|the equation has) )?no (?:real )?(?:solution|root)s?"
        r"(?: exists?)?$|^(?:the )?(?:empty|null) set$",
        r"\\emptyset",
    ),
    (
        r"(?i)^(?:the set of )?(?:all|any|every|the) (?:the )?"
        r"(?:real numbers?|reals?|real values?(?: of [a-z])?)$",
        r"\\mathbb{R}",
    ),
)


@remembered
def rewritten(text: str) -> str:
    """Write an answer in LaTeX that math-verify reads.

    Args:
        text: of one answer, without its marker.
    """
    text = rewrite(folded(text).strip(" \n.,;"), _REWRITES)
    text = _COLUMN.sub(lambda column: f"({column[2].replace(chr(92) * 2, ',')})", text)
    text = _RECURRING.sub(_quotient, text).strip(" \n.,;")
    words = TEXT_COMMAND.sub(r"\1", text).strip(" $.*")
    named = rewrite(words, _WORDS)
    return text if named == words else named


def _quotient(decimal: re.Match[str]) -> str:
    """A recurring decimal as the quotient that it is."""
    whole, fixed, cycle = decimal.groups()
    repeated = Fraction(int(cycle), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    value = Fraction(f"{whole}.{fixed}0") + repeated
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
