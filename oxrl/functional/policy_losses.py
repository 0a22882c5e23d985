"""Further policy losses, and `GATES`, which names them all.

Every one reads: clean tokens, what is decided about them, loss. Its tensors and what it returns are
those of every gate (gates.py); its own arguments come by keyword and are described where they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oxrl.functional.advantages import suffix_scan
from oxrl.functional.divergences import teacher_divergence
from oxrl.functional.gates import CLIPPED_GATES, Decision, Gate, Tokens, clean, clipped, finish
from oxrl.functional.masks import LossAndMetrics, OptionalTensor, fill_masked, require_same_shape
from oxrl.functional.ratios import geometric_level, sequence_level
from oxrl.tables.numbers import (
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOW,
    DPPO_HIGH,
    DPPO_KL_HIGH,
    DPPO_KL_LOW,
    DPPO_LOW,
    DPPO_WEIGHT_MAX,
    DRO_COEFF,
    DRPO_DELTA,
    GATE_SHARPNESS,
    GMPO_CLIP_HIGH,
    GMPO_CLIP_LOW,
    INFLUENCE_HALF_LIFE,
    INFLUENCE_RANGE,
    INFLUENCE_RATIO_MAX,
    KL_COV_COEFF,
    PROXIMAL_COEFF,
    SAPO_NEGATIVE,
    SAPO_POSITIVE,
    SIMKO_ALPHA,
    SIMKO_BOOST,
    SPO,
    WEIGHT_MAX,
    WEIGHT_MIN,
)

MIN_LOG_PRODUCT = math.log(1e-8)
TINY = 1e-8


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    weight_min: float = WEIGHT_MIN.default,
    weight_max: float = WEIGHT_MAX.default,
) -> LossAndMetrics:
    """Clipped importance weights: the ratio is capped as a weight, and no token loses its gradient.

    w = clip(r, weight_min, weight_max), detached;  S = w * A * logprobs

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        weight_min, weight_max: absolute bounds of w, not offsets from 1; the paper's lower bound is
            inactive, hence 0.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, Eq. 4.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    live = tokens.advantages != 0
    weight = tokens.ratio.clamp(weight_min, weight_max)
    value = weight * tokens.advantages * tokens.now
    high = live & (tokens.ratio > weight_max)
    low = live & (tokens.ratio < weight_min)
    decision = Decision(value, weight, high, low)
    return finish(tokens, decision, loss_weights, correction)


def _sigmoid_gate(tokens: Tokens, positive: float, negative: float) -> Decision:
    """Decide as `sapo` does, with the sharpness `positive` where A > 0 and `negative` elsewhere."""
    tau = torch.full_like(tokens.ratio, negative).masked_fill(tokens.advantages > 0, positive)
    sigma = torch.sigmoid(tau * (tokens.ratio - 1))
    weight = torch.where(tokens.inside, tokens.ratio * 4 * sigma * (1 - sigma), 0.0)
    return Decision(4 / tau * sigma * tokens.advantages, weight)


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    sapo_positive: float = SAPO_POSITIVE.default,
    sapo_negative: float = SAPO_NEGATIVE.default,
) -> LossAndMetrics:
    """Soft adaptive gate: a sigmoid instead of a cliff, so that a weight fades and is never zero.

    S = 4 / tau * sigmoid(tau * (r - 1)) * A
    w = r * 4 * sigma * (1 - sigma) = r * sech(tau * (r - 1) / 2)^2

    The value at r = 1 is 2 * A / tau: not comparable with PPO's.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        sapo_positive: tau where A > 0.
        sapo_negative: tau elsewhere; larger, so that negative tokens fade sooner.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: SAPO, arXiv:2511.20347.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    decision = _sigmoid_gate(tokens, sapo_positive, sapo_negative)
    return finish(tokens, decision, loss_weights, correction)


def rgpo_like(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    gate_sharpness: float = GATE_SHARPNESS.default,
) -> LossAndMetrics:
    """Rejection gating with a sigmoid acceptance: `sapo` with one sharpness for both signs.

    S = 4 / k * sigmoid(k * (r - 1)) * A

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        gate_sharpness: k.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: after RGPO, arXiv:2604.14895. The paper's exact gate and its second gate on the
    reference ratio could not be verified, hence the name; no guarantee of the paper is claimed.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    decision = _sigmoid_gate(tokens, gate_sharpness, gate_sharpness)
    return finish(tokens, decision, loss_weights, correction)


