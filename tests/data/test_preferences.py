"""Judged completions on the byte-level tokenizer: what is kept, what is shared, what is learned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from oxrl.data.dataset import ReadOptions
from oxrl.data.preferences import PreferenceDataset, to_preference_batch
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer

WriteRows = Callable[..., Path]
PAIR = {"prompt": "1+1", "chosen": "2", "rejected": "three"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return builtin_tokenizer()


def test_both_rows_share_the_prompt_and_learn_the_reply_with_its_stop(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    (unit,) = PreferenceDataset.load(write_rows(PAIR), tokenizer).in_order()
    chosen, rejected = unit.rows
    assert chosen.token_ids[:5] == rejected.token_ids[:5]  # <user> 1 + 1 <end>
    learned = [
        tokenizer.decode([t for t, on in zip(r.token_ids, r.trained, strict=True) if on])
        for r in unit.rows
    ]
    assert learned == ["2<|end|>", "three<|end|>"]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "1+1"}], "chosen": "2", "rejected": "three"},
        {
            "prompt": "1+1",
            "chosen": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}],
            "rejected": [
                {"role": "user", "content": "1+1"},
                {"role": "assistant", "content": "three"},
            ],
        },
        {
            "chosen": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}],
            "rejected": [
                {"role": "user", "content": "1+1"},
                {"role": "assistant", "content": "three"},
            ],
        },
    ],
)
def test_every_column_convention_gives_the_same_tokens(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, row: dict[str, object]
) -> None:
    (plain,) = PreferenceDataset.load(write_rows(PAIR), tokenizer).in_order()
    (other,) = PreferenceDataset.load(write_rows(row, name="other.jsonl"), tokenizer).in_order()
    assert [r.token_ids for r in plain.rows] == [r.token_ids for r in other.rows]
    assert [r.trained for r in plain.rows] == [r.trained for r in other.rows]


def said(*turns: str) -> list[dict[str, str]]:
    """Messages from texts such as "user: 1+1"."""
    pairs = [turn.split(": ", 1) for turn in turns]
    return [{"role": role, "content": content} for role, content in pairs]


BRIEF = said("system: be brief", "user: 1+1")
ASKED_TWICE = said("user: hi", "assistant: yo", "user: 1+1")


@pytest.mark.parametrize("method", ["pairs", "verdicts"])
@pytest.mark.parametrize(
    ("prompt", "before", "prefix"),
    [
        ("1+1", BRIEF, BRIEF),
        (said("user: 1+1"), BRIEF, BRIEF),
        (BRIEF, said("user: 1+1"), BRIEF),
        (said("system: be brief"), said("user: 1+1"), BRIEF),
        ("1+1", ASKED_TWICE, ASKED_TWICE),
        (ASKED_TWICE, [*said("system: be brief"), *ASKED_TWICE], BRIEF[:1] + ASKED_TWICE),
        (ASKED_TWICE, [*ASKED_TWICE], ASKED_TWICE),
    ],
)
def test_a_prompt_beside_whole_conversations_is_read_once(
    write_rows: WriteRows,
    tokenizer: PreTrainedTokenizerFast,
    prompt: object,
    before: list[dict[str, str]],
    prefix: list[dict[str, str]],
    method: str,
) -> None:
    replies = {"chosen": said("assistant: 2"), "rejected": said("assistant: three")}
    if method == "verdicts":
        replies = {"completion": said("assistant: 2")}
    label = {"label": True} if method == "verdicts" else {}
    options = ReadOptions(unpaired=method == "verdicts")
    repeated = {name: before + reply for name, reply in replies.items()}
    row = write_rows({"prompt": prompt, **repeated, **label})
    apart = write_rows({"prompt": prefix, **replies, **label}, name="apart.jsonl")
    (found,) = PreferenceDataset.load(row, tokenizer, options).in_order()
    (right,) = PreferenceDataset.load(apart, tokenizer, options).in_order()
    assert [r.token_ids for r in found.rows] == [r.token_ids for r in right.rows]
    assert [r.trained for r in found.rows] == [r.trained for r in right.rows]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("2+2", BRIEF),
        ("be brief", BRIEF),
        (said("system: be long", "user: 1+1"), BRIEF),
        ("1+1", said("assistant: ask", "user: 1+1")),
    ],
)
def test_a_prompt_that_is_not_in_the_conversation_beside_it_is_refused(
    write_rows: WriteRows,
    tokenizer: PreTrainedTokenizerFast,
    prompt: object,
    before: list[dict[str, str]],
) -> None:
    chosen = before + said("assistant: 2")
    rejected = before + said("assistant: three")
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    with pytest.raises(DataError, match="prompt") as caught:
        PreferenceDataset.load(write_rows(row), tokenizer)
    assert "rows.jsonl:1" in str(caught.value)


def test_other_words_before_the_prompt_in_one_of_two_replies_are_refused(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    chosen = BRIEF + said("assistant: 2")
    row = {"prompt": "1+1", "chosen": chosen, "rejected": BRIEF[1:] + said("assistant: three")}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: what stands before the prompt"):
        PreferenceDataset.load(write_rows(row), tokenizer)


def test_useless_pairs_are_counted_and_dropped(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows(
        PAIR, PAIR | {"rejected": "2"}, PAIR | {"rejected": " \n"}, PAIR | {"chosen": "x" * 99}
    )
    report = PreferenceDataset.load(path, tokenizer, ReadOptions(max_tokens=40)).report
    assert [report[name] for name in ("rows", "kept", "identical", "empty", "overlong")] == [
        4,
        1,
        1,
        1,
        1,
    ]
    with pytest.raises(DataError, match="more than 40"):
        PreferenceDataset.load(path, tokenizer, ReadOptions(max_tokens=40, overlong="error"))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, "only the unpaired methods"),
        (PAIR | {"rejected": 3}, "rejected is int"),
        (PAIR | {"margin": "big"}, "margin is no number, but 'big'"),
        (PAIR | {"margin": True}, "margin is no number, but True"),
        (PAIR | {"margin": float("nan")}, "margin is nan"),
        (PAIR | {"offset": float("inf")}, "offset is inf"),
        (PAIR | {"offset": -1e300}, r"offset is -1e\+300"),
        (PAIR | {"offset": 10**400}, "offset is 1000"),
        ({"prompt": "a", "completion": "b", "label": True}, "only the unpaired methods"),
        (
            PAIR | {"prompt": [{"role": "assistant", "content": "hm"}]},
            "ends where the assistant answers",
        ),
        ({"chosen": "b", "rejected": "c"}, "ends where the assistant answers"),
    ],
)
def test_a_malformed_row_says_what_a_row_looks_like(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast, row: dict[str, object], problem: str
) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        PreferenceDataset.load(write_rows(row), tokenizer)
    assert "rows.jsonl:1" in str(caught.value) and "expected" in str(caught.value)


def test_earlier_replies_of_a_conversation_are_context(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = [
        {"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "yo"), ("user", "1+1"))
    ]
    (unit,) = PreferenceDataset.load(write_rows(PAIR | {"prompt": prompt}), tokenizer).in_order()
    assert sum(unit.rows[0].trained) == 2


def test_labels_and_pairs_both_give_single_completions(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    labeled = {"prompt": "2+2", "completion": "4", "label": True}
    units = PreferenceDataset.load(
        write_rows(PAIR, labeled), tokenizer, ReadOptions(unpaired=True)
    ).in_order()
    assert [unit.desirable for unit in units] == [True, False, True]
    mismatched = PreferenceDataset(units, {}).with_mismatched().in_order()
    texts = [tokenizer.decode(unit.rows[1].token_ids) for unit in mismatched]
    assert (
        texts[0] == "<|user|>1+1<|end|><|assistant|>4<|end|>"
    )  # not "three": that answers the same prompt
    assert texts[2] == "<|user|>2+2<|end|><|assistant|>2<|end|>"


def test_pairs_of_equal_lengths_train_the_same_number_of_tokens(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    data = PreferenceDataset.load(write_rows(PAIR), tokenizer).with_equal_lengths()
    assert [sum(row.trained) for row in data.in_order()[0].rows] == [2, 2]


def test_a_batch_keeps_pairs_whole_under_selection(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = [PAIR | {"chosen": str(i), "offset": i} for i in range(4)]
    data = PreferenceDataset.load(write_rows(*rows), tokenizer).with_reference(
        torch.tensor([(-i, -10 - i) for i in range(4)]), range(4)
    )
    batch = to_preference_batch(data.in_order(), pad_id=0)
    assert len(batch) == 4 and len(batch.inputs) == 8
    picked = batch.select(torch.tensor([2, 0]), length=9)
    assert picked.ref_logprobs is not None and picked.ref_logprobs.tolist() == [-2, -12, 0, -10]
    assert picked.inputs.tokens.tolist() == batch.inputs.tokens[[4, 5, 0, 1], :9].tolist()
    assert picked.extras["offsets"].tolist() == [2, 0] and picked.loss_weights.tolist() == [
        0.25,
        0.25,
    ]


def test_a_row_keeps_its_own_uid(write_rows: WriteRows, tokenizer: PreTrainedTokenizerFast) -> None:
    (unit,) = PreferenceDataset.load(write_rows(PAIR | {"uid": "q7"}), tokenizer).in_order()
    assert unit.uid == "q7"
