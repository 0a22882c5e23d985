"""Which tokens are learned, on the byte-level tokenizer: pad 0, end 1, user 2, assistant 3, system
4.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oxrl.data.conversations import AnsweredPrompts, ConversationDataset
from oxrl.data.dataset import ReadOptions
from oxrl.data.prompts import PromptDataset
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.types import Example

WriteRows = Callable[..., Path]
END, USER, ASSISTANT = 1, 2, 3
DIALOG = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "+3"},
    {"role": "assistant", "content": "5."},
]
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return builtin_tokenizer()


def learned(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text of each run of learned tokens."""
    runs: list[list[int]] = []
    for position, (token, trained) in enumerate(
        zip(example.token_ids, example.trained, strict=True)
    ):
        if trained and not (position and example.trained[position - 1]):
            runs.append([])
        if trained:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


def test_only_replies_and_their_stop_tokens_are_learned(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    (example,) = ConversationDataset.load(write_rows({"messages": DIALOG}), tokenizer).in_order()
    assert tokenizer.decode(example.token_ids) == (
        "<|system|>Add.<|end|><|user|>1+1<|end|><|assistant|>2<|end|><|user|>+3<|end|><|assistant|>5.<|end|>"
    )
    assert learned(example, tokenizer) == ["2<|end|>", "5.<|end|>"]


def test_a_prompt_and_completion_row_equals_the_sampled_layout(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows({"prompt": "1+1", "completion": "2"})
    (example,) = ConversationDataset.load(path, tokenizer).in_order()
    (prompt,) = PromptDataset.load(path, tokenizer).in_order()
    assert example.token_ids == (*prompt.token_ids, *tokenizer.encode("2"), END)
    assert example.trained == (False,) * len(prompt.token_ids) + (True, True)


BRIEF = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
ANSWER = [{"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1", "completion": BRIEF + ANSWER},
        {"prompt": BRIEF[1:], "completion": BRIEF + ANSWER},
        {"prompt": BRIEF, "completion": BRIEF + ANSWER},
        {"prompt": "1+1", "messages": BRIEF + ANSWER},
        {"prompt": BRIEF, "messages": ANSWER},
    ],
)
def test_a_prompt_beside_a_whole_conversation_is_read_once(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, row: dict[str, object]
) -> None:
    whole = write_rows({"messages": BRIEF + ANSWER})
    (right,) = ConversationDataset.load(whole, tokenizer).in_order()
    path = write_rows(row, name="repeated.jsonl")
    (found,) = ConversationDataset.load(path, tokenizer).in_order()
    assert (found.token_ids, found.trained) == (right.token_ids, right.trained)
    (asked,) = AnsweredPrompts.load(path, tokenizer).in_order()
    assert asked.messages == tuple(BRIEF)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2", "completion": BRIEF + ANSWER},
        {"prompt": "1+1", "messages": BRIEF[:1] + ANSWER},
    ],
)
def test_a_prompt_that_is_not_in_the_conversation_beside_it_is_refused(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, row: dict[str, object]
) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the prompt does not stand at"):
        ConversationDataset.load(write_rows(row), tokenizer)


def test_what_the_template_writes_after_the_stop_token_is_not_learned(
    write_rows: WriteRows,
) -> None:
    chatml = builtin_tokenizer()
    chatml.chat_template = CHATML
    (example,) = ConversationDataset.load(write_rows({"messages": DIALOG}), chatml).in_order()
    assert learned(example, chatml) == ["2<|end|>", "5.<|end|>"]
    rendered = chatml.apply_chat_template(DIALOG, return_dict=False)
    assert list(example.token_ids) == rendered


