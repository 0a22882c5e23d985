"""Rows of published layouts and with other column names give the tokens of the same row in ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import Dataset, ReadOptions
from oxrl.data.preferences import PreferenceDataset
from oxrl.data.prompts import PromptDataset
from oxrl.data.rows import Record, in_our_words
from oxrl.data.steps import StepDataset
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer

WriteRows = Callable[..., Path]
SYSTEM = {"role": "system", "content": "Add."}
USER = {"role": "user", "content": "1+1"}
REPLY = {"role": "assistant", "content": "2"}
HUMAN, GPT = {"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}
WRONG = {"from": "gpt", "value": "3"}
SFT, PAIRS, PROMPTS = ConversationDataset, PreferenceDataset, PromptDataset
OURS: dict[str, Any] = {"messages": [USER, REPLY]}
WITH_SYSTEM: dict[str, Any] = {"messages": [SYSTEM, USER, REPLY]}
PAIR: dict[str, Any] = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
JUDGED: dict[str, Any] = {"prompt": "1+1", "completion": "2", "label": True}
CASES: list[tuple[type[Dataset[Any]], dict[str, Any], dict[str, Any], dict[str, str]]] = [
    (SFT, {"conversations": [HUMAN, GPT]}, OURS, {}),
    (SFT, {"conversations": [HUMAN, GPT], "system": "Add."}, WITH_SYSTEM, {}),
    (SFT, {"conversations": [USER, REPLY]}, OURS, {}),
    (SFT, {"instruction": "1+1", "input": "", "output": "2"}, OURS, {}),
    (SFT, {"instruction": "1+1", "output": "2", "system": "Add."}, WITH_SYSTEM, {}),
    (
        SFT,
        {"instruction": "1+1", "input": "Now", "output": "2"},
        {"prompt": "1+1\n\nNow", "completion": "2"},
        {},
    ),
    (
        SFT,
        {"instruction": "1+1", "output": "2", "history": [["0+1", "1"]]},
        {"messages": [{"role": "user", "content": "0+1"}, {**REPLY, "content": "1"}, USER, REPLY]},
        {},
    ),
    (SFT, {"prompt": [USER], "completion": [REPLY]}, OURS, {}),
    (SFT, {"q": "1+1", "a": "2"}, OURS, {"prompt": "q", "completion": "a"}),
    (SFT, {"chat": [HUMAN, GPT]}, OURS, {"messages": "chat"}),
    (SFT, {"chat": [HUMAN, GPT]}, OURS, {"conversations": "chat"}),
    (SFT, {"d": {"q": "1+1"}, "a": "2"}, OURS, {"prompt": "d.q", "completion": "a"}),
    (PAIRS, {"conversations": [HUMAN], "chosen": GPT, "rejected": WRONG}, PAIR, {}),
    (PAIRS, {"instruction": "1+1", "input": "", "chosen": "2", "rejected": "3"}, PAIR, {}),
    (PAIRS, {"chosen": [HUMAN, GPT], "rejected": [HUMAN, WRONG]}, PAIR, {}),
    (
        PAIRS,
        {"question": "1+1", "good": "2", "bad": "3"},
        PAIR,
        {"prompt": "question", "chosen": "good", "rejected": "bad"},
    ),
    (PROMPTS, {"question": "1+1", "gold": "2"}, {"prompt": "1+1"}, {"prompt": "question"}),
    (PROMPTS, {"instruction": "1+1", "output": "2"}, {"prompt": "1+1"}, {}),
    (PROMPTS, {"talk": [HUMAN]}, {"prompt": [USER]}, {"prompt": "talk"}),
    (
        StepDataset,
        {"q": "1+1", "steps": ["1", "2"], "right": [True, False]},
        {"prompt": "1+1", "completions": ["1", "2"], "labels": [True, False]},
        {"prompt": "q", "completions": "steps", "labels": "right"},
    ),
]


def tokens(unit: Any) -> Any:
    return [row.token_ids for row in unit.rows] if hasattr(unit, "rows") else unit.token_ids


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "stream"])
@pytest.mark.parametrize(("dataset", "theirs", "ours", "columns"), CASES)
def test_the_same_tokens_as_the_row_in_our_words(
    dataset: type[Dataset[Any]],
    theirs: dict[str, Any],
    ours: dict[str, Any],
    columns: dict[str, str],
    suffix: str,
    write_rows: WriteRows,
    tmp_path: Path,
) -> None:
    tokenizer = builtin_tokenizer()
    (expected,) = dataset.load(write_rows(ours, name="ours.jsonl"), tokenizer).in_order()
    path = write_rows(theirs, name="theirs.jsonl")
    if suffix == "parquet":
        path = tmp_path / "theirs.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([theirs]), path)
    options = ReadOptions(columns=columns, stream=suffix == "stream")
    (found,) = dataset.load(path, tokenizer, options).in_order()
    assert tokens(found) == tokens(expected)


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"conversations": [HUMAN, GPT], "label": True}, {}),
        ({"messages": [USER, REPLY], "label": True}, {}),
        ({"instruction": "1+1", "output": "2", "label": True}, {}),
        ({"conversations": [HUMAN, GPT], "kto_tag": True}, {"label": "kto_tag"}),
        ({"p": "1+1", "c": "2", "l": True}, {"prompt": "p", "completion": "c", "label": "l"}),
    ],
)
def test_judged_completions_of_other_layouts(
    row: dict[str, Any], columns: dict[str, str], write_rows: WriteRows
) -> None:
    tokenizer = builtin_tokenizer()
    plain = ReadOptions(unpaired=True)
    (expected,) = PreferenceDataset.load(write_rows(JUDGED), tokenizer, plain).in_order()
    options = ReadOptions(unpaired=True, columns=columns)
    (found,) = PreferenceDataset.load(write_rows(row), tokenizer, options).in_order()
    assert (tokens(found), found.desirable) == (tokens(expected), True)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER, REPLY]},
        {"messages": [USER, REPLY], "label": "good"},
        {"messages": [REPLY], "label": True},
        {"messages": [USER, REPLY], "label": True, "completion": "2"},
        {"messages": [USER, REPLY], "label": True, "prompt": "1+1"},
        {"messages": "1+1", "label": True},
        {"conversations": [HUMAN, GPT], "messages": [USER, REPLY]},
    ],
)
def test_what_is_in_our_words_is_left_alone(fields: dict[str, Any]) -> None:
    record = Record("rows.jsonl line 1", fields)
    assert in_our_words(record, {}) is record


@pytest.mark.parametrize(
    ("fields", "name", "turns"),
    [
        ({"chosen": GPT, "rejected": WRONG}, "prompt", [HUMAN]),
        ({"chosen": GPT}, "messages", [HUMAN]),
        ({"rejected": WRONG}, "messages", [HUMAN]),
        ({"system": "Add."}, "messages", [SYSTEM, HUMAN]),
        ({"system": ""}, "messages", [HUMAN]),
        ({"system": 5}, "messages", [HUMAN]),
    ],
)
def test_a_conversation_is_a_prompt_where_two_replies_are_judged(
    fields: dict[str, Any], name: str, turns: list[Any]
) -> None:
    given = {"conversations": [HUMAN], **fields}
    assert in_our_words(Record("rows.jsonl line 1", given), {}).fields == {**given, name: turns}


def test_a_verdict_is_on_the_last_message() -> None:
    given = {"messages": [SYSTEM, USER, REPLY], "label": False}
    found = in_our_words(Record("rows.jsonl line 1", given), {}).fields
    assert found == {**given, "prompt": [SYSTEM, USER], "completion": [REPLY]}


def test_a_column_that_is_not_there_is_named_with_those_that_are(write_rows: WriteRows) -> None:
    options = ReadOptions(columns={"prompt": "question"})
    with pytest.raises(DataError, match=r"no column 'question'.*data\.columns\.prompt") as caught:
        PromptDataset.load(write_rows({"text": "1+1", "gold": 2}), builtin_tokenizer(), options)
    assert "this row has: text (str), gold (int)" in str(caught.value)


def test_a_file_that_already_has_our_names_may_stand_beside_one_that_has_not(
    write_rows: WriteRows,
) -> None:
    options = ReadOptions(columns={"prompt": "question"})
    path = write_rows({"question": "1+1"}, {"prompt": "1+1"})
    first, second = PromptDataset.load(path, builtin_tokenizer(), options).in_order()
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("dataset", [SFT, PAIRS, PROMPTS])
def test_an_unknown_layout_names_the_columns_and_what_is_read(
    dataset: type[Dataset[Any]], write_rows: WriteRows
) -> None:
    with pytest.raises(DataError) as caught:
        dataset.load(write_rows({"question": "1+1", "response": "2"}), builtin_tokenizer())
    told = str(caught.value)
    for part in ("question (str), response (str)", "ShareGPT", "Alpaca", "data.columns"):
        assert part in told


@pytest.mark.parametrize("turn", [["0+1", "1", "2"], ["0+1"], "01"])
def test_a_turn_of_a_history_that_is_no_question_and_answer_is_refused(
    turn: object, write_rows: WriteRows
) -> None:
    path = write_rows({"instruction": "1+1", "output": "2", "history": [turn]})
    with pytest.raises(DataError, match="message 1 of"):
        SFT.load(path, builtin_tokenizer())
