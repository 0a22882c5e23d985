"""Rollouts and examples to padded tensors, and the checks that every batch must pass."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from oxrl.data.token_rows import lay_out, pad_rows, to_inputs
from oxrl.errors import InvariantError
from oxrl.types import Completion, Images, RolloutBatch, Rollouts, Tensors

# A log-probability above this is a wrong gather or a wrong temperature, not rounding.
LOGPROB_CEILING = 1e-3


def to_rollout_batch(rollouts: Rollouts, *, pad_id: int, images: Images = None) -> RolloutBatch:
    """Lay scored rollouts out as padded tensors, in the order given.

    Args:
        rollouts: B of them.
        pad_id: the token that fills rows on the right.
        images: those of the prompts; None: they have none.

    Returns:
        [B, T] tensors. A row without a score has reward NaN and is not valid; an aborted one is not
            valid either. Where an episode has several rows, T is that of lines: see
            `oxrl.data.episode_rows`.
    """
    episodes = [lay_out(rollout) for rollout in rollouts]
    rows = [parts[0] for parts in episodes]
    if all(len(parts) == 1 for parts in episodes):
        inputs = to_inputs(rows, pad_id, images)
    else:
        # Turns that read other things than all before: rare, and nobody else pays for it.
        from oxrl.data.episode_rows import lay_out_episodes

        rows, inputs = lay_out_episodes(episodes, pad_id, images)
    ends = [how_it_ended(rollout.completion) for rollout in rollouts]
    values = [rollout.score.value for rollout in rollouts]
    scores = [math.nan if value is None else value for value in values]
    rewards = torch.tensor(scores, dtype=torch.float64)
    # An aborted sample is a fragment; training on it as if it had ended would teach the model to
    # stop there.
    ended = [end != "neither" for end in ends]
    of_episodes = any(rollout.completion.turns for rollout in rollouts)
    turns = [row.turns for row in rows] if of_episodes else None
    return RolloutBatch(
        inputs=inputs,
        rollout_logprobs=pad_rows([row.logprobs for row in rows], 0.0, torch.float32),
        rewards=rewards,
        token_rewards=pad_rows([row.rewards for row in rows], 0.0, torch.float64),
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts], dtype=torch.int64),
        versions=pad_rows([row.versions for row in rows], -1, torch.int64),
        terminated=torch.tensor([end == "terminated" for end in ends]),
        truncated=torch.tensor([end == "truncated" for end in ends]),
        valid=~rewards.isnan() & torch.tensor(ended),
        part_rewards=_part_rewards(rollouts),
        turns=None if turns is None else pad_rows(turns, -1, torch.int64),
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
) -> RolloutBatch:
    """Lay scored rollouts out and refuse them where they are broken.

    Args:
        rollouts, pad_id, images: as of `to_rollout_batch`.
        stop_token_ids, max_tokens, strict_version: as of `check_rollout_batch`.

    Returns:
        [B, T] tensors.

    Raises:
        InvariantError: see `check_rollout_batch`.
    """
    batch = to_rollout_batch(rollouts, pad_id=pad_id, images=images)
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
