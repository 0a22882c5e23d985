"""math_reward on replies in six languages, right or wrong by construction. A reward that accepts
what says another thing teaches it.

A sample of them, so that it takes seconds; all of them with `OXRL_ALL_REPLIES=1` in the
environment.
"""

from __future__ import annotations

import os

import pytest

from oxrl.rewards import math_reward
from support.tongues import KINDS, Reply, replies

# Of two draws, every so many replies of a kind.
STEP = 1 if os.environ.get("OXRL_ALL_REPLIES") else 4
ALL = replies(seed=0, draws=2)
# Ground truth, and a response that is right.
RIGHT = [
    ("42", "答案：42"),
    ("42", "答案等于 42。"),
    ("42", "所以最后结果等于42。"),
    ("3/4", "答案是 3/4。"),
    ("-5", "答えは-5です。"),
    ("1234", "答案是1,234。"),
    ("42", "La risposta è 42."),
    ("42", "A resposta é 42."),
    ("42", "Ответ: 42"),
    ("420000", "\\boxed{42\\text{万}}"),
    ("42000000", "\\boxed{42 \\text{ Millionen}}"),
    ("5/6", "\\boxed{\\frac{\\frac{5}{1}}{6}}"),
    ("\\frac{\\pi}{4}", "\\boxed{\\dfrac\\pi4}"),
    ("\\frac{\\sqrt{3}}{2}", "\\boxed{\\sin{60^{\\circ}}}"),
    ("\\frac{1}{2}", "\\boxed{\\sin\\left(30^\\circ\\right)}"),
    ("2, 3", "$x = 2$ 或 $x = 3$"),
    ("2,3", "x = 2 または x = 3"),
    ("-2, 3", "$x = -2$ ou $x = 3$."),
    ("\\{1,2\\}", "\\boxed{\\lbrace 1, 2\\rbrace}"),
    ("(1,2)", "\\boxed{\\begin{cases}x=1\\\\y=2\\end{cases}}"),
    ("2 hours and 30 minutes", "2 hours 30 minutes"),
    ("2 hours and 30 minutes", "The answer is 2 h 30 min."),
    ("150 minutes", "2 hours and 30 minutes"),
    ("2.5 hours", "2 hours and 30 minutes"),
    ("2 hours and 30 minutes", "\\boxed{2.5\\text{ hours}}"),
    ("3 kg", "3000 g"),
    ("5 feet 3 inches", "5 ft 3 in"),
    ("-7", "\\boxed{–7}"),
    ("0.5", "\\boxed{0,5}"),
    ("3.14", "La réponse est 3,14."),
    ("12.5", "\\boxed{12{,}5}"),
    ("42", "\\boxed{\\color{blue}{42}}"),
    ("42", "{\\color{red} \\boxed{42}}"),
    ("42", "\\boxed{\\Large 42}"),
    ("42", "\\boxed{42\\,\\textrm{cm}}"),
    ("42", "\\boxed{\\texttt{42}}"),
    ("x+1", "\\boxed{\\underline{x+1}}"),
    ("$28$ %", "$28\\%$"),
    ("$28\\%$", "28 %"),
    ("36 cm^2", "36 cm²"),
    ("36 \\text{ cm}^2", "\\boxed{36\\ \\mathrm{cm}^2}"),
    ("36 cm^2", "36 square centimetres"),
    ("5 m/s", "5 meters per second"),
    ("March 5", "5 March"),
    ("March 5", "the 5th of March"),
    ("5. März", "5 March"),
    ("2024年3月5日", "March 5, 2024"),
    ("\\pi", "3.14159"),
    ("\\sqrt{2}", "1.41421"),
    ("1/3", "0.333333"),
    ("6.02\\times10^{23}", "6.02e23"),
    ("\\frac{1.6}{10^{19}}", "1.6\\times 10^{-19}"),
    ("5", "It took 5 days. No further work was needed."),
    ("5", "The answer is 5. Wait times were ignored."),
    ("12", "共12名学生"),
    ("12", "12個"),
    ("3", "第3个"),
    ("42", "最終的な答えは 42 になります。"),
    ("42", "答案为 $42$。"),
    ("42", "因此 $x=42$。"),
    ("7", "Die Lösung ist x = 7."),
    ("1500000", "1,5 Millionen"),
    ("2500", "2.5千"),
    ("35000", "3.5万"),
    ("1.5", "1,5 kg"),
    ("42", "我不确定，但答案是42。"),
    ("42", "Das ist nicht schwer, die Antwort ist 42."),
    ("18", "She has $18 left."),
    (
        "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",
        "\\boxed{\\left[\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right]}",
    ),
    ("\\frac{1}{2}", "\\boxed{\\frac{1}{2}\\ }"),
    ("100000!", "\\boxed{100000!}"),
    ("2^{100}", "\\boxed{1267650600228229401496703205376}"),
    ("\\{1,2,3\\}", "\\boxed{\\{3,1,2\\}}"),
    ("17", "Voici la réponse : 17"),
    ("3 + 4i", "\\boxed{3+4i}"),
    ("5", "**答案：5**"),
    ("0.00001", "\\boxed{10^{-5}}"),
    ("8", "2^3=8"),
    ("8", "\\boxed{2^3=8}"),
    ("8", "\\log_2 256 = 8"),
    ("7", "3 + 4 = 7"),
    ("-\\frac{1}{2}", "\\boxed{−\\frac12}"),
]
# Ground truth, and a response that holds it and says another thing.
WRONG = [
    ("10^{-7}", "2\\times10^{-7}"),
    ("10^{-19}", "1.6\\times10^{-19}"),
    ("0.0000001", "0.0000002"),
    ("\\sqrt{2}\\times10^{-8}", "\\sqrt{3}\\times10^{-8}"),
    ("10^{-7}i", "\\boxed{2\\cdot10^{-7}i}"),
    ("10^{-8}x", "\\boxed{3\\cdot10^{-8}x}"),
    ("(10^{-7},1)", "\\boxed{(2\\times10^{-7},1)}"),
    ("\\{10^{-7}\\}", "\\boxed{\\{2\\times10^{-7}\\}}"),
    ("March 5", "May 5"),
    ("5 mars", "5 mai"),
    ("3月5日", "5月5日"),
    ("Jan 3", "Jun 3"),
    ("36 cm^2", "36 cm^3"),
    ("36 m²", "36 m³"),
    ("36 square feet", "36 cubic feet"),
    ("36 square units", "36 cubic units"),
    ("5 m/s", "5 m/s^2"),
    ("10 kg/m^3", "10 kg/m^2"),
    ("\\frac13", "\\frac13\\%"),
    ("0.3", "0.3%"),
    ("\\sqrt{2}", "\\sqrt{2}\\%"),
    ("42", "42万"),
    ("42", "42 millones"),
    ("42", "42 Tsd."),
    ("42", "42 mila"),
    ("42", "42 bn"),
    ("42", "42億円"),
    ("42", "42百万"),
    ("42", "42 lakh"),
    ("42", "42 k"),
    ("42", "no es 42"),
    ("42", "nicht 42"),
    ("42", "42ではありません"),
    ("42", "答えは42ではない。"),
    ("42", "non è 42"),
    ("42", "não é 42"),
    ("42", "не 42"),
    ("42", "n'est pas 42"),
    ("42", "答案不是42。"),
    ("42", "42是错的"),
    ("42", "42 ist falsch"),
    ("42", "Die Antwort ist nicht 42, sondern 43."),
    ("42", "La respuesta no es 42."),
    ("42", "답은 42가 아닙니다"),
    ("42", "La réponse n'est certainement pas 42."),
    ("42", "Die Antwort ist keinesfalls 42."),
    ("42", "La respuesta jamás será 42."),
    ("7", "8=7"),
    ("7", "\\boxed{8=7}"),
    ("7", "8 = 7"),
    ("7", "9 = 8 = 7"),
    ("7", "7th power"),
    ("5", "5th power"),
    ("5", "the 5th root of 2"),
    ("7", "7e puissance"),
    ("5", "5..7"),
    ("5", "5...7"),
    ("5", "5 .. 7"),
    ("5", "5 bis 7"),
    ("7", "5 bis 7"),
    ("5", "entre 5 y 7"),
    ("7", "5~7"),
    ("7", "5至7"),
    ("5", "5? No, it is 6"),
    ("5", "The answer is 5. Wait, it is 6."),
    ("5", "5 — actually 6"),
    ("5", "\\boxed{5}. Hmm, no, it is \\boxed{6}."),
    ("5", "#### 5, no, 6"),
    ("5", "The answer is 5? No."),
    ("5", "5 oder 7"),
    ("5", "5 ou 7"),
    ("5", "5或7"),
    ("5", "5か7"),
    ("\\{1,2,9\\}", "\\{1,2,\\dots,9\\}"),
    ("\\{1,2\\}", "\\{\\{1\\},2\\}"),
    ("\\{1,2\\}", "\\{\\{1,2\\}\\}"),
    ("1, 2, 9", "1, 2, ..., 9"),
    ("\\{1\\}", "\\{\\{1\\}\\}"),
    ("2", "2 hours and 30 minutes"),
    ("30", "2 hours and 30 minutes"),
    ("2 hours and 30 minutes", "2 hours and 31 minutes"),
    ("2.5 hours", "2 hours and 50 minutes"),
    ("2.5 minutes", "150 hours"),
    ("\\frac12", "\\sin 30"),
    ("5", "mindestens 5"),
    ("5", "plus de 5"),
    ("5", "5以上"),
    ("5", "5 o más"),
    ("5", "超过5"),
    ("5", "不到5"),
    ("5", "5未満"),
    ("5", "5倍以上"),
    ("5", "5 dozen"),
    ("3.14", "\\boxed{31,4}"),
    ("(3,14)", "3.14"),
    ("42", "¬42"),
    ("500 BC", "500 AD"),
    ("5 km", "5 km²"),
    ("1048576", "1.04858\\times10^6"),
    ("22026", "e^{10}"),
    ("42", "42 hundred"),
    ("42", "42.42"),
    ("42", "420"),
    ("-42", "42"),
    ("42", "–42"),
    ("\\frac{1}{7}", "0.14"),
    ("12", "dozen 12s"),
    ("42", "It isn't 42."),
    ("42", "Not 42!"),
    ("42", "ungleich 42"),
    ("42", "weniger als 42"),
    ("42", "moins de 42"),
    ("42", "menos de 42"),
    ("5", "1/5"),
    ("5", "5分之1"),
    ("3", "3割"),
    ("5", "5折"),
    ("5", "5%の半分"),
    ("5", "半分の5"),
    ("5", "5個半"),
    ("42", "42以外"),
    ("7", "x ≠ 7"),
    ("7", "7 ± 1"),
    ("7", "7 ≈ 8"),
    ("7", "7 < 8"),
    ("7", "6 < 7"),
    ("7", "f(7)"),
    ("7", "7 mod 10"),
]