def test_text_after_the_last_reply_is_left_out(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows({"messages": DIALOG[:4]})
    (example,) = ConversationDataset.load(path, tokenizer).in_order()
    assert tokenizer.decode(example.token_ids).endswith("<|assistant|>2<|end|>")


def test_special_token_text_in_replies_is_learned_as_text(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows({"prompt": "quote <|user|>", "completion": "<|end|> ends"})
    (example,) = ConversationDataset.load(path, tokenizer).in_order()
    assert [token for token in example.token_ids if token < 5] == [USER, END, ASSISTANT, END]
    assert learned(example, tokenizer) == ["<|end|> ends<|end|>"]


def test_a_template_that_drops_the_stop_token_is_an_error(write_rows: WriteRows) -> None:
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    shown = r"- rendered: \.\.\.'2'\n  \+ expected: \.\.\.'2<\|end\|>'"
    with pytest.raises(
        DataError, match=r"(?s)rows\.jsonl:1: the chat template does not stop a reply .*" + shown
    ):
        ConversationDataset.load(write_rows({"prompt": "1+1", "completion": "2"}), tokenizer)


def test_an_unknown_character_is_no_stop_token(write_rows: WriteRows) -> None:
    vocabulary = {"<unk>": 0, "<end>": 1, "<user>": 2, "<assistant>": 3, "a": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        eos_token="<end>",
        extra_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = builtin_tokenizer().chat_template.replace("<|end|>", "<end> ?")  # pyright: ignore
    tokenizer.chat_template = tokenizer.chat_template.replace("<|", "<").replace("|>", ">")
    (example,) = ConversationDataset.load(
        write_rows({"prompt": "a", "completion": "a z"}), tokenizer
    ).in_order()
    assert example.token_ids == (2, 4, 1, 0, 3, 4, 0, 1, 0)
    assert example.trained == (False,) * 5 + (True, True, True, False)


def test_a_template_that_rewrites_earlier_turns_is_an_error_that_shows_both_texts(
    write_rows: WriteRows,
) -> None:
    tokenizer = builtin_tokenizer()
    # Drops all replies but the last, as templates of reasoning models do with earlier thoughts.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
        "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(DataError, match="changes earlier text when a turn is added") as caught:
        ConversationDataset.load(write_rows({"messages": DIALOG}), tokenizer)
    assert "<|assistant|>2<|end|>" in str(caught.value) and "<|user|>+3<|end|>" in str(caught.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": DIALOG[:2]}, "no assistant message"),
        ({"prompt": "x"}, "neither 'messages' nor 'prompt' with a 'completion'"),
        ({"prompt": "x", "completion": 5}, "neither 'messages'"),
        ({"messages": "x"}, "no assistant message"),
        ({"messages": {"say": "user"}}, "messages is dict"),
        ({"messages": {"role": "user"}}, "message 1 of messages has role 'user' and content of"),
    ],
)
def test_a_malformed_row_is_named(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, row: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        ConversationDataset.load(write_rows({"messages": DIALOG}, row), tokenizer)
    assert "rows.jsonl:2: " in str(caught.value)


def test_long_and_empty_rows_are_dropped_and_counted(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [{"prompt": "x", "completion": reply} for reply in ("123", "1234", " ")]
    dataset = ConversationDataset.load(write_rows(*rows), tokenizer, ReadOptions(max_tokens=8))
    report = {
        k: dataset.report[k]
        for k in ("rows", "kept", "overlong", "empty", "longest", "trained_tokens")
    }
    assert report == {
        "rows": 3,
        "kept": 1,
        "overlong": 1,
        "empty": 1,
        "longest": 8,
        "trained_tokens": 4,
    }
    with pytest.raises(
        DataError, match=r"rows\.jsonl:2: the conversation has 9 tokens, more than 8"
    ):
        ConversationDataset.load(
            write_rows(*rows), tokenizer, ReadOptions(max_tokens=8, overlong="error")
        )
    with pytest.raises(DataError, match=r"3 rows, 1 empty, 2 longer than 2 tokens"):
        ConversationDataset.load(write_rows(*rows), tokenizer, ReadOptions(max_tokens=2))


def test_dropped_rows_are_warned_of(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(*[{"prompt": "x", "completion": reply} for reply in ("1", " ", "2")])
    ConversationDataset.load(path, tokenizer)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and f"{path}: 2 of 3 rows are used" in record.getMessage()
    assert "'empty': 1" in record.getMessage()


def test_prompts_that_were_laid_out_already_are_warned_of(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    laid_out = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1"}], tokenize=False, add_generation_prompt=True
    )
    path = write_rows({"prompt": laid_out, "completion": "2"}, {"prompt": "2", "completion": "2"})
    ConversationDataset.load(path, tokenizer)
    (told,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert f"{path}: 1 of 2 rows hold the text of special tokens" in told.getMessage()
    caplog.clear()
    plain = write_rows({"prompt": "2", "completion": "2"})
    ConversationDataset.load(plain, tokenizer)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_conversation_that_the_assistant_begins_is_refused_in_these_words(
    write_rows: WriteRows,
) -> None:
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content[:0] }}" + str(tokenizer.chat_template)
    greeting = [{"role": "assistant", "content": "hi"}, *DIALOG]
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: .* a conversation that the assistant begins"
    ):
        ConversationDataset.load(write_rows({"messages": greeting}), tokenizer)


def test_every_example_comes_once_per_epoch(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    dataset = ConversationDataset.load(
        write_rows(*[{"prompt": str(i), "completion": "x"} for i in range(9)]), tokenizer
    )
    epoch = [dataset.at(draw, seed=3).uid for draw in range(9, 18)]
    assert sorted(epoch) == sorted(example.uid for example in dataset.in_order())


def test_real_multi_turn_chats_are_read(
    real_data: Callable[[str], Path], write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    def messages(line: str) -> list[dict[str, str]]:
        row = json.loads(line)
        turns = [*row["history"], (row["instruction"] + row["input"], row["output"])]
        return [
            {"role": role, "content": text}
            for turn in turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]

    source = (real_data("oasst_zh") / "sft.jsonl").read_text(encoding="utf-8")
    rows = [{"messages": messages(line)} for line in source.split("\n") if line]
    dataset = ConversationDataset.load(write_rows(*rows), tokenizer)
    assert len(dataset) == 610
    for example, row in zip(dataset.in_order(), rows, strict=True):
        replies = [m["content"] + "<|end|>" for m in row["messages"] if m["role"] == "assistant"]
        assert learned(example, tokenizer) == replies


def test_a_row_with_images_is_refused_not_read_without_them(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    without = {"prompt": "1+1", "completion": "2", "images": []}
    assert (
        len(ConversationDataset.load(write_rows(without, without | {"images": None}), tokenizer))
        == 2
    )
    path = write_rows(without, without | {"images": ["cat.png"]})
    with pytest.raises(DataError, match=r":2: it has images, which this model cannot read"):
        ConversationDataset.load(path, tokenizer)
