"""Maths reward: the final answer of a response has to equal the known one mathematically.

What counts as the final answer, in this order:

1. Text up to the last `</think>` is ignored.
2. The explicit marker that stands last: `<answer>...</answer>`, `\\boxed{...}`, `#### ...`, a line
   starting `A:`, or prose such as "the answer is ...", "Final answer: ..."; prose without a digit
   or LaTeX after it does not count.
3. Without a marker: the last number, or what math-verify reads if the response holds LaTeX or the
   answer is no number.

What takes an answer back ("5? No, it is 6") puts another in its place.

Plain numbers (`quantities`: currency, thousands commas, fractions, magnitudes, units around them
allowed) are compared exactly: math-verify takes 20 times as long and decides some spellings
otherwise. What holds a number and says another thing (`not 5`, `5n`, `5 to 7`) is not that number.
Inequalities and intervals are compared as the sets of numbers they are (`relations`), several
solutions as the values they name (`solutions`), times, ratios, numerals and families by their form
(`forms`). Other expressions are compared as numbers, to six significant digits where one is a
decimal, or go to math-verify, without its own timeouts: what takes longer than a deadline here has
no score. Words are the same if they are spelled alike.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Score
from oxrl_graders.forms import same_form
from oxrl_graders.quantities import (
    FALSE,
    TEXT_COMMAND,
    Quantity,
    around,
    closing_bracket,
    compiled,
    is_equation,
    plain,
    read_number,
    remembered,
    rewrite,
    undressed,
)
from oxrl_graders.relations import (
    EndlessError,
    compare,
    deadline,
    library,
    mark_relations,
    parse,
    same_number,
    spelling,
)
from oxrl_graders.rewrites import rewritten
from oxrl_graders.solutions import same_solutions

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
# What may stand between boxes that state one answer together: "\boxed{1} and \boxed{2}".
_GLUE = re.compile(r"(?:\\text\{[^{}]*\}|\\q?quad|\\[()\[\],;! ]|[\s$.,;&]|\b(?:and|or)\b)*")
_LATEX = re.compile(r"\\[a-zA-Z(\[]")
_ENVIRONMENT = re.compile(r"\$|\\\(|\\\[")
_PROSE = re.compile(
    r"""(?imx)
    ^\W*A:
  | (?: \banswers?\b(?!>)
      | \b(?:Antwort|Ergebnis|Lösung|réponse|résultat|respuesta|resultado|solución|resposta|risposta
          |ответ)\b
      | 答案|结果|結果|答え|解答|정답 )
    [^\n.:=。：]{0,60}? (?: \b(?:is|ist|lautet|est|es|é|è|равен)\b | 是|为|為|は|：|:|= )
    """
)
# What prose must hold to state an answer: a digit, LaTeX or a set that has a name.
_READABLE = re.compile(r"(?i)[\d\\$∅ℝ]|\bno (?:real )?solution|\bempty set|\breal numbers")
# Not the point of an abbreviation or of an ordinal before its noun.
_SENTENCE_END = re.compile(
    r"""(?x)
    (?<!\.) (?: (?<!\b[a-zA-Z]{2})(?<!\b[a-zA-Z]{3}) | (?!.\s+\d) ) [.!?] (?=\s|\Z)
        (?! \s+(?:Potenz|Wurzel|Jan|Feb|März|Apr|Mai|Jun|Jul|Aug|Sep|Okt|Nov|Dez) )
  | [。！？]
    """
)
# What takes back the answer before it, up to the one in its place.
_TAKEN_BACK = re.compile(
    r"""(?ix)
    [?.!,;:。？！，、；…—–-]+ \s*
    (?: (?:no|nope|nein|non|não|нет|不|いや|いえ|いいえ|아니)(?:\ wait)?\s*[,.:;!，、。：！—–-]
      | (?:wait|actually|sorry|oops|correction|scratch\ that|i\ mean|(?:or\ )?rather|moment|halt
          |warte|korrektur|besser\ gesagt|vielmehr|attendez|attends|pardon|plutôt|en\ fait|espera
          |espere|perdón|mejor\ dicho|digo|corrección|aspetta|стоп)\b
      | 不对|不對|错了|等等|更正|等一下|待って|違う|違います|訂正 )
    (?: [\s,:;.。，、：…]+
      | (?:it|this|that|the|correct|right|real|true|answer|should|must|have|been|be|was|is
          |to|make|in|fact|sorry|mean|i|no|wait|actually|rather|es|ist|muss|sein|die|das|richtige
          |antwort|lautet|sind|c['’]est|ce|la|réponse|est|bonne|doit|être|respuesta|son|debe|ser
          |correcta|sería|é|è|это|it['’]s|that['’]s)(?=[\s,:;])
      | 应该|應該|正确|答案|是|为|正しくは|答え|は )*
    (?=[-–−+$€£(]*[\d\\])
  | [?？]\s*(?:no|nein|non|não|нет|不|いや|いえ|いいえ|아니)(?![^\W\d_])
    """
)
# "or" and "and" of other languages, in the text of a formula or between two.
_OR = r"(?:oder|ou|o|или|或者?|または|もしくは|또는)"
_AND = r"(?:und|et|y|e|и|和|与|與|以及|と|および|及び?)"
_PLACE = r"\\text\s*\{{\s*{0}\s*\}}|(?<=[\d$}})\]])\s*{0}(?![a-zA-Z])\s*(?=\$|\\[(\[b]|[a-z]\s*=)"
_JOINERS = compiled(f"{_PLACE.format(_OR)} « or » {_PLACE.format(_AND)} « and »")
# Bounds on what a response that repeats itself thousands of times can cost.
_LONGEST_LINE = 2000
_MOST_BOXES = 16
_LONGEST_TEXT = 10_000
_LONGEST_STATEMENT = 12  # words
_DEADLINE_S = 8  # less than a worker gets by default
# "x = 1 or x = 3" states no number, "x = 2 + 3 = 5" does.
_SEVERAL = re.compile(r"=.*(?:\bor\b|\band\b|[;&]|,(?!\d{3})).*=")
_MATH = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_JOINED = re.compile(r"\W*(?:\b(?:or|and)\b\W*)*")
_COMMAND = re.compile(r"\\(?:begin|end|operatorname)\*?\{[a-z]*\}|\\text\{[^{}]*\}|\\[a-zA-Z]+")
_ASSIGNED = re.compile(r"[\s$\\(\[]*([a-zA-Z])\s*=")
_STRUCTURE = re.compile(
    r"""
    \d[^\d\n]*[,;=<>≤≥≠∪∈±({\[] | [,;=<>≤≥≠∪∈±({\[][^\d\n]*\d
  | \b[a-zA-Z]\s*[<>≤≥≠]\s*[a-zA-Z]\b | \d\s*,?\s*\b(?:or|and)\b
    """,
    re.VERBOSE,
)
_WORD = re.compile(r"(?!and\b|or\b)\b[a-zA-Z]{2}")
# Three letters in a row, but for functions and names in LaTeX; and the short words of English.
_PROSE_WORD = re.compile(
    r"(?<![\\a-zA-Z])(?:(?!(?:sin|cos|tan|cot|log|exp|sqrt|abs|max|min)\b)[a-zA-Z]{3,}"
    r"|(?:is|it|we|so|of|to|in|by|be|at|as|if|an|am|my|he|me|no|do|on|km|cm|mm|kg|mg|ml)\b)"
)
# What names the value after it, and neither denies or bounds it nor joins it to another.
_LABEL = re.compile(
    r"(?is)(?!.*(?:[,;]|n['’]t\b|\b(?:and|or|not?|never|least|most|than|twice|double|half)\b)).*="
)
# A sum with a variable in it: x^2 - 3x + 2, (x - 1)(x - 2).
_SUM = re.compile(
    r"""
    (?<![a-zA-Z\\]) [a-zA-Z] (?:\^\{?\d+\}?)? [)}]* \s*[-+−]\s* [\w(\\]       # x^2 - 3
  | [\d)}] \s*[-+−]\s* \d* \s? (?<![a-zA-Z]) [a-zA-Z] (?![a-zA-Z])             # 2 - 3x
  | \d \s? [xyz] (?![a-zA-Z])                                                   # 2x
    """,
    re.VERBOSE,
)
# A quoted line of markdown, in running text.
_QUOTE = re.compile(r"(?m)^\s*>+\s")


@dataclass(frozen=True)
class _Final:
    """The text that states the answer.

    Args:
        text: after its marker, or in it.
        start: where the marker starts; -1 if there is none.
        lead: of running text, what stands before `text` in its sentence; None of a text that
            states the answer and nothing else.
        boxed: whether the marker is a box.
        bare: whether the response is nothing but the answer.
    """

    text: str
    start: int = -1
    lead: str | None = None
    boxed: bool = False
    bare: bool = False

    @property
    def marked(self) -> bool:
        return self.start >= 0


def math_reward(response: str, answer: object) -> Score:
    """Score 1 if the final answer of `response` equals `answer`, else 0.

    The module's docstring says what counts as the final answer. May run for very long on hostile
    input (sympy): call it through `RewardPool`.

    Args:
        response: the text that the model wrote.
        answer: the ground truth, a number or a string: "1,234", "\\frac{1}{2}", "$x^2$", or a full
            solution that ends in a marker.

    Returns:
        Value 1.0, or 0.0 with a reason; status "invalid" if `answer` cannot be read, "timeout" if
        the two cannot be compared in a few seconds.
    """
    gold = _gold_text(answer)
    try:
        with deadline(_DEADLINE_S):
            if gold is None or not _is_readable(gold):
                reason = f"cannot read the ground truth {answer!r} as mathematics"
                return Score(value=None, status="invalid", reason=reason)
            final = _final_answer(_readied(response))
            if final is None:
                return Score(value=0.0, reason="no answer found")
            equal = _is_equal(final, gold)
    except EndlessError as error:
        reason = f"cannot compare with the ground truth {gold!r}: {error}"
        return Score(value=None, status="timeout", reason=reason)
    if equal:
        # Equal answers are one vote, however they are written.
        return Score(value=1.0, answer=gold)
    read = repr(final.text[-80:])
    if equal is None:
        return Score(value=0.0, reason=f"no answer found in {read}")
    reason = f"read {read}, expected {gold[-80:]!r}"
    return Score(value=0.0, reason=reason, answer=final.text)


def _gold_text(answer: object) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return None
    if isinstance(answer, float):
        if not isfinite(answer):
            return None
        if answer.is_integer():
            answer = int(answer)
    return _readied(str(answer)).strip() or None


def _is_equal(final: _Final, gold: str) -> bool | None:
    """True if the answer equals the ground truth; None if it cannot be read."""
    right = _marked_final(gold)
    number = _read_number(final)
    expected = _read_number(right)
    if expected and expected.comma:
        expected = None
    if number and expected:
        names = [match[1] for match in map(_ASSIGNED.match, (final.text, right.text)) if match]
        agreed = names[:1] == names[-1:] and expected.agrees(number)  # x = 5 is not y = 5
        if agreed or not number.comma:
            return agreed
        number = None
    said = _statement(final)
    meant = _statement(right)
    if said and spelling(said) == spelling(meant):
        return True
    decided = same_form(meant, said)
    if decided is None:
        decided = same_solutions(meant, said, in_order=not final.bare)
    if decided is not None:
        return decided
    return _same_value(expected.text if expected else meant, number.text if number else said)


def _same_value(meant: str, said: str) -> bool | None:
    """True if two relations or expressions are equal; None if the second cannot be read."""
    decided = compare(meant, said)
    if decided is not None:
        return decided
    if not said:
        return None
    wanted = _without_label(meant, said)
    found = _without_label(said, meant)
    if not (wanted and found):
        return False
    terms = (parse(wanted), parse(found))
    decided = same_number(*terms[0][:1], *terms[1][:1]) if all(terms) else None
    return library().verify(*terms, timeout_seconds=None) if decided is None else decided


def _without_label(text: str, other: str) -> str:
    """A value without the words that name it: of `\\text{Area} = 9\\pi` the `9\\pi`.

    Empty where it is the same as the other only if both are spelled alike: it holds more words, is
    an equation and the other none, or both have a label.
    """
    if is_equation(text) and "=" not in other:
        return ""
    if not _holds_words(text):
        return text
    value = _LABEL.sub("", text)
    return "" if "=" in other or _holds_words(value) else value


def _is_readable(gold: str) -> bool:
    final = _marked_final(gold)
    if _read_number(final):
        return True
    meant = _statement(final)
    # A string is text that math-verify could not parse; alone it is no expression.
    try:
        if not all(isinstance(item, str) for item in parse(meant)):
            return True
        return any(same(meant, meant) for same in (same_form, same_solutions, compare))
    except EndlessError:
        return True  # It may be spelled alike.


def _readied(text: str) -> str:
    """A text without what only changes how its formulas look."""
    return rewrite(undressed(text), _JOINERS)


@remembered
def _marked_final(text: str) -> _Final:
    """The text at the last marker in one that states an answer, such as a ground truth; else all
    of it.
    """
    final = _final_answer(text)
    return final if final is not None and final.marked else _Final(text, start=0)


@functools.lru_cache(maxsize=1024)
def _statement(final: _Final) -> str:
    """The mathematics that states the answer, as `rewritten`: of running text, its last formula;
    nothing where the words around it turn it into another.
    """
    text = final.text[-_LONGEST_TEXT:]
    formulas = list(_MATH.finditer(text))
    joined = len(formulas) > 1 and (final.marked or _JOINED.fullmatch(_MATH.sub(" ", text)))
    before = after = ""
    if formulas and not joined:  # not "$x < 1$ or $x > 3$"
        before = text[: formulas[-1].start()]
        after = text[formulas[-1].end() :]
        text = "".join(formulas[-1].groups(""))
    elif not (joined or final.marked or _is_short(text)):
        return ""
    if not final.marked and re.search(r"\d", after):
        return ""  # A number after it states the answer.
    turned = around(f"{final.lead or ''} {plain(before)}", plain(after)) - {"operator"}
    return "" if turned else rewritten(text)


def _final_answer(response: str) -> _Final | None:
    """The text at the last answer marker, or everything; None if there is nothing to read."""
    text = response.rpartition("</think>")[2]
    found = [*_answer_tag(text), *_last_boxes(text), *_hash_marks(text), *_prose(text)]
    readable = [final for final in found if re.search(r"[\w\\∅]", final.text)]
    if readable:
        return max(readable, key=lambda final: final.start)
    if _is_formula(text):
        return _Final(text, start=0, bare=True)
    return _Final(text) if _READABLE.search(text) else None


def _is_formula(text: str) -> bool:
    """True if the response is nothing but a list, a relation or a bracket: it is all the answer."""
    if len(text) > _LONGEST_LINE or not _is_short(text) or _WORD.search(_COMMAND.sub(" ", text)):
        return False
    sums = "\n" not in text.strip() and _SUM.search(text)
    return bool(sums or _STRUCTURE.search(mark_relations(text)))


def _is_short(text: str) -> bool:
    """True if a text is no running text, but a few words or symbols alone."""
    return len(text.split()) <= _LONGEST_STATEMENT or not _PROSE_WORD.search(text)


def _answer_tag(text: str) -> Iterator[_Final]:
    """The content of the last <answer>, or what a marker inside it points to more precisely."""
    before, tag, after = text.rpartition("<answer>")
    if tag:
        # Nothing of a response is kept: only ground truths come again.
        told = _TAKEN_BACK.split(after.partition("</answer>")[0])[-1]
        found = _marked_final.__wrapped__(told.strip())
        yield dataclasses.replace(found, start=len(before), bare=False)


def _last_boxes(text: str) -> Iterator[_Final]:
    """The content of the last box; boxes joined by commas or "and" are one answer."""
    contents: list[str] = []
    start = end = 0
    for match in _BOXED.finditer(text):
        if match.start() < end:
            continue  # a box inside the box before
        if len(contents) == _MOST_BOXES or not _GLUE.fullmatch(text, end, match.start()):
            contents = []
        start = match.start()
        brace = closing_bracket(text, match.end())
        contents.append(text[match.end() : brace])
        end = brace + 1
    said_before = text[:start].rpartition("\n")[2]
    said_after = text[end : end + _LONGEST_LINE]
    taken_back = _TAKEN_BACK.match(said_after)
    turned = around(plain(said_before[-_LONGEST_LINE:]), said_after)
    if contents and not (taken_back or "denied" in turned):
        yield _Final(", ".join(contents), start, boxed=True)


def _hash_marks(text: str) -> Iterator[_Final]:
    before, marks, after = text.rpartition("####")
    if marks:
        yield _Final(_first_line(after), len(before))


def _prose(text: str) -> Iterator[_Final]:
    """Every "the answer is ..." with a digit or LaTeX in the sentence that follows."""
    for match in _PROSE.finditer(text):
        line = _first_line(text[match.end() : match.end() + _LONGEST_LINE])
        sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
        if _READABLE.search(sentence):
            line = text[: match.end()].rpartition("\n")[2]
            lead = _SENTENCE_END.split(line[-_LONGEST_LINE:])[-1]
            yield _Final(sentence, match.start(), lead)


def _first_line(text: str) -> str:
    """The first line with content, without the punctuation that joins it to a marker, and without
    what it takes back.
    """
    line = text.lstrip(" \t\r\n:=*").partition("\n")[0]
    return _TAKEN_BACK.split(line)[-1].strip()


@functools.lru_cache(maxsize=1024)
def _read_number(final: _Final) -> Quantity | None:
    """The plain number at `final`; None if it is an expression, several numbers or no number."""
    text = plain(final.text)
    if not final.marked and _LATEX.search(text):
        text = plain(_MATH.sub("$", final.text).rpartition("$")[2])
    if _LATEX.search(text) or (final.marked and _SEVERAL.search(text)):
        return None
    text = mark_relations(text if final.marked else _QUOTE.sub("", text))
    formula = final.boxed or _ENVIRONMENT.search(final.text) is not None
    if FALSE.search(text):
        return None
    result = text.rpartition("=")[2]  # "5 + 3 = 8" states 8
    if final.marked and re.search(r"\d", result):
        if is_equation(text):
            return None
        text = result
    lead = "" if not final.marked else final.lead and plain(final.lead)
    return read_number(text, lead, last=not final.marked, formula=formula)


def _holds_words(text: str) -> bool:
    """True if a statement holds words beside its formulas."""
    return bool(_PROSE_WORD.search(_COMMAND.sub(" ", re.sub(TEXT_COMMAND, r" \1 ", text))))


MATH = BuiltIn(math_reward)
