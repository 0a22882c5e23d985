"""Rows of tokens, one by one and as tensors: what every batch is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oxrl.types import Images, Rollout, Segment, TokenBatch


def pad_rows(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
    """Stack rows of uneven length, filled on the right.

    Args:
        rows: numbers, B rows of any length.
        fill: what stands behind a shorter row.
        dtype: of the result.

    Returns:
        [B, T], B = len(rows), T the longest of them and at least 1.
    """
    length = max([1, *map(len, rows)])
    # One tensor of everything: one per row costs more than its numbers.
    padded = [[*row, *[fill] * (length - len(row))] for row in rows]
    return torch.tensor(padded, dtype=dtype).view(len(rows), length)


def to_token_batch(
    rows: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]], pad_id: int
) -> TokenBatch:
    """Lay token rows out as a batch, padded on the right.

    Args:
        rows: B rows of token ids.
        trained: per row and token, whether it goes into `response_mask`.
        pad_id: the token that fills rows on the right.

    Returns:
        [B, T], on the CPU; T is the longest of the rows.
    """
    lengths = torch.tensor([len(row) for row in rows])
    tokens = pad_rows(rows, pad_id, torch.int64)
    return TokenBatch(
        tokens=tokens,
        attention_mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        response_mask=pad_rows(trained, 0, torch.bool),
    )


@dataclass
class Laid:
    """The tokens of one row, and what a batch holds of each of them."""

    tokens: list[int] = field(default_factory=list[int])
    trained: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    turns: list[int] = field(default_factory=list[int])
    # The row's own uid, and the names of the images that it shows.
    shown: tuple[str, Sequence[str]] = ("", ())

    def read(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the policy reads, and did not write: not trained, with version -1.

        Args:
            token_ids: in order, behind those that it has.
        """
        count = len(token_ids)
        self.tokens.extend(token_ids)
        self.trained.extend([False] * count)
        self.logprobs.extend([0.0] * count)
        self.versions.extend([-1] * count)
        self.rewards.extend([0.0] * count)
        self.turns.extend([-1] * count)

    def write(self, segment: Segment) -> None:
        """Add tokens that the policy sampled: trained, with their log-probabilities and versions.

        Args:
            segment: of the policy; its reward is not added here.
        """
        count = len(segment.token_ids)
        self.tokens.extend(segment.token_ids)
        self.trained.extend([True] * count)
        self.logprobs.extend(segment.logprobs)
        self.versions.extend(segment.versions)
        self.rewards.extend([0.0] * count)
        self.turns.extend([segment.turn] * count)

    def show(self, images: Sequence[str]) -> None:
        """Add images behind those that it shows.

        Args:
            images: names, in the order in which the tokens show them.
        """
        uid, before = self.shown
        self.shown = (uid, (*before, *images))

    def extend(self, other: Laid, places: Sequence[int]) -> None:
        """Add some tokens of another row, with all that is known of each; images stay where they
        are.

        Args:
            other: the row, which is not changed.
            places: of tokens in it, in the order in which they are added.
        """
        for name, values in vars(self).items():
            if name != "shown":
                source = getattr(other, name)
                values.extend([source[at] for at in places])


def to_inputs(rows: Sequence[Laid], pad_id: int, images: Images) -> TokenBatch:
    """Lay rows out as a model reads them, with the images that they show.

    Args:
        rows: B rows.
        pad_id: the token behind a shorter row.
        images: attaches those that rows show; None: no row shows any.

    Returns:
        [B, T], on the CPU; T is the longest of the rows.
    """
    tokens = [row.tokens for row in rows]
    inputs = to_token_batch(tokens, [row.trained for row in rows], pad_id)
    return inputs if images is None else images.attach(inputs, [row.shown for row in rows])


def lay_out(rollout: Rollout) -> list[Laid]:
    """Lay a rollout out token by token, with its rewards in place.

    A segment with a context of its own begins a row; a response has one, an episode may have more.
    The outcome reward sits on the last policy token; a segment's own reward on that segment's last
    policy token, or on the policy token before it when an environment produced the segment; the
    reward of a step on the token where it ends. What segments and steps carry is part of the
    outcome, and is not counted twice.

    Args:
        rollout: a prompt, what was sampled, and its score; where that has no value, its reward is
            0.

    Returns:
        The rows, at least one.
    """
    segments = rollout.completion.segments
    uid = rollout.prompt.uid
    rows = [Laid(shown=(uid, rollout.prompt.images))]
    if not segments or segments[0].context is None:
        rows[0].read(rollout.prompt.token_ids)
    # Rewards of the row that was written last, and the place of its last sampled token.
    last: tuple[list[float], int] | None = None
    for index, segment in enumerate(segments):
        if segment.context is not None:
            if index:
                rows.append(Laid())
            rows[-1].shown = (uid, ())
            rows[-1].read(segment.context)
        row = rows[-1]
        row.show(segment.images)
        if segment.origin == "environment":
            row.read(segment.token_ids)
        else:
            row.write(segment)
            if segment.token_ids:
                last = (row.rewards, len(row.tokens) - 1)
        if last is not None:
            rewards, at = last
            rewards[at] += segment.reward or 0.0
    if last is not None:
        rewards, at = last
        of_segments = sum(segment.reward or 0.0 for segment in segments)
        of_steps = _add_steps(rows, rollout.score.token_rewards)
        rewards[at] += (rollout.score.value or 0.0) - of_segments - of_steps
    return rows


def _add_steps(rows: Sequence[Laid], token_rewards: Mapping[int, float]) -> float:
    """Put rewards on sampled tokens, by their place among those of all rows; their sum."""
    if not token_rewards:
        return 0.0
    places = [(row.rewards, at) for row in rows for at, own in enumerate(row.trained) if own]
    for place, reward in token_rewards.items():
        rewards, at = places[place]
        rewards[at] += reward
    return sum(token_rewards.values())
