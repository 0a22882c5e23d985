"""Policy losses whose trust region is not PPO's interval. Arguments and returns: gates.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oxrl.functional.gates import Decision, Tokens, gate
from oxrl.functional.masks import fill_masked, masked_mean

MIN_LOG_PRODUCT = math.log(1e-8)
TINY = 1e-8


def _sigmoid_gate(tokens: Tokens, positive: float, negative: float) -> Decision:
    tau = torch.full_like(tokens.ratio, negative).masked_fill(tokens.advantages > 0, positive)
    sigma = torch.sigmoid(tau * (tokens.ratio - 1))
    weight = torch.where(tokens.inside, tokens.ratio * 4 * sigma * (1 - sigma), 0.0)
    return Decision(4 / tau * sigma * tokens.advantages, weight)


@gate
def sapo(tokens: Tokens, *, sapo_positive: float = 1.0, sapo_negative: float = 1.05) -> Decision:
    """Soft adaptive gate: a sigmoid instead of a cliff; the weight decays smoothly and never reaches zero.

    S = 4 / tau * sigmoid(tau * (r - 1)) * A;   w = r * 4 * sigma * (1 - sigma) = r * sech(tau * (r - 1) / 2)^2
    tau = sapo_positive where A > 0, else sapo_negative: larger, so that negative tokens fade sooner.
    Source: SAPO, arXiv:2511.20347. The value at r = 1 is 2 * A / tau: not comparable with PPO's.
    """
    return _sigmoid_gate(tokens, sapo_positive, sapo_negative)


@gate
def rgpo_like(tokens: Tokens, *, gate_sharpness: float = 1.0) -> Decision:
    """Rejection gating with a sigmoid acceptance: S = 4 / k * sigmoid(k * (r - 1)) * A, k = gate_sharpness, both signs.

    Source: after RGPO, arXiv:2604.14895. The paper's exact gate and its second gate on the reference ratio could not be
    verified, hence the name; no guarantee of the paper is claimed.
    """
    return _sigmoid_gate(tokens, gate_sharpness, gate_sharpness)


def divergence_gate(
    tokens: Tokens, divergence: Tensor, *, dppo_low: float, dppo_high: float, weight_max: float
) -> Decision:
    """w = min(r, weight_max), 0 where the token moved the favoured way and its divergence is above the bound."""
    high = (tokens.advantages > 0) & (tokens.log_ratio > 0) & (divergence > dppo_high)
    low = (tokens.advantages < 0) & (tokens.log_ratio < 0) & (divergence > dppo_low)
    weight = torch.where(high | low, 0.0, tokens.ratio.clamp(max=weight_max))
    value = weight * tokens.advantages * tokens.now
    return Decision(value, weight, high, low, further={"update/divergence": divergence})


@gate
def dppo_tv(tokens: Tokens, *, dppo_low: float = 0.2, dppo_high: float = 0.2, weight_max: float = 20.0) -> Decision:
    """Divergence PPO, total variation of {sampled token, all others}: bounds the change of probability, not the ratio.

    M = 0 if (A > 0 and p - mu > dppo_high) or (A < 0 and mu - p > dppo_low);   w = min(p / mu, weight_max) * M

    A rare token may triple, 0.01 to 0.03, where PPO would clip it; 0.5 to 0.75 is stopped. `old_logprobs` are the
    sampler's (denominator "rollout"), so the mismatch is inside the ratio and takes no further correction.

    Source: DPPO, arXiv:2602.04879. Bounds of prime-rl; the paper's were not verified.
    """
    moved = (tokens.now.exp() - (tokens.now - tokens.log_ratio).exp()).abs()
    return divergence_gate(tokens, moved, dppo_low=dppo_low, dppo_high=dppo_high, weight_max=weight_max)


@gate
def dppo_kl(tokens: Tokens, *, dppo_low: float = 0.2, dppo_high: float = 0.2, weight_max: float = 20.0) -> Decision:
    """Divergence PPO with the KL of {sampled token, all others}: K = mu log(mu/p) + (1-mu) log((1-mu)/(1-p)).

    As `dppo_tv` with K above the bound in place of the change of probability; the two disagree near probability 1.
    Source: DPPO, arXiv:2602.04879.
    """
    mu = (tokens.now - tokens.log_ratio).exp()
    others, others_mu = ((1 - x).clamp(min=TINY) for x in (tokens.now.exp(), mu))
    divergence = -mu * tokens.log_ratio + (1 - mu) * (others_mu / others).log()
    return divergence_gate(tokens, divergence, dppo_low=dppo_low, dppo_high=dppo_high, weight_max=weight_max)


@gate
def vespo(tokens: Tokens) -> Decision:
    """Soft weight of the whole response: w = phi(W), detached; phi(W) = e^l W^k e^(-l W), phi(1) = 1, maximum at k / l.

    (k, l) = (2, 3) where A >= 0 and (3, 2) where A < 0. W is the ratio this gate is given: the product over the row
    against the sampler (ratio "sequence", denominator "rollout"), its logarithm kept in [log 1e-8, 20].

    Source: VESPO, arXiv:2602.10693. W is a true product: on long rows a small drift drives phi to 0.
    """
    log_w = tokens.log_ratio.clamp(min=MIN_LOG_PRODUCT)
    positive = tokens.advantages >= 0
    k, decay = (torch.full_like(log_w, x).masked_fill(positive, y) for x, y in ((3.0, 2.0), (2.0, 3.0)))
    weight = (decay + k * log_w - decay * log_w.exp()).exp()
    return Decision(weight * tokens.advantages * tokens.now, weight)


@gate
def proximal(tokens: Tokens, *, proximal_coeff: float = 1e-3) -> Decision:
    """Policy gradient with a quadratic pull to the old policy: S = A * logprobs - proximal_coeff / 2 * (log r)^2.

    dS / d logprobs = A - proximal_coeff * log r. No clip; right off-policy too, with the sampler as denominator.
    Source: Kimi k1.5, arXiv:2501.12599; DRO, arXiv:2405.19107.
    """
    pull = proximal_coeff * tokens.log_ratio
    value = tokens.advantages * tokens.now - pull * tokens.log_ratio / 2
    slope = tokens.advantages - torch.where(tokens.inside, pull, 0.0)
    weight = torch.where(tokens.advantages == 0, 1.0, slope / tokens.advantages)
    return Decision(value, weight, push=slope * tokens.own_push)


def clipped_geometric_mean(tokens: Tokens, *, clip_low: float, clip_high: float) -> Decision:
    """The rule of `gmpo` and `rspo`."""
    high = (tokens.advantages > 0) & (tokens.log_ratio > clip_high)
    low = (tokens.advantages < 0) & (tokens.log_ratio < -clip_low)
    kept = torch.where(high, clip_high, torch.where(low, -clip_low, tokens.log_ratio))
    mean = masked_mean(kept, tokens.mask, dim=1)[:, None].expand_as(tokens.mask)
    ratio = fill_masked(mean, tokens.mask).exp()
    weight = torch.where(high | low | ~tokens.inside, 0.0, ratio)
    return Decision(ratio * tokens.advantages, weight, high, low)


@gate
def gmpo(tokens: Tokens, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Decision:
    """Geometric-mean policy optimization: the row's geometric mean of clipped token ratios.

    x~ = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0;   M = exp(mean over the row of x~)
    w = M for tokens that were not clipped, else 0. With `sequence_mean` weights this is the gradient of -M * A.
    Source: GMPO, arXiv:2507.20673.
    """
    return clipped_geometric_mean(tokens, clip_low=clip_low, clip_high=clip_high)
