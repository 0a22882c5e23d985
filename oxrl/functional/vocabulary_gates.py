"""Policy losses that read more than the sampled token's logprob: top candidates, routers, or a choice of tokens.

Contract: policy_losses.py. What they read beyond it comes as keyword tensors, [B, T] or [B, T, K].
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.gates import LossAndMetrics, clean_tokens, clip_tokens, own_push, surrogate_loss
from oxrl.functional.masks import fill_masked, masked_mean, require_same_shape
from oxrl.functional.soft_gates import TINY, divergence_gate, gmpo


def _buckets(logprobs: Tensor, top_logprobs: Tensor, sampled_in_top: Tensor, mask: Tensor) -> Tensor:
    """Probabilities of {top K, the sampled token if not among them, the rest}: [B, T, K + 2], detached, sum 1."""
    top = fill_masked(top_logprobs.detach(), mask[..., None], -torch.inf).exp()
    sampled = torch.where(sampled_in_top, 0.0, fill_masked(logprobs.detach(), mask).exp())[..., None]
    known = torch.cat([top, sampled], dim=-1)
    return torch.cat([known, (1 - known.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)


def dppo_topk_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    top_logprobs: Tensor,
    old_top_logprobs: Tensor,
    sampled_in_top: Tensor,
    correction: Tensor | None = None,
    dppo_low: float = 0.2,
    dppo_high: float = 0.2,
    weight_max: float = 20.0,
) -> LossAndMetrics:
    """`dppo_tv` with the total variation over the sampler's top K tokens, the sampled one, and the rest.

    Source: DPPO, arXiv:2602.04879, whose authors report no gain over the two-bucket form.

    Args:
        top_logprobs, old_top_logprobs: [B, T, K] nats of the sampler's K most likely tokens, now and when sampled.
        sampled_in_top: [B, T] bool, the sampled token is among them.
        dppo_low, dppo_high, weight_max: as in `dppo_tv`.
    """
    tokens = clean_tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    p = _buckets(logprobs, top_logprobs, sampled_in_top, mask)
    mu = _buckets(old_logprobs, old_top_logprobs, sampled_in_top, mask)
    return divergence_gate(
        tokens,
        (p - mu).abs().sum(-1) / 2,
        tokens.log_ratio,
        dppo_low=dppo_low,
        dppo_high=dppo_high,
        weight_max=weight_max,
    )


def dppo_topk_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    top_logprobs: Tensor,
    old_top_logprobs: Tensor,
    sampled_in_top: Tensor,
    correction: Tensor | None = None,
    dppo_low: float = 0.2,
    dppo_high: float = 0.2,
    weight_max: float = 20.0,
) -> LossAndMetrics:
    """`dppo_kl` with KL(sampler || current) over the same buckets as `dppo_topk_tv`; same arguments."""
    tokens = clean_tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    p = _buckets(logprobs, top_logprobs, sampled_in_top, mask)
    mu = _buckets(old_logprobs, old_top_logprobs, sampled_in_top, mask)
    divergence = (mu * (mu.clamp(min=TINY) / p.clamp(min=TINY)).log()).sum(-1)
    return divergence_gate(
        tokens, divergence, tokens.log_ratio, dppo_low=dppo_low, dppo_high=dppo_high, weight_max=weight_max
    )


def simko(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    top_logprobs: Tensor,
    old_top_logprobs: Tensor,
    explore: Tensor,
    sampled_is_top: Tensor,
    correction: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    simko_alpha: float = 0.01,
    simko_boost: float = 1.1,
) -> LossAndMetrics:
    """Simple pass@k optimization: right answers lift the other top candidates too, wrong top-1 tokens fall harder.

    On `explore` tokens:
      A > 0:  r~ = (1 - alpha) * r + alpha / K * sum_k sg(r / r_k) * r_k: the value of r, its gradient shared with the
              top K candidates (a sampled token among them gets both parts)
      A < 0 and the sampled token was the most likely one:  A * simko_boost
    then PPO's clip.

    Source: SimKO, arXiv:2510.14807, and the authors' code. It is not an entropy bonus.

    Args:
        top_logprobs: [B, T, K] nats, current, with gradient, of the old policy's K most likely tokens.
        old_top_logprobs: [B, T, K] nats; their ratios are clamped like the sampled token's.
        explore: [B, T] bool, entropy above the row's quantile (`selections.above_row_quantile`).
        sampled_is_top: [B, T] bool, the sampled token was the old policy's most likely one.
        simko_alpha: share of the gradient given to the candidates, in [0, 1].
        simko_boost: factor on the advantage of penalised top-1 tokens.
    """
    require_same_shape(logprobs=logprobs, explore=explore, sampled_is_top=sampled_is_top)
    require_same_shape(top_logprobs=top_logprobs, old_top_logprobs=old_top_logprobs)
    boosted = (explore & sampled_is_top & (advantages < 0)).to(logprobs.dtype)
    advantages = advantages * (1 + (simko_boost - 1) * boosted)
    tokens = clean_tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    clip = clip_tokens(tokens, clip_low=clip_low, clip_high=clip_high)
    alpha = simko_alpha * (explore & (tokens.advantages > 0)).to(tokens.ratio.dtype)
    top = fill_masked(top_logprobs, mask[..., None])
    shared = (1 - alpha) * own_push(tokens) + alpha * (top - top.detach()).mean(-1)
    loss, metrics = surrogate_loss(
        tokens,
        clip.ratio * tokens.advantages,
        clip.weight,
        high=clip.high,
        low=clip.low,
        push=clip.weight * tokens.advantages * shared,
    )
    return loss, metrics | {"update/simko_frac": masked_mean((alpha > 0) | (boosted > 0), mask)}


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    selected: Tensor,
    correction: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossAndMetrics:
    """PPO's clip without gradient on `selected`: a few tokens whose logprob and advantage covary strongly.

    Source: Clip-Cov, arXiv:2505.22617, Eq. 11. The choice is made over the whole step (`selections.select_clip_cov`).

    Args:
        selected: [B, T] bool, tokens that get no gradient.
    """
    tokens = clean_tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    clip = clip_tokens(tokens, clip_low=clip_low, clip_high=clip_high)
    weight = torch.where(selected, 0.0, clip.weight)
    return surrogate_loss(tokens, clip.ratio * tokens.advantages, weight, high=clip.high, low=clip.low)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    selected: Tensor,
    correction: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_cov_coeff: float = 1.0,
) -> LossAndMetrics:
    """PPO's clip, and on `selected` tokens a penalty kl_cov_coeff * |log r|.

    Source: KL-Cov, arXiv:2505.22617, Eq. 12. The choice is made over the whole step (`selections.select_kl_cov`).

    Args:
        selected: [B, T] bool, tokens with the largest covariance of logprob and advantage.
        kl_cov_coeff: not negative; 1 in the paper, 0.1 in verl.
    """
    tokens = clean_tokens(logprobs, old_logprobs, advantages, mask, loss_weights, correction)
    clip = clip_tokens(tokens, clip_low=clip_low, clip_high=clip_high)
    coeff = kl_cov_coeff * (selected & tokens.inside).to(tokens.ratio.dtype)
    slope = clip.weight * tokens.advantages - coeff * tokens.log_ratio.sign()
    value = clip.ratio * tokens.advantages - coeff * tokens.log_ratio.abs()
    return surrogate_loss(tokens, value, clip.weight, high=clip.high, low=clip.low, push=slope * own_push(tokens))


def rspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    router_shift: Tensor,
    correction: Tensor | None = None,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> LossAndMetrics:
    """Router-shift policy optimization: each token's ratio is scaled down by how far its experts moved, then `gmpo`.

    r~ = r * gamma, gamma = max(exp(-Delta), gamma_min), detached: with gradient, training collapses (paper).

    Source: RSPO, arXiv:2510.23027.

    Args:
        router_shift: [B, T] gamma in (0, 1], from `selections.router_shift`; 1 where no expert moved.
    """
    require_same_shape(logprobs=logprobs, router_shift=router_shift)
    shifted = old_logprobs - fill_masked(router_shift.detach(), mask, 1.0).log()
    return gmpo(
        logprobs,
        shifted,
        advantages,
        mask,
        loss_weights,
        correction=correction,
        clip_low=clip_low,
        clip_high=clip_high,
    )
