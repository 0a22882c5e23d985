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
_REWRITES = compiled(
    r"""
    # 1 234 567 as LaTeX has it, which math-verify reads as several numbers.
    (?<!\d{4})(?<=\d)(?:[ ~]|\\[,;:! ])(?=\d{3}(?!\d)) «»
    [“”\"*`]{2,} « »
    (?<=[a-zA-Z)]\s)– | –(?=\s?\d*[a-zA-Z(]) «-»
    × «\\times »
    [·⋅] «\\cdot »
    π «\\pi »
    √\s*(\d+|[a-zA-Z]) «\\sqrt{\1}»
    ° «^\\circ »
    ∅ | \\varnothing(?![a-zA-Z]) «\\emptyset »
    # A ratio of two parts.
    ^\$?(\d{1,99}(?:\.\d{1,99})?) \s*(?:\\colon|(?:\\text\s*\{)?\s*to\b\s*\}?)\s*
        (\d{1,99}(?:\.\d{1,99})?)\$?$ «\1:\2»
    \\[dtc]?frac\s*(\\[a-zA-Z]+|[a-zA-Z\d])(?!\w*\}) «\\frac{\1}»
    (\\[dtc]?frac\s*\{(?:[^{}]|\{[^{}]*\})*\})\s*(\\[a-zA-Z]+|[a-zA-Z\d]) «\1{\2}»
    \\sqrt\s*(\\[a-zA-Z]+|[a-zA-Z]|\d+) «\\sqrt{\1}»
    \\left\s*[\[(]\s*\\begin\{(?:array|matrix)\}(?:\{[clr|\s]*\})?((?s:.*?))
        \\end\{(?:array|matrix)\}\s*\\right\s*[\])] «\\begin{pmatrix}\1\\end{pmatrix}»
    # Systems of equations.
    (?:\\left\s*)?(?:\\\{\s*)?\\begin\{(cases|array|aligned|matrix)\}(?:\{[clr|\s]*\})?
        ((?s:(?:(?!\\begin|\\end|\\\\).)+=(?:(?!\\begin|\\end).)*?))
        \\end\{\1\}(?:\s*\\right\s*\.?)? «\2»
    \\\\(?!(?s:.*)\\end) «, »
    &\s*=\s*&? «=»
    # Degrees that a function is taken of.
    (?<!arc)\\?(sin|cos|tan|cot|sec|csc)(\s*\^\s*\{?\d\}?)?\s*(?:\\left)?\s*
        (?P<open>[({])?\s*(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?\s*(?(open)(?:\\right)?\s*[)}])
        «\\\1\2(\\frac{\4\\pi}{180})»
    # A set of one value is that value.
    ^(\$?)\\\{((?:[^{},:|<>=≤≥≠\\]|\\(?!mid|vert|in\b|[gl]e|[gl]t|ne)[a-zA-Z]+
        |(?<!\\)\{[^{}]*\})+)\\\}(\$?)$ «\1\2\3»
    # Functions that it does not know, as names.
    \\(det|dim|Pr)(?![a-zA-Z]) «\\mathrm{\1}»
    \\binom\s*(\d)\s*(\d) «\\binom{\1}{\2}»
    \\log\s*_\s*(?:e(?![a-zA-Z])|\{\s*e\s*\}) «\\ln »
    (?<![\w.])(\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})(?!\w) «\1\\times 10^{\2}»
    10\^([-−]\d{1,3})(?!\d) «10^{\1}»
    (?<![\w.])(\d+)\s+(\d+)\s?/\s?(\d+)(?![\w/]) «(\1+\\frac{\2}{\3})»
    (?:\\langle|⟨)(.*?)(?:\\rangle|⟩) «(\1)»
    \\(?:mathbf|boldsymbol|bm|vec|hat|mathit)\s*\{([^{}]*)\} «\1»
    (?<=[A-Z)])\s*\^\s*\{?\s*(?:T|\\top|\\mathsf\{T\}|\\intercal)\s*\}?(?!\w) «^{\\tau}»
    # The unit that an expression ends in.
    (?<=[\w})])(?:\s|~|\\[,;: ])*\\(?:text|mathrm|textnormal|mbox)\s*\{\s*
        (?![^{}]*\b(?:or|and|is|are|was|not|if|for|where|to|in|than|at|with|when|wrong|mod|base
          |most|least|times|more|less|[ap]\.?\s?m|(?i:PM|AM)|million|thousand|hundred|billion
          |trillion|dozen|integers?|squared|cubed|factorial)\b)
        (?:[a-zA-Z][^{}\d]+|[smhgLVWNJA])\}(?:\^\{?[1-3]\}?)?\.?\s*$ «»
    (?<=[\w})])\s+(?:[kcmd]m|k?mph|[km]g|lbs?|ft|feet|in(?:ches)?|miles?
        |(?:kilo|centi|milli)?met(?:er|re)s?|hours?|minutes?|seconds?|days?|degrees?|units?
        |k?m/h?s?)(?:\^\{?[1-3]\}?)?\s*$ «»
    """
)
_COLUMN = re.compile(
    r"\\begin\{([pbv]?)matrix\}((?:(?!\\begin|\\end|&).)*?\\\\(?:(?!\\begin|\\end|&).)*?)"
    r"(?:\\\\)?\s*\\end\{\1matrix\}",
    re.DOTALL,
)
_WORDS = compiled(
    r"""
    (?i: ^ (?:(?:there\ (?:is|are)|it\ has|the\ equation\ has)\ )?
        no\ (?:real\ )?(?:solution|root)s?(?:\ exists?)?$ | ^(?:the\ )?(?:empty|null)\ set$ )
        «\\emptyset»
    (?i: ^(?:the\ set\ of\ )?(?:all|any|every|the)\ (?:the\ )?
        (?:real\ numbers?|reals?|real\ values?(?:\ of\ [a-z])?)$ )
        «\\mathbb{R}»
    """
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
    words = re.sub(TEXT_COMMAND, r"\1", text).strip(" $.*")
    named = rewrite(words, _WORDS)
    return text if named == words else named


def _quotient(decimal: re.Match[str]) -> str:
    """A recurring decimal as the quotient that it is."""
    whole, fixed, cycle = decimal.groups()
    repeated = Fraction(int(cycle), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    value = Fraction(f"{whole}.{fixed}0") + repeated
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
