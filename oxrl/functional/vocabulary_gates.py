"""Policy losses that read more than the sampled token's logprob: top candidates, routers, or a choice of tokens.

Arguments and returns: gates.py, and as keyword tensors:
    top_logprobs, old_top_logprobs: [B, T, K] nats of the sampler's K most likely tokens, now and when sampled.
    sampled_in_top, sampled_is_top: [B, T] bool, the sampled token is among them, or is the first.
    explore, selected, router_shift: [B, T], chosen or measured over the whole step by selections.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.functional.gates import Decision, Tokens, clipped, gate
from oxrl.functional.masks import fill_masked, require_same_shape
from oxrl.functional.soft_gates import TINY, clipped_geometric_mean, divergence_gate


def _buckets(tokens: Tokens, top: Tensor, old_top: Tensor, sampled_in_top: Tensor) -> list[Tensor]:
    """Probabilities of {top K, the sampled token if not among them, the rest}, [B, T, K + 2]: now and when sampled."""
    found: list[Tensor] = []
    for own, logprobs in ((tokens.now, top), (tokens.now - tokens.log_ratio, old_top)):
        listed = fill_masked(logprobs.detach(), tokens.mask[..., None], -torch.inf).exp()
        known = torch.cat([listed, torch.where(sampled_in_top, 0.0, own.exp())[..., None]], dim=-1)
        found.append(torch.cat([known, (1 - known.sum(-1, keepdim=True)).clamp(min=0)], dim=-1))
    return found


@gate
def dppo_topk_tv(
    tokens: Tokens,
    *,
    top_logprobs: Tensor,
    old_top_logprobs: Tensor,
    sampled_in_top: Tensor,
    dppo_low: float = 0.2,
    dppo_high: float = 0.2,
    weight_max: float = 20.0,
) -> Decision:
    """`dppo_tv` with the total variation over the sampler's top K tokens, the sampled one, and the rest.

    Source: DPPO, arXiv:2602.04879, whose authors report no gain over the two-bucket form.
    """
    p, mu = _buckets(tokens, top_logprobs, old_top_logprobs, sampled_in_top)
    divergence = (p - mu).abs().sum(-1) / 2
    return divergence_gate(tokens, divergence, dppo_low=dppo_low, dppo_high=dppo_high, weight_max=weight_max)


@gate
def dppo_topk_kl(
    tokens: Tokens,
    *,
    top_logprobs: Tensor,
    old_top_logprobs: Tensor,
    sampled_in_top: Tensor,
    dppo_low: float = 0.2,
    dppo_high: float = 0.2,
    weight_max: float = 20.0,
) -> Decision:
    """`dppo_kl` with KL(sampler || current) over the same buckets as `dppo_topk_tv`."""
    p, mu = _buckets(tokens, top_logprobs, old_top_logprobs, sampled_in_top)
    divergence = (mu * (mu.clamp(min=TINY) / p.clamp(min=TINY)).log()).sum(-1)
    return divergence_gate(tokens, divergence, dppo_low=dppo_low, dppo_high=dppo_high, weight_max=weight_max)


@gate
def simko(
    tokens: Tokens,
    *,
    top_logprobs: Tensor,
    old_top_logprobs: Tensor,
    explore: Tensor,
    sampled_is_top: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    simko_alpha: float = 0.01,
    simko_boost: float = 1.1,
) -> Decision:
    """Simple pass@k optimization: right answers lift the other top candidates too, wrong top-1 tokens fall harder.

    On `explore` tokens:
      A > 0:  r~ = (1 - alpha) * r + alpha / K * sum_k sg(r / r_k) * r_k: the value of r, its gradient shared with the
              top K candidates (a sampled token among them gets both parts)
      A < 0 and the sampled token was the most likely one:  A * simko_boost
    then PPO's clip. `top_logprobs` carry a gradient here; `old_top_logprobs` cancel, only their shape is checked.
    Source: SimKO, arXiv:2510.14807, and the authors' code. It is not an entropy bonus.
    """
    require_same_shape(mask=tokens.mask, explore=explore, sampled_is_top=sampled_is_top)
    require_same_shape(top_logprobs=top_logprobs, old_top_logprobs=old_top_logprobs)
    boosted = explore & sampled_is_top & (tokens.advantages < 0)
    advantages = torch.where(boosted, simko_boost * tokens.advantages, tokens.advantages)
    clip = clipped(tokens._replace(advantages=advantages), clip_low=clip_low, clip_high=clip_high)
    shares = explore & (tokens.advantages > 0)
    alpha = simko_alpha * shares.to(tokens.ratio.dtype)
    top = fill_masked(top_logprobs, tokens.mask[..., None])
    push = clip.weight * advantages * ((1 - alpha) * tokens.own_push + alpha * (top - top.detach()).mean(-1))
    return clip._replace(push=push, further={"update/simko_frac": shares | boosted})


@gate
def clip_cov(tokens: Tokens, *, selected: Tensor, clip_low: float = 0.2, clip_high: float = 0.2) -> Decision:
    """PPO's clip without gradient on `selected`: a few tokens whose logprob and advantage covary strongly.

    Source: Clip-Cov, arXiv:2505.22617. The choice is made over the whole step (`selections.select_clip_cov`).
    """
    clip = clipped(tokens, clip_low=clip_low, clip_high=clip_high)
    weight = torch.where(selected, 0.0, clip.weight)
    return clip._replace(weight=weight, further={**clip.further, "update/selected_frac": selected})


@gate
def kl_cov(
    tokens: Tokens, *, selected: Tensor, clip_low: float = 0.2, clip_high: float = 0.2, kl_cov_coeff: float = 1.0
) -> Decision:
    """PPO's clip, and on `selected` tokens, of the largest covariance, a penalty kl_cov_coeff * |log r|.

    Source: KL-Cov, arXiv:2505.22617; coefficient 1 in the paper, 0.1 in verl. The choice is made over the whole step
    (`selections.select_kl_cov`).
    """
    clip = clipped(tokens, clip_low=clip_low, clip_high=clip_high)
    coeff = kl_cov_coeff * (selected & tokens.inside).to(tokens.ratio.dtype)
    slope = clip.weight * tokens.advantages - coeff * tokens.log_ratio.sign()
    value, further = clip.value - coeff * tokens.log_ratio.abs(), {**clip.further, "update/selected_frac": selected}
    return clip._replace(value=value, push=slope * tokens.own_push, further=further)


@gate
def rspo(tokens: Tokens, *, router_shift: Tensor, clip_low: float = 0.4, clip_high: float = 0.4) -> Decision:
    """Router-shift policy optimization: each token's ratio is scaled down by how far its experts moved, then `gmpo`.

    r~ = r * gamma, gamma = max(exp(-Delta), gamma_min) from `selections.router_shift`, detached: with gradient,
    training collapses (paper). The bounds are on log r~.
    Source: RSPO, arXiv:2510.23027.
    """
    require_same_shape(mask=tokens.mask, router_shift=router_shift)
    shifted = tokens.log_ratio + fill_masked(router_shift.detach(), tokens.mask, 1.0).log()
    return clipped_geometric_mean(tokens._replace(log_ratio=shifted), clip_low=clip_low, clip_high=clip_high)
