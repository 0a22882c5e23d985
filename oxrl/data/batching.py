"""Scored rollouts and tokenised examples to padded tensors, with the structural checks every batch
must pass.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from oxrl.errors import InvariantError
from oxrl.seeds import stable_seed
from oxrl.types import Rollout, RolloutBatch, TokenBatch

# A log-probability above this is a wrong gather or a wrong temperature, not rounding.
LOGPROB_CEILING = 1e-3


def pad_rows(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
    """Stack rows of uneven length into [B, T], filled on the right with `fill`; T is at least 1."""
    length = max([1, *(len(row) for row in rows)])
    out = torch.full((len(rows), length), fill, dtype=dtype)
    for index, row in enumerate(rows):
        out[index, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def to_token_batch(
    rows: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]], pad_id: int
) -> TokenBatch:
    """Right-pad token rows; `trained` marks, per row and token, what goes into `response_mask`."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = pad_rows(rows, pad_id, torch.int64)
    return TokenBatch(
        tokens=tokens,
        attention_mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        response_mask=pad_rows(trained, 0, torch.bool),
    )


def to_rollout_batch(rollouts: Sequence[Rollout], *, pad_id: int) -> RolloutBatch:
    """Lay out rollouts as [B, T] tensors, B = len(rollouts), in the order given. An invalid row has
    reward NaN.
    """
    columns = [_columns(rollout) for rollout in rollouts]
    tokens, trained, logprobs, versions, rewards = map(list, zip(*columns, strict=True))
    finish = [rollout.completion.finish_reason for rollout in rollouts]
    values = [rollout.score.value for rollout in rollouts]
    return RolloutBatch(
        inputs=to_token_batch(tokens, trained, pad_id),
        rollout_logprobs=pad_rows(logprobs, 0.0, torch.float32),
        rewards=torch.tensor(
            [float("nan") if value is None else value for value in values], dtype=torch.float64
        ),
        token_rewards=pad_rows(rewards, 0.0, torch.float64),
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts], dtype=torch.int64),
        versions=pad_rows(versions, -1, torch.int64),
        terminated=torch.tensor([reason == "stop" for reason in finish]),
        truncated=torch.tensor([reason == "length" for reason in finish]),
        # An aborted sample is a fragment; training on it as if it had ended would teach the model
        # to stop there.
        valid=torch.tensor(
            [v is not None and reason != "abort" for v, reason in zip(values, finish, strict=True)]
        ),
    )


def _columns(rollout: Rollout) -> tuple[list[int], list[bool], list[float], list[int], list[float]]:
    """Per token of a rollout: id, trained, log-probability, version, reward.

    The outcome reward sits on the last policy token; a segment's own reward on that segment's last
    policy token, or on the policy token before it when an environment produced the segment.
    """
    tokens = list(rollout.prompt.token_ids)
    trained, logprobs, versions = [False] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens)
    placed: list[tuple[int, float | None]] = []
    last = -1
    for segment in rollout.completion.segments:
        count, by_policy = len(segment.token_ids), segment.origin == "policy"
        tokens += segment.token_ids
        trained += [by_policy] * count
        logprobs += segment.logprobs if by_policy else [0.0] * count
        versions += segment.versions if by_policy else [-1] * count
        last = len(tokens) - 1 if by_policy and count else last
        placed.append((last, segment.reward))
    rewards = [0.0] * len(tokens)
    for position, reward in (*placed, (last, rollout.score.value)):
        if reward is not None and position >= 0:
            rewards[position] += reward
    return tokens, trained, logprobs, versions, rewards


def check_rollout_batch(
    batch: RolloutBatch,
    *,
    stop_token_ids: Collection[int],
    max_tokens: int,
    strict_version: int | None,
) -> None:
    """Refuse a structurally broken batch before anything is learned from it.

    Raises:
        InvariantError: a hole in the padding, a trained token on padding, a log-probability above
            zero, a finished row that does not end in a stop token inside its mask, a cut row that
            does, or a token sampled by a version other than `strict_version` (None allows any).
            Names the row and the position.
    """
    tokens, attention, trained = (
        batch.inputs.tokens,
        batch.inputs.attention_mask,
        batch.inputs.response_mask,
    )
    _refuse("padding hole: a real token follows padding", attention[:, 1:] & ~attention[:, :-1])
    _refuse("a padding position is marked as trained", trained & ~attention)
    _refuse(
        f"a sampler log-probability above {LOGPROB_CEILING} (wrong gather or wrong temperature)",
        trained & (batch.rollout_logprobs > LOGPROB_CEILING),
    )
    positions = torch.arange(tokens.shape[1])
    last = torch.where(trained, positions, -1).amax(1)  # [B], -1 for an empty response
    is_stop = torch.isin(tokens, torch.tensor(sorted(stop_token_ids), dtype=torch.int64)) & trained
    ends_in_stop = (last >= 0) & is_stop.gather(1, last.clamp(min=0)[:, None])[:, 0]
    too_short = batch.truncated & (trained.sum(1) < max_tokens) & (last == attention.sum(1) - 1)
    _refuse(
        "a row that finished with a stop token does not end in one",
        batch.terminated & ~ends_in_stop,
    )
    _refuse("a row cut by the token limit ends in a stop token", batch.truncated & ends_in_stop)
    _refuse(f"a row is marked as cut before rollout.max_tokens={max_tokens}", too_short)
    # Only the last policy token may be a stop token, unless an environment answered in between
    # (multi-turn).
    _refuse("a stop token inside a response", is_stop[:, :-1] & trained[:, 1:])
    if strict_version is not None:
        stale = trained & (batch.versions != strict_version)
        _refuse(
            f"a token of a weight version other than {strict_version} under rollout.force_strict_on_policy",
            stale,
        )


def _refuse(what: str, where: Tensor) -> None:
    """`where` is [B] or [B, T]."""
    if where.any():
        place = ", ".join(
            f"{name} {int(i)}"
            for name, i in zip(("row", "position"), where.nonzero()[0], strict=False)
        )
        raise InvariantError(f"{what}: {place} ({int(where.sum())} in all)")


def split_by_group(group_ids: Tensor, count: int, *, seed: int) -> list[Tensor]:
    """Rows of `count` minibatches: groups shuffled by `seed`, kept whole, spread as evenly as they
    go. [int64] each.
    """
    groups = group_ids.unique().numpy()
    if count > 1:
        groups = np.random.default_rng(stable_seed("minibatches", seed)).permutation(groups)
    parts = np.array_split(groups, count)
    return [torch.isin(group_ids, torch.from_numpy(part)).nonzero()[:, 0] for part in parts]
