"""Metrics of algorithms over a whole batch: plain floats under the keys of the run directory's metrics.jsonl.

They are computed once per optimizer step from detached full-batch tensors, so they cannot depend on micro-batches.
Means run over the trained tokens (`response_mask`) unless said otherwise; KLs are in nats per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.corrections import Level, importance_ratio
from oxrl.functional.group_advantages import Groups
from oxrl.functional.masks import fill_masked, masked_values, require_same_shape
from oxrl.functional.ratios import MAX_LOG_RATIO

PASS_REWARD = 0.5  # a reward above this counts as solved; verifiers give 0 or 1


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0


def _std(x: Tensor) -> float:
    return float(x.double().std()) if x.numel() > 1 else 0.0


def reward_metrics(rewards: Tensor, group_ids: Tensor) -> dict[str, float]:
    """`reward/...` over rows and groups: what was scored, and how many groups can teach anything.

    Args:
        rewards: [B] finite.
        group_ids: [B] int64.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    if not rewards.numel():
        return {}
    groups = Groups.of(group_ids)
    rows = torch.arange(len(rewards), device=rewards.device)
    first = groups.extreme(rows, "amin") == rows  # one row speaks for each group
    variance = groups.mean(rewards.double().square()) - groups.mean(rewards).square()
    passed = rewards > PASS_REWARD
    all_pass, none_pass = groups.mean(passed) == 1, groups.mean(passed) == 0
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/pass_rate": _mean(passed),
        "reward/zero_variance_groups": _mean(groups.flat(rewards)[first]),
        "reward/all_pass_groups": _mean(all_pass[first]),
        "reward/all_fail_groups": _mean(none_pass[first]),
        "reward/group_std": _mean(variance.clamp(min=0).sqrt()[first]),
    }


def data_metrics(response_mask: Tensor, truncated: Tensor, rewards: Tensor) -> dict[str, float]:
    """`data/...`: trained tokens, lengths, and whether long answers are the wrong ones.

    Args:
        response_mask: [B, T] bool.
        truncated: [B] bool, cut by the token limit.
        rewards: [B].
    """
    lengths = response_mask.sum(1).double()
    if not lengths.numel():
        return {"data/tokens": 0.0, "data/rows": 0.0, "data/empty_rows": 0.0}
    passed = rewards > PASS_REWARD
    return {
        "data/tokens": float(lengths.sum()),
        "data/rows": float((lengths > 0).sum()),
        "data/empty_rows": float((lengths == 0).sum()),
        "data/length_mean": _mean(lengths),
        "data/length_p95": float(lengths.quantile(0.95)),
        "data/length_max": float(lengths.max()),
        "data/length_correct": _mean(lengths[passed]),
        "data/length_wrong": _mean(lengths[~passed]),
        "data/truncated_frac": _mean(truncated),
    }


def staleness_metrics(versions: Tensor, response_mask: Tensor, *, version: int) -> dict[str, float]:
    """`data/staleness_...`: how many weight versions lie between sampling a token and training on it."""
    age = (version - versions)[response_mask].double()
    return {"data/staleness_mean": _mean(age), "data/staleness_max": float(age.max()) if age.numel() else 0.0}


def advantage_metrics(advantages: Tensor, response_mask: Tensor) -> dict[str, float]:
    """`advantage/...` over the trained tokens."""
    values = masked_values(advantages, response_mask)
    return {
        "advantage/mean": _mean(values),
        "advantage/std": _std(values),
        "advantage/abs_max": float(values.abs().max()) if values.numel() else 0.0,
        "advantage/positive_frac": _mean(values > 0),
    }


def policy_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> dict[str, float]:
    """`update/ratio_...`, `kl/...`, `policy/entropy`: where the policy stands against old self and reference.

    `kl/old_k3` is mean(r - 1 - log r) with r against the old policy: the data come from it, so this estimates
    KL(old || current). `kl/ref_...` estimate KL(current || reference); `kl/ref_row_sum` is per response.

    Args:
        logprobs: [B, T] of the current policy, full batch, as the engine returned them.
        old_logprobs: [B, T] of the policy at the start of the step.
        response_mask: [B, T] bool.
        ref_logprobs: [B, T] or None.
        entropy: [B, T] nats or None; without it `policy/entropy` is left out.
    """
    raw = masked_values(logprobs, response_mask) - masked_values(old_logprobs, response_mask)
    metrics = {"policy/logprob_mean": _mean(masked_values(logprobs, response_mask))}
    if raw.numel():
        log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        low, high = ratio.quantile(torch.tensor([0.01, 0.99], dtype=ratio.dtype, device=ratio.device)).tolist()
        metrics |= {
            "update/ratio_mean": _mean(ratio),
            "update/ratio_std": _std(ratio),
            "update/ratio_min": float(ratio.min()),
            "update/ratio_max": float(ratio.max()),
            "update/ratio_p01": low,
            "update/ratio_p99": high,
            "update/ratio_clamped_frac": _mean(raw != log_ratio),
            "kl/old_k3": _mean(ratio - 1 - log_ratio),
        }
    if entropy is not None:
        metrics["policy/entropy"] = _mean(masked_values(entropy, response_mask))
    if ref_logprobs is not None:
        metrics |= _reference_metrics(logprobs, ref_logprobs, response_mask)
    return metrics