def _divergence_gate(
    tokens: Tokens, divergence: Tensor, dppo_low: float, dppo_high: float, weight_max: float
) -> Decision:
    """w = min(r, weight_max), or 0 past the divergence's bound in the favored direction."""
    rising = tokens.log_ratio > 0
    falling = tokens.log_ratio < 0
    high = (tokens.advantages > 0) & rising & (divergence > dppo_high)
    low = (tokens.advantages < 0) & falling & (divergence > dppo_low)
    weight = torch.where(high | low, 0.0, tokens.ratio.clamp(max=weight_max))
    value = weight * tokens.advantages * tokens.now
    return Decision(value, weight, high, low, further={"update/divergence": divergence})


def dppo_tv(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    dppo_low: float = DPPO_LOW.default,
    dppo_high: float = DPPO_HIGH.default,
    weight_max: float = DPPO_WEIGHT_MAX.default,
) -> LossAndMetrics:
    """Divergence PPO by total variation: bounds the change of probability, not the ratio.

    M = 0 if (A > 0 and p - mu > dppo_high) or (A < 0 and mu - p > dppo_low)
    w = min(p / mu, weight_max) * M;  S = w * A * logprobs

    The total variation is that of {sampled token, all others}. A rare token may triple, 0.01 to
    0.03, where PPO would clip it; 0.5 to 0.75 is stopped. `old_logprobs` are the sampler's
    (denominator "rollout"), so the mismatch is inside the ratio and takes no further correction.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        dppo_low, dppo_high: largest fall and rise of the probability in the favored direction.
        weight_max: largest weight of a token.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: DPPO, arXiv:2602.04879. The bounds are its authors', in verl.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    divergence = (tokens.now.exp() - tokens.old.exp()).abs()
    decision = _divergence_gate(tokens, divergence, dppo_low, dppo_high, weight_max)
    return finish(tokens, decision, loss_weights, correction)


def dppo_kl(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    dppo_low: float = DPPO_KL_LOW.default,
    dppo_high: float = DPPO_KL_HIGH.default,
    weight_max: float = DPPO_WEIGHT_MAX.default,
) -> LossAndMetrics:
    """Divergence PPO by the KL of {sampled token, all others}: `dppo_tv` with another distance.

    K = mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p))

    K above the bound takes the place of the change of probability; the two disagree near
    probability 1.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        dppo_low, dppo_high: largest K, in nats, of a token that fell or rose as favored.
        weight_max: largest weight of a token.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: DPPO, arXiv:2602.04879.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    log_mu = tokens.old
    others = (-tokens.now.expm1()).clamp(min=TINY)
    others_mu = (-log_mu.expm1()).clamp(min=TINY)
    of_others = others_mu * (others_mu / others).log()
    divergence = -log_mu.exp() * tokens.log_ratio + of_others
    decision = _divergence_gate(tokens, divergence, dppo_low, dppo_high, weight_max)
    return finish(tokens, decision, loss_weights, correction)


