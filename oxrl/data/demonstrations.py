"""Rows of actions that somebody did: conversations whose replies are actions, as tokens.

A row is `{"prompt" or "messages": ..., "images": [...], "actions": [[...], ...]}`: the actions of
one turn, after what was seen. An episode may be one row as well: then messages of the assistant
have their own `actions` in the place of content. Beside `actions`, `padded` says how many at their
end nobody did: they fill a chunk at the end of an episode, and their tokens are not learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oxrl.data.actions import ActionHead
from oxrl.data.chat import ChatEncoder
from oxrl.data.messages import MessageSequence, images_of, read_messages
from oxrl.data.rows import Fields, Json, JsonArray, JsonObject, Record, content_uid
from oxrl.data.turns import TurnEncoder
from oxrl.types import Example, TokenIds

ACTIONS = "actions"
PADDED = "padded"
EXPECTED = (
    '{"prompt": text or messages, "actions": [the actions of a turn]}, or {"messages": [...]} in '
    'which those of the assistant have "actions" instead of content'
)
# What is read before a turn, what is done in it, and how much of that nobody did.
_Turn = tuple[MessageSequence, Sequence[Json], int]


def chunk_at(actions: Sequence[Json], at: int, chunk: int) -> JsonObject:
    """Return the actions of an episode from a place on, as a row or a message has them.

    Args:
        actions: of the whole episode.
        at: the first one that is taken.
        chunk: how many are; those beyond the end repeat the last one.

    Returns:
        `actions`, and `padded` where some are beyond the end.
    """
    done = list(actions[at : at + chunk])
    missing = chunk - len(done)
    if not missing:
        return {ACTIONS: done}
    return {ACTIONS: done + [actions[-1]] * missing, PADDED: missing}


def padded_in(rows: Sequence[Fields]) -> int:
    """Count the actions of rows, as `chunk_at` makes them, that nobody did.

    Args:
        rows: with `messages`.
    """
    parts = [part for row in rows for part in (row, *row["messages"])]
    return sum(part.get(PADDED, 0) for part in parts)


def encode_demonstration(record: Record, encoder: ChatEncoder, head: ActionHead) -> Example:
    """Encode a row of actions with its loss mask: the very tokens that an episode would have.

    Args:
        record: the row.
        encoder: of what is read.
        head: of what is done.

    Returns:
        Tokens, and which of them are trained: those of actions that somebody did; of a code whose
        tokens stand for a chunk as a whole, all.

    Raises:
        DataError: no row of that form, or an action that is none; names the row.
    """
    talk = _talk(record)
    turns = TurnEncoder(encoder, encoder.special_ids, open_turns=head.ends_by is None)
    done: TokenIds = ()
    ids: list[int] = []
    trained: list[bool] = []
    clipped = 0
    for number, (said, actions, padded) in enumerate(talk):
        if number:
            read = turns.after(done, turns.suffix(said)) or ()
        else:
            read = turns.opening(said)
        try:
            done = head.encode(actions)
        except (ValueError, TypeError) as error:
            record.fail(f"turn {number + 1} {error}", EXPECTED)
        clipped += head.clipped(actions)
        learned = head.kept(done, head.chunk - padded)
        ids += (*read, *done)
        trained += [False] * len(read) + [True] * learned + [False] * (len(done) - learned)
    messages = [message for said, _, _ in talk for message in said]
    known = [dict(message) for message in messages]
    return Example(
        uid=content_uid(known, [list(actions) for _, actions, _ in talk]),
        token_ids=tuple(ids),
        trained=tuple(trained),
        images=images_of(messages),
        clipped=clipped,
    )


def _talk(record: Record) -> list[_Turn]:
    """Split a row into turns: the messages read before each, its actions, and how many of them
    nobody did.
    """
    fields = record.fields
    name = "messages" if "messages" in fields else "prompt"
    given = fields.get(name)
    items: JsonArray = list(given) if isinstance(given, list) else [given]
    if fields.get(ACTIONS) is not None:
        items.append({**fields, "role": "assistant"})
    talk: list[_Turn] = []
    said: JsonArray = []
    for item in items:
        if not isinstance(item, Mapping) or item.get("role") != "assistant":
            said.append({"role": "user", "content": item} if isinstance(item, str) else item)
            continue
        actions = item.get(ACTIONS)
        if not isinstance(actions, list) or not said:
            record.fail(f"a reply without actions: {str(dict(item))[:120]}", EXPECTED)
        padded = item.get(PADDED) or 0
        # No actions at all are told of where they are encoded.
        if padded not in range(len(actions) or 1):
            record.fail(f"padded is {padded!r:.40} of {len(actions)} actions", EXPECTED)
        talk.append((read_messages(record, said, what=name), actions, int(padded)))
        said = []
    if not talk:
        record.fail("no actions: nothing to learn", EXPECTED)
    return talk
