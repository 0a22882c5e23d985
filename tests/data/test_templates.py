"""Training templates: more turns only add text, and a first turn is what the model's own writes.

The models' own templates come with TRL, which the `bench` extra brings; without it only a part can be
tested.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template  # pyright: ignore

from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import ConversationDataset
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.modelfiles.chat_templates import DATE, TRAINING_TEMPLATES, fitting_template, template_text
from oxrl.models.load import load_tokenizer

WriteRows = Callable[..., Path]
Chat = list[dict[str, Any]]
SYSTEM = {"role": "system", "content": "Add."}
ONE: Chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
TWO: Chat = [*ONE, {"role": "user", "content": "+3"}, {"role": "assistant", "content": "5."}]
THOUGHT = {"reasoning_content": "one more than one", "thinking": "one more than one"}
THINKING: Chat = [{**turn, **THOUGHT} if turn["role"] == "assistant" else turn for turn in TWO]
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
CALLING: Chat = [
    TWO[0],
    {"role": "assistant", "content": "", "tool_calls": [ADD]},
    {"role": "tool", "name": "add", "content": "2"},
    *TWO[1:],
]
# The models' own templates, by the names that TRL gives them.
OWN = {
    "qwen3_training": ("qwen3",),
    "qwen3_5_training": ("qwen3_5_think", "qwen3_6"),
    "qwen3_5_direct_training": ("qwen3_5_nothink",),
    "phi3_training": ("phi3", "phi3_5"),
    "gpt_oss_training": ("gptoss",),
    "deepseek_r1_training": ("deepseek_r1_distill", "deepseekv3"),
}
PAIRS = [(name, own) for name, owns in OWN.items() for own in owns]
# A reply begins elsewhere in them, which is why they have to be replaced; Phi-3 ends the text.
OTHER_REPLY = ("phi3", "phi3_5", "deepseek_r1_distill", "deepseekv3")
# Ends whatever it writes, so that one more turn changes what was there.
ENDING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)


def own_template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip('needs trl: pip install -e ".[bench]"')
    file = Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"this trl has no {file.name}")
    return file.read_text(encoding="utf-8")


def rendered(template: str, chat: Chat, *, prompt: bool) -> str:
    compiled = _compile_jinja_template(template)
    return compiled.render(
        messages=chat, add_generation_prompt=prompt, bos_token="<B>", eos_token="<E>", tools=None
    )


def tokenizer_of(name: str, template: str) -> Any:
    tokenizer = builtin_tokenizer()
    ends = ("<|call|>",) if name == "gpt_oss_training" else ()
    special = [*TRAINING_TEMPLATES[name].tokens, *ends]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def chats_of(name: str) -> list[Chat]:
    chats = [ONE, TWO, [SYSTEM, *TWO]]
    if name not in ("phi3_training", "qwen3_5_direct_training"):
        chats.append(THINKING)
    return chats if name == "phi3_training" else [*chats, CALLING]


@pytest.mark.parametrize("name", TRAINING_TEMPLATES)
def test_more_turns_only_add_text(name: str) -> None:
    template = TRAINING_TEMPLATES[name].text()
    for chat in chats_of(name):
        written = ""
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = rendered(template, chat[:turn], prompt=True)
            after = rendered(template, chat[: turn + 1], prompt=False)
            assert before.startswith(written)
            assert after.startswith(before)
            assert message["content"] in after[len(before) :]
            written = after


@pytest.mark.parametrize("name", TRAINING_TEMPLATES)
def test_whole_conversations_are_learned(name: str, write_rows: WriteRows) -> None:
    template = TRAINING_TEMPLATES[name].text()
    tokenizer = tokenizer_of(name, template)
    for chat in chats_of(name):
        path = write_rows({"messages": chat})
        (example,) = ConversationDataset.load(path, tokenizer).in_order()
        whole = tokenizer.apply_chat_template(chat, tokenize=False)
        assert tokenizer.decode(example.token_ids) == whole
        learned = tokenizer.decode(
            [t for t, on in zip(example.token_ids, example.trained, strict=True) if on]
        )
        for message in chat:
            if message["role"] == "assistant":
                assert message["content"] in learned
        assert "1+1" not in learned


@pytest.mark.parametrize(("name", "own"), PAIRS)
def test_a_first_question_is_what_the_models_own_template_writes(name: str, own: str) -> None:
    theirs = own_template(own)
    ours = TRAINING_TEMPLATES[name].text()
    for chat in (ONE, [SYSTEM, *ONE]):
        question = DATE.sub("", rendered(theirs, chat[:-1], prompt=True))
        assert rendered(ours, chat[:-1], prompt=True) == question
        if own not in OTHER_REPLY:
            answered = DATE.sub("", rendered(theirs, chat, prompt=False))
            assert rendered(ours, chat, prompt=False) == answered


@pytest.mark.parametrize(("name", "own"), PAIRS)
def test_the_error_about_the_models_own_template_names_ours(
    name: str, own: str, write_rows: WriteRows
) -> None:
    tokenizer = tokenizer_of(name, own_template(own))
    assert fitting_template(tokenizer) == name
    with pytest.raises(DataError, match=f"set model.chat_template to {name}, oxRL's training"):
        ConversationDataset.load(write_rows({"messages": TWO}), tokenizer)


def test_the_error_names_ours_for_a_template_that_ends_the_text(write_rows: WriteRows) -> None:
    tokenizer = tokenizer_of("phi3_training", ENDING)
    path = write_rows({"messages": TWO})
    with pytest.raises(DataError, match="set model.chat_template to phi3_training"):
        ConversationDataset.load(path, tokenizer)
    tokenizer.chat_template = template_text("phi3_training", tokenizer)
    assert len(ConversationDataset.load(path, tokenizer)) == 1
    tokenizer.chat_template = ENDING.replace("\n", " ")
    with pytest.raises(DataError, match="to a Jinja file that keeps it"):
        ConversationDataset.load(path, tokenizer)


def test_a_training_template_of_another_family_is_refused() -> None:
    told = r"qwen3_training is for Qwen3 .*no <\|im_start\|>"
    with pytest.raises(DataError, match=told):
        load_tokenizer("builtin:tiny", chat_template="qwen3_training")
    with pytest.raises(DataError, match=r"no file 'qwen4_training', nor one of .*gpt_oss_training"):
        load_tokenizer("builtin:tiny", chat_template="qwen4_training")


def test_what_was_sampled_behind_the_prompt_is_learned_as_it_was() -> None:
    """Replies of rejection sampling hold their thoughts in their text."""
    for name, sampled in {
        "qwen3_training": "<think>\nhm\n</think>\n\n2",
        "deepseek_r1_training": "hm\n</think>\n\n2",
    }.items():
        template = TRAINING_TEMPLATES[name].text()
        before = rendered(template, ONE[:1], prompt=True)
        after = rendered(
            template, [ONE[0], {"role": "assistant", "content": sampled}], prompt=False
        )
        assert re.sub(r"<[|｜](im_end|end▁of▁sentence)[|｜]>\n?$", "", after) == before + sampled


def test_a_template_that_reads_the_clock_is_told_the_day_of_its_tokenizer() -> None:
    asked = ({"role": "user", "content": "1+1"},)
    shown: list[str] = []
    for day in ("2001-02-03", "2001-02-04"):
        tokenizer = load_tokenizer("builtin:tiny", day=day)
        clock = "{% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d %H') }}{% endif %}"
        tokenizer.chat_template = f"<|system|>{clock}<|end|>{tokenizer.chat_template}"
        shown.append(ChatEncoder(tokenizer).render(asked, generation_prompt=True))
    assert [text.partition("<|end|>")[0] for text in shown] == [
        "<|system|>2001-02-03 00",
        "<|system|>2001-02-04 00",
    ]
