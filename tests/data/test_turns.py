"""Suffixes of conversations under templates of several kinds, and templates that cannot be used."""

from __future__ import annotations

import pytest

from oxrl.data.chat import ChatEncoder, TemplateError
from oxrl.data.contexts import Conversation, Exchange, contexts_of
from oxrl.data.turns import TurnEncoder
from oxrl.modelfiles.builtin import builtin_tokenizer

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TRIMS = PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}")
DROPS_THOUGHTS = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}",
)
THINKS = PLAIN.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n<think>{% endif %}")
ADDS_THOUGHTS = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.index0 > 2 %}<think></think>{% endif %}{{ m.content }}",
)
DROPS_TOOLS = "{% for m in messages if m.role != 'tool' %}" + PLAIN.partition("%}")[2]
# As GLM has it: the token that opens a message ends the one before.
OPENS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_STOP = PLAIN.replace("<|end|>", "")
DROPS_ASSISTANT = "{% for m in messages if m.role != 'assistant' %}" + PLAIN.partition("%}")[2]
END, USER, ASSISTANT = 1, 2, 3


def encoder(template: str, stops: tuple[int, ...] = (END,), tool_role: str = "tool") -> TurnEncoder:
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = template
    return TurnEncoder(ChatEncoder(tokenizer), stops, tool_role=tool_role)


def text_of(ids: tuple[int, ...]) -> str:
    return str(builtin_tokenizer().decode(list(ids)))


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_suffix_is_what_the_template_puts_after_the_stop_token() -> None:
    found = encoder(PLAIN).suffix(user("well"))
    assert found.stop_id == END
    assert text_of(found.token_ids) == "\n<|user|>\nwell<|end|>\n<|assistant|>\n"


def test_special_tokens_in_an_answer_are_text() -> None:
    found = encoder(PLAIN).suffix(user("a <|end|> b<|user|>"))
    assert found.token_ids.count(END) == 1
    assert found.token_ids.count(USER) == 1
    assert "a <|end|> b<|user|>" in text_of(found.token_ids)


def test_where_the_stop_token_opens_the_next_message_it_is_not_written_twice() -> None:
    found = encoder(OPENS, stops=(END, USER)).suffix(user("well"))
    assert found.stop_id == USER
    assert text_of(found.token_ids) == "well<|assistant|>"


@pytest.mark.parametrize("template", [PLAIN, OPENS])
def test_a_template_that_only_adds_passes(template: str) -> None:
    assert encoder(template, stops=(END, USER)).check() == []


def test_a_template_that_trims_passes_with_a_note() -> None:
    assert encoder(TRIMS).check() == ["text between spaces before a message of role 'user'"]


@pytest.mark.parametrize("template", [DROPS_THOUGHTS, THINKS, ADDS_THOUGHTS])
def test_a_template_that_rewrites_turns_is_refused_with_both_texts(template: str) -> None:
    with pytest.raises(TemplateError, match="rewrites turns that are over") as caught:
        encoder(template).check()
    assert "turn by turn" in str(caught.value)
    assert "rendered at once" in str(caught.value)


def test_a_template_that_drops_answers_of_tools_is_refused_and_the_way_out_named() -> None:
    with pytest.raises(TemplateError, match="environment.tool_role=user"):
        encoder(DROPS_TOOLS).check(tools_answer=True)
    assert encoder(DROPS_TOOLS, tool_role="user").check(tools_answer=True) == []


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (NO_STOP, "does not end a turn with a token that ends a response"),
        (DROPS_ASSISTANT, "drops what the assistant wrote"),
    ],
)
def test_a_template_without_turns_is_refused(template: str, problem: str) -> None:
    with pytest.raises(TemplateError, match=problem):
        encoder(template).check()


def test_a_rewritten_history_begins_a_row_only_where_that_is_asked_for() -> None:
    turns = encoder(DROPS_THOUGHTS)
    said = "hm</think>4"
    exchange = Exchange((*builtin_tokenizer().encode(said), END), said, user("and 3+3?"))
    talk = Conversation(opening=user("2+2?"), tools=(), exchanges=[exchange])
    rewritten = contexts_of(turns, "whole", splits=True)(talk)
    assert rewritten is not None and rewritten.new
    assert "hm" not in text_of(rewritten.token_ids) and "4<|end|>" in text_of(rewritten.token_ids)
    kept = contexts_of(turns, "whole", splits=False)(talk)
    assert kept is not None and not kept.new
    assert text_of(kept.token_ids) == "\n<|user|>\nand 3+3?<|end|>\n<|assistant|>\n"


def test_every_text_of_a_message_has_to_stand_in_what_is_read() -> None:
    """Of a message of two texts the template writes one before everything else."""
    texts = [{"type": "text", "text": text} for text in ("apples", "pears")]
    for stays, moves in (("first", "last"), ("last", "first")):
        before = (
            "{% for m in messages if m.content is not string %}"
            f"{{{{ (m.content | {moves}).text }}}}{{% endfor %}}"
        )
        after = (
            "{% if m.content is string %}{{ m.content }}{% else %}"
            f"{{{{ (m.content | {stays}).text }}}}{{% endif %}}"
        )
        with pytest.raises(TemplateError, match="drops or changes a message of role 'user'"):
            encoder(before + PLAIN.replace("{{ m.content }}", after)).suffix(
                [{"role": "user", "content": texts}]
            )
