"""A chat template that leaves out what messages say, or does not end, is refused before training."""

from __future__ import annotations

import time

import pytest
from transformers import PreTrainedTokenizerFast

from oxrl.data import template_trial
from oxrl.data.chat import ChatEncoder, TemplateError
from oxrl.data.template_trial import REFUSED, require_end, try_here
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer

LOOP = "{% for i in range(100000) %}"
END = "{% endfor %}"


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "template",
    [
        f"{LOOP}{LOOP}{LOOP}{END}{END}{END}",
        f"{{{{ messages[0].content }}}}{LOOP}{LOOP}x{END}{END}",
        "{{ 'x' * 100000000000 }}",
        "{{ 9 ** (9 ** 9) > 0 }}",
        "{% if messages | length > 2 %}" + LOOP * 2 + END * 2 + "{% endif %}",
    ],
)
def test_a_template_that_does_not_end_is_refused_in_time(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_trial, "DEADLINE_S", 1.0)
    started = time.monotonic()
    with pytest.raises(DataError, match="the chat template does not end") as raised:
        ChatEncoder(tokenizer_with(template))
    assert raised.value.exit_code == 2
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "roles", ["user", "system user", "user assistant user", "system user assistant user"]
)
def test_a_template_is_tried_on_short_conversations_of_every_shape(roles: str) -> None:
    said = "messages | map(attribute='role') | join(' ')"
    there = "{% if " + said + " == '" + roles + "' %}"
    # More than any memory, so that nothing of it is written.
    assert try_here(there + "{{ messages[0].content * 10 ** 17 }}{% endif %}") == REFUSED
    assert try_here(there + "{{ messages[0].content * 10 }}{% endif %}") == 0


def test_a_template_that_ends_is_taken_whatever_else_is_wrong_with_it() -> None:
    require_end("{% for i in range(3) %}{{ messages[i].content }}{% endfor %}")
    require_end("{% macro x() %}{{ raise_exception('no') }}{% endmacro %}{{ x() }}")
    require_end("{% macro x(")


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages %}<|{{ m.role }}|>{% endfor %}", "system"),
        ("<|user|>{{ messages[-1].content }}", "system"),
        (
            "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "user",
        ),
        ("{% for m in messages %}{{ m.content[:5] }}{% endfor %}", "user"),
    ],
)
def test_a_template_that_leaves_out_what_a_message_says_is_refused(
    template: str, role: str
) -> None:
    encoder = ChatEncoder(tokenizer_with(template))
    messages = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "what is 1 + 1?"},
    ]
    with pytest.raises(TemplateError, match=rf"leaves out what message . \(role {role}\) says"):
        encoder.encode_prompt(messages)


def test_white_space_and_reasoning_may_be_left_out() -> None:
    template = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim | replace('\n', ' ') }}"
        "{% endfor %}"
    )
    encoder = ChatEncoder(tokenizer_with(template))
    messages = [
        {"role": "user", "content": "  1\n+  1? "},
        {"role": "assistant", "content": "<think>hard</think>\n\n2"},
        {"role": "user", "content": ""},
    ]
    assert encoder.encode_prompt(messages)
