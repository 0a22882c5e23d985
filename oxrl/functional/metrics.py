"""Metrics of algorithms over a whole batch: plain floats under the keys of metrics.jsonl.

They are computed once per optimizer step from detached full-batch tensors, so they cannot depend on
micro-batches. Means run over the trained tokens (`response_mask`) unless said otherwise; KLs are in
nats per token. Rewards, truncated and group_ids are [B], everything else [B, T].
"""

from __future__ import annotations

from math import ceil, floor

import torch
from torch import Tensor

from oxrl.functional.group_advantages import Groups
from oxrl.functional.masks import OptionalTensor, fill_masked, masked_values, require_same_shape
from oxrl.functional.ratios import MAX_LOG_RATIO, importance_ratio
from oxrl.tables.numbers import Level

Metrics = dict[str, float]
PASS_REWARD = 0.5  # a reward above this counts as solved; verifiers give 0 or 1


def quantile(x: Tensor, fraction: float) -> float:
    """Quantile of any number of values, linear between neighbors.

    torch.quantile refuses more than 2**24 values, and a large step has more tokens.

    Args:
        x: [N], N > 0.
        fraction: in [0, 1].

    Returns:
        The value below which that fraction lies.
    """
    place = fraction * (len(x) - 1)
    below = float(x.kthvalue(floor(place) + 1).values)
    above = float(x.kthvalue(ceil(place) + 1).values)
    return below + (above - below) * (place % 1)


def _mean(x: Tensor) -> float:
    """0 where there is nothing."""
    if not x.numel():
        return 0.0
    return float(x.double().mean())


def _std(x: Tensor) -> float:
    """Unbiased; 0 for fewer than two values."""
    if len(x) < 2:
        return 0.0
    return float(x.double().std())


def _max(x: Tensor) -> float:
    """0 where there is nothing."""
    if not len(x):
        return 0.0
    return float(x.max())


def _log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    """logprobs - other, [B, T] float64, 0 where masked, detached."""
    own = fill_masked(logprobs.detach(), mask).double()
    return own - fill_masked(other.detach(), mask).double()


def _bounded(log_ratio: Tensor) -> Tensor:
    """So that exp stays finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def reward_metrics(rewards: Tensor, group_ids: Tensor) -> Metrics:
    """`reward/...`: what was scored, and how many groups can teach anything.

    Args:
        rewards, group_ids: [B].

    Returns:
        Metrics over rows and groups; none without rows.

    Raises:
        ValueError: shapes differ.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    if not rewards.numel():
        return {}
    groups = Groups.of(group_ids)
    rows = torch.arange(len(rewards), device=rewards.device)
    first = groups.extreme(rows, "amin") == rows  # one row speaks for each group
    passed = rewards > PASS_REWARD
    rate = groups.mean(passed)
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/pass_rate": _mean(passed),
        "reward/zero_variance_groups": _mean(groups.flat(rewards)[first]),
        "reward/all_pass_groups": _mean((rate == 1)[first]),
        "reward/all_fail_groups": _mean((rate == 0)[first]),
        "reward/group_std": _mean(groups.std(rewards)[first]),
    }


def data_metrics(response_mask: Tensor, truncated: Tensor, rewards: Tensor) -> Metrics:
    """`data/...`: trained tokens, lengths, and whether long answers are the wrong ones.

    Args:
        response_mask: [B, T] bool.
        truncated: [B] bool, cut by the token limit.
        rewards: [B]; NaN where nothing says what a row is worth.

    Returns:
        Metrics over rows; the length of right or wrong ones is NaN where there are none.
    """
    lengths = response_mask.sum(1).double()
    passed = rewards > PASS_REWARD
    failed = rewards <= PASS_REWARD
    metrics = {
        "data/tokens": float(lengths.sum()),
        "data/rows": float((lengths > 0).sum()),
        "data/empty_rows": float((lengths == 0).sum()),
    }
    if len(lengths):
        metrics |= {
            "data/length_mean": _mean(lengths),
            "data/length_p95": quantile(lengths, 0.95),
            "data/length_max": float(lengths.max()),
            # Of nothing: NaN.
            "data/length_correct": float(lengths[passed].mean()),
            "data/length_wrong": float(lengths[failed].mean()),
            "data/truncated_frac": _mean(truncated),
        }
    return metrics


