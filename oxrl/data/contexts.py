"""The context of the policy's next turn in an episode: everything so far, or less.

Where the next turn reads what stands there already and something after it, its tokens go on in the
same row; where it reads something else, they begin a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from oxrl.data.messages import MessageList, MessageSequence, Tools, images_of
from oxrl.data.turns import TurnEncoder
from oxrl.types import Names, TokenIds


class Exchange(NamedTuple):
    """A turn that is over: what the policy sampled and wrote, and what it was answered."""

    token_ids: TokenIds
    text: str
    answer: MessageSequence


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """An episode so far; the last exchange has just been answered."""

    opening: MessageSequence
    tools: Tools
    exchanges: Sequence[Exchange]


class Reading(NamedTuple):
    """The tokens that the next turn reads: after what stands there, or, where `new`, alone.

    images: names of those that it shows, in their order.
    """

    token_ids: TokenIds
    new: bool
    images: Names = ()


# Decides what the turn after the last exchange reads. None: the policy ended its turn with a token
# after which the template puts nothing. A template that cannot write it is a TemplateError.
Contexts = Callable[[Conversation], Reading | None]


def contexts_of(encoder: TurnEncoder, context: str, *, splits: bool) -> Contexts:
    """Make the contexts that `rollout.context` and `rollout.rewritten_history` name.

    Args:
        encoder: of turns, for the policy's tokenizer.
        context: "whole", "last", or such as "window: 3"; see `shown_turns`.
        splits: a turn that reads a rewritten text begins a row of its own, instead of being
            refused.
    """
    shown = shown_turns(context)
    if shown == 1:
        return partial(_last_answer, encoder)
    return partial(_rendered if splits else _window, encoder, shown)


def shown_turns(context: str) -> int | None:
    """Return the number of answers that a turn reads with a value of `rollout.context`; None: all.

    Args:
        context: "whole", "last", or such as "window: 3".

    Returns:
        At least 1. "last" is one answer, which is all that the next turn reads of what was before.
    """
    if context == "whole":
        return None
    return 1 if context == "last" else int(context.rpartition(" ")[2])


def system_part(messages: MessageSequence) -> MessageList:
    """Return the messages of the system at the beginning, which every context keeps.

    Args:
        messages: of a conversation, from its beginning.

    Returns:
        Those before the first of another role, in order; perhaps none.
    """
    return list(takewhile(lambda message: message["role"] in ("system", "developer"), messages))


def _last_answer(encoder: TurnEncoder, talk: Conversation) -> Reading:
    """`last`: the system's messages, and what the environment said last.

    Every stop token will do, because the turn before is not read.
    """
    messages = _beginning(talk, len(talk.exchanges))
    token_ids = encoder.opening(messages, talk.tools)
    return Reading(token_ids, new=True, images=images_of(messages))


def _window(encoder: TurnEncoder, shown: int | None, talk: Conversation) -> Reading | None:
    """`whole` and `window: k`: sampled tokens as they were sampled, answers encoded once.

    Args:
        shown: how many answers of the environment a turn reads; None: all.
    """
    last = talk.exchanges[-1]
    behind = encoder.after(last.token_ids, encoder.suffix(last.answer))
    if behind is None:
        return None
    first = _first_shown(talk, shown)
    if first == 0:
        return Reading(behind, new=False, images=images_of(last.answer))
    messages = _beginning(talk, first)
    tokens = [*encoder.opening(messages, talk.tools)]
    images = [*images_of(messages)]
    for exchange in talk.exchanges[first:]:
        tokens += exchange.token_ids
        suffix = encoder.suffix(exchange.answer)
        tokens += encoder.after(exchange.token_ids, suffix) or ()
        images += images_of(exchange.answer)
    return Reading(tuple(tokens), new=True, images=tuple(images))


def _rendered(encoder: TurnEncoder, shown: int | None, talk: Conversation) -> Reading:
    """As `_window`, but where the template rewrites what was said before, what it makes of it."""
    last = talk.exchanges[-1]
    first = _first_shown(talk, shown)
    before = _messages(talk, first)
    if first == 0:
        suffix = encoder.kept_suffix(before, last.text, last.answer, talk.tools)
        if suffix is not None and last.token_ids[-1] == suffix.stop_id:
            return Reading(suffix.token_ids, new=False, images=images_of(last.answer))
    whole = [*before, _said(last.text), *last.answer]
    token_ids = encoder.opening(whole, talk.tools)
    return Reading(token_ids, new=True, images=images_of(whole))


def _first_shown(talk: Conversation, shown: int | None) -> int:
    """Return the first answer that the next turn reads. 0: the opening, k: of exchange k - 1."""
    return 0 if shown is None else max(0, len(talk.exchanges) - shown + 1)


def _beginning(talk: Conversation, first: int) -> MessageList:
    """Return answer `first` as the beginning of what a turn reads."""
    if first == 0:
        return list(talk.opening)
    return [*system_part(talk.opening), *talk.exchanges[first - 1].answer]


def _messages(talk: Conversation, first: int) -> MessageList:
    """Return the conversation from answer `first` on, up to where the last turn was written."""
    messages = _beginning(talk, first)
    for exchange in talk.exchanges[first:-1]:
        messages += [_said(exchange.text), *exchange.answer]
    return messages


def _said(text: str) -> Mapping[str, str]:
    return {"role": "assistant", "content": text}
