"""Rows of actions that somebody did: conversations whose replies are actions, as tokens.

A row is `{"prompt" or "messages": ..., "images": [...], "actions": [[...], ...]}`: the actions of
one turn, after what was seen. An episode may be one row as well: then messages of the assistant
have their own `actions` in the place of content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from oxrl.data.actions import ActionHead
from oxrl.data.chat import ChatEncoder
from oxrl.data.messages import Message, images_of, read_messages
from oxrl.data.rows import Json, Record, content_uid
from oxrl.data.turns import TurnEncoder
from oxrl.types import TokenIds

ACTIONS = "actions"
EXPECTED = (
    '{"prompt": text or messages, "actions": [the actions of a turn]}, or {"messages": [...]} in '
    'which those of the assistant have "actions" instead of content'
)


class Encoded(NamedTuple):
    """What `oxrl.data.conversations.Example` holds, of a row of actions."""

    uid: str
    token_ids: TokenIds
    trained: tuple[bool, ...]
    images: tuple[str, ...]


def encode_demonstration(record: Record, encoder: ChatEncoder, head: ActionHead) -> Encoded:
    """Token ids and loss mask of a row of actions: the very tokens that an episode would have.

    Args:
        record: the row.
        encoder: of what is read.
        head: of what is done.

    Returns:
        Tokens, and which of them are trained: those of actions.

    Raises:
        DataError: no row of that form, or an action that is none; names the row.
    """
    talk = _talk(record)
    turns = TurnEncoder(encoder, encoder.special_ids, open_turns=head.ends_by is None)
    done: tuple[int, ...] = ()
    ids: list[int] = []
    trained: list[bool] = []
    for number, (said, actions) in enumerate(talk):
        if number:
            read = turns.after(done, turns.suffix(said)) or ()
        else:
            read = turns.opening(said)
        try:
            done = head.encode(actions)
        except (ValueError, TypeError) as error:
            record.fail(f"turn {number + 1} {error}", EXPECTED)
        ids += (*read, *done)
        trained += [False] * len(read) + [True] * len(done)
    messages = [message for said, _ in talk for message in said]
    known = [dict(message) for message in messages]
    return Encoded(
        uid=content_uid(known, [list(actions) for _, actions in talk]),
        token_ids=tuple(ids),
        trained=tuple(trained),
        images=images_of(messages),
    )


def _talk(record: Record) -> list[tuple[Sequence[Message], Sequence[Json]]]:
    """What is read before each turn, and what is done in it."""
    fields = record.fields
    name = "messages" if "messages" in fields else "prompt"
    given: Json = fields.get(name)
    items: list[Json] = list(given) if isinstance(given, list) else [given]
    if fields.get(ACTIONS) is not None:
        items.append({"role": "assistant", ACTIONS: fields[ACTIONS]})
    talk: list[tuple[Sequence[Message], Sequence[Json]]] = []
    said: list[Json] = []
    for item in items:
        if not isinstance(item, Mapping) or item.get("role") != "assistant":
            said.append({"role": "user", "content": item} if isinstance(item, str) else item)
            continue
        actions = item.get(ACTIONS)
        if not isinstance(actions, list) or not said:
            record.fail(f"a reply without actions: {str(dict(item))[:120]}", EXPECTED)
        talk.append((read_messages(record, said, what=name), actions))
        said = []
    if not talk:
        record.fail("no actions: nothing to learn", EXPECTED)
    return talk