def _reference_metrics(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor) -> dict[str, float]:
    raw = fill_masked(logprobs.detach(), response_mask).double() - fill_masked(ref_logprobs, response_mask).double()
    difference = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k1 = difference[response_mask]
    return {
        "kl/ref_k1": _mean(k1),
        "kl/ref_k3": _mean(torch.expm1(-k1) + k1),
        "kl/ref_row_sum": _mean(difference.sum(1)[response_mask.any(1)]),
        "kl/clamped_frac": _mean((raw != difference)[response_mask]),
    }


def mismatch_metrics(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    correction: Tensor | None = None,
    *,
    correction_level: Level = "token",
) -> dict[str, float]:
    """`mismatch/...`: trainer against sampler, before any bound, and what the correction did about it.

    rho = exp(old - rollout). Healthy dense models in bfloat16 have `kl_k3` below 1e-3; a lasting 1e-2 ends in collapse.

    Args:
        old_logprobs: [B, T] nats, the trainer's at the start of the step.
        rollout_logprobs: [B, T] nats, the sampler's.
        response_mask: [B, T] bool.
        correction: [B, T] weights or None for none.
        correction_level: the level the correction was computed at.
    """
    mask = response_mask
    old, rollout = masked_values(old_logprobs, mask), masked_values(rollout_logprobs, mask)
    if not old.numel():
        return {}
    log_rho = (old - rollout).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = log_rho.exp()
    rows = mask.any(1)
    difference = (
        fill_masked(old_logprobs.detach(), mask).double() - fill_masked(rollout_logprobs.detach(), mask).double()
    )
    row_sum, row_mean = difference.sum(1), difference.sum(1) / mask.sum(1).clamp(min=1)
    metrics = {
        "mismatch/kl_k1": _mean(-log_rho),
        "mismatch/kl_k3": _mean(rho - 1 - log_rho),
        "mismatch/abs_logdiff_mean": _mean((old - rollout).abs()),
        "mismatch/abs_logdiff_max": float((old - rollout).abs().max()),
        "mismatch/prob_diff_max": float((old.exp() - rollout.exp()).abs().max()),
        "mismatch/ppl_ratio": float((-row_mean[rows]).mean().exp()),
        "mismatch/chi2_token": _mean(rho.square()) - 1,
        "mismatch/chi2_seq": _mean((2 * row_sum[rows].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()) - 1,
    }
    if correction is not None:
        metrics |= _correction_metrics(old_logprobs, rollout_logprobs, mask, correction, correction_level)
    return metrics


def _correction_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: Tensor, level: Level
) -> dict[str, float]:
    weights = masked_values(correction, mask)
    ratio = masked_values(importance_ratio(old_logprobs, rollout_logprobs, mask, correction_level=level), mask)
    rows = mask.any(1)
    rejected_rows = ((correction == 0) | ~mask).all(1)[rows]
    squares = float(weights.square().sum())
    return {
        "mismatch/weight_mean": _mean(weights),
        "mismatch/ess": float(weights.sum().square()) / (len(weights) * squares) if squares else 0.0,
        "mismatch/trunc_frac_hi": _mean((weights > 0) & (weights < ratio * (1 - 1e-6))),
        "mismatch/trunc_frac_lo": _mean(weights > ratio * (1 + 1e-6)),
        "mismatch/reject_frac_token": _mean(weights == 0),
        "mismatch/reject_frac_row": _mean(rejected_rows),
    }


def value_metrics(values: Tensor, returns: Tensor, response_mask: Tensor) -> dict[str, float]:
    """`value/...`: mean value and return, and how much of the returns' variance the critic explains (1 is all)."""
    predicted, target = masked_values(values, response_mask), masked_values(returns, response_mask)
    variance = float(target.var()) if target.numel() > 1 else 0.0
    explained = 1 - float((target - predicted).var()) / variance if variance > 0 else 0.0
    return {
        "value/mean": _mean(predicted),
        "value/return_mean": _mean(target),
        "value/error": _mean((target - predicted).square()),
        "value/explained_variance": explained,
    }