def row_metrics(
    response_mask: Tensor,
    truncated: Tensor,
    rewards: Tensor,
    versions: Tensor,
    advantages: Tensor,
    *,
    version: int,
) -> Metrics:
    """`data/...` and `advantage/...` of rows that are trained on.

    Args:
        response_mask: [B, T] bool.
        truncated: [B] bool, cut by the token limit.
        rewards: [B].
        versions: [B, T], of the weights that sampled a token.
        advantages: [B, T].
        version: of the weights being trained.

    Returns:
        What data_metrics, staleness_metrics and advantage_metrics say.
    """
    metrics = data_metrics(response_mask, truncated, rewards)
    metrics |= staleness_metrics(versions, response_mask, version=version)
    return metrics | advantage_metrics(advantages, response_mask)


def staleness_metrics(versions: Tensor, response_mask: Tensor, *, version: int) -> Metrics:
    """`data/staleness_...`: how old the weights were that sampled a token.

    Args:
        versions: [B, T], of the weights that sampled it.
        response_mask: [B, T] bool.
        version: of the weights being trained.

    Returns:
        Metrics over tokens, in weight versions.
    """
    staleness = (version - versions)[response_mask].double()
    return {"data/staleness_mean": _mean(staleness), "data/staleness_max": _max(staleness)}


def advantage_metrics(advantages: Tensor, response_mask: Tensor) -> Metrics:
    """`advantage/...` over the trained tokens.

    Args:
        advantages: [B, T].
        response_mask: [B, T] bool.

    Returns:
        Metrics over tokens.
    """
    values = advantages.detach()[response_mask].double()
    return {
        "advantage/mean": _mean(values),
        "advantage/std": _std(values),
        "advantage/abs_max": _max(values.abs()),
        "advantage/positive_frac": _mean(values > 0),
    }


def policy_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    ref_logprobs: OptionalTensor = None,
    entropy: OptionalTensor = None,
) -> Metrics:
    """Measure how far the policy has moved from its old self and from the reference.

    `kl/old_k3` is mean(r - 1 - log r) with r against the old policy: the data come from it, so this
    estimates KL(old || current). `kl/ref_...` estimate KL(current || reference); `kl/ref_row_sum`
    is per response.

    Args:
        logprobs, old_logprobs: [B, T] nats.
        response_mask: [B, T] bool.
        ref_logprobs: [B, T] nats, or None where there is no reference.
        entropy: [B, T] nats, or None.

    Returns:
        `update/ratio_...`, `kl/...`, `policy/...`.
    """
    raw = _log_ratio(logprobs, old_logprobs, response_mask)[response_mask]
    metrics = {"policy/logprob_mean": _mean(masked_values(logprobs, response_mask))}
    if raw.numel():
        log_ratio = _bounded(raw)
        ratio = log_ratio.exp()
        metrics |= {
            "update/ratio_mean": _mean(ratio),
            "update/ratio_std": _std(ratio),
            "update/ratio_min": float(ratio.min()),
            "update/ratio_max": float(ratio.max()),
            "update/ratio_p01": quantile(ratio, 0.01),
            "update/ratio_p99": quantile(ratio, 0.99),
            "update/ratio_clamped_frac": _mean(raw != log_ratio),
            "kl/old_k3": _mean(ratio - 1 - log_ratio),
        }
    if entropy is not None:
        metrics["policy/entropy"] = _mean(masked_values(entropy, response_mask))
    if ref_logprobs is not None:
        raw = _log_ratio(logprobs, ref_logprobs, response_mask)
        difference = _bounded(raw)
        k1 = difference[response_mask]
        metrics |= {
            "kl/ref_k1": _mean(k1),
            "kl/ref_k3": _mean(torch.expm1(-k1) + k1),
            "kl/ref_row_sum": _mean(difference.sum(1)[response_mask.any(1)]),
            "kl/clamped_frac": _mean((raw != difference)[response_mask]),
        }
    return metrics


