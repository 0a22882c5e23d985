"""Rewards of steps, from places in the text to places among the sampled tokens.

Who judges steps knows in characters of the text where one ends. Training gives rewards to tokens:
the token that brought the last character of a step has its reward, so that GAE and returns give
credit to the tokens of a step for it and for what follows.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oxrl.data.chat import reply_text
from oxrl.rewards.pools import GroupScorer
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Group, Score, Scores, TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StepScorer:
    """A GroupScorer that says on which tokens the steps end that another one rewards.

    Args:
        scorer: gives the scores.
        tokenizer: of the policy.
        stop_token_ids: tokens that end a response.
    """

    def __init__(
        self, scorer: GroupScorer, tokenizer: PreTrainedTokenizerBase, stop_token_ids: TokenIds
    ) -> None:
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._stops = stop_token_ids

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """See GroupScorer. A response whose tokens do not say its text is "invalid"."""
        found: Scores = []
        scored = self._scorer.score(groups, patience)
        for (_, completions), scores in zip(groups, scored, strict=True):
            found.append(list(map(self._placed, completions, scores)))
        return found

    def _placed(self, completion: Completion, score: Score) -> Score:
        if not score.steps or score.value is None:
            return score
        first, token_ids = last_turn(completion)
        if self._text(token_ids) != completion.text:
            reason = "its steps cannot be placed: its tokens say another text than was scored"
            return dataclasses.replace(score, value=None, status="invalid", reason=reason, steps=())
        placed: dict[int, float] = {}
        for end, share in score.steps:
            place = first + self._token_at(token_ids, end, completion.text)
            placed[place] = placed.get(place, 0.0) + share
        return dataclasses.replace(score, token_rewards=placed)

    def _token_at(self, token_ids: Sequence[int], end: int, text: str) -> int:
        """The place of the token that brings character number `end`, counted from 1.

        A step that ends with the text ends with the response, whose last token says so.
        """
        if end >= len(text.rstrip()):
            return len(token_ids) - 1

        def is_said(count: int) -> bool:
            # Not by counting: a character of several tokens is another one until the last is there.
            return self._text(token_ids[:count]).startswith(text[:end])

        return bisect_left(range(1, len(token_ids)), True, key=is_said)

    def _text(self, token_ids: Sequence[int]) -> str:
        """As samplers decode what they sampled."""
        return reply_text(self._tokenizer, token_ids, self._stops)


def last_turn(completion: Completion) -> tuple[int, list[int]]:
    """Count the tokens that the policy sampled before its last turn, and return those of that turn.

    A response that is no episode is one turn.

    Args:
        completion: a response, or an episode of several turns.

    Returns:
        The number of tokens that the policy sampled before; the token ids of its last turn, in
        order. What an environment said is in neither.
    """
    sampled = [segment for segment in completion.segments if segment.origin == "policy"]
    turn = sampled[-1].turn if sampled else 0
    token_ids: list[int] = []
    for segment in sampled:
        if segment.turn == turn:
            token_ids += segment.token_ids
    return completion.sampled - len(token_ids), token_ids
