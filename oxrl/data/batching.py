"""Scored rollouts and tokenised examples to padded tensors, with the structural checks every batch must pass."""

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


def to_token_batch(rows: Sequence[Sequence[int]], trained: Sequence[Sequence[bool]], pad_id: int) -> TokenBatch:
    """Right-pad token rows; `trained` marks, per row and token, what goes into `response_mask`."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = pad_rows(rows, pad_id, torch.int64)
    return TokenBatch(
        tokens=tokens,
        attention_mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        response_mask=pad_rows(trained, 0, torch.bool),
    )


def to_rollout_batch(rollouts: Sequence[Rollout], *, pad_id: int) -> RolloutBatch:
    """Lay out rollouts as [B, T] tensors, B = len(rollouts), in the order given.

    The outcome reward sits on the last policy token; a segment's own reward on that segment's last policy token, or on
    the policy token before it when an environment produced the segment. An invalid row has reward NaN.
    """
    tokens: list[list[int]] = []
    trained: list[list[bool]] = []
    logprobs: list[list[float]] = []
    versions: list[list[int]] = []
    rewards: list[list[float]] = []
    for rollout in rollouts:
        prompt = rollout.prompt.token_ids
        row_tokens, row_trained = list(prompt), [False] * len(prompt)
        row_logprobs, row_versions, row_rewards = [0.0] * len(prompt), [-1] * len(prompt), [0.0] * len(prompt)
        last_policy_token: int | None = None
        for segment in rollout.completion.segments:
            by_policy = segment.origin == "policy"
            row_tokens.extend(segment.token_ids)
            row_trained.extend([by_policy] * len(segment.token_ids))
            row_logprobs.extend(segment.logprobs if by_policy else [0.0] * len(segment.token_ids))
            row_versions.extend(segment.versions if by_policy else [-1] * len(segment.token_ids))
            row_rewards.extend([0.0] * len(segment.token_ids))
            if by_policy and segment.token_ids:
                last_policy_token = len(row_tokens) - 1
            if segment.reward is not None and last_policy_token is not None:
                row_rewards[last_policy_token] += segment.reward
        if rollout.score.value is not None and last_policy_token is not None:
            row_rewards[last_policy_token] += rollout.score.value
        tokens.append(row_tokens)
        trained.append(row_trained)
        logprobs.append(row_logprobs)
        versions.append(row_versions)
        rewards.append(row_rewards)

    finish = [rollout.completion.finish_reason for rollout in rollouts]
    values = [rollout.score.value for rollout in rollouts]
    return RolloutBatch(
        inputs=to_token_batch(tokens, trained, pad_id),
        rollout_logprobs=pad_rows(logprobs, 0.0, torch.float32),
        rewards=torch.tensor([float("nan") if value is None else value for value in values], dtype=torch.float64),
        token_rewards=pad_rows(rewards, 0.0, torch.float64),
        group_ids=torch.tensor([rollout.group_id for rollout in rollouts], dtype=torch.int64),
        versions=pad_rows(versions, -1, torch.int64),
        terminated=torch.tensor([reason == "stop" for reason in finish]),
        truncated=torch.tensor([reason == "length" for reason in finish]),
        # An aborted sample is a fragment; training on it as if it had ended would teach the model to stop there.
        valid=torch.tensor(
            [value is not None and reason != "abort" for value, reason in zip(values, finish, strict=True)]
        ),
    )


def check_rollout_batch(
    batch: RolloutBatch, *, stop_token_ids: Collection[int], max_tokens: int, strict_version: int | None
) -> None:
    """Refuse a structurally broken batch before anything is learned from it.

    Raises:
        InvariantError: a hole in the padding, a trained token on padding, a log-probability above zero, a finished row
            that does not end in a stop token inside its mask, a cut row that does, or a token sampled by a version
            other than `strict_version` (None allows any). Names the row and the position.
    """
    tokens, attention, trained = batch.inputs.tokens, batch.inputs.attention_mask, batch.inputs.response_mask
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
    _refuse_rows("a row that finished with a stop token does not end in one", batch.terminated & ~ends_in_stop)
    _refuse_rows("a row cut by the token limit ends in a stop token", batch.truncated & ends_in_stop)
    too_short = batch.truncated & (trained.sum(1) < max_tokens) & (last == attention.sum(1) - 1)
    _refuse_rows(f"a row is marked as cut before rollout.max_tokens={max_tokens}", too_short)
    # Only the last policy token may be a stop token, unless an environment answered in between (multi-turn).
    _refuse("a stop token inside a response", is_stop[:, :-1] & trained[:, 1:])
    if strict_version is not None:
        _refuse(
            f"a token was sampled by a weight version other than {strict_version} while "
            "rollout.force_strict_on_policy is on",
            trained & (batch.versions != strict_version),
        )


def _refuse(what: str, where: Tensor) -> None:
    if where.any():
        row, position = (int(i) for i in where.nonzero()[0])
        raise InvariantError(f"{what}: row {row}, position {position} ({int(where.sum())} in all)")


def _refuse_rows(what: str, rows: Tensor) -> None:
    if rows.any():
        raise InvariantError(f"{what}: row {int(rows.nonzero()[0])} ({int(rows.sum())} rows in all)")


def split_by_group(group_ids: Tensor, count: int, *, seed: int) -> list[Tensor]:
    """Rows of `count` minibatches: groups shuffled by `seed`, kept whole, spread as evenly as they go. [int64] each."""
    groups = group_ids.unique().tolist()
    order = np.random.default_rng(stable_seed("minibatches", seed)).permutation(len(groups)) if count > 1 else None
    shuffled = groups if order is None else [groups[i] for i in order]
    return [
        torch.isin(group_ids, torch.tensor(part.tolist(), dtype=torch.int64)).nonzero()[:, 0]
        for part in np.array_split(np.array(shuffled, dtype=np.int64), count)
    ]
