"""Every gate once more, as its paper writes it, differentiated by autograd: what the proofs compare
the gates with.

Slow, without clamps or fills, and written apart from the gates: min and clip are torch's, row
ratios are attached.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Numbers = Mapping[str, Any]
# (log r, logprobs, advantages, numbers, signals) of one row's trained tokens -> S per token.
Surrogate = Callable[[Tensor, Tensor, Tensor, Numbers, Mapping[str, Tensor]], Tensor]


def _ppo(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    r = x.exp()
    clipped = r.clamp(1 - n.get("clip_low", 0.2), 1 + n.get("clip_high", 0.2))
    surrogate = torch.minimum(r * a, clipped * a)
    return (
        surrogate
        if n.get("clip_dual") is None
        else torch.where(a < 0, surrogate.maximum(n["clip_dual"] * a), surrogate)
    )


def _cispo(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    return x.exp().clamp(n.get("weight_min", 0.0), n.get("weight_max", 5.0)).detach() * a * logprobs


def _sapo(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    positive = n.get("sapo_positive", n.get("gate_sharpness", 1.0))
    negative = n.get("sapo_negative", n.get("gate_sharpness", 1.05))
    terms = []
    for x_t, a_t in zip(x, a, strict=True):
        tau = positive if a_t > 0 else negative
        terms.append(4 / tau / (1 + torch.exp(-tau * (x_t.exp() - 1))) * a_t)
    return torch.stack(terms)


def _rgpo(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    return _sapo(x, logprobs, a, {"gate_sharpness": n.get("gate_sharpness", 1.0)}, signals)


def _dppo(divergence: Callable[[list[float], list[float]], float]) -> Surrogate:
    """Mask from the divergence of the buckets {top tokens, sampled token, rest}, one token at a
    time.
    """

    def surrogate(
        x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
    ) -> Tensor:
        terms = []
        for t in range(len(x)):
            p, mu = math.exp(logprobs[t].item()), math.exp((logprobs[t] - x[t]).item())
            now, then = [p], [mu]
            if "top_logprobs" in signals:
                top, old_top = (
                    signals["top_logprobs"][t].exp().tolist(),
                    signals["old_top_logprobs"][t].exp().tolist(),
                )
                sampled_apart = not bool(signals["sampled_in_top"][t])
                now, then = top + [p] * sampled_apart, old_top + [mu] * sampled_apart
            now, then = [*now, max(1 - sum(now), 0.0)], [*then, max(1 - sum(then), 0.0)]
            favoured = p > mu if a[t] > 0 else p < mu
            bound = n.get("dppo_high", 0.2) if a[t] > 0 else n.get("dppo_low", 0.2)
            keep = 0.0 if favoured and divergence(now, then) > bound else 1.0
            terms.append(keep * min(p / mu, n.get("weight_max", 20.0)) * a[t] * logprobs[t])
        return torch.stack(terms)

    return surrogate


def _tv(now: list[float], then: list[float]) -> float:
    return sum(abs(p - mu) for p, mu in zip(now, then, strict=True)) / 2


def _kl(now: list[float], then: list[float]) -> float:
    pairs = zip(now, then, strict=True)
    return sum(mu * math.log(max(mu, 1e-8) / max(p, 1e-8)) for p, mu in pairs)


def _vespo(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    terms = []
    for x_t, l_t, a_t in zip(x.tolist(), logprobs, a, strict=True):
        k, decay = (2, 3) if a_t >= 0 else (3, 2)
        w = math.exp(min(max(x_t, math.log(1e-8)), 20))
        terms.append(math.exp(decay) * w**k * math.exp(-decay * w) * a_t * l_t)
    return torch.stack(terms)


def _proximal(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    """arXiv:2501.12599, Eq. 3: the square is of the response's log-ratio, a sum over its tokens;
    here each token holds an equal part of it.
    """
    tau = n.get("proximal_coeff", 0.01)
    return a * logprobs - tau / 2 * x.sum() ** 2 / len(x)


def _gmpo(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    """Row value exp(mean of clipped log r) * A, attached, given to every token of the row."""
    x = x + signals["router_shift"].log() if "router_shift" in signals else x
    low, high = n.get("clip_low", 0.4), n.get("clip_high", 0.4)
    clipped = torch.where(a > 0, x.clamp(max=high), torch.where(a < 0, x.clamp(min=-low), x))
    return clipped.mean().exp() * a


def _simko(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    terms = []
    for t in range(len(x)):
        r, advantage = x[t].exp(), a[t]
        r_top = (signals["top_logprobs"][t] - signals["old_top_logprobs"][t]).exp()
        if signals["explore"][t] and advantage > 0:
            r = 0.99 * r + 0.01 / len(r_top) * sum(
                (x[t].exp() / r_k).detach() * r_k for r_k in r_top
            )
        if signals["explore"][t] and advantage < 0 and signals["sampled_is_top"][t]:
            advantage = 1.1 * advantage
        clipped = r.clamp(1 - n.get("clip_low", 0.2), 1 + n.get("clip_high", 0.2))
        terms.append(torch.minimum(r * advantage, clipped * advantage))
    return torch.stack(terms)


def _clip_cov(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    """arXiv:2505.22617 and PRIME-RL/Entropy-Mechanism-of-RL, verl/trainer/ppo/core_algos.py:
    compute_policy_loss_clip_cov multiplies the loss of the chosen tokens by 0.
    """
    return _ppo(x, logprobs, a, n, signals) * (1 - signals["selected"].double())


def _kl_cov(
    x: Tensor, logprobs: Tensor, a: Tensor, n: Numbers, signals: Mapping[str, Tensor]
) -> Tensor:
    """arXiv:2505.22617 and PRIME-RL/Entropy-Mechanism-of-RL, verl/trainer/ppo/core_algos.py:
    compute_policy_loss_kl_cov has -A * ratio on every token, plus ppo_kl_coef * |log ratio| on the
    chosen ones, and no clip.
    """
    penalty = n.get("kl_cov_coeff", 1.0) * x.abs()
    return x.exp() * a - signals["selected"].double() * penalty


# gate -> its surrogate.
LITERAL: dict[str, Surrogate] = {
    "policy_gradient": lambda x, logprobs, a, n, signals: a * logprobs,
    "importance_sampling": lambda x, logprobs, a, n, signals: x.exp() * a,
    "ppo_clip": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "rgpo_like": _rgpo,
    "dppo_tv": _dppo(_tv),
    "dppo_kl": _dppo(_kl),
    "dppo_topk_tv": _dppo(_tv),
    "dppo_topk_kl": _dppo(_kl),
    "vespo": _vespo,
    "proximal": _proximal,
    "gmpo": _gmpo,
    "rspo": _gmpo,
    "simko": _simko,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}
