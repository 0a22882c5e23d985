"""Instruction reward: a response has to follow IFEval's instructions, which a program can check.

Source: Zhou et al. 2023, arXiv:2311.07911, table 1, and its `instructions.py`
(google-research/google-research, instruction_following_eval, read at 3f357bde), whose rules these
are. It splits sentences and words with NLTK and tells languages with langdetect; here rules of this
file and of `languages` do, which may decide a text at a limit otherwise. Two more differences, on
purpose: a marker or section word is a text here and a pattern there, and a response without a
letter is in no language here and in every one there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Named, Score
from oxrl_graders.languages import KNOWN, is_language

Check = Callable[..., bool]
CONSTRAINED = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
# Points after these end no sentence.
ABBREVIATIONS = "mr mrs ms dr prof sr jr st vs inc ltd co corp fig e.g i.e u.s a.m p.m".split()
_SENTENCE_END = re.compile(r"[.!?]+[\"')\]”’*]*(?=\s|$)")
# What NLTK's word tokenizer puts apart from words.
_APART = re.compile(r"[\s,:;@#$%&?!*\[\](){}<>\"“”«»]+|--+|\.{2,}")
_CONTRACTED = re.compile(r"(?<=\w)(?=n't$|'(?:s|m|d|ll|re|ve)$)", re.IGNORECASE)


def compared(found: int, relation: str, wanted: int) -> bool:
    """Compare a count with the number that an instruction names.

    Args:
        found: how many there are.
        relation: "less than" or "at least".
        wanted: how many the instruction names; exactly so many are "at least", and not "less than".

    Raises:
        ValueError: the relation is neither "less than" nor "at least".
    """
    if relation not in ("less than", "at least"):
        raise ValueError(f"the relation {relation!r} is neither 'less than' nor 'at least'")
    return (found < wanted) == (relation == "less than")


def sentences_in(text: str) -> int:
    """Count the sentences of a text, as NLTK's Punkt does.

    A point, exclamation or question mark before white space ends one, the end of a line does not.

    Args:
        text: the response.

    Returns:
        At least 0; a last sentence without a mark counts.
    """
    count = start = 0
    for end in _SENTENCE_END.finditer(text):
        before = text[start : end.start()].split()
        if before and _ends_sentence(end[0], before[-1], text[end.end() :].lstrip()):
            count += 1
            start = end.end()
    return count + bool(text[start:].strip())


def _ends_sentence(mark: str, last: str, following: str) -> bool:
    """Check that a mark after the word `last`, with `following` after it, ends a sentence."""
    if set(mark) & set("!?"):
        return True
    goes_on = following[:1].islower()
    if mark.startswith("..") or last.isdigit():
        return not goes_on
    word = last.lower().strip("(\"'*")
    return word not in ABBREVIATIONS and not re.fullmatch("[a-z]", word)


def capital_words_in(text: str) -> int:
    """Count the words in capital letters, split into words as NLTK's word tokenizer does.

    Words with a hyphen are one, "I'M" and "CAN'T" are two.

    Args:
        text: the response.

    Returns:
        At least 0.
    """
    words = [part for word in _APART.split(text) for part in _CONTRACTED.split(word)]
    return sum(word.isupper() for word in words)


def existence(text: str, *, keywords: list[str]) -> bool:
    """Check that every keyword occurs in a text, in any case, also inside of a word.

    Args:
        text: the response.
        keywords: regular expressions.

    Raises:
        re.error: a keyword is no regular expression.
    """
    return all(re.search(word, text, re.IGNORECASE) for word in keywords)


def forbidden_words(text: str, *, forbidden_words: list[str]) -> bool:
    """Check that no forbidden word occurs in a text as a whole word, in any case.

    Args:
        text: the response.
        forbidden_words: regular expressions, of a word each.

    Raises:
        re.error: a word is no regular expression.
    """
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)


def keyword_frequency(text: str, *, keyword: str, frequency: int, relation: str) -> bool:
    """Check that a keyword occurs in a text often enough, or seldom enough.

    Args:
        text: the response.
        keyword: a regular expression, whatever the case of its letters; it may match inside of a
            word.
        frequency: how often, by `relation`.
        relation: as of `compared`.

    Raises:
        ValueError: the relation is unknown.
        re.error: the keyword is no regular expression.
    """
    found = re.findall(keyword.strip(), text, re.IGNORECASE)
    return compared(len(found), relation, frequency)


def letter_frequency(text: str, *, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Check that a letter occurs in a text often enough, or seldom enough, in either case.

    Args:
        text: the response.
        letter: one character.
        let_frequency: how often, by `let_relation`.
        let_relation: as of `compared`.

    Raises:
        ValueError: the relation is unknown.
    """
    return compared(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, *, language: str) -> bool:
    """Check that a text is in a language.

    Args:
        text: the response.
        language: two letters of ISO 639-1, such as "de".

    Returns:
        For English, True also where nothing tells the language of a text in Latin letters.

    Raises:
        ValueError: the language is none of those that `languages` knows.
    """
    if language not in KNOWN:
        raise ValueError(f"the language {language!r} is not known")
    return is_language(text, language)


