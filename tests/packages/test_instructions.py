"""Every kind of instruction of IFEval, and the real file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxrl_datasets.published import ifeval
from oxrl_graders.instructions import (
    CHECKS,
    capital_words_in,
    instructions_reward,
    sentences_in,
)
from oxrl_graders.languages import language_of

# kind -> arguments, texts that follow it, texts that do not
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "keywords:existence": ({"keywords": ["cat", "dog"]}, ["Cats and DOGS"], ["a cat", "x"]),
    "keywords:forbidden_words": ({"forbidden_words": ["cat"]}, ["category"], ["The Cat sat"]),
    "keywords:frequency": (
        {"keyword": "cat", "frequency": 2, "relation": "at least"},
        ["cat CAT", "cats, cats"],
        ["cat"],
    ),
    "keywords:letter_frequency": (
        {"letter": "Q", "let_frequency": 2, "let_relation": "less than"},
        ["q", "none"],
        ["qQ"],
    ),
    "language:response_language": (
        {"language": "de"},
        ["Das ist nicht der Hund, den ich mit dem Ball gesehen habe."],
        ["This is not the dog that I have seen with the ball.", "यह एक किताब है और यह अच्छी है।"],
    ),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", "Is it? Yes, Dr. No", "3. First"],
        ["One, Mr. Two", "3. first", "One\nTwo"],
    ),
    "length_constraints:number_words": (
        {"num_words": 3, "relation": "less than"},
        ["one two", "one, two!"],
        ["one two three"],
    ),
    "length_constraints:number_paragraphs": (
        {"num_paragraphs": 2},
        ["a\n***\nb", "***\na\n***\nb\n***"],
        ["a\n\nb", "a *** b *** c", "a *** *** b"],
    ),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "firms"},
        ["a\n\nFirms, b", 'a\n\n"Firms" b'],
        ["Firms\n\na", "a\n\nfirm b", "a\n\nfirms\n\nc"],
    ),
    "detectable_content:number_placeholders": (
        {"num_placeholders": 2},
        ["[name] and [address]"],
        ["[name]", "none"],
    ),
    "detectable_content:postscript": (
        {"postscript_marker": "P.P.S"},
        ["text\nP.P.S. more", "p. p.s more"],
        ["text\nP.S. more", "text"],
    ),
    "detectable_format:number_bullet_lists": (
        {"num_bullets": 2},
        ["* a\n* b", "- a\n- b\n"],
        ["* a", "* a\n* b\n- c", "** a **\n* b"],
    ),
    "detectable_format:constrained_response": ({}, ["So: My answer is yes."], ["Yes."]),
    "detectable_format:number_highlighted_sections": (
        {"num_highlights": 2},
        ["*a* and *b c*", "**a** and *b*"],
        ["*a*", "** ** x"],
    ),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1\na", "Sections\na\nb"],
    ),
    "detectable_format:json_format": (
        {},
        ['{"a": 1}', '```json\n{"a": [1]}\n```', "```\n[]\n```"],
        ["{a: 1}", 'so {"a": 1}'],
    ),
    "detectable_format:title": ({}, ["<<a title>>\ntext"], ["<a title>", "<<>>", "<< >>"]),
    "combination:two_responses": (
        {},
        ["a\n******\nb", "******a******b"],
        ["a", "a******a", "a******b******c"],
    ),
    "combination:repeat_prompt": (
        {"prompt_to_repeat": "Say it."},
        ["say it.\nI do."],
        ["I do. Say it."],
    ),
    "startend:end_checker": (
        {"end_phrase": "The end."},
        ['x the END. "'.strip()[:-2]],
        ["The end. x"],
    ),
    "startend:quotation": ({}, ['"a b"', ' "a" '], ['"a', '"', "a"]),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["THE dog and THE-CAT"],
        ["The DOG", "dog"],
    ),
    "change_case:english_capital": (
        {},
        ["THE DOG AND THE CAT, 2"],
        ["The dog", "DAS IST NICHT DER HUND UND DIE KATZE"],
    ),
    "change_case:english_lowercase": (
        {},
        ["the dog and the cat, 2"],
        ["The dog", "das ist nicht der hund und die katze"],
    ),
    "punctuation:no_comma": ({}, ["a; b"], ["a, b"]),
}


def answer(*kinds: str) -> dict[str, Any]:
    nothing = {"unused": None}
    return {
        "instructions": list(kinds),
        "kwargs": [{**CASES[kind][0], **nothing} for kind in kinds],
    }


@pytest.mark.parametrize("kind", CHECKS)
def test_a_kind_of_instruction_is_followed_or_not(kind: str) -> None:
    _, right, wrong = CASES[kind]
    for text in right:
        assert instructions_reward(text, answer(kind)).value == 1.0, text
    for text in [*wrong, "", "  \n"]:
        score = instructions_reward(text, answer(kind))
        assert (score.value, score.reason) == (0.0, f"not followed: {kind}"), text


def test_all_instructions_count_or_the_share_that_is_followed() -> None:
    both = answer("punctuation:no_comma", "startend:quotation")
    assert instructions_reward('"a"', both).value == 1.0
    assert instructions_reward('"a, b"', both).value == 0.0
    assert instructions_reward('"a, b"', both, share=True).value == 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"instructions": [], "kwargs": []},
        {"instructions": ["punctuation:no_comma"], "kwargs": []},
        {"instructions": ["punctuation:no_dots"], "kwargs": [{}]},
        {"instructions": ["startend:end_checker"], "kwargs": [{}]},
        {"instructions": ["language:response_language"], "kwargs": [{"language": "tlh"}]},
        {"instructions": ["keywords:existence"], "kwargs": [{"keywords": ["("]}]},
    ],
)
def test_an_answer_that_cannot_be_checked_is_invalid(wrong: object) -> None:
    score = instructions_reward("text", wrong)
    assert (score.value, score.status) == (None, "invalid")


def test_every_row_of_the_real_file_can_be_checked(real_data: Callable[[str], Path]) -> None:
    lines = (real_data("ifeval") / "input_data.jsonl").read_text().splitlines()
    seen: set[str] = set()
    for line in lines:
        for row in ifeval(json.loads(line)):
            seen |= set(row["answer"]["instructions"])
            for text in ("", row["prompt"], "A short answer, in English."):
                assert instructions_reward(text, row["answer"]).status == "ok", row["uid"]
    assert seen == set(CHECKS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("The cat is on the table and it is not mine.", "en"),
        ("Il gatto è sul tavolo e non è mio, ma il cane sì.", "it"),
        ("O gato está na mesa e não é meu, mas o cão é.", "pt"),
        ("Paka yuko juu ya meza na si wangu, lakini mbwa ni wa kwangu.", "sw"),
        ("Kissa on pöydällä ja se ei ole minun, mutta koira on.", "fi"),
        ("Con mèo ở trên bàn và nó không phải của tôi.", "vi"),
        ("Кошка на столе, и это не моя, но собака была моей, мы её ждали.", "ru"),
        ("Котката е на масата и не е моя, но кучето ще бъде мое.", "bg"),
        ("القطة على الطاولة وهذا ليس لي في البيت", "ar"),
        ("گربه روی میز است و این برای من نیست که می گویم", "fa"),
        ("بلی میز پر ہے اور یہ میری نہیں ہے", "ur"),
        ("बिल्ली मेज पर है और यह मेरी नहीं है", "hi"),
        ("मांजर टेबलावर आहे आणि ते माझे नाही", "mr"),
        ("बिरालो टेबलमा छ र यो मेरो होइन भने पनि", "ne"),
        ("বিড়ালটি টেবিলে আছে", "bn"),
        ("ਬਿੱਲੀ ਮੇਜ਼ ਤੇ ਹੈ", "pa"),
        ("બિલાડી ટેબલ પર છે", "gu"),
        ("பூனை மேசையில் உள்ளது", "ta"),
        ("పిల్లి బల్ల మీద ఉంది", "te"),
        ("ಬೆಕ್ಕು ಮೇಜಿನ ಮೇಲೆ ಇದೆ", "kn"),
        ("고양이가 탁자 위에 있다", "ko"),
        ("12 + 3 = 15", ""),
    ],
)
def test_languages_of_the_file_are_told_apart(text: str, name: str) -> None:
    assert language_of(text) == name


def test_sentences_end_at_points_that_end_them() -> None:
    assert sentences_in("Dr. Who lives at 3.5 Main St. in the U.S. with e.g. cats. Right?") == 2
    # The end of a line ends none; the number of an item does, as in Punkt.
    assert sentences_in("A title\n\n* one\n* two\n\nThe end. Is it") == 2
    assert sentences_in("1. First\n2. Second\n\nDone") == 3
    assert sentences_in("see no. 3. or\n4. below") == 2
    assert sentences_in('He said "No." Then he left...') == 2
    assert sentences_in("He left... and came back! so **what?** Nothing.") == 3
    assert sentences_in("") == 0


def test_capital_words_are_those_of_a_word_tokenizer() -> None:
    assert capital_words_in("I'M A **BOLD** AND/OR CAN'T well-KNOWN X-RAY, U.S. 'QUOTED' 42") == 10
    assert capital_words_in("Nobody shouts.") == 0


def test_arguments_are_read_without_white_space_around_them() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("keywords:frequency", {"keyword": " cat ", "frequency": 1, "relation": "at least"}, "cat"),
        ("detectable_content:postscript", {"postscript_marker": "P.S. "}, "P.S. bye"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": " Day ", "num_sections": 1},
            "Day 1",
        ),
    ]
    for name, arguments, text in cases:
        assert CHECKS[name](text, **arguments), name
    # Only these spellings of a fence, and quotes in this order, as in the source.
    assert not CHECKS["detectable_format:json_format"]("```jSON\n{}\n```")
    first = {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"}
    assert CHECKS["length_constraints:nth_paragraph_first_word"]('\'"a" b', **first)
    assert not CHECKS["length_constraints:nth_paragraph_first_word"]("\"'a' b", **first)
