"""The one plain number that a statement says its answer is, perhaps with a unit; or none.

`5 apples`, `$5`, `2 1/3 hours`, `2 million` and `1.05 × 10^-3` say a number. "Not 5", "at most 5",
"5 to 7", "twice 5", `5n`, `5!` and `5²` hold a number and say another thing. A unit is one that is
known or an ordinary word; a letter alone is a variable, unless it is a known symbol that stands
apart from the number in running text.

Nothing here imports sympy: most answers are decided by these numbers.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Ground truths and answers come again and again in a group.
remembered = functools.lru_cache(maxsize=4096)
Table = list[tuple[re.Pattern[str], str]]


def compiled(*rows: tuple[str, str]) -> Table:
    """Make the table of patterns that `rewrite` reads.

    Args:
        rows: pairs of a pattern and what takes its place.
    """
    return [(re.compile(pattern), new) for pattern, new in rows]


# At most 3 exponent digits: 1e999999999 must stay cheap to compare.
_NUMBER = re.compile(
    r"""
    (?<![\w.^\\√∛|])(?<![\^_]\{)
    (?P<sign>[-+]?\s?|\b(?:minus|negative)\s) [$€£¥₹₩]?\s?(?P<inner>-?)
    (?:(?P<whole>\d{1,99})\s+(?=\d+\s?/\s?\d))?          # 2 1/3
    (?P<digits>
        \d{1,3}(?:,\d{3})+(?![\d,]) (?:\.\d+)?           # 1,234.5
      | \d{1,3}(?:\\?\ \d{3})+(?![\d,]) (?:\.\d+)?       # 1 234.5
      | \d{1,2}(?:,\d{2})+,\d{3}(?![\d,])                # 12,34,567
      | \d+,\d+(?![\d,])                                 # 1000,99: a decimal comma
      | (?:\d+(?:\.\d+)?|\.\d+) (?:[eE][-+]?\d{1,3}(?!\w))?
    )
    (?:\s?/\s?(?P<below>0*[1-9]\d{,99}))?
    (?:\s?[×·*]\s?10\s?\^\{?(?P<power>[-+]?\d{1,3})\b\}?)?
    (?P<percent>[\s\u2060]*(?:%|percent\b|pct\b))?
    (?:[\s\u2060]*(?P<magnitude>hundred|thousand|million|billion|trillion|dozen|lakh|crore)s?\b)?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LONGEST = 1000  # characters: reading digits takes the square of their number
_GROUPED = re.compile(r"[1-9]\d{,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d?(?:,\d{2})+,\d{3}")
_MAGNITUDES = {
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
    "lakh": 10**5,
    "crore": 10**7,
}
# The groups are units: two spellings of one do not contradict each other.
_UNIT = re.compile(
    r"""
    (?:sq\.?\s|cu\.?\s|square\s|cubic\s)?
    (?: (?P<kmh>km/hr?|kmph|kph|kmh|k(?:m|ilomet(?:er|re)s?)\sper\shour)
      | (?P<mph>mph|mi(?:les?)?/hr?|miles?\sper\shour) | (?P<speed>m/s(?:ec)?)
      | (?P<km>kms?|kilomet(?:er|re)s?) | (?P<cm>cms?|centimet(?:er|re)s?)
      | (?P<mm>mm|millimet(?:er|re)s?) | (?P<dm>dm|decimet(?:er|re)s?) | (?P<m>met(?:er|re)s?|m)
      | (?P<mi>miles?|mi) | (?P<ft>ft|feet|foot) | (?P<inch>inch(?:es)?|in) | (?P<yd>yards?|yds?)
      | (?P<kg>kgs?|kilograms?|kilos?) | (?P<mg>mg|milligrams?) | (?P<g>grams?|gms?|g)
      | (?P<lb>lbs?|pounds?) | (?P<oz>oz|ounces?) | (?P<t>tons?|tonnes?)
      | (?P<ml>m[lL]|millilit(?:er|re)s?) | (?P<l>lit(?:er|re)s?|[lL])
      | (?P<hour>hours?|hrs?|h) | (?P<minute>minutes?|mins?) | (?P<second>seconds?|secs?|s)
      | (?P<day>days?) | (?P<week>weeks?) | (?P<month>months?) | (?P<year>years?|yrs?)
      | (?P<am>[aA]\.?\s?[mM]\b\.?) | (?P<pm>[pP]\.?\s?[mM]\b\.?)
      | (?P<celsius>°[\s\u2060]*C) | (?P<fahrenheit>°[\s\u2060]*F) | (?P<degree>°|degrees?|deg)
      | (?P<kelvin>K)
      | (?P<cent>cents?) | (?P<watt>k?W|watts?) | (?P<volt>V|volts?) | (?P<newton>N|newtons?)
      | (?P<joule>k?J|joules?) | (?P<amp>A|amps?) | (?P<hz>[kMG]?Hz) | (?P<pa>k?Pa) | (?P<kwh>kWh)
      | (?P<mol>mol) )
    (?![^\W\d_]|&)
    """,
    re.VERBOSE,
)
# A degree may be of either scale.
_ALIKE = ({"degree", "celsius"}, {"degree", "fahrenheit"})
# What stands at a number without a space: 5th, 5's, and words of languages that write none.
_ATTACHED = re.compile(r"(?:st|nd|rd|th)\b|['’]s\b|[\u2e80-\uffef]")
# No words: a factor (5 pi, 5 sin x), a billion, what a number follows (5C2), and at the number (\A)
# two letters of one case or usual names in a row: 5xy, but 16GB.
_WORD = re.compile(
    r"""
    (?! (?:pi|theta|bn|xy|ab)\b | [^\W\d_]+\d
      | (?:sin|cos|tan|cot|log|ln)\b\W*(?:[a-z]\b|\d|theta|pi|$)
      | \A(?:(?:sin|cos|tan|cot|log|ln)[a-z]|[a-z]{2}|(?![KMGT]B)[A-Z]{2}|[abcpqrxyz]{3}|[A-F]{3}
        |PQR|XYZ)\b )
    (?:[^\W\d_]{2,}(?:[-'’][^\W\d_]+)*|[a-zA-Z]&[^\W\d_]\S*|o['’]clock|a(?=\s\w))
    """,
    re.VERBOSE,
)
_PER = re.compile(
    r"(?:\s?\^\{?-?[1-3]\}?(?!\d))?"
    r"(?P<per>(?:\s?/\s?|\sper\s)(?:[^\W\d_]{2,}|[smhLl](?![^\W\d_]))(?:\^\{?[1-3]\}?)?)?"
)
# Text of LaTeX: what stands in it is words, where a letter of the formula is a variable.
TEXT_COMMAND = re.compile(
    r"\\(?:text|mathrm|textnormal|mbox|textbf|mathbf|textit|rm|operatorname)\s*\{\s*([^{}]*)\}"
)
_FOLDED = compiled(
    (r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+)", r"^{\1}"),
    (r"([₀-₉]+)", r"_{\1}"),
    (r"(?<=\d)(?=[¼-¾⅐-⅞])", " "),
    (r"ℝ", r"\\mathbb{R}"),
    (r"ℤ", r"\\mathbb{Z}"),
)
_PLAIN = compiled(
    (r",\\!\s*|\{,\}", ","),
    (TEXT_COMMAND.pattern, " \u2060\\1 "),
    (r"\\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))", r" \1\2/\3\4"),
    (r"\^\s*\{?\s*\\circ\s*\}?", "°"),
    (r"\\(?:times|cdot)(?![a-zA-Z])", "×"),
    (r"\\([$%])", r"\1"),
    (r"\\[,;:! ]|\\[()\[\]]|\*\*|`|~", " "),
)
_VARIABLE = r"(?<![a-zA-Z\\])(?:[a-z]|[A-Z]{1,3})(?![a-zA-Z])"
_EQUATION = re.compile(
    rf"{_VARIABLE}[^a-zA-Z]*[-+*×·\d]|[-+*×·\d][^a-zA-Z]*{_VARIABLE}|[a-z]\s+[a-z](?![a-zA-Z])"
    r"|(?<![a-zA-Z])[abcpqrxyz]{2,3}(?![a-zA-Z])|\|\s*[a-z]\s*\|"
)
_SIDE = compiled(
    (r"_\{[^{}]*\}|_\w|(?<=[a-zA-Z])\([^()]*\)", ""),
    (TEXT_COMMAND.pattern, ""),
    (r"\\sqrt|\^", "+"),
    (r"\\[a-zA-Z]+", " "),
)
_OPERATORS = r"[/*^×÷·+±<>≤≥≠|√∛⌊⌈_]|\d\s*-|\bsqrt\b|[([{]"
_OPERAND_BEFORE = re.compile(r"(?:[\d)]|(?<![a-zA-Z])[a-zA-Z])\s*$")
# What stands directly before a number and makes another statement of "it is this number". A verb
# of its own ends what a "not" denies: "the people who do not like it are 5" denies no number.
_BEFORE = re.compile(
    r"""
    (?: (?P<denied>
        \b(?:not|never|cannot|neither|nor|without|no\ longer|\w*n['’]t)\b (?:\s+[^\W\d][\w'’-]*)?
        (?:\s+(?!(?:is|are|was|were|equals?|ha[sd]|have|gives?|makes?|leaves?|so|then|but|who|that
            |which|because|since|as|when|while|where|if)\b)[^\W\d][\w'’-]*){0,4}
      | \b(?:false|untrue|doubts?|wrong|incorrect|disagree|deny|not\ (?:true|the\ case|so)
          |(?:do|does|did)(?:\ not|n['’]t)\ (?:think|believe)(?:\ that)?\ the\ (?:\w+\ )?answer)
        (?:\s+[\w'’]+){0,6}
      | \b(?:instead\ of|except|(?:anything|all)\ but|far\ from|nowhere\ near|differ\w*\ from)
    ) | (?P<turned>
        \b(?:than|at\ (?:the\ )?(?:most|least)|under|over|below|above|beyond|between|short\ of
          |(?<!rounds\ )(?<!rounded\ )(?<!adds\ )(?<!add\ )(?<!adding\ )up\ to
          |exceed(?:s|ing)?|as\ (?:many|much|few|little)\ as|(?:hundred|thousand|million)\ and
          |times|plus|minus|twice|thrice|double|triple|half|mod(?:ulo)?|base|sqrt|log|ln|sin|cos|tan
          |(?:between|either|(?:(?<!\w\s)|(?<=\bis\s))from)\s+\D?\d\S*\s+(?:\w+\s+)?(?:and|or|to)
          |(?:divided|multiplied|divisible)\ by
          |(?:(?:max|min)imum|half|thirds?|quarters?|roots?|square|cube|power|log(?:arithm)?
            |factorial|reciprocal|inverse|opposite|percent|multiples?|factors?|divisors?|product
            |difference)\ of)
        (?:\s+(?:or\ equal\ to|equal\ to|the|number|a\ total\ of|about|only|exactly|just|around))*
    ) | (?P<operator>
        (?<!answer\ )(?<!option\ )(?<![\w'’.])[b-zB-HJ-Z\u0370-\u03ff]        # a variable
      | (?<![a-zA-Z:]\s)(?<![\w.])\d{1,99}\s?:\s?\Z                         # a ratio
      | (?<!\A[A-Z])(?<!\s[A-Z])\)\Z | \w[-+]\Z
      | [^\s\w.,:;=!?"'“”’*)\]$€£¥₹₩≈\u2060-]
    ) ) [\s\u2060]*[$€£¥₹₩]?\s*$
    """,
    re.VERBOSE | re.IGNORECASE,
)
# The same after it, or after it and some words. A dash before words is no operator.
_AFTER = re.compile(
    r"""
    (?P<denied> [\s\u2060$]* (?:
        (?:(?:is|was|does|would|could|can|must|should|will)\s+)?
        (?:not|never|cannot|neither|nor|without|no\ longer|\w*n['’]t)\b
      | (?:\s*(?!(?:who|that|which|because|since|as|when|while|so|where|if)\b)[^\W\d_]{2,}\s+)?
        (?:is|are|was|were|seems?|looks?)\s+
        (?:wrong|incorrect|false|impossible|too|not\ (?:the|correct|right))\b )
    ) | (?P<turned> [\s\u2060$]* (?:
        (?:plus|minus|squared|cubed|factorial|choose|remainder|mod|half|halves|thirds
          |in\s(?:\d{1,2}|two|three|four|five|six|seven|eight|nine|ten)(?!\s?\w|\.\d)
          |(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths)\b
      | (?:\s*(?!(?:who|that|which|because|since|as|when|while|so|where|if)\b)
          [^\W\d_][^\s\d,;.]+){0,3}? [\s\u2060]*\$? (?:
            (?:[,;]?\s*\(?(?:or|and)|times|plus|minus|over|mod(?:ulo)?|(?:divided|multiplied)\ by
              |out\ of|to|through|per|versus|(?:more|less|fewer|\w+er)\ than|base|choose|of)
            [\s\u2060$]+
            (?:(?:maybe|perhaps|also|possibly|even|about|around|then|the|another|a|an)\s)*
            (?:[-+]?\s?[$€£¥₹₩]?\s?\.?\d|[a-zA-Z]\b(?!\s\w|-)
              |(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half)\b)
          | [,;]\s*[-+]?[$€£¥₹₩]?\d
          | (?:and|or)\s+(?:(?:an?\s+|one\s+)?(?:half|quarter|third)|more|less|fewer|so|higher|lower
              |greater|above|below|over|under|larger|smaller|bigger|up)\b
          | (?:at\ )?(?:the\ )?(?:most|least|minimum|maximum)\b ) )
    ) | (?P<operator> (?!\s?/\s?(?:[^\W\d_]{3}|kg|hr|km|lb))               # but 5/month
        [\s\u2060$]* (?: ! | \)\s?[(\w^] | [-+](?!\s+[a-zA-Z]{2}) | _ | [–—:]\s*[\d$€£¥₹₩.]
          | [^\s\w.,:;!?"'“”’*)\]}…$€£¥₹₩—–°Ωµ\u2060+-] ) )
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Quantity:
    """A number and what it counts or measures.

    Args:
        value: of 20%, 20.
        percent: whether it may mean a hundredth of this, too: answers are published either way.
        unit: name of a known unit; empty for none, a word or a currency.
        exact: whether it was written as a decimal, and not as a quotient.
    """

    value: Fraction
    percent: bool
    unit: str
    exact: bool

    @property
    def values(self) -> set[Fraction]:
        """The values that the number may mean."""
        return {self.value, self.value / 100} if self.percent else {self.value}

    @property
    def text(self) -> str:
        """The number in LaTeX."""
        quotient = str(self.value)
        decimal = f"{Decimal(self.value.numerator) / self.value.denominator:f}"
        return (decimal if self.exact else quotient) + r"\%" * self.percent

    def agrees(self, other: Quantity) -> bool:
        """True if both may be the same number with the same unit.

        Args:
            other: the answer's quantity; this one is the ground truth's.
        """
        if (
            self.unit
            and other.unit != self.unit
            and (other.unit or self.unit in ("am", "pm"))
            and {self.unit, other.unit} not in _ALIKE
        ):
            return False
        return bool(self.values & other.values)


def rewrite(text: str, table: Table) -> str:
    """Replace every pattern of a table, in its order.

    Args:
        text: of an answer.
        table: pairs of a pattern and what takes its place.
    """
    for pattern, new in table:
        text = pattern.sub(new, text)
    return text


def folded(text: str) -> str:
    """Write raised and lowered digits as LaTeX does, and characters of many forms in one.

    Args:
        text: of an answer: 5² is 5^{2}, 2½ is 2 1/2.
    """
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", rewrite(text, _FOLDED))
    return text.replace("⁄", "/").replace("−", "-")


def plain(text: str) -> str:
    """Undo the LaTeX and markdown around a plain number; other LaTeX stays, as no plain number.

    Args:
        text: of an answer.
    """
    return rewrite(folded(text), _PLAIN)


def around(before: str, after: str) -> set[str | None]:
    """Find how the words and symbols around a number change what it says.

    Args:
        before, after: the rest of its sentence, from `plain`.

    Returns:
        Those that hold of "denied" (it is not the answer), "turned" (it bounds the answer, is one
        of several or something is worked out with it) and "operator" (a part of a formula).
    """
    found = (_BEFORE.search(before[-200:]), _AFTER.match(after))
    return {match.lastgroup for match in found if match}


def is_equation(text: str) -> bool:
    """True if a text gives the value of an expression, and not only of a name.

    Args:
        text: `x = 5`, `f(x) = 5`, `|AB| = 5` and `2 + 3 = 5` are none, `x + y = 5`, `2x = 10` are.
    """
    side, equals, _ = text.partition("=")
    return bool(equals and _EQUATION.search(rewrite(side, _SIDE)))


def read_number(text: str, lead: str | None, last: bool, formula: bool) -> Quantity | None:
    """Read the number that a text states.

    Args:
        text: from `plain`.
        lead: of running text, what stands before `text` in its sentence; None of a text that is
            the answer and nothing else.
        last: of running text, the last number states the answer, and not the first.
        formula: whether letters outside of LaTeX's text are variables.

    Returns:
        The number with its unit; None unless the text says that the answer is this number.
    """
    text = re.sub(r"=\s*\$?[a-zA-Z]\s*\$?\.?\s*$", "", text.rstrip())  # 5 = x
    matches = list(_NUMBER.finditer(text))
    if not matches or (lead is None and len(matches) > 1):
        return None
    match = matches[-1 if last else 0]
    before = text[: match.start()]
    after = text[match.end() :]
    alone = lead is None
    if not alone:
        before = f"{lead} {before}"
        after = after.partition("\n")[0]
    # A number in LaTeX's text is no formula.
    measured = _unit(after, formula and alone and not before.endswith("\u2060"))
    value = _value(match, formula)
    if measured is None or value is None or around(before, after):
        return None
    unit, rest = measured
    if "operator" in around("", rest) or (match["sign"].strip() and _OPERAND_BEFORE.search(before)):
        return None
    if alone and (
        re.search(_OPERATORS, before)
        or re.search(f"{_OPERATORS}|{_VARIABLE}" if formula else _OPERATORS, rest)
    ):
        return None
    return Quantity(value, bool(match["percent"]), unit, exact=not match["below"])


def _unit(after: str, formula: bool) -> tuple[str, str] | None:
    """The unit at the start of a text, and what follows it; None if a factor stands there."""
    rest = after.lstrip(" \t$*\u2060")
    apart = len(rest) < len(after)
    in_words = "\u2060" in after[: len(after) - len(rest)]
    symbol = _UNIT.match(rest)
    word = _WORD.match(after, len(after) - len(rest)) if apart or not formula else None
    named = symbol or word
    per: Any = _PER.match(rest, named.end() if named else 0)
    end = rest[per.end() :]
    if symbol and (
        symbol.end() > 1 or in_words or (not formula and (apart or per[0] or symbol[0] == "g"))
    ):
        return "" if per["per"] else symbol.lastgroup or "", end
    if _ATTACHED.match(after) or not re.match(r"[^\W\d_]", rest):
        return "", end if per["per"] else after
    if word is None or (formula and not in_words and word.end() < 3):
        return None
    return "", end


def _value(match: re.Match[str], formula: bool) -> Fraction | None:
    digits = re.sub(r"[\s\\]", "", match["digits"])
    grouped = _GROUPED.fullmatch(digits)
    if len(digits) > _LONGEST or ("," in digits and formula and not grouped):
        return None  # In LaTeX "2,1" is a list, in text it is 2.1.
    value = Fraction(digits.replace(",", "" if grouped else "."))
    if match["below"]:
        value = value / int(match["below"]) + int(match["whole"] or 0)
    if match["power"]:
        value *= Fraction(10) ** int(match["power"])
    if match["magnitude"]:
        value *= _MAGNITUDES[match["magnitude"].lower()]
    return -value if match["sign"].strip(" \n\t+") or match["inner"] else value
