"""The policy losses, and `GATES`, which names them all. Arguments and returns: gates.py, and as
keyword tensors:

top_logprobs, old_top_logprobs: [B, T, K] nats of the sampler's K most likely tokens, now and when
sampled.
sampled_in_top, sampled_is_top: [B, T] bool, the sampled token is among them, or is the first.
explore, selected, router_shift: [B, T], chosen or measured over the whole step by selections.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oxrl.functional.gates import Decision, LossAndMetrics, Tokens, gate
from oxrl.functional.masks import fill_masked, require_same_shape
from oxrl.functional.ratios import geometric_level

MIN_LOG_PRODUCT = math.log(1e-8)
TINY = 1e-8


@gate
def policy_gradient(tokens: Tokens) -> Decision:
    """The plain policy gradient: S = A * logprobs, w = 1. No ratio, so it is right for on-policy
    data only.

    Source: Williams 1992, REINFORCE.
    """
    return Decision(tokens.advantages * tokens.now, torch.ones_like(tokens.ratio))


def _clipped(
    tokens: Tokens, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> Decision:
    ratio, advantages = tokens.ratio, tokens.advantages
    high = (advantages > 0) & (ratio > 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    cap = torch.inf if clip_dual is None else clip_dual
    dual = (advantages < 0) & (ratio > cap)
    bounded = torch.where(
        high, 1 + clip_high, torch.where(low, 1 - clip_low, torch.where(dual, cap, ratio))
    )
    weight = torch.where(high | low | dual | ~tokens.inside, 0.0, ratio)
    return Decision(
        bounded * advantages, weight, high, low, further={"update/clip_frac_dual": dual}
    )


@gate
def ppo_clip(
    tokens: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, clip_dual: float | None = None
) -> Decision:
    """Clipped surrogate of PPO, shared by GRPO and DAPO.

    S = min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A);   with clip_dual c, where A < 0:
        max(S, c * A)
    w = 0 if (A > 0 and r > 1 + clip_high) or (A < 0 and (r < 1 - clip_low or r > c)), else r

    The gradient is zero past the bound in the favored direction only: a token that moved the wrong
    way is pulled back. At a bound itself the token is not clipped.
    Source: arXiv:1707.06347, Eq. 7; separate bounds: DAPO, arXiv:2503.14476; dual clip, typically
    3: arXiv:1912.09729.
    """
    return _clipped(tokens, clip_low, clip_high, clip_dual)


@gate
def gspo(tokens: Tokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Decision:
    """Group sequence policy optimization: `ppo_clip` on the row's geometric-mean ratio.

    s = exp(mean over the row of (logprobs - old_logprobs)), carried by every token of the row with
    its own gradient; a row is clipped as a whole. With one advantage per row and `sequence_mean`
    weights this is GSPO's gradient.
    Source: arXiv:2507.18071, Eq. 5 and 14. The bounds are two orders of magnitude smaller than
    PPO's.
    """
    mean = geometric_level(tokens.log_ratio, tokens.mask)
    return _clipped(
        tokens._replace(log_ratio=mean, ratio=mean.exp(), inside=tokens.mask), clip_low, clip_high
    )


@gate
def cispo(tokens: Tokens, *, weight_min: float = 0.0, weight_max: float = 5.0) -> Decision:
    """Clipped importance weights: the ratio is capped as a weight, and no token loses its gradient.

    w = clip(r, weight_min, weight_max), detached;  S = w * A * logprobs.
    Source: CISPO, MiniMax-M1, arXiv:2506.13585, Eq. 4. The bounds are absolute, not offsets from 1;
    the paper's lower bound is inactive, hence 0.
    """
    weight, live = tokens.ratio.clamp(weight_min, weight_max), tokens.advantages != 0
    high, low = live & (tokens.ratio > weight_max), live & (tokens.ratio < weight_min)
    return Decision(weight * tokens.advantages * tokens.now, weight, high, low)


def _sigmoid_gate(tokens: Tokens, positive: float, negative: float) -> Decision:
    tau = torch.full_like(tokens.ratio, negative).masked_fill(tokens.advantages > 0, positive)
    sigma = torch.sigmoid(tau * (tokens.ratio - 1))
    weight = torch.where(tokens.inside, tokens.ratio * 4 * sigma * (1 - sigma), 0.0)
    return Decision(4 / tau * sigma * tokens.advantages, weight)


@gate
def sapo(tokens: Tokens, *, sapo_positive: float = 1.0, sapo_negative: float = 1.05) -> Decision:
    """Soft adaptive gate: a sigmoid instead of a cliff; the weight decays smoothly and never
    reaches zero.

    S = 4 / tau * sigmoid(tau * (r - 1)) * A;
        w = r * 4 * sigma * (1 - sigma) = r * sech(tau * (r - 1) / 2)^2
    tau = sapo_positive where A > 0, else sapo_negative: larger, so that negative tokens fade
    sooner.
    Source: SAPO, arXiv:2511.20347. The value at r = 1 is 2 * A / tau: not comparable with PPO's.
    """
    return _sigmoid_gate(tokens, sapo_positive, sapo_negative)


@gate
def rgpo_like(tokens: Tokens, *, gate_sharpness: float = 1.0) -> Decision:
    """Rejection gating with a sigmoid acceptance: S = 4 / k * sigmoid(k * (r - 1)) * A, k =
    gate_sharpness, both signs.

    Source: after RGPO, arXiv:2604.14895. The paper's exact gate and its second gate on the
    reference ratio could not be verified, hence the name; no guarantee of the paper is claimed.
    """
    return _sigmoid_gate(tokens, gate_sharpness, gate_sharpness)


def _divergence_gate(
    tokens: Tokens, divergence: Tensor, dppo_low: float, dppo_high: float, weight_max: float
) -> Decision:
    """w = min(r, weight_max), 0 where the token moved the favored way and its divergence is above
    the bound.
    """
    high = (tokens.advantages > 0) & (tokens.log_ratio > 0) & (divergence > dppo_high)
    low = (tokens.advantages < 0) & (tokens.log_ratio < 0) & (divergence > dppo_low)
    weight = torch.where(high | low, 0.0, tokens.ratio.clamp(max=weight_max))
    value = weight * tokens.advantages * tokens.now
    return Decision(value, weight, high, low, further={"update/divergence": divergence})


@gate
def dppo_tv(
    tokens: Tokens, *, dppo_low: float = 0.2, dppo_high: float = 0.2, weight_max: float = 20.0
) -> Decision:
    """Divergence PPO, total variation of {sampled token, all others}: bounds the change of
    probability, not the ratio.

    M = 0 if (A > 0 and p - mu > dppo_high) or (A < 0 and mu - p > dppo_low);
        w = min(p / mu, weight_max) * M

    A rare token may triple, 0.01 to 0.03, where PPO would clip it; 0.5 to 0.75 is stopped.
    `old_logprobs` are the sampler's (denominator "rollout"), so the mismatch is inside the ratio
    and takes no further correction.

    Source: DPPO, arXiv:2602.04879. Bounds of prime-rl; the paper's were not verified.
    """
    moved = (tokens.now.exp() - (tokens.now - tokens.log_ratio).exp()).abs()
    return _divergence_gate(tokens, moved, dppo_low, dppo_high, weight_max)


@gate
def dppo_kl(
    tokens: Tokens, *, dppo_low: float = 0.2, dppo_high: float = 0.2, weight_max: float = 20.0
) -> Decision:
    """Divergence PPO with the KL of {sampled token, all others}: K = mu log(mu/p) + (1-mu)
    log((1-mu)/(1-p)).

    As `dppo_tv` with K above the bound in place of the change of probability; the two disagree near
    probability 1.
    Source: DPPO, arXiv:2602.04879.
    """
    log_mu = tokens.now - tokens.log_ratio
    others, others_mu = ((-x.expm1()).clamp(min=TINY) for x in (tokens.now, log_mu))
    divergence = -log_mu.exp() * tokens.log_ratio + others_mu * (others_mu / others).log()
    return _divergence_gate(tokens, divergence, dppo_low, dppo_high, weight_max)


def _buckets(
    tokens: Tokens, *, top_logprobs: Tensor, old_top_logprobs: Tensor, sampled_in_top: Tensor
) -> tuple[Tensor, Tensor]:
    """Probabilities of {top K, the sampled token if not among them, the rest}, [B, T, K + 2]: now
    and when sampled.
    """

    def buckets(own: Tensor, top: Tensor) -> Tensor:
        listed = fill_masked(top.detach(), tokens.mask[..., None], -torch.inf).exp()
        known = torch.cat([listed, torch.where(sampled_in_top, 0.0, own.exp())[..., None]], dim=-1)
        return torch.cat([known, (1 - known.sum(-1, keepdim=True)).clamp(min=0)], dim=-1)

    return buckets(tokens.now, top_logprobs), buckets(
        tokens.now - tokens.log_ratio, old_top_logprobs
    )


@gate
def dppo_topk_tv(
    tokens: Tokens,
    *,
    dppo_low: float = 0.2,
    dppo_high: float = 0.2,
    weight_max: float = 20.0,
    **top: Tensor,
) -> Decision:
    """`dppo_tv` with the total variation over the sampler's top K tokens, the sampled one, and the
    rest.

    Takes top_logprobs, old_top_logprobs and sampled_in_top.
    Source: DPPO, arXiv:2602.04879, whose authors report no gain over the two-bucket form.
    """
    p, mu = _buckets(tokens, **top)
    return _divergence_gate(tokens, (p - mu).abs().sum(-1) / 2, dppo_low, dppo_high, weight_max)


@gate
def dppo_topk_kl(
    tokens: Tokens,
    *,
    dppo_low: float = 0.2,
    dppo_high: float = 0.2,
    weight_max: float = 20.0,
    **top: Tensor,
) -> Decision:
    """`dppo_kl` with KL(sampler || current) over the same buckets as `dppo_topk_tv`."""
    p, mu = _buckets(tokens, **top)
    divergence = (mu * (mu.clamp(min=TINY) / p.clamp(min=TINY)).log()).sum(-1)
    return _divergence_gate(tokens, divergence, dppo_low, dppo_high, weight_max)


@gate
def vespo(tokens: Tokens) -> Decision:
    """Soft weight of the whole response: w = phi(W), detached; phi(W) = e^l W^k e^(-l W), phi(1) =
    1, maximum at k / l.

    (k, l) = (2, 3) where A >= 0 and (3, 2) where A < 0. W is the ratio this gate is given: the
    product over the row against the sampler (ratio "sequence", denominator "rollout"), its
    logarithm kept in [log 1e-8, 20].

    Source: VESPO, arXiv:2602.10693. W is a true product: on long rows a small drift drives phi to
    0.
    """
    log_w = tokens.log_ratio.clamp(min=MIN_LOG_PRODUCT)
    positive = tokens.advantages >= 0
    k, decay = (
        torch.full_like(log_w, x).masked_fill(positive, y) for x, y in ((3.0, 2.0), (2.0, 3.0))
    )
    weight = (decay + k * log_w - decay * log_w.exp()).exp()
    return Decision(weight * tokens.advantages * tokens.now, weight)


@gate
def proximal(tokens: Tokens, *, proximal_coeff: float = 1e-3) -> Decision:
    """Policy gradient with a quadratic pull to the old policy: S = A * logprobs - proximal_coeff /
    2 * (log r)^2.

    dS / d logprobs = A - proximal_coeff * log r. No clip; right off-policy too, with the sampler as
    denominator.
    Source: Kimi k1.5, arXiv:2501.12599; DRO, arXiv:2405.19107.
    """
    pull = proximal_coeff * tokens.log_ratio
    value = tokens.advantages * tokens.now - pull * tokens.log_ratio / 2
    slope = tokens.advantages - torch.where(tokens.inside, pull, 0.0)
    weight = torch.where(tokens.advantages == 0, 1.0, slope / tokens.advantages)
    return Decision(value, weight, push=slope * tokens.own_push)


def _clipped_geometric_mean(tokens: Tokens, clip_low: float, clip_high: float) -> Decision:
    high = (tokens.advantages > 0) & (tokens.log_ratio > clip_high)
    low = (tokens.advantages < 0) & (tokens.log_ratio < -clip_low)
    kept = torch.where(high, clip_high, torch.where(low, -clip_low, tokens.log_ratio))
    ratio = geometric_level(kept, tokens.mask).exp()
    weight = torch.where(high | low | ~tokens.inside, 0.0, ratio)
    return Decision(ratio * tokens.advantages, weight, high, low)


@gate
def gmpo(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Decision:
    """Geometric-mean policy optimization: the row's geometric mean of clipped token ratios.

    x~ = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0;
        M = exp(mean over the row of x~)
    w = M for tokens that were not clipped, else 0. With `sequence_mean` weights this is the
    gradient of -M * A.
    Source: GMPO, arXiv:2507.20673.
    """
    return _clipped_geometric_mean(tokens, clip_low, clip_high)


@gate
def rspo(
    tokens: Tokens, *, router_shift: Tensor, clip_low: float = 0.4, clip_high: float = 0.4
) -> Decision:
    """Router-shift policy optimization: each token's ratio is scaled down by how far its experts
    moved, then `gmpo`.

    r~ = r * gamma, gamma = max(exp(-Delta), gamma_min) from `selections.router_shift`, detached:
    with gradient, training collapses (paper). The bounds are on log r~.
    Source: RSPO, arXiv:2510.23027.
    """
    require_same_shape(mask=tokens.mask, router_shift=router_shift)
    shifted = tokens.log_ratio + fill_masked(router_shift.detach(), tokens.mask, 1.0).log()
    return _clipped_geometric_mean(tokens._replace(log_ratio=shifted), clip_low, clip_high)


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
    """Simple pass@k optimization: right answers lift the other top candidates too, wrong top-1
    tokens fall harder.

    On `explore` tokens:
      A > 0:
          r~ = (1 - alpha) * r + alpha / K * sum_k sg(r / r_k) * r_k: the value of r, its gradient
              shared with the top K candidates (a sampled token among them gets both parts)
      A < 0 and the sampled token was the most likely one:  A * simko_boost
    then PPO's clip. `top_logprobs` carry a gradient here; `old_top_logprobs` cancel, only their
    shape is checked.
    Source: SimKO, arXiv:2510.14807, and the authors' code. It is not an entropy bonus.
    """
    require_same_shape(mask=tokens.mask, explore=explore, sampled_is_top=sampled_is_top)
    require_same_shape(top_logprobs=top_logprobs, old_top_logprobs=old_top_logprobs)
    boosted = explore & sampled_is_top & (tokens.advantages < 0)
    advantages = torch.where(boosted, simko_boost * tokens.advantages, tokens.advantages)
    clip = _clipped(tokens._replace(advantages=advantages), clip_low, clip_high)
    shares = explore & (tokens.advantages > 0)
    alpha = simko_alpha * shares.to(tokens.ratio.dtype)
    top = fill_masked(top_logprobs, tokens.mask[..., None])
    push = (
        clip.weight
        * advantages
        * ((1 - alpha) * tokens.own_push + alpha * (top - top.detach()).mean(-1))
    )
    return clip._replace(push=push, further={"update/simko_frac": shares | boosted})


@gate
def clip_cov(
    tokens: Tokens, *, selected: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> Decision:
    """PPO's clip without gradient on `selected`: a few tokens whose logprob and advantage covary
    strongly.

    Source: Clip-Cov, arXiv:2505.22617. The choice is made over the whole step
    (`selections.select_clip_cov`).
    """
    clip = _clipped(tokens, clip_low, clip_high)
    weight = torch.where(selected, 0.0, clip.weight)
    return clip._replace(weight=weight, further={**clip.further, "update/selected_frac": selected})


@gate
def kl_cov(
    tokens: Tokens,
    *,
    selected: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_cov_coeff: float = 1.0,
) -> Decision:
    """PPO's clip, and on `selected` tokens, of the largest covariance, a penalty kl_cov_coeff *
    |log r|.

    Source: KL-Cov, arXiv:2505.22617; coefficient 1 in the paper, 0.1 in verl. The choice is made
    over the whole step (`selections.select_kl_cov`).
    """
    clip = _clipped(tokens, clip_low, clip_high)
    coeff = kl_cov_coeff * (selected & tokens.inside).to(tokens.ratio.dtype)
    slope = clip.weight * tokens.advantages - coeff * tokens.log_ratio.sign()
    value, further = (
        clip.value - coeff * tokens.log_ratio.abs(),
        {**clip.further, "update/selected_frac": selected},
    )
    return clip._replace(value=value, push=slope * tokens.own_push, further=further)


# Row.gate -> the function; its numbers are the train fields of PARAMETERS. A gate that reads
# further tensors takes them by keyword; its needs are in algorithms.NEEDS.
GATES: dict[str, Callable[..., LossAndMetrics]] = {
    "policy_gradient": policy_gradient,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "sapo": sapo,
    "rgpo_like": rgpo_like,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dppo_topk_tv": dppo_topk_tv,
    "dppo_topk_kl": dppo_topk_kl,
    "vespo": vespo,
    "proximal": proximal,
    "gmpo": gmpo,
    "rspo": rspo,
    "simko": simko,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
