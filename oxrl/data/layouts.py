"""Rows of other layouts, and with other column names, as the rows that oxRL's datasets read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oxrl.data.rows import Fields, Json, JsonArray, JsonObject, Record

Columns = Mapping[str, str]
NO_COLUMNS: Columns = {}
# What every dataset's EXPECTED ends with.
OTHERS = (
    "; also read: ShareGPT (conversations of from, value), Alpaca (instruction, input, output); "
    "columns of other names are named in data.columns, such as {prompt: question}"
)


def in_our_words(record: Record, columns: Columns = NO_COLUMNS) -> Record:
    """Return a row under the names that datasets here read.

    Args:
        record: one row, as the file has it; not changed.
        columns: our name -> theirs; "a.b" is the field b inside of a. Theirs is kept beside.

    Returns:
        The record itself where it has our names already, else one like it.

    Raises:
        DataError: a column that `columns` names is not there, nor ours.
    """
    named = dict(record.fields)
    for ours, theirs in columns.items():
        found, value = field_at(record.fields, theirs)
        if found:
            named[ours] = value
        elif ours not in named:
            problem = f"no column {theirs!r}, which data.columns.{ours} names"
            record.fail(problem, f"{theirs!r}, or {ours!r}")
    known = _with_verdict(_with_conversations(_with_instruction(named)))
    if known == record.fields:
        return record
    return replace(record, fields=known, raw=record.fields)


def field_at(fields: Fields, path: str) -> tuple[bool, Json]:
    """Look up a field by its name or path; the first result says if it is there.

    Args:
        fields: of a row.
        path: a name, or names joined by dots; a name with dots in it goes first.

    Returns:
        Whether it is there; its value, which may be None.
    """
    if path in fields:
        return True, fields[path]
    here: Json = fields
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return False, None
        here = here[part]
    return True, here


def _with_instruction(fields: JsonObject) -> JsonObject:
    """Alpaca: the instruction and its input are the prompt, the output is the completion."""
    instruction = fields.get("instruction")
    has_prompt = any(name in fields for name in ("prompt", "messages", "conversations"))
    if not isinstance(instruction, str) or has_prompt:
        return fields
    given = fields.get("input")
    text = f"{instruction}\n\n{given}" if isinstance(given, str) and given else instruction
    prompt: Json = text
    if "system" in fields or "history" in fields:
        turns = [*(fields.get("history") or ())]
        prompt = [*_system(fields), *_turns(turns), {"role": "user", "content": text}]
    translated = {**fields, "prompt": prompt}
    if "completion" not in fields and isinstance(fields.get("output"), str):
        translated["completion"] = fields["output"]
    return translated


def _with_conversations(fields: JsonObject) -> JsonObject:
    """ShareGPT: a conversation, or one that ends where two judged replies begin."""
    turns = fields.get("conversations")
    if not isinstance(turns, list) or "messages" in fields or "prompt" in fields:
        return fields
    judged = "chosen" in fields and "rejected" in fields
    name = "prompt" if judged else "messages"
    return {**fields, name: [*_system(fields), *turns]}


def _with_verdict(fields: JsonObject) -> JsonObject:
    """Read a whole conversation with a verdict: it is on the last message."""
    turns = fields.get("messages")
    if not isinstance(turns, list) or len(turns) < 2 or not isinstance(fields.get("label"), bool):
        return fields
    if "prompt" in fields or "completion" in fields:
        return fields
    return {**fields, "prompt": turns[:-1], "completion": turns[-1:]}


def _system(fields: Fields) -> JsonArray:
    text = fields.get("system")
    return [{"role": "system", "content": text}] if isinstance(text, str) and text else []


def _turns(history: JsonArray) -> JsonArray:
    """Read turns of [question, answer] as messages; what is no such turn is left to the caller."""
    messages: JsonArray = []
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            messages.append(turn)
            continue
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})
    return messages
