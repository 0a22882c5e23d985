"""Metrics of algorithms over a whole batch: plain floats under the keys of the run directory's
metrics.jsonl.

They are computed once per optimizer step from detached full-batch tensors, so they cannot depend on
micro-batches. Means run over the trained tokens (`response_mask`) unless said otherwise; KLs are in
nats per token. Rewards, truncated and group_ids are [B], everything else [B, T].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oxrl.functional.corrections import Level, importance_ratio
from oxrl.functional.group_advantages import Groups
from oxrl.functional.masks import fill_masked, masked_values, require_same_shape
from oxrl.functional.ratios import MAX_LOG_RATIO

PASS_REWARD = 0.5  # a reward above this counts as solved; verifiers give 0 or 1


def quantile(x: Tensor, fraction: float) -> float:
    """Linear between neighbors. torch.quantile refuses more than 2**24 values, and a large step has
    more tokens.
    """
    place = fraction * (len(x) - 1)
    below, above = (float(x.kthvalue(rank(place) + 1).values) for rank in (math.floor, math.ceil))
    return below + (above - below) * (place % 1)


def _mean(x: Tensor) -> float:
    return float(x.double().mean()) if x.numel() else 0.0


_STATISTICS: dict[str, Callable[[Tensor], float]] = {
    "mean": _mean,
    "std": lambda x: float(x.double().std()) if len(x) > 1 else 0.0,
    "min": lambda x: float(x.min()),
    "max": lambda x: float(x.max()),
    "abs_max": lambda x: float(x.abs().max()),
    "p01": lambda x: quantile(x, 0.01),
    "p95": lambda x: quantile(x, 0.95),
    "p99": lambda x: quantile(x, 0.99),
}


def _summary(prefix: str, x: Tensor, names: str) -> dict[str, float]:
    """These statistics of the values x, 0 where there are none."""
    return {f"{prefix}{name}": _STATISTICS[name](x) if len(x) else 0.0 for name in names.split()}


def _log_ratio(logprobs: Tensor, other: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """logprobs - other as it is, and clamped so that exp stays finite. [B, T] float64, 0 where
    masked, detached.
    """
    raw = fill_masked(logprobs.detach(), mask).double() - fill_masked(other.detach(), mask).double()
    return raw, raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def reward_metrics(rewards: Tensor, group_ids: Tensor) -> dict[str, float]:
    """`reward/...` over rows and groups: what was scored, and how many groups can teach
    anything.
    """
    require_same_shape(rewards=rewards, group_ids=group_ids)
    if not rewards.numel():
        return {}
    groups = Groups.of(group_ids)
    rows = torch.arange(len(rewards), device=rewards.device)
    first = groups.extreme(rows, "amin") == rows  # one row speaks for each group
    variance = groups.mean(rewards.double().square()) - groups.mean(rewards).square()
    passed = rewards > PASS_REWARD
    return _summary("reward/", rewards, "mean std min max") | {
        "reward/pass_rate": _mean(passed),
        "reward/zero_variance_groups": _mean(groups.flat(rewards)[first]),
        "reward/all_pass_groups": _mean((groups.mean(passed) == 1)[first]),
        "reward/all_fail_groups": _mean((groups.mean(passed) == 0)[first]),
        "reward/group_std": _mean(variance.clamp(min=0).sqrt()[first]),
    }


def data_metrics(response_mask: Tensor, truncated: Tensor, rewards: Tensor) -> dict[str, float]:
    """`data/...`: trained tokens, lengths, rows cut by the token limit, and whether long answers
    are the wrong ones.
    """
    lengths, passed = response_mask.sum(1).double(), rewards > PASS_REWARD
    metrics = {
        "data/tokens": float(lengths.sum()),
        "data/rows": float((lengths > 0).sum()),
        "data/empty_rows": float((lengths == 0).sum()),
    }
    if len(lengths):
        metrics |= _summary("data/length_", lengths, "mean p95 max") | {
            "data/length_correct": _mean(lengths[passed]),
            "data/length_wrong": _mean(lengths[~passed]),
            "data/truncated_frac": _mean(truncated),
        }
    return metrics


def staleness_metrics(versions: Tensor, response_mask: Tensor, *, version: int) -> dict[str, float]:
    """`data/staleness_...`: how many weight versions lie between sampling a token and training on
    it.
    """
    return _summary("data/staleness_", (version - versions)[response_mask].double(), "mean max")


def advantage_metrics(advantages: Tensor, response_mask: Tensor) -> dict[str, float]:
    """`advantage/...` over the trained tokens."""
    values = masked_values(advantages, response_mask)
    return _summary("advantage/", values, "mean std abs_max") | {
        "advantage/positive_frac": _mean(values > 0)
    }


def policy_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
) -> dict[str, float]:
    """`update/ratio_...`, `kl/...`, `policy/entropy`: where the policy stands against old self and
    reference.

    `kl/old_k3` is mean(r - 1 - log r) with r against the old policy: the data come from it, so this
    estimates KL(old || current). `kl/ref_...` estimate KL(current || reference); `kl/ref_row_sum`
    is per response.
    """
    raw, log_ratio = (x[response_mask] for x in _log_ratio(logprobs, old_logprobs, response_mask))
    metrics = {"policy/logprob_mean": _mean(masked_values(logprobs, response_mask))}
    if raw.numel():
        ratio = log_ratio.exp()
        metrics |= _summary("update/ratio_", ratio, "mean std min max p01 p99") | {
            "update/ratio_clamped_frac": _mean(raw != log_ratio),
            "kl/old_k3": _mean(ratio - 1 - log_ratio),
        }
    if entropy is not None:
        metrics["policy/entropy"] = _mean(masked_values(entropy, response_mask))
    if ref_logprobs is not None:
        raw, difference = _log_ratio(logprobs, ref_logprobs, response_mask)
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
    correction: Tensor | None = None,
    *,
    correction_level: Level | None = "token",
) -> dict[str, float]:
    """`mismatch/...`: trainer against sampler, before any bound, and what the correction did about
    it.

    rho = exp(old - rollout). Healthy dense models in bfloat16 have `kl_k3` below 1e-3; a lasting
    1e-2 ends in collapse. `correction`, the weights [B, T], are bounded ratios at
    `correction_level`, or only 0 and 1 where that is None.
    """
    mask, rows = response_mask, response_mask.any(1)
    if not rows.any():
        return {}
    raw, bounded = _log_ratio(old_logprobs, rollout_logprobs, mask)
    log_rho, row_sum = bounded[mask], raw.sum(1)[rows]
    rho = log_rho.exp()
    moved = masked_values(old_logprobs, mask).exp() - masked_values(rollout_logprobs, mask).exp()
    metrics = _summary("mismatch/abs_logdiff_", raw[mask].abs(), "mean max") | {
        "mismatch/kl_k1": _mean(-log_rho),
        "mismatch/kl_k3": _mean(rho - 1 - log_rho),
        "mismatch/prob_diff_max": float(moved.abs().max()),
        "mismatch/ppl_ratio": float((-row_sum / mask.sum(1)[rows]).mean().exp()),
        "mismatch/chi2_token": _mean(rho.square()) - 1,
        "mismatch/chi2_seq": _mean((2 * row_sum.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).exp()) - 1,
    }
    if correction is not None:
        weights = ratio = masked_values(correction, mask)
        if correction_level is not None:
            rho = importance_ratio(
                old_logprobs, rollout_logprobs, mask, correction_level=correction_level
            )
            ratio = masked_values(rho, mask)
        squares = float(weights.square().sum())
        metrics |= {
            "mismatch/weight_mean": _mean(weights),
            "mismatch/ess": float(weights.sum().square()) / (len(weights) * squares)
            if squares
            else 0.0,
            "mismatch/trunc_frac_hi": _mean((weights > 0) & (weights < ratio * (1 - 1e-6))),
            "mismatch/trunc_frac_lo": _mean(weights > ratio * (1 + 1e-6)),
            "mismatch/reject_frac_token": _mean(weights == 0),
            "mismatch/reject_frac_row": _mean(((correction == 0) | ~mask).all(1)[rows]),
        }
    return metrics


def value_metrics(values: Tensor, returns: Tensor, response_mask: Tensor) -> dict[str, float]:
    """`value/...`: mean value and return, and how much of the returns' variance the critic explains
    (1 is all).
    """
    predicted, target = masked_values(values, response_mask), masked_values(returns, response_mask)
    variance = float(target.var()) if target.numel() > 1 else 0.0
    explained = 1 - float((target - predicted).var()) / variance if variance > 0 else 0.0
    return {
        "value/mean": _mean(predicted),
        "value/return_mean": _mean(target),
        "value/error": _mean((target - predicted).square()),
        "value/explained_variance": explained,
    }
