"""Ground truths and replies in six languages, right or wrong by construction.

Each kind draws values, and builds from each its spellings and what only holds them: a reply is
right exactly if it states the value of the ground truth. Kinds of the first table ask for what must
be told apart, those of the second for spellings that have to be read; most do both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Drawn = Iterator[tuple[str, str, bool]]


@dataclass(frozen=True)
class Reply:
    """One question to the reward.

    Args:
        kind: name of the function that built it.
        gold: the ground truth.
        text: of a model.
        same: whether it is right.
    """

    kind: str
    gold: str
    text: str
    same: bool


STATED = {
    "en": ("The answer is {}.", "So the result is {}.", "Answer: {}", "Hence we get {}."),
    "zh": ("答案是 {}。", "答案是{}。", "所以答案为{}。", "最终答案：{}", "因此，结果是 {}。"),
    "ja": ("答えは{}です。", "したがって、答えは {} です。", "答え：{}", "よって、{}となります。"),
    "de": (
        "Die Antwort ist {}.",
        "Also ist das Ergebnis {}.",
        "Antwort: {}",
        "Die Lösung lautet {}.",
    ),
    "fr": ("La réponse est {}.", "Donc le résultat est {}.", "Réponse : {}", "On obtient {}."),
    "es": ("La respuesta es {}.", "El resultado es {}.", "Respuesta: {}", "Por lo tanto, es {}."),
}
MARKED = ("\\boxed{{{}}}", "so it is $\\boxed{{{}}}$.", "#### {}", "<answer>{}</answer>", "{}")
FORMULA = (
    "\\boxed{{{}}}",
    "The answer is ${}$.",
    "#### ${}$",
    "答案是 ${}$。",
    "答えは${}$です。",
    "Die Antwort ist ${}$.",
    "La réponse est ${}$.",
    "La respuesta es ${}$.",
)


def said(rng: random.Random, language: str, text: str) -> str:
    """Words in a sentence of their language, or at a marker."""
    boxed = "\\text{" + text + "}" if text.isascii() and " " in text else text
    way = rng.choice((*STATED[language], *STATED[language], *MARKED))
    return way.format(boxed if "boxed" in way else text)


def shown(rng: random.Random, formula: str) -> str:
    """A formula in a sentence, or at a marker."""
    return rng.choice(FORMULA).format(formula)


def against(rng: random.Random, meanings: list[list[str]]) -> Drawn:
    """Formulas of every meaning, held against those of the first."""
    for place, spellings in enumerate(meanings):
        for formula in spellings:
            yield rng.choice(meanings[0]), shown(rng, formula), place == 0


# --- What must be told apart ------------------------------------------------------------------


def tiny_numbers(rng: random.Random) -> Drawn:
    power = rng.randrange(7, 25)
    digits = rng.choice(("1.6", "6.63", "2.5", "9.1"))
    small = f"{digits}\\times10^{{-{power}}}"
    meanings = [
        [
            small,
            f"{digits} \\times 10^{{-{power}}}",
            f"{digits}\\cdot 10^{{-{power}}}",
            f"\\frac{{{digits}}}{{10^{{{power}}}}}",
        ],
        [f"10^{{-{power}}}"],
        [f"{digits}\\times10^{{-{power + 1}}}"],
        [f"-{small}"],
        ["0"],
    ]
    yield from against(rng, meanings)
    yield from against(
        rng,
        [
            [f"10^{{-{power}}}", f"1\\times 10^{{-{power}}}", f"\\frac{{1}}{{10^{{{power}}}}}"],
            [f"2\\times10^{{-{power}}}"],
            [f"3\\cdot10^{{-{power}}}"],
        ],
    )
    n = rng.randrange(2, 7)
    yield from against(
        rng,
        [
            [f"{n}\\pi\\times10^{{-{power}}}", f"\\frac{{{n}\\pi}}{{10^{{{power}}}}}"],
            [f"\\pi\\times10^{{-{power}}}"],
            [f"{n}\\times10^{{-{power}}}"],
        ],
    )
    yield f"{n}e-{power}", f"The answer is {n}e-{power}.", True
    yield f"{n}e-{power}", f"The answer is {n + 1}e-{power}.", False
    yield (
        f"\\frac{{{n}}}{{7}}\\times10^{{-{power}}}",
        f"\\boxed{{{n / 7:.6f}\\times10^{{-{power}}}}}",
        True,
    )
    yield (
        f"\\frac{{{n}}}{{7}}\\times10^{{-{power}}}",
        f"\\boxed{{{n / 7:.2f}\\times10^{{-{power}}}}}",
        False,
    )


MONTHS = {
    "en": [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ],
    "de": [
        "Januar",
        "Februar",
        "März",
        "April",
        "Mai",
        "Juni",
        "Juli",
        "August",
        "September",
        "Oktober",
        "November",
        "Dezember",
    ],
    "fr": [
        "janvier",
        "février",
        "mars",
        "avril",
        "mai",
        "juin",
        "juillet",
        "août",
        "septembre",
        "octobre",
        "novembre",
        "décembre",
    ],
    "es": [
        "enero",
        "febrero",
        "marzo",
        "abril",
        "mayo",
        "junio",
        "julio",
        "agosto",
        "septiembre",
        "octubre",
        "noviembre",
        "diciembre",
    ],
}


def dates(rng: random.Random) -> Drawn:
    day, other_day = rng.sample(range(2, 29), 2)
    month, other = rng.sample(range(12), 2)
    year = rng.randrange(1900, 2030)

    def spelled(language: str, month: int, day: int) -> str:
        match language:
            case "zh" | "ja":
                return f"{month + 1}月{day}日"
            case "en":
                name = MONTHS["en"][month]
                return rng.choice(
                    (
                        f"{name} {day}",
                        f"{day} {name}",
                        f"{name} {day}th" if 3 < day < 21 else f"{name} {day}",
                        f"{name[:3]} {day}",
                        f"{name[:3]}. {day}",
                    )
                )
            case "de":
                return f"{day}. {MONTHS['de'][month]}"
            case "fr":
                return f"{day} {MONTHS['fr'][month]}"
            case _:
                return f"{day} de {MONTHS['es'][month]}"

    for language in STATED:
        gold = spelled(language, month, day)
        yield gold, said(rng, language, spelled(language, month, day)), True
        yield gold, said(rng, language, spelled(language, other, day)), False
        yield gold, said(rng, language, spelled(language, month, other_day)), False
    gold = f"{MONTHS['en'][month]} {day}, {year}"
    yield gold, f"\\boxed{{\\text{{{gold}}}}}", True
    yield gold, f"The answer is {gold}.", True
    yield gold, f"The answer is {MONTHS['en'][other]} {day}, {year}.", False
    yield gold, f"The answer is {MONTHS['en'][month]} {day}, {year + 1}.", False
    yield f"{year}年{month + 1}月{day}日", f"答案是{year}年{month + 1}月{day}日。", True
    yield f"{year}年{month + 1}月{day}日", f"答案是{year}年{other + 1}月{day}日。", False


def unit_powers(rng: random.Random) -> Drawn:
    n = rng.randrange(2, 90)
    unit, word = rng.choice(
        (
            ("cm", "centimeters"),
            ("m", "meters"),
            ("km", "kilometers"),
            ("ft", "feet"),
            ("in", "inches"),
            ("mm", "millimeters"),
            ("yd", "yards"),
        )
    )
    squares = [
        f"{n} \\text{{ {unit}}}^2",
        f"{n}\\,\\mathrm{{{unit}}}^{{2}}",
        f"{n} \\text{{ {unit}}}²",
        f"{n} \\text{{ square {word}}}",
        f"{n}\\text{{ sq {unit}}}",
    ]
    cubes = [
        f"{n} \\text{{ {unit}}}^3",
        f"{n}\\,\\mathrm{{{unit}}}^{{3}}",
        f"{n} \\text{{ cubic {word}}}",
    ]
    lengths = [f"{n} \\text{{ {word}}}", f"{n}\\,\\mathrm{{{unit}}}"]
    yield from against(rng, [squares, cubes, lengths])
    yield from against(rng, [cubes, squares, lengths])
    for gold, text, same in (
        (f"{n} {unit}^2", f"{n} {unit}²", True),
        (f"{n} {unit}^2", f"{n} {unit}^3", False),
        (f"{n} {unit}³", f"{n} {unit}^3", True),
        (f"{n} {unit}³", f"{n} {unit}²", False),
        (f"{n} {unit}", f"{n} {unit}^2", False),
        (f"{n} m/s", f"{n} m/s", True),
        (f"{n} m/s", f"{n} m/s^2", False),
        (f"{n} m/s^2", f"{n} m/s²", True),
        (f"{n} m/s^2", f"{n} m/s", False),
        (f"{n} km/h", f"{n} km/min", False),
        (f"{n} kg/m^3", f"{n} kg/m^2", False),
    ):
        yield gold, said(rng, "en", text), same
    for language, square, cube in (
        ("zh", "平方米", "立方米"),
        ("ja", "平方センチメートル", "立方センチメートル"),
        ("zh", "平方厘米", "立方厘米"),
        ("de", "Quadratmeter", "Kubikmeter"),
        ("fr", "mètres carrés", "mètres cubes"),
        ("es", "metros cuadrados", "metros cúbicos"),
    ):
        yield f"{n} {square}", said(rng, language, f"{n} {square}"), True
        yield f"{n} {square}", said(rng, language, f"{n} {cube}"), False


def percents(rng: random.Random) -> Drawn:
    top, bottom = rng.choice(((1, 3), (2, 3), (1, 7), (5, 9), (7, 3), (2, 11)))
    n = rng.randrange(11, 90)
    fraction = f"\\frac{{{top}}}{{{bottom}}}"
    yield fraction, shown(rng, f"{fraction}\\%"), False
    yield f"{fraction}\\%", shown(rng, fraction), False
    yield f"{fraction}\\%", shown(rng, f"{fraction}\\%"), True
    yield f"{top}/{bottom}", f"The answer is {top}/{bottom}%.", False
    yield f"{top}/{bottom}", f"The answer is {top}/{bottom} percent.", False
    yield f"0.{n}", shown(rng, f"0.{n}\\%"), False
    yield f"0.{n}", shown(rng, f"{n}\\%"), True
    yield f"{n}\\%", shown(rng, f"0.{n}"), True
    for gold in (f"${n}$ %", f"${n}\\%$", f"{n}%", f"${n}$\\%", f"{n} percent", f"$ {n} \\% $"):
        yield gold, f"The answer is ${n}$ %.", True
        yield (
            gold,
            rng.choice((f"\\boxed{{{n}\\%}}", f"${n}\\%$", f"{n}％", f"{n} \\text{{ percent}}")),
            True,
        )
        yield gold, f"The answer is ${n + 1}$ %.", False
    for language, word in (
        ("de", "Prozent"),
        ("es", "por ciento"),
        ("fr", "pour cent"),
        ("ja", "パーセント"),
    ):
        yield f"{n}\\%", said(rng, language, f"{n} {word}"), True
        yield f"0.{n}", said(rng, language, f"{n} {word}"), True


MAGNITUDES = [
    ("en", " thousand", 3),
    ("en", " million", 6),
    ("en", " billion", 9),
    ("en", " lakh", 5),
    ("en", " crore", 7),
    ("en", " hundred", 2),
    ("en", " hundred thousand", 5),
    ("zh", "万", 4),
    ("zh", "亿", 8),
    ("zh", "千", 3),
    ("zh", "百万", 6),
    ("zh", "千万", 7),
    ("zh", " 万", 4),
    ("zh", "百", 2),
    ("ja", "万", 4),
    ("ja", "億", 8),
    ("ja", "千", 3),
    ("ja", "千万", 7),
    ("ja", "兆", 12),
    ("de", " Millionen", 6),
    ("de", " Mio.", 6),
    ("de", " Milliarden", 9),
    ("de", " Mrd.", 9),
    ("de", " Tausend", 3),
    ("de", " tausend", 3),
    ("de", " Hundert", 2),
    ("fr", " mille", 3),
    ("fr", " millions", 6),
    ("fr", " milliards", 9),
    ("es", " mil", 3),
    ("es", " millones", 6),
    ("es", " mil millones", 9),
    ("es", " cientos", 2),
]


def number_words(rng: random.Random) -> Drawn:
    for language, word, power in MAGNITUDES:
        n = rng.randrange(2, 99)
        text = said(rng, language, f"{n}{word}")
        yield f"{n}", text, False
        yield f"{n * 10**power}", text, True
        yield f"{n * 10 ** (power + 1)}", text, False


NOT = {
    "en": [
        "not {}",
        "isn't {}",
        "never {}",
        "cannot be {}",
        "anything but {}",
        "not equal to {}",
        "not exactly {}",
        "unequal to {}",
        "no longer {}",
    ],
    "zh": ["不是 {}", "不是{}", "并非{}", "不等于{}", "不为{}", "不可能是{}", "绝不是{}", "没有{}"],
    "ja": [
        "{}ではありません",
        "{}ではない",
        "{}じゃない",
        "{}とは異なる",
        "{}ではないです",
        "{}でない",
        "{}に等しくない",
    ],
    "de": [
        "nicht {}",
        "keine {}",
        "niemals {}",
        "nie {}",
        "nicht gleich {}",
        "kein {}",
        "ungleich {}",
    ],
    "fr": [
        "ce n'est pas {}",
        "pas {}",
        "n'est pas {}",
        "jamais {}",
        "pas égal à {}",
        "n'est pas égale à {}",
        "différent de {}",
    ],
    "es": [
        "no es {}",
        "no {}",
        "nunca {}",
        "no es igual a {}",
        "jamás {}",
        "tampoco {}",
        "distinto de {}",
    ],
}
BOUNDS = {
    "en": [
        "more than {}",
        "at least {}",
        "at most {}",
        "{} or more",
        "less than {}",
        "fewer than {}",
    ],
    "zh": [
        "大于{}",
        "小于{}",
        "至少{}",
        "最多{}",
        "超过{}",
        "不到{}",
        "{}以上",
        "{}以下",
        "多于{}",
        "少于{}",
        "不超过{}",
    ],
    "ja": [
        "{}以上",
        "{}以下",
        "{}未満",
        "{}より大きい",
        "{}より小さい",
        "少なくとも{}",
        "{}を超える",
        "最大{}",
        "{}より多い",
    ],
    "de": [
        "mindestens {}",
        "höchstens {}",
        "mehr als {}",
        "weniger als {}",
        "größer als {}",
        "kleiner als {}",
        "{} oder mehr",
        "unter {}",
    ],
    "fr": [
        "au moins {}",
        "au plus {}",
        "plus de {}",
        "moins de {}",
        "supérieur à {}",
        "inférieur à {}",
        "{} ou plus",
    ],
    "es": [
        "al menos {}",
        "como máximo {}",
        "más de {}",
        "menos de {}",
        "mayor que {}",
        "menor que {}",
        "{} o más",
        "por lo menos {}",
    ],
}
BETWEEN = {
    "en": [
        "{} to {}",
        "from {} to {}",
        "between {} and {}",
        "{} or {}",
        "{}..{}",
        "{}...{}",
        "{}–{}",
        "{}~{}",
    ],
    "zh": [
        "{}到{}",
        "{}至{}",
        "{}或{}",
        "{}和{}",
        "{}~{}",
        "{}、{}",
        "在{}和{}之间",
        "{}或者{}",
        "{}～{}",
    ],
    "ja": [
        "{}から{}",
        "{}または{}",
        "{}か{}",
        "{}と{}の間",
        "{}～{}",
        "{}、{}",
        "{}と{}",
        "{}もしくは{}",
    ],
    "de": ["{} bis {}", "{} oder {}", "zwischen {} und {}", "von {} bis {}", "{} und {}", "{}–{}"],
    "fr": ["de {} à {}", "entre {} et {}", "{} ou {}", "{} et {}", "{} à {}", "soit {} soit {}"],
    "es": ["de {} a {}", "entre {} y {}", "{} o {}", "{} y {}", "{} a {}", "desde {} hasta {}"],
}
TAKEN_BACK = {
    "en": [
        "{}? No, it is {}",
        "{}. Wait, it is {}",
        "{}, no, {}",
        "{}? No, {}",
        "{}. No, it's {}",
        "{}; actually {}",
        "{} - wait, it is {}",
        "{}. Sorry, {}",
        "{}, I mean {}",
        "{}. Correction: {}",
    ],
    "zh": [
        "{}？不，是{}",
        "{}。不对，是{}",
        "{}，不对，应该是{}",
        "{}。等等，应该是{}",
        "{}？不，应该是{}",
    ],
    "ja": ["{}？いや、{}", "{}、いいえ、{}", "{}？いいえ、{}", "{}。いや、{}", "{}。待って、{}"],
    "de": [
        "{}? Nein, es ist {}",
        "{}. Nein, {}",
        "{}, nein, {}",
        "{}. Moment, es ist {}",
        "{}? Nein, {}",
    ],
    "fr": [
        "{} ? Non, c'est {}",
        "{}. Non, c'est {}",
        "{}, non, {}",
        "{}. Attendez, c'est {}",
        "{} ? Non, {}",
    ],
    "es": ["{}? No, es {}", "{}. No, es {}", "{}, no, {}", "{}. Espera, es {}", "{}? No, {}"],
}


def negations(rng: random.Random) -> Drawn:
    for language, phrases in NOT.items():
        for phrase in phrases:
            n = rng.randrange(2, 99)
            yield f"{n}", said(rng, language, phrase.format(n)), False
    for language, plain in (
        ("en", "I did not ask twice"),
        ("de", "Es war nicht leicht"),
        ("es", "No fue fácil"),
        ("fr", "Ce n'est pas difficile"),
        ("zh", "这不难"),
        ("ja", "難しくない"),
    ):
        n = rng.randrange(2, 99)
        stop = "。" if language in ("zh", "ja") else ". "
        yield f"{n}", plain + stop + STATED[language][0].format(n), True


def bounds(rng: random.Random) -> Drawn:
    for language, phrases in BOUNDS.items():
        for phrase in phrases:
            n = rng.randrange(2, 99)
            yield f"{n}", said(rng, language, phrase.format(n)), False


def ranges(rng: random.Random) -> Drawn:
    for language, phrases in BETWEEN.items():
        for phrase in phrases:
            n = rng.randrange(2, 50)
            m = n + rng.randrange(1, 9)
            text = said(rng, language, phrase.format(n, m))
            yield f"{n}", text, False
            yield f"{m}", text, False


def retractions(rng: random.Random) -> Drawn:
    for language, phrases in TAKEN_BACK.items():
        for phrase in phrases:
            n, m = rng.sample(range(2, 99), 2)
            text = rng.choice((*STATED[language], "#### {}", "{}")).format(phrase.format(n, m))
            yield f"{n}", text, False
            if rng.random() < 0.5:
                yield f"{m}", text, True
    n, m = rng.sample(range(2, 99), 2)
    yield f"{n}", f"\\boxed{{{n}}}? No, it is {m}.", False
    yield f"{n}", f"\\boxed{{{n}}}. Wait, it is \\boxed{{{m}}}.", False
    yield f"{n}", f"Is it {m}? No, it is {n}.", True
    yield f"{n}", f"The answer is \\boxed{{{n}}}. No further steps are needed.", True


def relations(rng: random.Random) -> Drawn:
    n, m = rng.sample(range(2, 99), 2)
    yield f"{n}", shown(rng, f"{m}={n}"), False
    yield f"{n}", shown(rng, f"{m} = {n}"), False
    yield f"{n}", f"#### {m} = {n}", False
    yield f"{n}", shown(rng, f"{m} \\ne {n}"), False
    yield f"{n}", shown(rng, f"{n} \\ne {m}"), False
    yield f"{n}", shown(rng, f"{m} < {n}"), False
    yield f"{n}", shown(rng, f"x \\ge {n}"), False
    yield f"{n}", shown(rng, f"x \\to {n}"), False
    yield f"{n}", shown(rng, f"{n} \\equiv {m}"), False
    yield f"{n}", shown(rng, f"{n}={n}"), True
    yield f"{n}", shown(rng, f"x={n}"), True
    yield f"{n + m}", shown(rng, f"{n}+{m}={n + m}"), True
    yield f"{n}", shown(rng, f"{n + m}-{m}={n}"), True


def ordinals(rng: random.Random) -> Drawn:
    n = rng.randrange(4, 20)
    wrong = {
        "en": [
            f"{n}th power",
            f"the {n}th power of 2",
            f"{n}th root",
            f"the {n}th root of 3",
            f"{n}th degree",
        ],
        "zh": [f"{n}次方", f"2的{n}次方", f"{n}次方根", f"{n}分之一", f"{n}折"],
        "ja": [f"{n}乗", f"2の{n}乗", f"{n}乗根", f"{n}分の1", f"{n}割"],
        "de": [f"{n}. Potenz", f"{n}-te Potenz", f"die {n}. Wurzel"],
        "fr": [f"puissance {n}", f"{n}e puissance", f"racine {n}e"],
        "es": [f"{n}.ª potencia", f"{n}ª potencia", f"raíz {n}ª"],
    }
    for language, phrases in wrong.items():
        for phrase in phrases:
            yield f"{n}", said(rng, language, phrase), False
    yield f"{n}", said(rng, "en", f"{n}th"), True
    yield f"{n}", said(rng, "zh", f"第{n}"), True
    yield f"{n}", said(rng, "ja", f"{n}番目"), True


def sets(rng: random.Random) -> Drawn:
    a, b, c = sorted(rng.sample(range(2, 30), 3))
    dots = rng.choice(("...", "\\ldots", "\\dots", "\\cdots", "…"))
    other = rng.choice(("\\ldots", "\\dots", "\\cdots"))
    listed = f"\\{{1, 2, {c + 4}\\}}"
    yield listed, shown(rng, f"\\{{1, 2, {dots}, {c + 4}\\}}"), False
    yield f"\\{{1, 2, {dots}, {c + 5}\\}}", shown(rng, f"\\{{1, 2, {c + 5}\\}}"), False
    yield f"\\{{1, 2, \\dots, {c + 5}\\}}", shown(rng, f"\\{{1,2,{other},{c + 5}\\}}"), True
    yield f"\\{{1, 2, \\dots, {c + 5}\\}}", shown(rng, f"\\{{1, 2, {other}, {c + 6}\\}}"), False
    yield f"\\{{1, 2, 3, {dots}\\}}", shown(rng, "\\{1, 2, 3\\}"), False
    yield "\\{1, 2, 3\\}", shown(rng, f"\\{{1, 2, 3, {dots}\\}}"), False
    for nested in (
        f"\\{{\\{{{a}\\}}, {b}\\}}",
        f"\\{{{a}, \\{{{b}\\}}\\}}",
        f"\\{{\\{{{a}, {b}\\}}\\}}",
        f"\\{{\\{{{a}\\}}, \\{{{b}\\}}\\}}",
    ):
        yield f"\\{{{a}, {b}\\}}", shown(rng, nested), False
        yield nested, shown(rng, f"\\{{{a}, {b}\\}}"), False
        yield nested, shown(rng, nested.replace(", ", ",")), True
    yield f"\\{{{a}\\}}", shown(rng, f"\\{{\\{{{a}\\}}\\}}"), False
    yield f"\\{{\\{{{a}\\}}, {b}\\}}", shown(rng, f"\\{{{b}, \\{{{a}\\}}\\}}"), True
    for opened, closed in (
        ("\\{", "\\}"),
        ("\\lbrace ", " \\rbrace"),
        ("\\left\\{", "\\right\\}"),
        ("\\bigl\\{", "\\bigr\\}"),
        ("\\left\\lbrace ", "\\right\\rbrace"),
    ):
        yield f"\\{{{a}, {b}, {c}\\}}", shown(rng, f"{opened}{c}, {a}, {b}{closed}"), True
        yield f"\\{{{a}, {b}, {c}\\}}", shown(rng, f"{opened}{c + 1}, {a}, {b}{closed}"), False


# --- What has to be read ------------------------------------------------------------------------


def values(rng: random.Random) -> tuple[str, str]:
    """A value and another one, in LaTeX."""
    n, m = rng.sample(range(2, 40), 2)
    return rng.choice(
        (
            (f"{n}", f"{m}"),
            (f"\\frac{{{n}}}{{41}}", f"\\frac{{{m}}}{{41}}"),
            (f"{n}\\sqrt{{2}}", f"{m}\\sqrt{{2}}"),
            (f"{n}\\pi", f"{m}\\pi"),
            (f"-{n}", f"-{m}"),
            (f"x^{{2}}+{n}", f"x^{{2}}+{m}"),
        )
    )


LOOKS = (
    "{}\\,",
    "{}\\ ",
    "\\ {}\\ ",
    "{}\\;",
    "{}\\quad",
    "{}~",
    "\\color{{red}}{{{}}}",
    "\\color{{blue}}{}",
    "\\textcolor{{red}}{{{}}}",
    "\\underline{{{}}}",
    "\\large {}",
    "\\Large{{{}}}",
    "{{\\large {}}}",
    "\\displaystyle {}",
    "\\boldsymbol{{{}}}",
    "\\mathbf{{{}}}",
    "\\bm{{{}}}",
    "{{\\bf {}}}",
    "\\huge {}",
    "\\textcolor[rgb]{{1,0,0}}{{{}}}",
    "\\mathrm{{{}}}",
    "{{{}}}",
    "\\left({}\\right)",
    "\\underline{{\\underline{{{}}}}}",
    "\\color{{red}}{{\\underline{{{}}}}}",
    "\\small {}",
    "\\hspace{{1cm}}{}",
    "\\,{}\\!",
)


def looks(rng: random.Random) -> Drawn:
    for look in LOOKS:
        value, other = values(rng)
        yield value, shown(rng, look.format(value)), True
        yield value, shown(rng, look.format(other)), False
    value, other = values(rng)
    yield value, f"\\color{{red}}{{\\boxed{{{value}}}}}", True
    yield value, f"\\underline{{\\boxed{{{other}}}}}", False
    for command in (
        "text",
        "textrm",
        "mathrm",
        "textsf",
        "mbox",
        "textnormal",
        "textit",
        "mathsf",
        "rm",
        "hbox",
    ):
        n = rng.randrange(2, 90)
        yield f"{n}", shown(rng, f"{n}\\{command}{{ cm}}"), True
        yield f"{n} \\text{{ cm}}", shown(rng, f"{n}\\,\\{command}{{cm}}"), True
        yield f"{n} \\text{{ cm}}", shown(rng, f"{n}\\,\\{command}{{kg}}"), False
        yield f"{n}", shown(rng, f"{n + 1}\\{command}{{ cm}}"), False


SENTENCES = {
    "en": ("In total there are {} apples.", "She has {} apples left.", "So it costs ${}."),
    "zh": (
        "总共有{}个苹果。",
        "一共有 {} 个苹果。",
        "小明还剩{}元。",
        "因此，共有{}人。",
        "所以他需要{}小时。",
        "故答案为：{}。",
        "最后得到{}。",
        "答案为{}，验证无误。",
        "答案：{}个",
    ),
    "ja": (
        "合計{}個のりんごがあります。",
        "りんごは全部で{}個です。",
        "したがって、{}円です。",
        "よって答えは{}です。",
        "答えは、{}です。",
        "残りは{}人になります。",
        "{}時間かかります。",
    ),
    "de": ("Insgesamt sind es {} Äpfel.", "Sie hat noch {} Euro.", "Also braucht er {} Stunden."),
    "fr": ("Il y a {} pommes en tout.", "Elle a encore {} euros.", "Il lui faut donc {} heures."),
    "es": ("Hay {} manzanas en total.", "Le quedan {} euros.", "Por lo tanto necesita {} horas."),
}


def sentences(rng: random.Random) -> Drawn:
    for language, ways in SENTENCES.items():
        for way in (*ways, *STATED[language]):
            n = rng.randrange(20, 999)
            yield f"{n}", way.format(n), True
            yield f"{n}", way.format(n + 1), False
            yield f"{n}", way.format(f"{n}.5"), False
    for language in ("zh", "ja"):
        for value in ("\\frac{2}{7}", "3\\sqrt{5}", "x^{2}+1"):
            way = rng.choice(STATED[language])
            yield value, way.format(f"${value}$"), True
            yield value, way.format(f"$2{value}$"), False


ORS = {"en": "or", "zh": "或", "ja": "または", "de": "oder", "fr": "ou", "es": "o"}


def alternatives(rng: random.Random) -> Drawn:
    for language, word in ORS.items():
        a, b, c = rng.sample(range(2, 40), 3)
        gold = rng.choice((f"{a}, {b}", f"\\{{{a}, {b}\\}}", f"x = {a} \\text{{ or }} x = {b}"))
        for first, second, same in ((a, b, True), (b, a, True), (a, c, False)):
            texts = (
                f"$x = {first}$ {word} $x = {second}$",
                f"\\boxed{{x = {first} \\text{{ {word} }} x = {second}}}",
                STATED[language][0].format(f"$x = {first}$ {word} $x = {second}$"),
                STATED[language][0].format(f"${first}$ {word} ${second}$"),
                f"$\\boxed{{{first}}}$ {word} $\\boxed{{{second}}}$",
                f"\\boxed{{{first} \\text{{ {word} }} {second}}}",
            )
            for text in rng.sample(texts, 3):
                yield gold, text, same
                yield f"{a}", text, False


def degrees(rng: random.Random) -> Drawn:
    table = (
        ("\\sin", 30, "\\frac{1}{2}"),
        ("\\cos", 60, "\\frac12"),
        ("\\tan", 45, "1"),
        ("\\sin", 60, "\\frac{\\sqrt{3}}{2}"),
        ("\\cos", 45, "\\frac{\\sqrt2}{2}"),
        ("\\tan", 60, "\\sqrt{3}"),
    )
    for function, angle, value in table:
        sign = rng.choice(("^\\circ", "^{\\circ}", "°"))
        inside = rng.choice(
            (
                f"{function} {angle}{sign}",
                f"{function}({angle}{sign})",
                f"{function}{{{angle}{sign}}}",
            )
        )
        yield value, shown(rng, inside), True
        yield inside, shown(rng, value), True
        yield value, shown(rng, inside.replace(f"{angle}", f"{angle + 10}")), False
        yield value, shown(rng, f"{function} {angle}"), False
        yield inside, shown(rng, f"{function} {angle + 5}^\\circ"), False
        yield (
            f"{angle % 7 + 2}{inside}",
            shown(rng, f"{angle % 7 + 2}\\cdot {function}({angle}^{{\\circ}})"),
            True,
        )


def bare_fractions(rng: random.Random) -> Drawn:
    n = rng.randrange(2, 9)
    for short, whole, other in (
        (f"\\frac\\pi{n}", f"\\frac{{\\pi}}{{{n}}}", f"\\frac{{\\pi}}{{{n + 1}}}"),
        (f"\\frac{n}\\pi", f"\\frac{{{n}}}{{\\pi}}", f"\\frac{{\\pi}}{{{n}}}"),
        (f"\\frac{{\\pi}}{n}", f"\\frac{{\\pi}}{{{n}}}", f"{n}\\pi"),
        (f"\\dfrac\\pi {n}", f"\\pi/{n}", "\\pi"),
        (f"\\frac x{n}", f"\\frac{{x}}{{{n}}}", f"\\frac{{{n}}}{{x}}"),
        (f"\\tfrac{n}x", f"\\frac{{{n}}}{{x}}", f"\\frac{{x}}{{{n}}}"),
        ("\\frac\\alpha\\beta", "\\frac{\\alpha}{\\beta}", "\\frac{\\beta}{\\alpha}"),
        (f"\\frac{{\\sqrt3}}{n}", f"\\frac{{\\sqrt{{3}}}}{{{n}}}", f"\\frac{{3}}{{{n}}}"),
        (f"-\\frac\\pi{n}", f"-\\frac{{\\pi}}{{{n}}}", f"\\frac{{\\pi}}{{{n}}}"),
        (f"\\sqrt{n}", f"\\sqrt{{{n}}}", f"{n + 20}"),
        ("\\sqrt\\pi", "\\sqrt{\\pi}", "\\pi"),
    ):
        yield whole, shown(rng, short), True
        yield short, shown(rng, whole), True
        yield other, shown(rng, short), False


def decimal_commas(rng: random.Random) -> Drawn:
    whole = rng.randrange(2, 99)
    part = rng.choice(("5", "14", "75", "25", "1416"))
    for language in ("de", "fr", "es"):
        yield (
            f"{whole}.{part}",
            rng.choice(STATED[language]).format(f"$\\boxed{{{whole},{part}}}$"),
            True,
        )
        yield f"{whole}.{part}", f"\\boxed{{{whole},{part}}}", True
        yield f"{whole}.{part}", f"\\boxed{{{whole},{part}1}}", False
        yield f"{whole}.{part}", f"\\boxed{{{whole + 1},{part}}}", False
        yield f"{whole}.{part}", rng.choice(STATED[language]).format(f"{whole},{part}"), True
        yield f"{whole}", f"\\boxed{{{whole},{part}}}", False
    yield f"{whole},{part}", f"\\boxed{{{whole},{part}}}", True
    yield f"{whole}.{part}", f"\\boxed{{{whole}{{,}}{part}}}", True
    yield f"({whole}, {int(part)})", f"\\boxed{{({whole}, {int(part)})}}", True
    yield f"{whole}234.5", f"Die Antwort ist {whole}.234,5.", True


def environments(rng: random.Random) -> Drawn:
    a, b, c, d = rng.sample(range(2, 40), 4)
    point = f"({a}, {b})"
    row = rng.choice(
        (f"x={a}\\\\y={b}", f"x = {a} \\\\ y = {b}", f"x={a},\\\\y={b}.", f"x&={a}\\\\y&={b}")
    )
    for begin, end in (
        ("\\begin{cases}", "\\end{cases}"),
        ("\\left\\{\\begin{array}{l}", "\\end{array}\\right."),
        ("\\begin{cases} ", " \\end{cases}"),
        ("\\left\\{\\begin{aligned}", "\\end{aligned}\\right."),
    ):
        yield point, shown(rng, begin + row + end), True
        yield f"x = {a}, y = {b}", shown(rng, begin + row + end), True
        yield f"({b}, {a})", shown(rng, begin + row + end), False
        yield f"x = {a}, y = {c}", shown(rng, begin + row + end), False
    matrix = f"{a}&{b}\\\\{c}&{d}"
    gold = f"\\begin{{pmatrix}}{matrix}\\end{{pmatrix}}"
    other = f"{a}&{b}\\\\{d}&{c}"
    for begin, end in (
        ("\\left[\\begin{array}{cc}", "\\end{array}\\right]"),
        ("\\left(\\begin{array}{cc}", "\\end{array}\\right)"),
        ("\\begin{bmatrix}", "\\end{bmatrix}"),
        ("\\left[\\begin{array}{rr} ", " \\end{array}\\right]"),
        ("\\left[\\begin{matrix}", "\\end{matrix}\\right]"),
        ("\\left[\\begin{array}{c|c}", "\\end{array}\\right]"),
    ):
        yield gold, shown(rng, begin + matrix + end), True
        yield gold, shown(rng, begin + other + end), False
        yield begin + matrix + end, shown(rng, gold), True
    column = f"\\left[\\begin{{array}}{{c}}{a}\\\\{b}\\end{{array}}\\right]"
    yield f"\\begin{{pmatrix}}{a}\\\\{b}\\end{{pmatrix}}", shown(rng, column), True
    yield f"\\begin{{pmatrix}}{b}\\\\{a}\\end{{pmatrix}}", shown(rng, column), False


MIXED = {
    "en": (
        "{} hours and {} minutes",
        "{} hours {} minutes",
        "{} hrs {} min",
        "{} h {} min",
        "{} hours, {} minutes",
        "{}h {}min",
    ),
    "zh": ("{}小时{}分钟", "{} 小时 {} 分钟", "{}个小时{}分钟", "{}小时{}分"),
    "ja": ("{}時間{}分", "{}時間と{}分", "{} 時間 {} 分"),
    "de": ("{} Stunden und {} Minuten", "{} Stunden {} Minuten", "{} Std. {} Min."),
    "fr": ("{} heures et {} minutes", "{} heures {} minutes", "{} h {} min"),
    "es": ("{} horas y {} minutos", "{} horas {} minutos", "{} h {} min"),
}


def mixed_units(rng: random.Random) -> Drawn:
    h = rng.randrange(2, 20)
    m = rng.randrange(5, 55)
    for language, ways in MIXED.items():
        for way in ways:
            gold = rng.choice(ways).format(h, m)
            yield gold, said(rng, language, way.format(h, m)), True
            yield gold, said(rng, language, way.format(h, m + 1)), False
            yield gold, said(rng, language, way.format(h + 1, m)), False
            yield f"{h}", said(rng, language, way.format(h, m)), False
    yield f"{h} hours and {m} minutes", f"The answer is {60 * h + m} minutes.", True
    yield f"{h} hours and {m} minutes", f"The answer is {60 * h + m + 1} minutes.", False
    yield (
        f"{h} hours and {m} minutes",
        f"\\boxed{{{h}\\text{{ hours and }}{m}\\text{{ minutes}}}}",
        True,
    )
    yield (
        f"{h} hours and {m} minutes",
        f"\\boxed{{{h}\\text{{ hours and }}{m + 1}\\text{{ minutes}}}}",
        False,
    )
    yield f"{h} feet {m % 12} inches", f"The answer is {h} feet and {m % 12} inches.", True
    yield f"{h} feet {m % 12} inches", f"The answer is {h} feet and {m % 12 + 1} inches.", False
    yield f"{h} kg {m} g", f"The answer is {h} kg and {m} g.", True
    yield f"{h} minutes and {m} seconds", f"The answer is {h} minutes {m} seconds.", True


def signs(rng: random.Random) -> Drawn:
    for sign in ("–", "−", "﹣", "－", "‐", "‑", "-"):
        n = rng.randrange(2, 99)
        for text in (
            f"\\boxed{{{sign}{n}}}",
            f"The answer is {sign}{n}.",
            f"答案是{sign}{n}。",
            f"x = {sign}{n}",
            f"Die Antwort ist {sign}{n}.",
            f"\\boxed{{{sign}{n}.0}}",
            f"答えは{sign}{n}です。",
        ):
            yield f"-{n}", text, True
            yield f"{n}", text, False
        yield f"-\\frac{{{n}}}{{101}}", f"\\boxed{{{sign}\\frac{{{n}}}{{101}}}}", True
        yield f"\\frac{{{n}}}{{101}}", f"\\boxed{{{sign}\\frac{{{n}}}{{101}}}}", False
        yield f"{n}\\sqrt2-1", f"\\boxed{{{n}\\sqrt{{2}}{sign}1}}", True


KINDS: tuple[Callable[[random.Random], Drawn], ...] = (
    tiny_numbers,
    dates,
    unit_powers,
    percents,
    number_words,
    negations,
    bounds,
    ranges,
    retractions,
    relations,
    ordinals,
    sets,
    looks,
    sentences,
    alternatives,
    degrees,
    bare_fractions,
    decimal_commas,
    environments,
    mixed_units,
    signs,
)


def replies(seed: int, draws: int) -> list[Reply]:
    """Pairs of every kind, each once.

    Args:
        seed: of all that is drawn.
        draws: how often each kind draws its values.
    """
    rng = random.Random(seed)
    found: dict[Reply, None] = {}
    for _ in range(draws):
        for kind in KINDS:
            found |= {Reply(kind.__name__, *drawn): None for drawn in kind(rng)}
    return list(found)
