"""Messages in the forms of other tools: calls of functions, names, parts, ShareGPT's keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from oxrl.data.conversations import ConversationDataset
from oxrl.data.memory import lines_of
from oxrl.data.messages import read_messages, read_tools
from oxrl.data.prompts import PromptDataset
from oxrl.data.rows import Record, read_rows
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer

WriteRows = Callable[..., Path]
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": ADD}]}
QUESTION = {"role": "user", "content": "1+2?"}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "3"}
ANSWER = {"role": "assistant", "content": "It is 3."}
WITH_TOOLS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>"
    "{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def read(value: Any, **fields: Any) -> list[dict[str, Any]]:
    record = Record("rows.jsonl:1", {"messages": value, **fields}, start=0)
    return [dict(message) for message in read_messages(record, value, what="messages")]


def tokenizer_with_tools() -> Any:
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    return tokenizer


def test_calls_come_out_in_one_form() -> None:
    expected = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": ADD}],
    }
    as_text = {"name": "add", "arguments": json.dumps(ADD["arguments"])}
    for call in ({"function": as_text}, as_text, ADD, {"type": "function", "function": ADD}):
        assert read([QUESTION, {"role": "assistant", "tool_calls": [call]}])[1] == expected
    share_gpt = {"from": "function_call", "value": json.dumps(ADD)}
    assert read([QUESTION, share_gpt])[1] == expected
    with_id = {**CALL, "tool_calls": [{"id": "c1", **CALL["tool_calls"][0]}]}
    assert read([QUESTION, with_id])[1]["tool_calls"][0]["id"] == "c1"


def test_speakers_of_share_gpt_have_roles() -> None:
    turns = [("system", "s"), ("human", "u"), ("gpt", "a"), ("observation", "o"), ("gpt", "b")]
    found = read([{"from": speaker, "value": text} for speaker, text in turns])
    assert [message["role"] for message in found] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in found] == [text for _, text in turns]


def test_parts_of_text_are_joined_and_others_are_refused_with_the_true_reason() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "2?"}]
    assert read([{"role": "user", "content": parts}]) == [QUESTION]
    for part in (
        {"type": "image", "image": "x.png"},
        {"type": "image_url", "image_url": {"url": "http://x"}},
        {"image": "x.png"},
    ):
        with pytest.raises(DataError, match="holds a part of type image.*: models here read text"):
            read([{"role": "user", "content": [*parts, part]}])


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "is no JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "not an object"),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool_calls of message 1"),
        ({"role": "user", "content": "x", "tool_calls": [ADD]}, "calls by the assistant"),
        ({"role": "user", "content": "x", "weight": 0}, "with weight"),
        ({"role": "user", "content": "x", "name": 3}, "name of message 1 of messages is int"),
        ({"from": "robot", "value": "x"}, "has role 'robot'"),
        ({"role": "assistant", "content": None}, "content of type NoneType"),
        ({"role": "user", "content": "x", "name": "\ud800"}, "a lone surrogate"),
    ],
)
def test_what_cannot_be_read_is_named(message: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read([message])


def test_what_is_no_message_is_shown_up_to_120_characters() -> None:
    with pytest.raises(DataError, match=r"message 1 of messages is 7{120}(?!7)"):
        read(["7" * 121])


def test_a_conversation_with_calls_is_learned_with_them(write_rows: WriteRows) -> None:
    tokenizer = tokenizer_with_tools()
    path = write_rows({"messages": [QUESTION, CALL, RESULT, ANSWER]})
    (example,) = ConversationDataset.load(path, tokenizer).in_order()
    ids = zip(example.token_ids, example.trained, strict=True)
    learned = tokenizer.decode([token for token, trained in ids if trained])
    assert learned == 'add{"a": 1, "b": 2}<|end|>It is 3.<|end|>'
    assert "<|user|>add: 3<|end|>" in tokenizer.decode(example.token_ids)


def test_a_template_without_words_for_calls_is_refused(write_rows: WriteRows) -> None:
    path = write_rows({"messages": [QUESTION, CALL, RESULT, ANSWER]})
    with pytest.raises(DataError, match="leaves out a part of a reply, its tool_calls"):
        ConversationDataset.load(path, builtin_tokenizer())
    thinking = {**ANSWER, "reasoning_content": "one and two"}
    with pytest.raises(DataError, match="leaves out a part of a reply, its reasoning"):
        ConversationDataset.load(
            write_rows({"messages": [QUESTION, thinking]}), builtin_tokenizer()
        )


def test_special_text_inside_of_calls_stays_text(write_rows: WriteRows) -> None:
    tokenizer = tokenizer_with_tools()
    call = {"name": "say", "arguments": {"text": "<|end|>"}}
    row = {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}
    (example,) = ConversationDataset.load(write_rows(row), tokenizer).in_order()
    assert example.token_ids.count(tokenizer.eos_token_id) == 2


def test_definitions_of_tools_reach_the_template(write_rows: WriteRows) -> None:
    tokenizer = tokenizer_with_tools()
    schema = {"name": "add", "parameters": {"type": "object"}}
    for tools in ([schema], json.dumps([schema]), [{"type": "function", "function": schema}]):
        path = write_rows({"prompt": [QUESTION], "answer": "3", "tools": tools})
        (prompt,) = PromptDataset.load(path, tokenizer).in_order()
        shown = tokenizer.decode(prompt.token_ids)
        whole = json.dumps([{"type": "function", "function": schema}])
        assert shown == f"<|system|>{whole}<|end|><|user|>1+2?<|end|><|assistant|>"
    record = Record("rows.jsonl:1", {"tools": "[1]"}, start=0)
    with pytest.raises(DataError, match="tools is list"):
        read_tools(record)


def test_keys_that_only_other_rows_of_a_table_have_are_not_there(tmp_path: Path) -> None:
    other = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"c": 5}}]}
    first = {"role": "assistant", "tool_calls": [ADD]}
    table = pyarrow.Table.from_pylist(
        [{"messages": [QUESTION, first]}, {"messages": [QUESTION, other]}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    record = next(read_rows(tmp_path / "rows.parquet"))
    assert record.fields["messages"][1]["content"] is None
    found = read_messages(record, record.fields["messages"], what="messages")
    assert found[1]["tool_calls"][0]["function"] == ADD


def test_calls_are_learned_alike_by_every_way_in(tmp_path: Path, write_rows: WriteRows) -> None:
    tokenizer = tokenizer_with_tools()
    schema = {"name": "f", "parameters": {"type": "object", "required": ["a"]}}
    arguments = [
        {"a": 1, "where": {"x": [1, 2], "unit": None}, "exact": 2.0, "half": 0.5},
        {"name": "c", "each": [{"u": 1}, {"v": "w"}], "empty": None},
    ]
    rows = [
        {
            "messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}],
            "tools": [{**schema, "strict": extra}],
        }
        for extra, call in zip(
            (None, True), ({"name": "f", "arguments": each} for each in arguments), strict=True
        )
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, parquet)
    given = {
        "list": rows,
        "filled list": table.to_pylist(),
        "frame": pandas.DataFrame(rows),
        "filled frame": pandas.read_parquet(parquet),
        "frame of Arrow": pandas.read_parquet(parquet, dtype_backend="pyarrow"),
    }
    paths = {"jsonl": write_rows(*rows), "parquet": parquet}
    for name, each in given.items():
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text(lines_of(each, "dataset"))
    found = {
        name: [
            tokenizer.decode(example.token_ids)
            for example in ConversationDataset.load(path, tokenizer).in_order()
        ]
        for name, path in paths.items()
    }
    assert set(map(str, found.values())) == {str(found["jsonl"])}
    assert 'f{"a": 1, "where": {"x": [1, 2]}, "exact": 2, "half": 0.5}' in found["jsonl"][0]
    assert "null" not in str(found)


def test_arguments_that_are_json_text_keep_what_they_say() -> None:
    call = {"name": "f", "arguments": '{"a": null, "b": 2.0}'}
    for start in (0, -1):
        record = Record("rows:1", {}, start=start)
        (message,) = read_messages(record, {"role": "assistant", "tool_calls": [call]}, what="m")
        assert str(message["tool_calls"][0]["function"]["arguments"]) == "{'a': None, 'b': 2.0}"