def _buckets(tokens: Tokens, own: Tensor, top: Tensor, sampled_in_top: Tensor) -> Tensor:
    """Probabilities [B, T, K + 2] of the top K, the sampled token if not among them, the rest."""
    listed = fill_masked(top.detach(), tokens.mask[..., None], -torch.inf).exp()
    sampled = torch.where(sampled_in_top, 0.0, own.exp())[..., None]
    known = torch.cat([listed, sampled], dim=-1)
    rest = (1 - known.sum(-1, keepdim=True)).clamp(min=0)
    return torch.cat([known, rest], dim=-1)


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
    correction: OptionalTensor = None,
    dppo_low: float = DPPO_LOW.default,
    dppo_high: float = DPPO_HIGH.default,
    weight_max: float = DPPO_WEIGHT_MAX.default,
) -> LossAndMetrics:
    """`dppo_tv` over the sampler's top K tokens, the sampled one, and the rest.

    D = 1/2 * sum over these buckets of |p - mu|

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        top_logprobs, old_top_logprobs: [B, T, K] nats of the sampler's K most likely tokens, now
            and when sampled; detached here.
        sampled_in_top: [B, T] bool, the sampled token is among them.
        dppo_low, dppo_high: largest D of a token that fell or rose as favored.
        weight_max: largest weight of a token.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: DPPO, arXiv:2602.04879, whose authors report no gain over the two-bucket form.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    p = _buckets(tokens, tokens.now, top_logprobs, sampled_in_top)
    mu = _buckets(tokens, tokens.old, old_top_logprobs, sampled_in_top)
    divergence = (p - mu).abs().sum(-1) / 2
    decision = _divergence_gate(tokens, divergence, dppo_low, dppo_high, weight_max)
    return finish(tokens, decision, loss_weights, correction)


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
    correction: OptionalTensor = None,
    dppo_low: float = DPPO_KL_LOW.default,
    dppo_high: float = DPPO_KL_HIGH.default,
    weight_max: float = DPPO_WEIGHT_MAX.default,
) -> LossAndMetrics:
    """`dppo_kl` over the sampler's top K tokens, the sampled one, and the rest.

    D = KL(sampler || current) = sum over these buckets of mu log(mu / p)

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        top_logprobs, old_top_logprobs, sampled_in_top: as in `dppo_topk_tv`.
        dppo_low, dppo_high: largest D, in nats, of a token that fell or rose as favored.
        weight_max: largest weight of a token.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: DPPO, arXiv:2602.04879.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    p = _buckets(tokens, tokens.now, top_logprobs, sampled_in_top)
    mu = _buckets(tokens, tokens.old, old_top_logprobs, sampled_in_top)
    log_ratios = (mu.clamp(min=TINY) / p.clamp(min=TINY)).log()
    divergence = (mu * log_ratios).sum(-1)
    decision = _divergence_gate(tokens, divergence, dppo_low, dppo_high, weight_max)
    return finish(tokens, decision, loss_weights, correction)


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
) -> LossAndMetrics:
    """Soft weight of the whole response, largest near ratio 1 and fading on either side.

    w = phi(W), detached;  phi(W) = e^l W^k e^(-l W);  S = w * A * logprobs

    phi(1) = 1, and phi is largest at k / l. (k, l) = (2, 3) where A >= 0 and (3, 2) where A < 0. W
    is the ratio this gate is given: the product over the row against the sampler (ratio "sequence",
    denominator "rollout"), its logarithm kept in [log 1e-8, 20].

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: VESPO, arXiv:2602.10693. W is a true product: on long rows a small drift drives phi to
    0.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    log_w = tokens.log_ratio.clamp(min=MIN_LOG_PRODUCT)
    positive = tokens.advantages >= 0
    k = torch.full_like(log_w, 3.0).masked_fill(positive, 2.0)
    decay = torch.full_like(log_w, 2.0).masked_fill(positive, 3.0)
    weight = (decay + k * log_w - decay * log_w.exp()).exp()
    decision = Decision(weight * tokens.advantages * tokens.now, weight)
    return finish(tokens, decision, loss_weights, correction)


def proximal(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    proximal_coeff: float = PROXIMAL_COEFF.default,
) -> LossAndMetrics:
    """Policy gradient with a quadratic pull of the whole response to the old policy, and no clip.

    S summed over a row = A * sum_t logprobs_t - proximal_coeff / 2 * X^2,  X = sum_t log r_t
    dS / d logprobs_t = A - proximal_coeff * X

    X is the log-ratio of the response, not of a token: with `sequence_sum` weights this is the
    source's gradient. It is not clamped, since nothing here takes its exponential.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        proximal_coeff: strength of the pull, tau.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: Kimi k1.5, arXiv:2501.12599, Eq. 3; DRO, arXiv:2405.19107.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    log_ratio = tokens.now - fill_masked(old_logprobs.detach(), mask)
    pull = proximal_coeff * sequence_level(log_ratio, mask)
    # X^2 is the sum over the row of log r_t * X.
    return finish(tokens, _pulled(tokens, log_ratio, pull), loss_weights, correction)


def _pulled(tokens: Tokens, log_ratio: Tensor, pull: Tensor) -> Decision:
    """S = A * logprobs - pull * log r / 2, whose slope is A - pull; no weight where A is 0."""
    value = tokens.advantages * tokens.now - pull * log_ratio / 2
    slope = tokens.advantages - pull
    return Decision(value, slope / tokens.advantages, push=slope * tokens.own_push)


