"""Rollouts and examples to padded tensors, and the checks that every batch must pass."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from oxrl.errors import InvariantError
from oxrl.tables.columns import ALWAYS, CODES, LOGPROBS, NOTHING_MORE, VERSIONS, Column, Columns
from oxrl.types import (
    Completion,
    Example,
    Images,
    Ragged,
    Rollout,
    RolloutBatch,
    Rollouts,
    Segment,
    Tensors,
    TokenBatch,
)

# A log-probability above this is a wrong gather or a wrong temperature, not rounding.
LOGPROB_CEILING = 1e-3


def to_rollout_batch(
    rollouts: Rollouts, *, pad_id: int, images: Images = None, columns: Columns = NOTHING_MORE
) -> RolloutBatch:
    """Lay scored rollouts out as padded tensors, in the order given.

    Args:
        rollouts: B of them.
        pad_id: the token that fills rows on the right.
        images: those of the prompts; None: they have none.
        columns: what else is recorded of every sampled token, by name.

    Returns:
        [B, T] tensors. A row without a score has reward NaN and is not valid, unless no reward was
            asked; an aborted one is not valid either. Where an episode has several rows, T is that
            of lines: see `oxrl.data.episode_rows`.
    """
    blanks = {name: column.blank for name, column in {**ALWAYS, **columns}.items()}
    episodes = [lay_out(rollout, blanks) for rollout in rollouts]
    rows = [parts[0] for parts in episodes]
    if all(len(parts) == 1 for parts in episodes):
        inputs = _recorded_inputs(rows, pad_id, images, columns)
    else:
        # Turns that read other things than all before.
        rows, inputs = _lay_out_episodes(episodes, pad_id, images, columns)
    ends = [how_it_ended(rollout.completion) for rollout in rollouts]
    values = [rollout.score.value for rollout in rollouts]
    scores = [math.nan if value is None else value for value in values]
    rewards = torch.tensor(scores, dtype=torch.float64)
    unasked = torch.tensor([rollout.score.status == "none" for rollout in rollouts])
    # An aborted sample is a fragment; training on it as if it had ended would teach the model to
    # stop there.
    ended = [end != "neither" for end in ends]
    turns = None
    if any(rollout.completion.turns for rollout in rollouts):
        turns = pad_rows([row.turns for row in rows], -1, torch.int64)
    return RolloutBatch(
        inputs=inputs,
        rollout_logprobs=padded_column(rows, "logprobs", LOGPROBS),
        rewards=rewards,
        token_rewards=pad_rows([row.rewards for row in rows], 0.0, torch.float64),
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts], dtype=torch.int64),
        versions=padded_column(rows, "versions", VERSIONS),
        terminated=torch.tensor([end == "terminated" for end in ends]),
        truncated=torch.tensor([end == "truncated" for end in ends]),
        valid=(unasked | ~rewards.isnan()) & torch.tensor(ended),
        places=torch.arange(len(rollouts)),
        part_rewards=_part_rewards(rollouts),
        turns=turns,
    )


def _recorded_inputs(
    rows: Sequence[Laid], pad_id: int, images: Images, columns: Columns
) -> TokenBatch:
    """Lay rows out as a model reads them, with what is recorded of their tokens."""
    found = {name: padded_column(rows, name, column) for name, column in columns.items()}
    ragged = {name: column for name, column in columns.items() if column.ragged}
    lists = {name: joined_entries(rows, name, column) for name, column in ragged.items()}
    return replace(to_inputs(rows, pad_id, images), columns=found, lists=lists)


def padded_column(rows: Sequence[Laid], name: str, column: Column) -> Tensor:
    """Stack what is recorded of the tokens of rows of uneven length.

    Args:
        rows: B rows.
        name: of the column.
        column: what it holds.

    Returns:
        [B, T], or [B, T, width] where a token has several numbers; [B, T] int32 of a ragged
        column: how many each token has.
    """
    entries = [row.recorded[name] for row in rows]
    dtype = getattr(torch, column.dtype)
    if column.ragged:
        counts = [[len(entry) // dtype.itemsize for entry in own] for own in entries]
        return pad_rows(counts, 0, torch.int32)
    if column.width == 1:
        return pad_rows(entries, column.fill, dtype)
    whole = [torch.frombuffer(bytearray().join(own), dtype=dtype) for own in entries]
    found = [numbers.view(-1, column.width) for numbers in whole]
    return pad_sequence(found, batch_first=True, padding_value=column.fill)


def joined_entries(rows: Sequence[Laid], name: str, column: Column) -> Ragged:
    """Join the numbers of a ragged column, row after row, in each token after token.

    Args:
        rows: B rows.
        name: of the column.
        column: what it holds.

    Returns:
        A row of numbers for each of the rows.
    """
    dtype = getattr(torch, column.dtype)
    whole = [bytearray().join(row.recorded[name]) for row in rows]
    counts = torch.tensor([0, *(len(own) // dtype.itemsize for own in whole)])
    values = numbers_of(bytearray().join(whole), dtype)
    return Ragged(values=values, row_offsets=counts.cumsum(0))


def lay_out(rollout: Rollout, blanks: Mapping[str, Any]) -> list[Laid]:
    """Lay a rollout out token by token, with its rewards in place.

    A segment with a context of its own begins a row; a response has one, an episode may have more.
    The outcome reward sits on the last policy token; a segment's own reward on that segment's last
    policy token, or on the policy token before it when an environment produced the segment; the
    reward of a step on the token where it ends. What segments and steps carry is part of the
    outcome, and is not counted twice.

    Args:
        rollout: a prompt, what was sampled, and its score; where that has no value, its reward is
            0.
        blanks: of everything recorded, what stands at tokens that were not sampled.

    Returns:
        The rows, at least one.
    """
    segments = rollout.completion.segments
    uid = rollout.prompt.uid
    rows = [Laid(blanks, uid=uid, images=list(rollout.prompt.images))]
    if not segments or segments[0].context is None:
        rows[0].read(rollout.prompt.token_ids)
    # Rewards of the row that was written last, and the place of its last sampled token.
    last: tuple[list[float], int] | None = None
    for index, segment in enumerate(segments):
        if segment.context is not None:
            if index:
                rows.append(Laid(blanks, uid=uid))
            rows[-1].images = []
            rows[-1].read(segment.context)
        row = rows[-1]
        row.images += segment.images
        if segment.origin == "environment":
            row.read(segment.token_ids)
        else:
            row.write(segment)
            if segment.token_ids:
                last = (row.rewards, len(row.token_ids) - 1)
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


@dataclass
class Laid:
    """The tokens of one row, and what a batch holds of each of them.

    blanks: as of `lay_out`. uid, images: the row's own, and the names of the images that it shows,
    in their order. recorded: name -> an entry per token.
    """

    blanks: Mapping[str, Any]
    uid: str = ""
    images: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorded: dict[str, list[Any]] = {name: [] for name in self.blanks}

    @property
    def per_token(self) -> dict[str, list[Any]]:
        """All that there is an entry per token of."""
        return {
            "token_ids": self.token_ids,
            "trained": self.trained,
            "rewards": self.rewards,
            "turns": self.turns,
            **self.recorded,
        }

    def read(self, token_ids: Sequence[int]) -> None:
        """Add tokens that the policy reads, and did not write: not trained, with version -1.

        Args:
            token_ids: in order, behind those that it has.
        """
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.trained.extend([False] * count)
        for name, blank in self.blanks.items():
            self.recorded[name].extend([blank] * count)
        self.rewards.extend([0.0] * count)
        self.turns.extend([-1] * count)

    def write(self, segment: Segment) -> None:
        """Add tokens that the policy sampled: trained, with what is recorded of them.

        Args:
            segment: of the policy; its reward is not added here.

        Raises:
            InvariantError: something was to be recorded of them, and is not there.
        """
        given = segment.per_token
        count = len(segment.token_ids)
        if count and not given.keys() >= self.recorded.keys():
            raise InvariantError(f"{[*self.recorded]} were to be recorded, {[*given]} were")
        self.token_ids.extend(segment.token_ids)
        self.trained.extend([True] * count)
        for name, entries in self.recorded.items():
            entries.extend(given.get(name, ()))
        self.rewards.extend([0.0] * count)
        self.turns.extend([segment.turn] * count)

    def extend(self, other: Laid, places: Sequence[int]) -> None:
        """Add some tokens of another row, with all that is known of each; images stay where they
        are.

        Args:
            other: the row, which is not changed.
            places: of tokens in it, in the order in which they are added.
        """
        source = other.per_token
        for name, entries in self.per_token.items():
            entries.extend([source[name][at] for at in places])


def _line_of(rows: Sequence[Laid]) -> tuple[Laid, list[list[int]]]:
    """Keep what was sampled, one token before each turn, and the end of what came after all.

    Returns:
        The line of an episode, and for each of its rows the place of every token.
    """
    line = Laid(rows[0].blanks)
    places: list[list[int]] = []
    for row in rows:
        leads = [*row.trained[1:], row is rows[-1]]
        kept = [at for at, sampled in enumerate(row.trained) if sampled or leads[at]]
        of_row = [-1] * len(row.token_ids)
        for place, at in enumerate(kept, start=len(line.token_ids)):
            if row.trained[at]:
                of_row[at] = place
        places.append(of_row)
        line.extend(row, kept)
    return line, places


def _lay_out_episodes(
    episodes: Sequence[Sequence[Laid]], pad_id: int, images: Images, columns: Columns
) -> tuple[list[Laid], TokenBatch]:
    """Lay episodes out as lines, with the inputs that hold their rows.

    Args:
        episodes: the rows of each, in order.
        pad_id: the token that fills rows and lines on the right.
        images: those that rows show; None: there are none.
        columns: as of `to_rollout_batch`.

    Returns:
        One line per episode, and `EpisodeInputs`.
    """
    from oxrl.data.episode_rows import EpisodeInputs  # most rollouts are one row each

    lines: list[Laid] = []
    places: list[list[int]] = []
    for rows in episodes:
        line, of_rows = _line_of(rows)
        lines.append(line)
        places += of_rows
    line_inputs = _recorded_inputs(lines, pad_id, None, columns)
    rows = [row for rows in episodes for row in rows]
    counts = torch.tensor([len(rows) for rows in episodes])
    inputs = EpisodeInputs(
        tokens=line_inputs.tokens,
        attention_mask=line_inputs.attention_mask,
        response_mask=line_inputs.response_mask,
        columns=line_inputs.columns,
        lists=line_inputs.lists,
        rows=_recorded_inputs(rows, pad_id, images, columns),
        episode_ids=torch.arange(len(episodes)).repeat_interleave(counts),
        places=pad_rows(places, -1, torch.int64),
    )
    return lines, inputs


def to_inputs(rows: Sequence[Example | Laid], pad_id: int, images: Images) -> TokenBatch:
    """Lay rows out as a model reads them, with the images that they show.

    Args:
        rows: B rows.
        pad_id: the token behind a shorter row.
        images: attaches those that rows show; None: no row shows any.

    Returns:
        [B, T], on the CPU; T is the longest of the rows.
    """
    inputs = to_token_batch([row.token_ids for row in rows], [row.trained for row in rows], pad_id)
    if images is None:
        return inputs
    return images.attach(inputs, [(row.uid, row.images) for row in rows])


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
    # As numbers of C first: PyTorch takes several times as long to read a list of lists.
    kind = CODES[str(dtype).removeprefix("torch.")]
    padded = [array(kind, [*row, *[fill] * (length - len(row))]) for row in rows]
    return numbers_of(bytearray().join(padded), dtype).view(len(rows), length)


def numbers_of(buffer: bytearray, dtype: torch.dtype) -> Tensor:
    """Return the numbers in a buffer, not copied; PyTorch itself refuses one of no bytes.

    Args:
        buffer: numbers one after the other.
        dtype: of the numbers.
    """
    if not buffer:
        return torch.zeros(0, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype)


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


def _part_rewards(rollouts: Rollouts) -> Tensors:
    """Return name -> [B] float64, of every part that a score has; NaN where it does not count."""
    names = sorted({name for rollout in rollouts for name in rollout.score.parts})
    found: Tensors = {}
    for name in names:
        values = [rollout.score.counted(name) for rollout in rollouts]
        found[name] = torch.tensor(values, dtype=torch.float64)
    return found


def how_it_ended(completion: Completion) -> Literal["terminated", "truncated", "neither"]:
    """Tell apart responses whose task was over, those that a limit cut, and those that broke off.

    Args:
        completion: a response, or an episode, which says itself how it ended.

    Returns:
        "terminated": nothing follows the last token, which is worth 0; "truncated": something would
        have followed, so its worth is bootstrapped; "neither": a fragment, not to be learned from.
    """
    match completion.end or completion.finish_reason:
        case "stop" | "completed" | "parse_error":
            return "terminated"
        case "abort" | "environment_error" | "timeout":
            return "neither"
        case _:
            return "truncated"


def checked_rollout_batch(
    rollouts: Rollouts,
    *,
    pad_id: int,
    images: Images,
    stop_token_ids: Collection[int],
    max_tokens: int | None,
    strict_version: int | None,
    columns: Columns = NOTHING_MORE,
) -> RolloutBatch:
    """Lay scored rollouts out and refuse them where they are broken.

    Args:
        rollouts, pad_id, images, columns: as of `to_rollout_batch`.
        stop_token_ids, max_tokens, strict_version: as of `check_rollout_batch`.

    Returns:
        [B, T] tensors.

    Raises:
        InvariantError: see `check_rollout_batch`.
    """
    batch = to_rollout_batch(rollouts, pad_id=pad_id, images=images, columns=columns)
    check_rollout_batch(
        batch,
        stop_token_ids=stop_token_ids,
        max_tokens=max_tokens,
        strict_version=strict_version,
    )
    return batch


def check_rollout_batch(
    batch: RolloutBatch,
    *,
    stop_token_ids: Collection[int],
    max_tokens: int | None,
    strict_version: int | None,
) -> None:
    """Refuse a structurally broken batch before anything is learned from it.

    Args:
        batch: to be learned from; not changed.
        stop_token_ids: tokens that end a response.
        max_tokens: the longest response that is sampled; None of episodes, whose turns have been
            checked one by one.
        strict_version: the weights that must have sampled every token; None allows any.

    Raises:
        InvariantError: a hole in the padding, a trained token on padding, a log-probability above
            zero, a finished row that does not end in a stop token inside its mask, a cut row that
            does, or a token of another version. Names the row and the position.
    """
    tokens = batch.inputs.tokens
    attention = batch.inputs.attention_mask
    trained = batch.inputs.response_mask
    _refuse("padding hole: a real token follows padding", attention[:, 1:] & ~attention[:, :-1])
    _refuse("a padding position is marked as trained", trained & ~attention)
    cause = "(wrong gather or wrong temperature)"
    above = trained & (batch.rollout_logprobs > LOGPROB_CEILING)
    _refuse(f"a sampler log-probability above {LOGPROB_CEILING} {cause}", above)
    positions = torch.arange(tokens.shape[1])
    last = torch.where(trained, positions, -1).amax(1)  # [B], -1 for an empty response
    stops = torch.tensor(sorted(stop_token_ids), dtype=torch.int64)
    is_stop = torch.isin(tokens, stops) & trained
    last_is_stop = is_stop.gather(1, last.clamp(min=0)[:, None])[:, 0]
    if max_tokens is not None:
        ends_in_stop = (last >= 0) & last_is_stop
        unfinished = batch.terminated & ~ends_in_stop
        _refuse("a row that finished with a stop token does not end in one", unfinished)
        _refuse("a row cut by the token limit ends in a stop token", batch.truncated & ends_in_stop)
        ends_in_response = last == attention.sum(1) - 1
        too_short = batch.truncated & (trained.sum(1) < max_tokens) & ends_in_response
        _refuse(f"a row is marked as cut before rollout.max_tokens={max_tokens}", too_short)
    # Only the last policy token may be a stop token, unless an environment answered in between
    # (multi-turn).
    _refuse("a stop token inside a response", is_stop[:, :-1] & trained[:, 1:])
    if strict_version is not None:
        stale = trained & (batch.versions != strict_version)
        other = f"a token of a weight version other than {strict_version}"
        _refuse(f"{other} under rollout.force_strict_on_policy", stale)


def _refuse(what: str, where: Tensor) -> None:
    """Raise for the first place of a mask [B] or [B, T], if there is one."""
    if not where.any():
        return
    row, *position = where.nonzero()[0].tolist()
    place = f"row {row}" + "".join(f", position {at}" for at in position)
    raise InvariantError(f"{what}: {place} ({int(where.sum())} in all)")


def check_first_ratio(logprobs: Tensor, old: Tensor, mask: Tensor, tolerance: float) -> None:
    """Before the first update the policy is its own old policy, so every ratio must be 1.

    Args:
        logprobs, old: [B, T] nats, of the update and of the pass before it.
        mask: [B, T] bool, trained tokens.
        tolerance: nats.

    Raises:
        InvariantError: it is not: the two passes saw other weights, temperature, or dropout.
    """
    worst = float((logprobs - old)[mask].abs().max())
    if worst > tolerance:
        raise InvariantError(
            f"the first minibatch's log-ratio to the old log-probabilities is {worst:.3g}, above "
            f"{tolerance}: the recompute pass and the update pass disagree about the same weights"
        )