@pytest.fixture(scope="module")
def scored() -> list[tuple[Reply, float | None]]:
    found: list[tuple[Reply, float | None]] = []
    for kind in KINDS:
        of_kind = [reply for reply in ALL if reply.kind == kind.__name__]
        found += [(reply, math_reward(reply.text, reply.gold).value) for reply in of_kind[::STEP]]
    return found


def test_no_reply_that_says_another_thing_is_accepted(
    scored: list[tuple[Reply, float | None]],
) -> None:
    assert len(ALL) >= 1500
    assert len({reply.kind for reply, _ in scored}) == len(KINDS)
    assert [reply for reply, value in scored if not reply.same and value == 1.0] == []


def test_at_most_one_right_reply_in_a_hundred_is_missed(
    scored: list[tuple[Reply, float | None]],
) -> None:
    right = [(reply, value) for reply, value in scored if reply.same]
    missed = [reply for reply, value in right if value != 1.0]
    assert len(right) > len(scored) / 4
    assert len(missed) <= len(right) / 100, missed


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_an_answer_is_read_in_the_words_of_its_language(gold: str, response: str) -> None:
    score = math_reward(response, gold)
    assert score.value == 1.0, score.reason


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_what_turns_an_answer_is_heard_in_its_language(gold: str, response: str) -> None:
    assert math_reward(response, gold).value == 0.0
