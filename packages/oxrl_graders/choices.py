"""Multiple choice: which option a response names, by its letter or its word."""

from __future__ import annotations

import re

from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Score

# What stands before a final answer; the last one in a response counts.
_MARKER = re.compile(
    r"<answer>|\\boxed\s*\{|####|(?<!/)\b(?:final\s+)?(?:answer|option|choice)\b(?:\s+is)?\s*[:=]?"
    r"|(?:\b(?:Antwort|réponse|respuesta)\b|答案|答え)(?:\s*(?:ist|est|es|是|为|は))?\s*[:：]?",
    re.IGNORECASE,
)
_ENDS = re.compile(r"</answer>|\n")
_PLAIN = re.compile(
    r"\\(?:text|math)(?:bf|rm|it|sf|tt|normal)?\s*\{|\\[,;:! ]|[*_`$\\{}\"“”「」‘]|’(?!\w)"
    # A letter that is denied, and the reason for one.
    r"|(?:\b(?i:not|never|cannot|neither|nor|except|without|no longer|(?:anything|all) but"
    r"|nicht|pas|no es)\b|n['’]t\b)[^.,;\n]*?\(?\b[A-Z]\b\)?"
    r"|\(?\b[A-Z]\)?\s+(?:is|was|must be)\s+(?:not|wrong|false|incorrect)\b.*"
    r"|不是\s*[A-Z]|\b[A-Z]\s*(?:では|じゃ)(?:あり|な).*|(?<=[A-Z)\"”])\s+(?:because|since|as|for|so)\b.*"
)
# "(B)", "B", "B)", "B.", "B: because": a letter that is no word of a sentence.
_LETTER = re.compile(
    r"\(([A-Za-z])\)|(?<![\w'])([A-Za-z])(?=\s*(?:[).:,;?!。，\]/–—]|(?:or|and)\b|$))"
)
_GOLD = re.compile(r"\(?([A-Za-z])\)?")


def choice_reward(response: str, answer: object) -> Score:
    """Score 1 if a response ends in the right choice, else 0.

    What counts stands behind the last marker (`####`, `<answer>`, `\\boxed{`, "the answer is"), or
    is the last line where there is none, after any `</think>`. If `answer` is a letter, as in AQuA
    ("B") or BBH ("(B)"), the one letter there is compared; two different ones name nothing. Any
    other answer, such as BBH's "True", "24" or ") ]", is compared as text, without regard to case,
    white space and a final point.

    Args:
        response: the text that the model wrote.
        answer: the right choice, a text.

    Returns:
        Value 1.0, or 0.0 with a reason; status "invalid" if `answer` is no text.
    """
    if not isinstance(answer, str) or not answer.strip():
        return Score(value=None, status="invalid", reason=f"choice needs a text, got {answer!r}")
    told = final_words(response)
    gold = _GOLD.fullmatch(answer.strip())
    if gold is None:
        found = _normal(told)
        wanted = _normal(answer)
        if found != wanted:
            found = _normal(_PLAIN.sub("", told))
    else:
        told = _PLAIN.sub("", told)
        letters = {(one or other).upper() for one, other in _LETTER.findall(told)}
        found = letters.pop() if len(letters) == 1 else ""
        wanted = gold[1].upper()
    if found == wanted:
        return Score(value=1.0, answer=found)
    reason = f"read {found[:80]!r}, expected {wanted[:80]!r}"
    return Score(value=0.0, reason=reason, answer=found)


def final_words(response: str) -> str:
    """Find the final words of a response: after its last marker ("answer:" and the like), or else
    its last line.

    Args:
        response: the text that the model wrote; what it thinks before `</think>` is not read.

    Returns:
        The words without the marker, up to the end of their line or tag; empty if there are none.
    """
    text = response.rpartition("</think>")[2]
    for marker in reversed(list(_MARKER.finditer(text))):
        told = _ENDS.split(text[marker.end() :].lstrip(), maxsplit=1)[0]
        told = told.strip(" :=")
        if told:
            return told
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def _normal(text: str) -> str:
    return " ".join(text.lower().rstrip(" .").split())


CHOICE = BuiltIn(choice_reward)