def mismatch_metrics(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    correction: OptionalTensor = None,
    *,
    correction_level: Level | None = "token",
) -> Metrics:
    """Trainer against sampler, before any bound, and what the correction did about it.

    rho = exp(old - rollout). Healthy dense models in bfloat16 have `kl_k3` below 1e-3; a lasting
    1e-2 ends in collapse.

    Args:
        old_logprobs, rollout_logprobs: [B, T] nats.
        response_mask: [B, T] bool.
        correction: weights [B, T], or None.
        correction_level: of the bounded ratios that the weights are; None where they are 0 or 1.

    Returns:
        `mismatch/...`; none without a trained token.
    """
    rows = response_mask.any(1)
    if not rows.any():
        return {}
    raw = _log_ratio(old_logprobs, rollout_logprobs, response_mask)
    sampled = masked_values(rollout_logprobs, response_mask).exp()
    moved = masked_values(old_logprobs, response_mask).exp() - sampled
    distance = raw[response_mask].abs()
    log_rho = _bounded(raw)[response_mask]
    rho = log_rho.exp()
    row_sum = raw.sum(1)[rows]
    metrics = {
        "mismatch/abs_logdiff_mean": _mean(distance),
        "mismatch/abs_logdiff_max": float(distance.max()),
        "mismatch/kl_k1": _mean(-log_rho),
        "mismatch/kl_k3": _mean(rho - 1 - log_rho),
        "mismatch/prob_diff_max": float(moved.abs().max()),
        "mismatch/ppl_ratio": float((-row_sum / response_mask.sum(1)[rows]).mean().exp()),
        "mismatch/chi2_token": _mean(rho.square()) - 1,
        "mismatch/chi2_seq": _mean((2 * _bounded(row_sum)).exp()) - 1,
    }
    if correction is None:
        return metrics
    weights = masked_values(correction, response_mask)
    bounded = weights
    if correction_level is not None:
        rho = importance_ratio(
            old_logprobs, rollout_logprobs, response_mask, correction_level=correction_level
        )
        bounded = masked_values(rho, response_mask)
    truncated = (weights > 0) & (weights < bounded * (1 - 1e-6))
    return metrics | {
        "mismatch/weight_mean": _mean(weights),
        "mismatch/ess": _effective_share(weights),
        "mismatch/trunc_frac_hi": _mean(truncated),
        "mismatch/trunc_frac_lo": _mean(weights > bounded * (1 + 1e-6)),
        "mismatch/reject_frac_token": _mean(weights == 0),
        "mismatch/reject_frac_row": _mean(((correction == 0) | ~response_mask).all(1)[rows]),
    }


def _effective_share(weights: Tensor) -> float:
    """Effective sample size over the number of weights; 0 where all weights are 0."""
    squares = float(weights.square().sum())
    if not squares:
        return 0.0
    return float(weights.sum().square()) / (len(weights) * squares)


def value_metrics(values: Tensor, returns: Tensor, response_mask: Tensor) -> Metrics:
    """`value/...`: means, and how much of the returns' variance the critic explains (1 is all).

    Args:
        values, returns: [B, T].
        response_mask: [B, T] bool.

    Returns:
        Metrics over tokens.
    """
    predicted = masked_values(values, response_mask)
    target = masked_values(returns, response_mask)
    error = target - predicted
    variance = 0.0
    if target.numel() > 1:
        variance = float(target.var())
    explained = 0.0
    if variance > 0:
        explained = 1 - float(error.var()) / variance
    return {
        "value/mean": _mean(predicted),
        "value/return_mean": _mean(target),
        "value/error": _mean(error.square()),
        "value/explained_variance": explained,
    }