def dro(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    proximal_coeff: float = DRO_COEFF.default,
) -> LossAndMetrics:
    """Policy gradient with a quadratic pull of every token to the old policy, and no clip.

    S = A * logprobs - proximal_coeff / 2 * (log r)^2
    dS / d logprobs = A - proximal_coeff * log r

    `proximal` token by token: a token comes to rest where log r = A / proximal_coeff.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        proximal_coeff: strength of the pull; 0 is `policy_gradient`.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: DRO, arXiv:2405.19107, per token as in verl (verl/trainer/ppo/core_algos.py,
    compute_policy_loss_dro).
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    log_ratio = tokens.now - fill_masked(old_logprobs.detach(), mask)
    decision = _pulled(tokens, log_ratio, proximal_coeff * log_ratio)
    return finish(tokens, decision, loss_weights, correction)


def drpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    drpo_delta: float = DRPO_DELTA.default,
    spo: bool = SPO.default,
) -> LossAndMetrics:
    """Divergence-regularized policy optimization: a trust region on the change of probability whose
    weight falls in a straight line, through 0 at its bound, instead of a mask.

    S = r * A - |A| * mu * (r - 1)^2 / (2 * drpo_delta),  r = p / mu
    w = r * (1 - sign(A) * (p - mu) / drpo_delta)

    A token that has moved as favored by more than the bound is pulled back, one that has moved the
    wrong way weighs more. `old_logprobs` are the sampler's (denominator "rollout"). With `spo`, mu
    is left out of S, and r - 1 takes the place of p - mu.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        drpo_delta: the bound. Above 1 it bounds nothing, since |p - mu| <= 1: with the authors'
            12.5 the weight stays within 8 % of r. Towards infinity it is `importance_sampling`.
        spo: bound the ratio, as simple policy optimization does, not the probability.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: DRPO, arXiv:2606.09821; Tencent-Hunyuan/UniRL, unirl/algorithms/drpo.py. Another method
    of this name, arXiv:2510.04474, decouples rewards, and is not meant.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    distance = tokens.ratio - 1
    moved = distance if spo else tokens.old.exp() * distance
    favored = tokens.advantages.sign() * moved
    pulled = tokens.advantages.abs() * moved * distance / (2 * drpo_delta)
    decision = Decision(
        value=tokens.ratio * tokens.advantages - pulled,
        weight=torch.where(tokens.inside, tokens.ratio * (1 - favored / drpo_delta), 0.0),
        high=(tokens.advantages > 0) & (moved > drpo_delta),
        low=(tokens.advantages < 0) & (moved < -drpo_delta),
        further={"update/divergence": moved.abs()},
    )
    return finish(tokens, decision, loss_weights, correction)


def fipo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    clip_low: float = CLIP_LOW.default,
    clip_high: float = CLIP_HIGH.default,
    clip_dual: float | None = CLIP_DUAL.default,
    influence_range: float = INFLUENCE_RANGE.default,
    influence_half_life: float = INFLUENCE_HALF_LIFE.default,
    influence_ratio_max: float = INFLUENCE_RATIO_MAX.default,
) -> LossAndMetrics:
    """Future-KL influenced policy optimization: PPO's clip, with more weight on tokens after which
    the response has become likelier.

    F_t = sum_{k >= t} gamma^(k - t) * log r_k,  gamma = 2^(-1 / influence_half_life)
    f_t = clip(exp(F_t), 1, 1 + influence_range), and 1 where A < 0 and r > influence_ratio_max
    S, w = f * those of `ppo_clip`; f is detached

    k goes over the positions of the row; tokens that are not trained, or whose r is above
    clip_dual, add nothing. In the first update on a batch F is 0, and this is `ppo_clip`.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        clip_low, clip_high, clip_dual: as of `ppo_clip`.
        influence_range: how far f may exceed 1.
        influence_half_life: positions over which gamma falls to one half.
        influence_ratio_max: the largest r of a token with A < 0 that f may enlarge.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: FIPO, arXiv:2603.19835; modelscope/ms-swift, swift/megatron/trainers/grpo_trainer.py,
    _compute_fipo_influence with fipo_clip_high_only.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    clip = clipped(tokens, clip_low, clip_high, clip_dual)
    counted = tokens.log_ratio
    if clip_dual is not None:
        counted = counted.masked_fill(tokens.ratio > clip_dual, 0.0)
    gamma = counted.new_full((1,), 2 ** (-1 / influence_half_life))
    influence = suffix_scan(counted, gamma).exp().clamp(1, 1 + influence_range)
    unsafe = (tokens.advantages < 0) & (tokens.ratio > influence_ratio_max)
    influence = influence.masked_fill(unsafe, 1.0)
    further = {**clip.further, "update/influence": influence}
    value = influence * clip.value
    decision = clip._replace(value=value, weight=influence * clip.weight, further=further)
    return finish(tokens, decision, loss_weights, correction)


def _clipped_geometric_mean(tokens: Tokens, clip_low: float, clip_high: float) -> Decision:
    """Decide for every token as `gmpo` does: its value, its weight, and what is clipped."""
    log_ratio = tokens.log_ratio
    high = (tokens.advantages > 0) & (log_ratio > clip_high)
    low = (tokens.advantages < 0) & (log_ratio < -clip_low)
    bounded = torch.where(low, -clip_low, log_ratio)
    kept = torch.where(high, clip_high, bounded)
    ratio = geometric_level(kept, tokens.mask).exp()
    weight = torch.where(high | low | ~tokens.inside, 0.0, ratio)
    return Decision(ratio * tokens.advantages, weight, high, low)


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    correction: OptionalTensor = None,
    clip_low: float = GMPO_CLIP_LOW.default,
    clip_high: float = GMPO_CLIP_HIGH.default,
) -> LossAndMetrics:
    """Geometric-mean policy optimization: the row's geometric mean of clipped token ratios.

    x~ = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0
    M = exp(mean over the row of x~);  S = M * A
    w = M for tokens that were not clipped, else 0

    With `sequence_mean` weights this is the gradient of -M * A.

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        clip_low, clip_high: bounds of log r, nats.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: GMPO, arXiv:2507.20673.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    decision = _clipped_geometric_mean(tokens, clip_low, clip_high)
    return finish(tokens, decision, loss_weights, correction)


def rspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    router_shift: Tensor,
    correction: OptionalTensor = None,
    clip_low: float = GMPO_CLIP_LOW.default,
    clip_high: float = GMPO_CLIP_HIGH.default,
) -> LossAndMetrics:
    """Router-shift policy optimization: `gmpo` on ratios scaled down by how far the experts moved.

    r~ = r * gamma,  gamma = max(exp(-Delta), gamma_min)

    gamma is `selections.router_shift`, detached: with gradient, training collapses (paper).

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        router_shift: [B, T], gamma.
        clip_low, clip_high: bounds of log r~, nats.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: RSPO, arXiv:2510.23027.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    require_same_shape(mask=mask, router_shift=router_shift)
    gamma = fill_masked(router_shift.detach(), mask, 1.0)
    shifted = tokens._replace(log_ratio=tokens.log_ratio + gamma.log())
    decision = _clipped_geometric_mean(shifted, clip_low, clip_high)
    return finish(tokens, decision, loss_weights, correction)


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
    correction: OptionalTensor = None,
    clip_low: float = CLIP_LOW.default,
    clip_high: float = CLIP_HIGH.default,
    simko_alpha: float = SIMKO_ALPHA.default,
    simko_boost: float = SIMKO_BOOST.default,
) -> LossAndMetrics:
    """Simple pass@k optimization: right answers lift the other top candidates too.

    On `explore` tokens, then PPO's clip; it is not an entropy bonus:
      A > 0:  r~ = (1 - alpha) * r + alpha / K * sum_k sg(r / r_k) * r_k: the value of r, its
              gradient shared with the top K candidates (a sampled token among them gets both parts)
      A < 0 and the sampled token was the most likely one:  A * simko_boost

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        top_logprobs: [B, T, K] nats of the sampler's K most likely tokens now; carries a gradient.
        old_top_logprobs: [B, T, K], when sampled; they cancel, only their shape is checked.
        explore: [B, T] bool, tokens of high entropy (`selections.above_row_quantile`).
        sampled_is_top: [B, T] bool, the sampled token was the most likely one.
        clip_low, clip_high: offsets of r from 1.
        simko_alpha: share of the gradient that goes to the candidates.
        simko_boost: factor on A of wrong top-1 tokens.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: SimKO, arXiv:2510.14807, and the authors' code.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    require_same_shape(mask=mask, explore=explore, sampled_is_top=sampled_is_top)
    require_same_shape(top_logprobs=top_logprobs, old_top_logprobs=old_top_logprobs)
    boosted = explore & sampled_is_top & (tokens.advantages < 0)
    boosted_advantages = torch.where(boosted, simko_boost * tokens.advantages, tokens.advantages)
    clip = clipped(tokens._replace(advantages=boosted_advantages), clip_low, clip_high)
    shares = explore & (tokens.advantages > 0)
    alpha = simko_alpha * shares.to(tokens.ratio.dtype)
    top = fill_masked(top_logprobs, mask[..., None])
    candidates_push = (top - top.detach()).mean(-1)
    shared_push = (1 - alpha) * tokens.own_push + alpha * candidates_push
    push = clip.weight * boosted_advantages * shared_push
    decision = clip._replace(push=push, further={"update/simko_frac": shares | boosted})
    return finish(tokens, decision, loss_weights, correction)


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    selected: Tensor,
    correction: OptionalTensor = None,
    clip_low: float = CLIP_LOW.default,
    clip_high: float = CLIP_HIGH.default,
) -> LossAndMetrics:
    """PPO's clip without a few tokens whose logprob and advantage covary strongly.

    S as in `ppo_clip`, and 0 on `selected` tokens;  w = 0 there

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        selected: [B, T] bool, chosen over the whole step (`selections.select_clip_cov`).
        clip_low, clip_high: offsets of r from 1.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: Clip-Cov, arXiv:2505.22617, and PRIME-RL/Entropy-Mechanism-of-RL
    (verl/trainer/ppo/core_algos.py, compute_policy_loss_clip_cov).
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    clip = clipped(tokens, clip_low, clip_high)
    value = torch.where(selected, 0.0, clip.value)
    weight = torch.where(selected, 0.0, clip.weight)
    further = {**clip.further, "update/selected_frac": selected}
    decision = clip._replace(value=value, weight=weight, further=further)
    return finish(tokens, decision, loss_weights, correction)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_weights: Tensor,
    *,
    selected: Tensor,
    correction: OptionalTensor = None,
    kl_cov_coeff: float = KL_COV_COEFF.default,
) -> LossAndMetrics:
    """The ratio without a clip, and a pull to the old policy on the tokens of largest covariance.

    S = r * A, minus kl_cov_coeff * |log r| on `selected` tokens
    w = r, but for the pull

    Args:
        logprobs, old_logprobs: [B, T] nats, now (with gradient) and of the policy to compare with.
        advantages: [B, T], detached here.
        mask: [B, T] bool, trained tokens; what stands elsewhere, NaN too, is not read.
        loss_weights: [B, T], normalized over the global batch (weights.py).
        correction: [B, T] factor of the policy term, detached here; None: 1 (corrections.py).
        selected: [B, T] bool, chosen over the whole step (`selections.select_kl_cov`).
        kl_cov_coeff: strength of the pull; 1 in the paper, 0.1 in verl.

    Returns:
        Scalar loss, and its metrics.

    Raises:
        ValueError: shapes differ.

    Source: KL-Cov, arXiv:2505.22617, and PRIME-RL/Entropy-Mechanism-of-RL
    (verl/trainer/ppo/core_algos.py, compute_policy_loss_kl_cov): no clip.
    """
    tokens = clean(logprobs, old_logprobs, advantages, mask)
    coeff = kl_cov_coeff * selected.to(tokens.ratio.dtype)
    weight = torch.where(tokens.inside, tokens.ratio, 0.0)
    value = tokens.ratio * tokens.advantages - coeff * tokens.log_ratio.abs()
    slope = weight * tokens.advantages - coeff * tokens.log_ratio.sign()
    further = {"update/selected_frac": selected}
    decision = Decision(value, weight, push=slope * tokens.own_push, further=further)
    return finish(tokens, decision, loss_weights, correction)


# Row.gate -> its loss. The numbers and tensors that it reads by keyword are named by the table of
# algorithms (oxrl/tables).
GATES: dict[str, Gate] = {
    **CLIPPED_GATES,
    "cispo": cispo,
    "sapo": sapo,
    "rgpo_like": rgpo_like,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dppo_topk_tv": dppo_topk_tv,
    "dppo_topk_kl": dppo_topk_kl,
    "vespo": vespo,
    "proximal": proximal,
    "dro": dro,
    "drpo": drpo,
    "fipo": fipo,
    "gmpo": gmpo,
    "rspo": rspo,
    "simko": simko,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "teacher_divergence": teacher_divergence,
}
