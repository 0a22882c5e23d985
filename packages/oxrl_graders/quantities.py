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
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Ground truths and answers come again and again in a group.
remembered = functools.lru_cache(maxsize=4096)
Table = list[tuple[re.Pattern[str], str]]


def compiled(rows: str) -> Table:
    """Make the table of patterns that `rewrite` reads.

    Args:
        rows: patterns as re.VERBOSE has them, each with what takes its place behind it, in « ».
    """
    found = re.findall("(.+?)«(.*?)»", rows, re.DOTALL)
    return [(re.compile(pattern, re.VERBOSE), new) for pattern, new in found]


# The groups say what a number is multiplied by.
_MAGNITUDE = r"""
    (?: (?P<x12>dozens?|dutzend|douzaines?|docenas?|dúzias?|打)
      | (?P<x100>hundreds?|hundert|centaines?|cientos?|百|백)
      | (?P<x1000>thousands?|tausend|tsd|mille|milliers?|mil|mila|тыс(?:яч\w?)?|千(?![克米瓦卡])|천)
      | (?P<x10000>[万萬만]) | (?P<x100000>lakhs?|lacs?|लाख)
      | (?P<x1000000>millions?|millionen|mio|mill[oó]n|millones|mln|milion[ei]|milh[õã]o|milhões
        |млн|миллион\w*)
      | (?P<x10000000>crores?|करोड़) | (?P<x100000000>[亿億억])
      | (?P<x1000000000>billions?|bn|milliarden?|mrd|milliards?|miliard[io]|bilh[õã]o|bilhões|млрд
        |миллиард\w*)
      | (?P<x1000000000000>trillions?|billionen|billones|trilh[õã]o|trilhões|兆|조)
    )(?![a-z])\.?
"""
# At most 3 exponent digits: 1e999999999 must stay cheap to compare.
_NUMBER = re.compile(
    rf"""
    (?<![^\W\u2e80-\uffef])(?<![.^\\√∛|])(?<![\^_]\{{)
    (?P<sign>[-+]?\s?|\b(?:minus|negative)\s) [$€£¥₹₩]?\s?(?P<inner>-?)
    (?:(?P<whole>\d{{1,99}})\s+(?=\d+\s?/\s?\d))?          # 2 1/3
    (?P<digits>
        \d{{1,3}}(?:,\d{{3}})+(?![\d,]) (?:\.\d+)?           # 1,234.5
      | \d{{1,3}}(?:\\?\ \d{{3}})+(?![\d,]) (?:\.\d+)?       # 1 234.5
      | \d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?![\d,])                # 12,34,567
      | \d{{1,3}}(?:\.\d{{3}})+,\d+(?![\d.,]\d)              # 1.234,5
      | \d+,\d+(?![\d,])                                 # 1000,99: a decimal comma
      | (?:\d+(?:\.\d+)?|\.\d+) (?:[eE][-+]?\d{{1,3}}(?!\w))?
    )
    (?:\s?/\s?(?P<below>0*[1-9]\d{{,99}}))?
    (?:\s?[×·*]\s?10\s?\^\{{?(?P<power>[-+]?\d{{1,3}})\b\}}?)?
    (?P<percent>[\s\u2060$]*(?:%|percent\b|pct\b|per\ cent\b|prozent\b|pour\ cent\b|por\ cient?o\b
        |パーセント|퍼센트))?
    (?P<magnitude>(?:[\s\u2060$]*{_MAGNITUDE})*)
    """,
    re.VERBOSE | re.IGNORECASE,
)
_LONGEST = 1000  # characters: reading digits takes the square of their number
_GROUPED = re.compile(r"[1-9]\d{,2}(?:,\d{3})+(?:\.\d+)?|[1-9]\d?(?:,\d{2})+,\d{3}")
# The groups are units: two spellings of one do not contradict each other. Case tells some apart.
_UNIT = re.compile(
    r"""
    (?: (?P<km>kms?|[Kk]ilom[eè]t(?:er|re|ro)s?|千米|公里|キロメートル)
      | (?P<cm>cms?|[CcZz]ent[ií]m[eè]t(?:er|re|ro)s?|厘米|センチメートル)
      | (?P<mm>mm|[Mm]il+[ií]m[eè]t(?:er|re|ro)s?|毫米|ミリメートル)
      | (?P<dm>dm|[Dd][eé]c[ií]m[eè]t(?:er|re|ro)s?|分米)
      | (?P<m>[Mm][eè]t(?:er|re|ro)[sn]?|m|米|メートル)
      | (?P<mile>miles?|mi|[Mm]eilen?|millas?|英里|マイル)
      | (?P<ft>ft|feet|foot|Fuß|pieds?|pies?|英尺|フィート)
      | (?P<inch>inch(?:es)?|in(?!\s+\d)|Zoll|pouces?|pulgadas?|英寸|インチ) | (?P<yd>yards?|yds?)
      | (?P<kg>kgs?|[Kk]ilogram(?:m|me|o)?s?|[Kk]ilos?|千克|公斤|キログラム)
      | (?P<mg>mg|[Mm]il+igram(?:m|me|o)?s?|毫克|ミリグラム)
      | (?P<g>[Gg]ram(?:m|me|o)?s?|gms?|g|克|グラム)
      | (?P<lb>lbs?|pounds?) | (?P<oz>oz|ounces?)
      | (?P<t>tons?|[Tt]onn?es?|Tonnen?|toneladas?|吨|トン)
      | (?P<ml>m[lL]|[Mm]il+ilit(?:er|re|ro)s?|毫升|ミリリットル)
      | (?P<l>[Ll]it(?:er|re|ro)s?|[lL]|升|リットル)
      | (?P<hour>hours?|hrs?|h|Stunden?|Std|heures?|horas?|个?小时|時間|시간)
      | (?P<minute>min(?:ute|uto)?s?|Minuten?|Min|分钟?|분)
      | (?P<second>sec(?:ond)?s?|s|Sekunden?|Sek|secondes?|segundos?|秒钟?|초)
      | (?P<day>days?|Tagen?|jours?|días?|天|日)
      | (?P<week>weeks?|Wochen?|semain?[ea]s?|周|星期|週間)
      | (?P<month>months?|Monaten?|mois|mes(?:es)?|个月|[かヶケ]月)
      | (?P<year>years?|yrs?|Jahren?|ans|années?|años?|年)
      | (?P<am>[aA]\.?\s?[mM]\b\.?) | (?P<pm>[pP]\.?\s?[mM]\b\.?)
      | (?P<celsius>°[\s\u2060]*C) | (?P<fahrenheit>°[\s\u2060]*F)
      | (?P<degree>°|degrees?|deg|Grad|degrés?|grados?|度) | (?P<kelvin>K)
      | (?P<cent>cents?) | (?P<dollar>dollars?) | (?P<watt>k?W|watts?) | (?P<volt>V|volts?)
      | (?P<newton>N|newtons?) | (?P<joule>k?J|joules?) | (?P<amp>A|amps?) | (?P<hz>[kMG]?Hz)
      | (?P<pa>k?Pa) | (?P<kwh>kWh) | (?P<mol>mol) | (?P<unit>units?(?=\s*\^))
      | (?P<bc>BCE?|B\.C\.(?:E\.)?|v\.\s?Chr\.) | (?P<ad>CE|AD|A\.D\.|n\.\s?Chr\.) )
    (?![^\W\d_\u2e80-\uffef]|&)
    """,
    re.VERBOSE,
)
# Of two units that make one amount, how many of the second the first is.
_SIZES = {
    "week day": 7,
    "day hour": 24,
    "hour minute": 60,
    "minute second": 60,
    "year month": 12,
    "km m": 1000,
    "m cm": 100,
    "ft inch": 12,
    "kg g": 1000,
    "lb oz": 16,
    "dollar cent": 100,
}
_AMOUNT = re.compile(
    r"(?<![\d.,/])(\d{1,30}(?:\.\d{1,30})?)[\s\u2060$]*([^\W\d_]+)[\s\u2060$,.]*"
    r"(?:and|und|et|y|e|と)?[\s\u2060$]*(\d{1,30})[\s\u2060$]*([^\W\d_]+)"
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
    r"(?:\s*\^\{?(?P<power>-?[1-3])\}?(?!\d))?"
    r"(?:(?:\s?/\s?|\sper\s)(?P<per>(?:[^\W\d_]{2,}[\d_]*|[smhLl](?![^\W\d_]))(?:\^\{?[1-3]\}?)?))?"
)
# Text of LaTeX: what stands in it is words, where a letter of the formula is a variable.
TEXT_COMMAND = (
    r"\\(?:text|mathrm|textnormal|mbox|textbf|mathbf|textit|rm|operatorname)\s*\{\s*([^{}]*)\}"
)
_FOLDED = compiled(
    r"""
    ([⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+)       «^{\1}»
    ([₀-₉]+)                «_{\1}»
    (?<=\d)(?=[¼-¾⅐-⅞])     « »
    ℝ                       «\\mathbb{R}»
    ℤ                       «\\mathbb{Z}»
    """
)
_NORMAL = compiled(
    r"""
    ⁄ «/»
    # A dash of any length that stands directly at what follows it, and at nothing before.
    − | (?:(?<![^\s${(=:是为為は]))[–—‐](?=[\d.\\]) | (?<=\})\s?[–‐]\s? «-»
    """
)
_LENGTH = r"""
    ((?:[cdkmz]\w{3,5})?[mM][eè]t[er]+s?|[ckmd]?m|fe?e?t|foot|in(?:ch\w*)?|yd|yards?|mi(?:les?)?
      |units?|[ァ-ー]+|[厘千分毫]?米|公里)(?![a-z])
"""
# Dates as numbers with a unit: days of a month, or without a day years of it.
_DATES = r"""
    (?i: \b(?: jan(?:uary?|uar|vier)? | enero | janeiro | gennaio | января )\b\.? ) «month1 »
    (?i: \b(?: feb(?:ruary?|ruar)? | févr(?:ier)? | febrero | fevereiro | febbraio | февраля
        )\b\.? ) «month2 »
    (?i: \b(?: mar(?:ch|s|zo|ço)? | märz | марта )\b\.? ) «month3 »
    (?i: \b(?: apr(?:ile?)? | avril | abril | апреля )\b\.? ) «month4 »
    (?i: \b(?: ma[iy] | mayo | maio | maggio | мая )\b\.? ) «month5 »
    (?i: \b(?: june? | juni | juin | junio | junho | giugno | июня )\b\.? ) «month6 »
    (?i: \b(?: july? | juli | juillet | julio | julho | luglio | июля )\b\.? ) «month7 »
    (?i: \b(?: aug(?:ust)? | août | agosto | августа )\b\.? ) «month8 »
    (?i: \b(?: sept?(?:ember|embre|iembre)? | setembro | settembre | сентября )\b\.? ) «month9 »
    (?i: \b(?: o[ck]t(?:ober|obre|ubre)? | outubro | ottobre | октября )\b\.? ) «month10 »
    (?i: \b(?: nov(?:ember|embre|iembre|embro)? | ноября )\b\.? ) «month11 »
    (?i: \b(?: de[cz](?:ember|embre|iembre)? | décembre | dicembre | dezembro | diciembre | декабря
        )\b\.? ) «month12 »
    month(\d+)\s+(\d\d?)(?![\d:/.]?\d)(?:st|nd|rd|th)?\b (?:,?\s+(?:del?\s+)?(\d{4})\b)?
        «\2 days/month\1_\3»
    \b(\d\d?)(?:st|nd|rd|th|\.|er|º)?\s+ (?:(?:of|de)\s+|d['’])? month(\d+)
        (?:\s*,?\s*(?:del?\s+)?(\d{4})\b)?
        «\1 days/month\2_\3»
    month(\d+)(?:\s*,?\s*(?:del?\s+)?)(\d{4})\b
        «\2 years/month\1_»
    (?:(\d{4})\s*[年년]\s*)? 0?(\d\d?)\s*[月월]\s*(\d\d?)\s*[日号號일]
        « \3 days/month\2_\1 »
"""
_PLAIN = compiled(
    r"""
    ,\\!\s* | \{,\}                          «,»
    (?<=\d)\s*~\s*(?=\d(?!\d\d(?!\d)))       «–»
    """
    f"{TEXT_COMMAND} « \u2060\\1 »"
    r"""
    \\[dtc]?frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d)) « \1\2/\3\4»
    \^\s*\{?\s*\\circ\s*\}?                  «°»
    \\(?:times|cdot)(?![a-zA-Z])             «×»
    \\([$%])                                 «\1»
    \\[,;:! ] | \\[()\[\]] | \*\* | ` | ~    « »
    \b(?:kmph|kph|kmh)\b                     «km/h»
    \bmph\b                                  «miles/h»
    ([^\W\d_]{2,})\s(?:carrée?s?|cuadrad[oa]s?|quadrad[oa]s?|squared)\b «\1^2»
    ([^\W\d_]{2,})\s(?:cubes|cúbic[oa]s?|cubed)\b «\1^3»
    """
    rf"(?:\b(?:sq\.?|square)\s|[qQ]uadrat|平方) {_LENGTH} «\1^2»"
    rf"(?:\b(?:cu\.?|cubic)\s|[kK]ubik|立方) {_LENGTH} «\1^3» {_DATES}"
)
_COLOR = r"\\(?:text)?color\s*(?:\[\w*\])?\s*\{[^{}]*\}"
# A command that changes only how the group after it looks, or the group that it stands in.
_DRESS = rf"""
    (?: {_COLOR} | \\(?:under(?:line|bar)|uline|boldsymbol|bm|math(?:bf|it|normal)|displaystyle
      |math(?:rm|sf)(?=\s*\{{\s*(?:[-\d]|\\frac|\\sqrt))|[lL]arge|LARGE|[hH]uge)\s* )
    \{{((?:[^{{}}]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})*)\}} « \1 »
"""
_UNDRESSED = compiled(
    r"""
    \\lbrace(?![a-zA-Z]) «\\{»
    \\rbrace(?![a-zA-Z]) «\\}»
    """
    rf"{_DRESS} {_DRESS} {_COLOR} « »"
    r"""
    (?<![\w}\]\\])\{\s*\\(?:[lL]arge|[hH]uge|bf|it)(?![a-zA-Z])
        ([^{}]*(?:\{[^{}]*\}[^{}]*)*)\} « \1 »
    \{\s*\\rm(?![a-zA-Z])
      | \\(?:text(?!color|style|width)[a-z]{2,6}|emph|[mh]box|rm|mathsf|mathtt)\s*\{ «\\text{»
    \\(?:[hv]space|phantom|tag|label)\*?\s*\{[^{}]*\}
      | \\(?:[lL]arge|LARGE|[hH]uge|small|normalsize|tiny|displaystyle|textstyle|bf|it|boldmath
          |hfill|nolimits)(?![a-zA-Z]) « »
    # What ends a row, and space at the ends of a formula.
    [.,;]\s*(?=\\\\|\\end\{(?:cases|array|aligned)\}) « »
    (?:[ \t]|\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~)+(?=\$|\}|\\\)|\\\]|\Z) « »
    (?:\A|(?<=[${]))(?:[ \t]|\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~)+ « »
    """
)
_VARIABLE = r"(?<![a-zA-Z\\])(?:[a-z]|[A-Z]{1,3})(?![a-zA-Z])"
_EQUATION = re.compile(
    rf"{_VARIABLE}[^a-zA-Z]*[-+*×·\d]|[-+*×·\d][^a-zA-Z]*{_VARIABLE}|[a-z]\s+[a-z](?![a-zA-Z])"
    r"|(?<![a-zA-Z])[abcpqrxyz]{2,3}(?![a-zA-Z])|\|\s*[a-z]\s*\|"
)
_SIDE = compiled(
    r"""
    _\{[^{}]*\} | _\w | (?<=[a-zA-Z])\([^()]*\) «»
    """
    f"{TEXT_COMMAND} «»"
    r"""
    \\sqrt | \^ «+»
    \\[a-zA-Z]+ « »
    """
)
# Two plain numbers of which one is said to be the other.
FALSE = re.compile(
    r"(?:\A|[,.:;。，：$]|[\u3040-\u9fff]|\b(?:is|get|so|have|that|hence|then))[\s$]*(-?\d+)[\s$]*="
    r"[\s$]*(?!\1(?!\d))-?\d+(?![\d.,]*[\s$]*[-+*/^×÷·(\d.,%])"
)
_OPERATORS = r"[/*^×÷·+±<>≤≥≠|√∛⌊⌈_]|\d\s*-|\bsqrt\b|[([{]"
_OPERAND_BEFORE = re.compile(r"(?:[\d)]|(?<![a-zA-Z])[a-zA-Z])\s*$")
# Between two numbers that are both said.
_JOIN = (
    r"bis|oder|und|ou|et|à|o|u|y|e|a|hasta|soit|ni|или|и|до|到|至|或者?|还是|和|与|與|及|跟|、|か|または|もしくは"
    r"|あるいは|から|と|や|~|또는|에서"
)
# What stands directly before a number and makes another statement of "it is this number". A verb
# of its own ends what a "not" denies: "the people who do not like it are 5" denies no number.
_BEFORE = re.compile(
    r"""
    (?: (?P<denied>
    \b(?:nicht|kein\w*|niemals|nie|ungleich|weder|statt|außer)\b
        (?:\s+(?:gleich|genau|einfach|nur|die|der|das|etwa))*
  | \b(?:pas|jamais|ni|aucune?|différente?s?\ (?:de|à)|plutôt\ que)\b
        (?:\s+(?:égale?s?|à|exactement|de|du|tout|la|le|simplement))*
  | (?:\b(?:no|nunca|jamás|tampoco|ni|não|nem|non|mai)\b
        (?:\s+(?:es|son|era|sea|será|sería|hay|puede|ser|está|da|é|são|è|sono|igual|uguale|a|exactamente))*
      | \b(?:distint[oa]s?|diferentes?|divers[oa])\ (?:de|a|da))
  | \b(?:не|ни|niet|geen)\b (?:\s+(?:равно|gelijk|aan))*
  | (?:不(?:可能|会|應該|应该|能|再|一定)?(?:是|等于|等於|为|為)
      |[并並][非不](?:是|等于)?|绝非|没有|沒有|非|無く)
      | \b(?:not|never|cannot|neither|nor|without|no\ longer|\w*n['’]t)\b (?:\s+[^\W\d][\w'’-]*)?
        (?:\s+(?!(?:is|are|was|were|equals?|ha[sd]|have|gives?|makes?|leaves?|so|then|but|who|that
            |which|because|since|as|when|while|where|if)\b)[^\W\d][\w'’-]*){0,4}
      | \b(?:false|untrue|doubts?|wrong|incorrect|disagree|deny|not\ (?:true|the\ case|so)
          |(?:do|does|did)(?:\ not|n['’]t)\ (?:think|believe)(?:\ that)?\ the\ (?:\w+\ )?answer)
        (?:\s+[\w'’]+){0,6}
      | \b(?:instead\ of|except|(?:anything|all)\ but|far\ from|nowhere\ near|differ\w*\ from
          |unequal\ to)
    ) | (?P<turned>
    \b(?:mindestens|höchstens|maximal|minimal|über|unter|zwischen|bis\ zu
      |(?:mehr|weniger|größer|kleiner|höher|niedriger)\ als)
  | \b(?:au\ (?:moins|plus)|(?:plus|moins)\ (?:de|que)
      |(?:supérieur|inférieur)e?s?\ (?:ou\ égale?\ )?à
      |entre|jusqu['’]à|(?:plus\ (?:grand|petit)e?s?)\ que|maximum|minimum|soit)
  | \b(?:al\ menos|por\ lo\ menos|como\ (?:máximo|mínimo|mucho|poco)|(?:más|menos)\ (?:de|que)
      |(?:mayor|menor|superior|inferior)e?s?\ (?:o\ igual\ )?(?:que|a|de)|hasta|desde
      |mais\ de|pelo\ menos|no\ máximo|più\ di|meno\ di|almeno|al\ massimo|не\ менее|больше|меньше)
  | \b(?:puissance|racine|Potenz|Wurzel|potencia|raíz|doppelte?|double|doble|hälfte|moitié|mitad)
        (?:\s+(?:de|von|du|carrée?|cuadrada|aus))*
  | (?:大于|大於|小于|小於|至少|至多|最多|最少|最大|最小|超过|超過|不到|不足|多于|多於
      |少于|少於|[高低]于|介于|不[超少多大小].于?
      |少なくとも|最低でも|多くとも|最大でも|分之|分の|平方根|根号|根號|√|のうち)
  """
    rf"| \d[\d.,$]*\s*[\u3040-\u9fff]{{,2}}?\s*(?:{_JOIN}) | "
    r"(?<!from\ )(?<![\d.])\d[\d.,]*\s+(?:to|or)"
    r"""
      | \b(?:than|at\ (?:the\ )?(?:most|least)|under|over|below|above|beyond|between|short\ of
          |(?<!rounds\ )(?<!rounded\ )(?<!adds\ )(?<!add\ )(?<!adding\ )up\ to
          |exceed(?:s|ing)?|as\ (?:many|much|few|little)\ as|(?:hundred|thousand|million)\ and
          |times|plus|minus|twice|thrice|double|triple|half|mod(?:ulo)?|base|sqrt|log|ln|sin|cos|tan
          |(?:between|either|(?:(?<!\w\s)|(?<=\bis\s)|(?<=\bget\s)|(?<=\bare\s))from)\s+\D?\d\S*\s+(?:\w+\s+)?(?:and|or|to)
          |(?:divided|multiplied|divisible)\ by
          |(?:(?:max|min)imum|half|thirds?|quarters?|roots?|square|cube|power|log(?:arithm)?
            |factorial|reciprocal|inverse|opposite|percent|multiples?|factors?|divisors?|product
            |difference)\ of)
        (?:\s+(?:or\ equal\ to|equal\ to|the|number|a\ total\ of|about|only|exactly|just|around))*
    ) | (?P<operator>
        (?<!answer\ )(?<!option\ )(?<![\w'’.])[b-zB-HJ-Z\u0370-\u03ff]        # a variable
      | (?<![a-zA-Z:]\s)(?<![\w.])\d{1,99}\s?:\s?\Z                         # a ratio
      | (?<!\A[A-Z])(?<!\s[A-Z])\)\Z | \w[-+]\Z
      | [^\s\w.,:;=!?"'“”’*)\]$€£¥₹₩≈\u2060。、「『【《-]
    ) ) [\s\u2060]*[$€£¥₹₩]?\s*$
    """,
    re.VERBOSE | re.IGNORECASE,
)
# The same after it, or after it and some words. A dash before words is no operator.
_AFTER = re.compile(
    r"""
    (?P<denied>
    [个個人元円本枚つ]?(?:では|じゃ|とは|で|に|と)?(?:は)?
        (?:あり(?!ます)ません|ない(?!し)|な[いか]|ありません|異な|違|等しくな|等しくあり|言えな|以外)
  | (?:是|就是)?(?:错|錯|不对|不對|不正确|不是)
  | 이?[가이은는]?\s*아[니닙]
  | \s*(?:ist|est|es|è|é)\s+(?:falsch|nicht|faux|incorrecto|falso|sbagliato|errado|no|pas)\b
  | \s*n['’]est\s+pas\b | \s+no\s+es\b
  | \s*[?？]\s*(?:no|nein|non|não|нет|不|いや|いえ|いいえ|아니)(?![^\W\d_])
      | [\s\u2060$]* (?:
        (?:(?:is|was|does|would|could|can|must|should|will)\s+)?
        (?:not|never|cannot|neither|nor|without|no\ longer|\w*n['’]t)\b
      | (?:\s*(?!(?:who|that|which|because|since|as|when|while|so|where|if)\b)[^\W\d_]{2,}\s+)?
        (?:is|are|was|were|seems?|looks?)\s+
        (?:wrong|incorrect|false|impossible|too|not\ (?:the|correct|right))\b )
    ) | (?P<turned>
    [\u3040-\u9fff]{0,4}?(?:以上|以下|以内|以外|未満|未滿|より
      |を(?:超|下回|上回)|超|多[个個人元]|余[个人元]|[个個]?半)
  | [次]?(?:方根|乗根|次方|次幂|乗|次冪|次根|平方根)
  | [折割成] | 分之 | 分の | の\s*\d+乗|の半分|的一半 | 倍根
    """
    rf"| \s*(?:{_JOIN})\s*[-+$]?\d | [.‥…]{{2,}}\s*\d"
    r"""
  | \s*(?:oder|ou|o|и|или)\s+(?:mehr|weniger|plus|moins|más|menos|mais|più|meno|больше|меньше)\b
  | (?:\.\s?|-?(?:te[nr]?)\s|(?:e|ème|ième|er|[ºªoa°])\s|\.[ºªoa]\s)
      (?:Potenz|Wurzel|puissance|racine|potencia|raíz|potência|raiz|potenza|radice)
  | (?:st|nd|rd|th)[\s\u2060-]+(?:power|root|degree|order|derivative)
      | [\s\u2060$]* (?:
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
          | [^\s\w.,:;!?"'“”’*)\]}…$€£¥₹₩—–°Ωµ\u2060。、」』】》+-] ) )
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True)
class Quantity:
    """A number and what it counts or measures.

    Args:
        value: of 20%, 20.
        percent: whether it may mean a hundredth of this, too: answers are published either way; but
            for quotients and what is less than 1.
        unit: power and name of a known unit; empty for none, a word or a currency.
        exact: whether it was written as a decimal, and not as a quotient.
        comma: whether it may be a list of two numbers as well: `2,1` in a formula.
    """

    value: Fraction
    percent: bool
    unit: str
    exact: bool
    comma: bool

    @property
    def values(self) -> set[Fraction]:
        """The values that the number may mean."""
        return {self.value, self.value / 100} if self.percent else {self.value}

    @property
    def text(self) -> str:
        """The number in LaTeX."""
        quotient = str(self.value)
        decimal = f"{Decimal(self.value.numerator) / self.value.denominator:f}"
        return (decimal if self.exact and "/" in quotient else quotient) + r"\%" * self.percent

    def agrees(self, other: Quantity) -> bool:
        """True if both may be the same number with the same unit.

        Args:
            other: the answer's quantity; this one is the ground truth's.
        """
        mine = self.measured_in(other.unit)
        theirs = other.measured_in(self.unit)
        if (
            mine.unit
            and theirs.unit != mine.unit
            and (theirs.unit or mine.unit in ("am", "pm"))
            and {mine.unit, theirs.unit} not in _ALIKE
        ):
            return False
        digits = Fraction if mine.exact == theirs.exact else _six_digits
        return not set(map(digits, mine.values)).isdisjoint(map(digits, theirs.values))

    def measured_in(self, unit: str) -> Quantity:
        """The same in a unit of which its own has several: 2.5 hours in minutes; else as it is.

        Args:
            unit: the other amount's.
        """
        size = _SIZES.get(f"{self.unit} {unit}")
        return replace(self, value=self.value * size, unit=unit) if size else self


def _six_digits(value: Fraction) -> object:
    """The six digits that two numbers have to share; all of a whole one."""
    decimal = Decimal(value.numerator) / value.denominator
    return value if value.denominator == 1 else f"{decimal:.5e}"


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
    return rewrite(unicodedata.normalize("NFKC", rewrite(text, _FOLDED)), _NORMAL)


def undressed(text: str) -> str:
    """Drop colours, sizes, lines under a formula and space at its ends; write text in one way.

    Args:
        text: LaTeX, with running text around it or without.
    """
    return rewrite(text, _UNDRESSED) if "\\" in text else text


def closing_bracket(text: str, start: int, pair: str = "{}") -> int:
    """Find where the bracket that opened just before `start` is closed.

    Args:
        text: LaTeX.
        start: index in `text`, right after the opening bracket.
        pair: the opening and the closing bracket.

    Returns:
        The index of the closing bracket; the length of `text` if it is never closed. One after a
        backslash neither opens nor closes.
    """
    depth = 1
    for sign in re.compile(rf"\\.|[{re.escape(pair)}]", re.DOTALL).finditer(text, start):
        depth += (sign[0] == pair[0]) - (sign[0] == pair[1])
        if depth == 0:
            return sign.start()
    return len(text)


def plain(text: str) -> str:
    """Undo the LaTeX and markdown around a plain number; other LaTeX stays, as no plain number.

    Args:
        text: of an answer.
    """
    return _AMOUNT.sub(_amount, rewrite(folded(text), _PLAIN))


def _amount(match: re.Match[str]) -> str:
    """Two numbers that make one amount as one: 2 hours and 30 minutes as 150 minutes."""
    units = map(_UNIT.match, match.group(2, 4))
    size = _SIZES.get(" ".join(unit.lastgroup or "" for unit in units if unit))
    if size is None:
        return match[0]
    return f"{size * Fraction(match[1]) + int(match[3])} {match[4]}"


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
    if FALSE.search(plain(text)):
        return True
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
    value = _value(match)
    if measured is None or value is None or around(before, after):
        return None
    unit, rest = measured
    if around("", rest) or (match["sign"].strip() and _OPERAND_BEFORE.search(before)):
        return None
    if alone and (
        re.search(_OPERATORS, before)
        or re.search(f"{_OPERATORS}|{_VARIABLE}" if formula else _OPERATORS, rest)
    ):
        return None
    percent = bool(match["percent"])
    if percent and (match["below"] or abs(value) < 1):
        value /= 100
        percent = False
    listed = formula and "," in match["digits"] and not _GROUPED.fullmatch(match["digits"])
    return Quantity(value, percent, unit, exact=not match["below"], comma=listed)


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
        symbol.end() > 1
        or in_words
        or not symbol[0].isascii()
        or (not formula and (apart or per[0] or symbol[0] == "g"))
    ):
        # One name for all spellings: `m3`, `ms2` of meters per second squared.
        below = re.sub(r"(?<=.)[^\W\d_]|\W", "", per["per"] or "")
        return f"{symbol.lastgroup}{per['power'] or ''}{below}", end
    if _ATTACHED.match(after) or not re.match(r"[^\W\d_]", rest):
        return "", end if per["per"] else after
    if word is None or (formula and not in_words and word.end() < 3):
        return None
    return "", end


def _value(match: re.Match[str]) -> Fraction | None:
    digits = re.sub(r"[\s\\]", "", match["digits"])
    if len(digits) > _LONGEST:
        return None
    grouped = _GROUPED.fullmatch(digits)
    if "," in digits and not grouped:
        digits = digits.replace(".", "").replace(",", ".")  # 1.234,5
    value = Fraction(digits.replace(",", ""))
    if match["below"]:
        value = value / int(match["below"]) + int(match["whole"] or 0)
    if match["power"]:
        value *= Fraction(10) ** int(match["power"])
    for word in re.finditer(_MAGNITUDE, match["magnitude"], re.VERBOSE | re.IGNORECASE):
        value *= int((word.lastgroup or "")[1:])
    return -value if match["sign"].strip(" \n\t+") or match["inner"] else value
