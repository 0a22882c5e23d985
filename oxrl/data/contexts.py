"""The context of the policy's next turn in an episode: everything so far, or less.

Where the next turn reads what stands there already and something after it, its tokens go on in the
same row; where it reads something else, they begin a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from oxrl.data.messages import MessageList, MessageSequence, Tools, images_of
from oxrl.data.turns import TurnEncoder
from oxrl.types import Names, TokenIds

WINDOW = "window"


class Exchange(NamedTuple):
    """A turn that is over: what the policy sampled and wrote, and what it was answered."""

    token_ids: TokenIds
    text: str
    answer: MessageSequence


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """An episode so far; the last exchange has just been answered.

    token_ids: all that was read and sampled in the present row.
    """

    opening: MessageSequence
    tools: Tools
    exchanges: Sequence[Exchange]
    token_ids: Sequence[int]


class Reading(NamedTuple):
    """The tokens that the next turn reads: after what stands there, or, where `new`, alone.

    images: names of those that it shows, in their order.
    """

    token_ids: TokenIds
    new: bool
    images: Names = ()


class Contexts(Protocol):
    """Decides what the next turn reads."""

    def next(self, talk: Conversation) -> Reading | None:
        """Return the tokens that the turn after the last exchange reads.

        Returns:
            None: the policy ended its turn with a token after which the template puts nothing.

        Raises:
            TemplateError: the template cannot write it.
        """
        ...


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
        return LastAnswer(encoder)
    return Rendered(encoder, shown) if splits else Window(encoder, shown)


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
    kept: MessageList = []
    for message in messages:
        if message["role"] not in ("system", "developer"):
            break
        kept.append(message)
    return kept


class LastAnswer:
    """`last`: the system's messages, and what the environment said last.

    Args:
        encoder: of turns.
    """

    def __init__(self, encoder: TurnEncoder) -> None:
        self._encoder = encoder

    def next(self, talk: Conversation) -> Reading | None:
        """See Contexts; every stop token will do, because the turn before is not read."""
        messages = [*system_part(talk.opening), *talk.exchanges[-1].answer]
        token_ids = self._encoder.opening(messages, talk.tools)
        return Reading(token_ids, new=True, images=images_of(messages))


class Window:
    """`whole` and `window: k`: sampled tokens as they were sampled, answers encoded once.

    Args:
        encoder: of answers, and of whole conversations.
        shown: how many answers of the environment a turn reads; None: all.
    """

    def __init__(self, encoder: TurnEncoder, shown: int | None) -> None:
        self._encoder = encoder
        self._shown = shown

    def next(self, talk: Conversation) -> Reading | None:
        """See Contexts."""
        last = talk.exchanges[-1]
        behind = self._encoder.after(last.token_ids, self._encoder.suffix(last.answer))
        if behind is None:
            return None
        first = _first_shown(talk, self._shown)
        if first == 0:
            return Reading(behind, new=False, images=images_of(last.answer))
        messages = [*system_part(talk.opening), *talk.exchanges[first - 1].answer]
        tokens = [*self._encoder.opening(messages, talk.tools)]
        images = [*images_of(messages)]
        for exchange in talk.exchanges[first:]:
            tokens += exchange.token_ids
            suffix = self._encoder.suffix(exchange.answer)
            tokens += self._encoder.after(exchange.token_ids, suffix) or ()
            images += images_of(exchange.answer)
        return Reading(tuple(tokens), new=True, images=tuple(images))


class Rendered(Window):
    """As `Window`, but where the template rewrites what was said before, what it makes of it."""

    def next(self, talk: Conversation) -> Reading | None:
        """See Contexts."""
        last = talk.exchanges[-1]
        first = _first_shown(talk, self._shown)
        before = _messages(talk, first)
        if first == 0:
            suffix = self._encoder.kept_suffix(before, last.text, last.answer, talk.tools)
            if suffix is not None and last.token_ids[-1] == suffix.stop_id:
                return Reading(suffix.token_ids, new=False, images=images_of(last.answer))
        whole = [*before, _said(last.text), *last.answer]
        token_ids = self._encoder.opening(whole, talk.tools)
        return Reading(token_ids, new=True, images=images_of(whole))


def _first_shown(talk: Conversation, shown: int | None) -> int:
    """Return the first answer that the next turn reads. 0: the opening, k: of exchange k - 1."""
    return 0 if shown is None else max(0, len(talk.exchanges) - shown + 1)


def _messages(talk: Conversation, first: int) -> MessageList:
    """Return the conversation from answer `first` on, up to where the last turn was written."""
    messages = list(talk.opening)
    if first:
        messages = [*system_part(talk.opening), *talk.exchanges[first - 1].answer]
    for exchange in talk.exchanges[first:-1]:
        messages += [_said(exchange.text), *exchange.answer]
    return messages


def _said(text: str) -> Mapping[str, str]:
    return {"role": "assistant", "content": text}