def number_sentences(text: str, *, num_sentences: int, relation: str) -> bool:
    """Check that a text has enough sentences, or few enough, as `sentences_in` counts them.

    Args:
        text: the response.
        num_sentences: how many, by `relation`.
        relation: as of `compared`.

    Raises:
        ValueError: the relation is unknown.
    """
    return compared(sentences_in(text), relation, num_sentences)


def number_words(text: str, *, num_words: int, relation: str) -> bool:
    """Check that a text has enough words, or few enough: runs of letters, digits and underscores.

    Args:
        text: the response.
        num_words: how many, by `relation`.
        relation: as of `compared`.

    Raises:
        ValueError: the relation is unknown.
    """
    return compared(len(re.findall(r"\w+", text)), relation, num_words)


def number_paragraphs(text: str, *, num_paragraphs: int) -> bool:
    """Check that a text has a number of paragraphs with `***` between them; only the first and the
    last may be empty.

    Args:
        text: the response.
        num_paragraphs: how many, exactly.
    """
    parts = re.split(r"\s?\*\*\*\s?", text)
    return _filled(parts) == num_paragraphs


def nth_paragraph_first_word(
    text: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Check that a text has a number of paragraphs, and that one of them begins with a word.

    An empty line stands between paragraphs.

    Args:
        text: the response.
        num_paragraphs: how many, exactly; empty ones do not count.
        nth_paragraph: which of them begins so, from 1; here an empty one has its place.
        first_word: the word, in small or capital letters, without the punctuation that follows it.
    """
    parts = text.split("\n\n")
    filled = list(filter(str.strip, parts))
    if len(filled) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    words = parts[nth_paragraph - 1].lower().split()[:1]
    begins = [re.split(r"[.,?!'\"]", word.lstrip("'").lstrip('"'))[0] for word in words]
    return begins == [first_word.lower()]


def number_placeholders(text: str, *, num_placeholders: int) -> bool:
    """Check that a text has enough placeholders, such as `[name]`.

    Args:
        text: the response.
        num_placeholders: how many, at least.
    """
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def postscript(text: str, *, postscript_marker: str) -> bool:
    """Check that a text has a postscript.

    Args:
        text: the response.
        postscript_marker: how a postscript begins; "P.S." and "P.P.S" may have spaces in them, and
            the case of letters says nothing.
    """
    known = {"P.P.S": r"\s*p\.\s?p\.\s?s.*$", "P.S.": r"\s*p\.\s?s\..*$"}
    marker = postscript_marker.strip()
    pattern = known.get(marker, rf"\s*{re.escape(marker.lower())}.*$")
    return re.search(pattern, text.lower(), re.MULTILINE) is not None


def number_bullet_lists(text: str, *, num_bullets: int) -> bool:
    """Check that a text has a number of bullet points: lines that begin with `*` or `-`.

    Args:
        text: the response.
        num_bullets: how many, exactly.
    """
    patterns = (r"^\s*\*[^\*].*$", r"^\s*-.*$")
    return sum(len(re.findall(kind, text, re.MULTILINE)) for kind in patterns) == num_bullets


def constrained_response(text: str) -> bool:
    """Check that a text holds one of the three sentences of CONSTRAINED, to the letter.

    Args:
        text: the response.
    """
    return any(option in text for option in CONSTRAINED)


def number_highlighted_sections(text: str, *, num_highlights: int) -> bool:
    """Check that a text has enough highlighted parts, `*so*` or `**so**`, that are not empty.

    Args:
        text: the response.
        num_highlights: how many, at least.
    """
    single = re.findall(r"\*([^\n\*]*)\*", text)
    double = re.findall(r"\*\*([^\n\*]*)\*\*", text)
    return len(list(filter(str.strip, single + double))) >= num_highlights


def multiple_sections(text: str, *, section_spliter: str, num_sections: int) -> bool:
    """Check that a text has enough sections that begin with a word and a number: "Section 1".

    Args:
        text: the response.
        section_spliter: the word, to the letter; the data's own spelling of this name.
        num_sections: how many, at least.
    """
    parts = re.split(rf"\s?{re.escape(section_spliter.strip())}\s?\d+\s?", text)
    return len(parts) - 1 >= num_sections


def json_format(text: str) -> bool:
    """Check that a text is JSON, with nothing else but perhaps one code fence around it.

    Args:
        text: the response.

    Returns:
        False too where JSON is nested too deeply to be read.
    """
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Check that a text has a title: `<<so>>`, on one line and not empty.

    Args:
        text: the response.
    """
    found = re.findall(r"<<[^\n]+>>", text)
    return any(part.lstrip("<").rstrip(">").strip() for part in found)


def two_responses(text: str) -> bool:
    """Check that a text is two different answers with six stars between them.

    Args:
        text: the response.
    """
    parts = [part.strip() for part in text.split("******")]
    return _filled(parts) == 2 and len(set(parts) - {""}) == 2


def repeat_prompt(text: str, *, prompt_to_repeat: str) -> bool:
    """Check that a text begins with the request itself, in any case.

    Args:
        text: the response.
        prompt_to_repeat: the request.
    """
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, *, end_phrase: str) -> bool:
    """Check that a text ends with a phrase, in any case, perhaps in quotation marks.

    Args:
        text: the response.
        end_phrase: the phrase.
    """
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, *, capital_frequency: int, capital_relation: str) -> bool:
    """Check that a text has enough words in capital letters, or few enough, as `capital_words_in`
    counts them.

    Args:
        text: the response.
        capital_frequency: how many, by `capital_relation`.
        capital_relation: as of `compared`.

    Raises:
        ValueError: the relation is unknown.
    """
    return compared(capital_words_in(text), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    """Check that a text is in English and in capital letters only.

    Args:
        text: the response.

    Returns:
        False for a text without a letter.
    """
    return text.isupper() and is_language(text, "en")


def english_lowercase(text: str) -> bool:
    """Check that a text is in English and has no capital letter.

    Args:
        text: the response.

    Returns:
        False for a text without a letter.
    """
    return text.islower() and is_language(text, "en")


def no_comma(text: str) -> bool:
    """Check that a text has no comma.

    Args:
        text: the response.
    """
    return "," not in text


def quotation(text: str) -> bool:
    """Check that the whole text stands in double quotation marks.

    Args:
        text: the response.
    """
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _filled(parts: list[str]) -> int:
    """Count the parts that are not empty; -1 where one in the middle is."""
    if not all(map(str.strip, parts[1:-1])):
        return -1
    return len(list(filter(str.strip, parts)))


CHECKS: dict[str, Check] = {
    "keywords:existence": existence,
    "keywords:forbidden_words": forbidden_words,
    "keywords:frequency": keyword_frequency,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_words": number_words,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}


def instructions_reward(response: str, answer: object, *, share: bool = False) -> Score:
    """Score 1 if a response follows every instruction in `answer`, else 0.

    Args:
        response: the text that the model wrote.
        answer: as `oxrl prepare ifeval` writes it: `instructions`, ids, and `kwargs`, one mapping
            each, in which null says nothing.
        share: score by the share of instructions that are followed.

    Returns:
        The score, with the ids of those that are not followed as its reason; status "invalid" if
        `answer` names a kind that is not known or gives it other arguments. An empty response
        follows nothing.
    """
    try:
        wanted = _wanted(answer)
        missed = [
            name
            for name, arguments in wanted
            if not (response.strip() and CHECKS[name](response, **arguments))
        ]
    except (ValueError, TypeError, re.error) as error:
        return Score(value=None, status="invalid", reason=str(error))
    value = 1 - len(missed) / len(wanted) if share else float(not missed)
    return Score(value=value, reason=f"not followed: {', '.join(missed)}" if missed else "")


def _wanted(answer: object) -> list[tuple[str, dict[str, Any]]]:
    """The instructions of an answer, with the arguments that say something.

    Raises:
        ValueError: it holds none, or one of a kind that is not known.
    """
    fields: Named = answer if isinstance(answer, Mapping) else {}
    names = fields.get("instructions")
    given = fields.get("kwargs")
    if not isinstance(names, list) or not isinstance(given, list) or len(names) != len(given):
        raise ValueError('ifeval needs an answer with "instructions" and as many "kwargs"')
    if not names:
        raise ValueError("the answer holds no instruction")
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"no instruction is called {unknown[0]!r}")
    return [
        (name, {key: value for key, value in (arguments or {}).items() if value is not None})
        for name, arguments in zip(names, given, strict=True)
    ]


IFEVAL = BuiltIn(instructions_reward)
