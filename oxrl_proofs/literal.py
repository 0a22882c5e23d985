"""Every policy-gradient row of the table once more, from its source alone: what the proofs compare
the rows with.

A row is looked up by its name only: which advantage, ratio, gate, correction, KL and mean it has is
said here again, from the paper or its authors' code, named beside it. Slow, without clamps or
fills, one response at a time; min and clip are torch's and differentiated by autograd. Deviations
that a row declares are followed where the source leaves nothing to compare. Nothing of oxRL is
imported; what is here changes when a source says so, never to match the code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oxrl_proofs import literal_batch as batchwise
from oxrl_proofs.literal_batch import (
    Advantage,
    Correction,
    Numbers,
    PerToken,
    Response,
    Responses,
    Weighting,
)

# A response, its advantages [n], numbers, and which of its tokens a rule chose -> S per token [n].
Surrogate = Callable[[Response, Tensor, Numbers, Tensor], Tensor]
Kl = Callable[[Response], Tensor]
Choice = Callable[[Responses, PerToken, Numbers], set[tuple[int, int]]]


# --- ratios: log r per token


def over_old(r: Response) -> Tensor:
    return r.logprobs - r.old


def over_sampler(r: Response) -> Tensor:
    return r.logprobs - r.sampler


def over_interpolated(r: Response) -> Tensor:
    """log pi_theta - log pi_prox, pi_prox between sampler and current policy: A-3PO."""
    part = torch.tensor([batchwise.toward(age) for age in r.ages], dtype=torch.float64)
    proximal = r.sampler + part * (r.logprobs.detach() - r.sampler)
    return r.logprobs - proximal


# --- surrogates


def clipped(x: Tensor, a: Tensor, n: Numbers) -> Tensor:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A): PPO, arXiv:1707.06347, Eq. 7; two bounds:
    DAPO, arXiv:2503.14476, Eq. 8; max(., c A) where A < 0: dual clip, arXiv:1912.09729, Eq. 5.
    """
    r = x.exp()
    surrogate = torch.minimum(r * a, r.clamp(1 - n["clip_low"], 1 + n["clip_high"]) * a)
    if n.get("clip_dual") is None:
        return surrogate
    return torch.where(a < 0, torch.maximum(surrogate, n["clip_dual"] * a), surrogate)


def ppo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """PPO's clip around the policy before the update."""
    return clipped(over_old(r), a, n)


def ppo_interpolated(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """PPO's clip around the interpolated policy: A-3PO, arXiv:2512.06547."""
    return clipped(over_interpolated(r), a, n)


def reinforce(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """A log pi: Williams 1992."""
    return a * r.logprobs


def m2po(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """pi_theta / pi_behav * A, no clip: arXiv:2510.01161; AReaL, docs/en/algorithms/m2po.md."""
    return over_sampler(r).exp() * a


def _cispo(x: Tensor, r: Response, a: Tensor, n: Numbers) -> Tensor:
    weight = x.exp().clamp(n["weight_min"], n["weight_max"]).detach()
    return weight * a * r.logprobs


def cispo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """sg(clip(r)) A log pi: MiniMax-M1, arXiv:2506.13585, Eq. 4 and 5."""
    return _cispo(over_old(r), r, a, n)


def scale_rl(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """sg(min(pi_train / pi_gen, cap)) A log pi: ScaleRL, arXiv:2510.13786."""
    return _cispo(over_sampler(r), r, a, n)


def _soft_gate(x: Tensor, a: Tensor, positive: float, negative: float) -> Tensor:
    terms = []
    for x_t, a_t in zip(x, a, strict=True):
        tau = positive if a_t > 0 else negative
        terms.append(4 / tau / (1 + torch.exp(-tau * (x_t.exp() - 1))) * a_t)
    return torch.stack(terms)


def sapo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """4 / tau * sigmoid(tau (r - 1)) A, tau by the sign of A: SAPO, arXiv:2511.20347, Eq. 6."""
    return _soft_gate(over_old(r), a, n["sapo_positive"], n["sapo_negative"])


def rgpo_like(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """4 / k * sigmoid(k (r - 1)) A: after RGPO, arXiv:2604.14895, whose gate is not known."""
    return _soft_gate(over_old(r), a, n["gate_sharpness"], n["gate_sharpness"])


def kimi(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """A log pi(y) - tau / 2 (log pi(y) / pi_i(y))^2 of the response y, an equal part of it per
    token: Kimi k1.5, arXiv:2501.12599, Eq. 3; horizon-rl/OpenKimi, compute_policy_loss_opmd.
    """
    whole = over_old(r).sum()
    return a * r.logprobs - n["proximal_coeff"] / 2 * whole**2 / len(r)


def dro(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """A log pi - beta / 2 (log r)^2 of every token: verl, compute_policy_loss_dro."""
    return a * r.logprobs - n["proximal_coeff"] / 2 * over_old(r) ** 2


def drpo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """r A - |A| mu (r - 1)^2 / (2 delta), of SPO without mu: DRPO, arXiv:2606.09821, section 3;
    Tencent-Hunyuan/UniRL, _drpo_loss.
    """
    ratio = over_sampler(r).exp()
    trust = torch.ones_like(r.sampler) if n["spo"] else r.sampler.exp()
    return ratio * a - a.abs() * trust * (ratio - 1) ** 2 / (2 * n["drpo_delta"])


def fipo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """PPO's clip times sg(clip(exp(F), 1, 1 + range)), F_t the sum of gamma^(k - t) log r_k from t
    on: FIPO, arXiv:2603.19835; ms-swift, _compute_fipo_influence.
    """
    logs = over_old(r).tolist()
    factors = []
    for t, a_t in enumerate(a.tolist()):
        future = 0.0
        for k in range(t, len(logs)):
            if n["clip_dual"] is None or math.exp(logs[k]) <= n["clip_dual"]:
                distance = r.places[k] - r.places[t]
                future += 2 ** (-distance / n["influence_half_life"]) * logs[k]
        factor = min(max(math.exp(future), 1.0), 1 + n["influence_range"])
        if a_t < 0 and math.exp(logs[t]) > n["influence_ratio_max"]:
            factor = min(max(factor, 0.8), 1.0)
        factors.append(factor)
    return torch.tensor(factors, dtype=torch.float64) * clipped(over_old(r), a, n)


def total_variation(now: Sequence[float], then: Sequence[float]) -> float:
    return sum(abs(p - mu) for p, mu in zip(now, then, strict=True)) / 2


def divergence_from_sampler(now: Sequence[float], then: Sequence[float]) -> float:
    pairs = zip(now, then, strict=True)
    return sum(mu * math.log(max(mu, 1e-8) / max(p, 1e-8)) for p, mu in pairs)


def _with_rest(known: list[float]) -> list[float]:
    return [*known, max(1 - sum(known), 0.0)]


def _buckets(r: Response, t: int) -> tuple[list[float], list[float]]:
    """Probabilities, now and when sampled, of the sampler's top tokens and the sampled one."""
    own = math.exp(r.logprobs[t].item()), math.exp(r.sampler[t].item())
    now, then = r.top[t].exp().tolist(), r.old_top[t].exp().tolist()
    if not r.flags[t]:  # the sampled token is not among the top ones
        now.append(own[0])
        then.append(own[1])
    return now, then


def _dppo(divergence: Callable[[Sequence[float], Sequence[float]], float], top: bool) -> Surrogate:
    """sg(min(r, cap) M) A log pi, M = 0 where the divergence from the sampler is too large and r
    moved as favored: DPPO, arXiv:2602.04879; sail-sg/Stable-RL, verl/trainer/ppo/core_algos.py.
    """

    def surrogate(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
        terms = []
        for t in range(len(r)):
            p, mu = math.exp(r.logprobs[t].item()), math.exp(r.sampler[t].item())
            now, then = _buckets(r, t) if top else ([p], [mu])
            found = divergence(_with_rest(now), _with_rest(then))
            rose_too_far = p > mu and found > n["dppo_high"]
            fell_too_far = p < mu and found > n["dppo_low"]
            dropped = rose_too_far if a[t] > 0 else fell_too_far
            weight = 0.0 if dropped else min(p / mu, n["weight_max"])
            terms.append(weight * a[t] * r.logprobs[t])
        return torch.stack(terms)

    return surrogate


def vespo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """sg(phi(W)) A log pi, W the response's ratio to the sampler, phi(W) = e^l W^k e^(-l W) with
    (k, l) = (2, 3) where A >= 0, else (3, 2); log W in [log 1e-8, 20]: VESPO, arXiv:2602.10693;
    FloyedShen/VESPO, recipe/vespo/code/core_algos.py.
    """
    log_w = min(max(float(over_sampler(r).detach().sum()), math.log(1e-8)), 20.0)
    terms = []
    for a_t, logprob in zip(a, r.logprobs, strict=True):
        k, decay = (2, 3) if a_t >= 0 else (3, 2)
        weight = math.exp(decay + k * log_w - decay * math.exp(log_w))
        terms.append(weight * a_t * logprob)
    return torch.stack(terms)


def _geometric_mean_of_clipped(x: Tensor, a: Tensor, n: Numbers) -> Tensor:
    """exp(mean of sign * min(sign x, clip(sign x))) A with the sign of A."""
    kept = []
    for x_t, a_t in zip(x, a, strict=True):
        if a_t > 0:
            kept.append(torch.minimum(x_t, x_t.clamp(-n["clip_low"], n["clip_high"])))
        elif a_t < 0:
            kept.append(torch.maximum(x_t, x_t.clamp(-n["clip_low"], n["clip_high"])))
        else:
            kept.append(x_t)
    return torch.stack(kept).mean().exp() * a


def gmpo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """GMPO, arXiv:2507.20673, Eq. 3 and Listing 1; callsys/GMPO, train_zero_math_gmpo.py."""
    return _geometric_mean_of_clipped(over_old(r), a, n)


def rspo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """GMPO on r * sg(max(exp(-Delta), 0.8)), Delta the mean over layers and experts of
    |log p - log p_old|: RSPO, arXiv:2510.23027; 0.8 as a third party runs it.
    """
    shift = (r.routers - r.old_routers).abs().mean((-1, -2))
    gamma = (-shift).exp().clamp(min=0.8).detach()
    return _geometric_mean_of_clipped(over_old(r) + gamma.log(), a, n)


def gspo(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """PPO's clip on s = exp(mean log r), attached: GSPO, arXiv:2507.18071, Eq. 5 and 7."""
    return clipped(over_old(r).mean(), a, n)


def gspo_token(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """PPO's clip on sg(s) pi / sg(pi): GSPO-token, arXiv:2507.18071, Eq. 13 and 14."""
    own = r.logprobs - r.logprobs.detach()
    return clipped(over_old(r).mean().detach() + own, a, n)


def simko(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """SimKO, arXiv:2510.14807; CLR-Lab/SimKO, compute_policy_loss_simko: on tokens of high entropy,
    right ones share their ratio with the top K, wrong ones that were the likeliest fall harder.
    """
    explores = batchwise.high_entropy(r, n["explore_quantile"])
    terms = []
    for t in range(len(r)):
        ratio = over_old(r)[t].exp()
        advantage = a[t]
        if explores[t] and advantage > 0:
            of_top = (r.top[t] - r.old_top[t]).exp()
            shared = (ratio.detach() / of_top.detach() * of_top).sum()
            alpha = n["simko_alpha"]
            ratio = (1 - alpha) * ratio + alpha / len(of_top) * shared
        if explores[t] and advantage < 0 and r.flags[t]:
            advantage = n["simko_boost"] * advantage
        bounded = ratio.clamp(1 - n["clip_low"], 1 + n["clip_high"])
        terms.append(torch.minimum(ratio * advantage, bounded * advantage))
    return torch.stack(terms)


def clip_cov(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """PPO's clip, times 0 on the chosen tokens: arXiv:2505.22617, Eq. 12;
    PRIME-RL/Entropy-Mechanism-of-RL, compute_policy_loss_clip_cov.
    """
    return clipped(over_old(r), a, n) * (1 - chosen)


def kl_cov(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """r A without a clip, minus beta |log r| on the chosen tokens: arXiv:2505.22617, Eq. 14;
    PRIME-RL/Entropy-Mechanism-of-RL, compute_policy_loss_kl_cov.
    """
    x = over_old(r)
    return x.exp() * a - n["kl_cov_coeff"] * chosen * x.abs()


def divergence_share(s: Tensor, t: Tensor, alpha: float) -> Tensor:
    """What a token of probabilities s and t adds to KL(T || S) where alpha is 0, to KL(S || T)
    where it is 1, and else to the Jensen-Shannon divergence: GKD, arXiv:2306.13649, section 2.
    """
    if alpha == 0:
        return t * torch.log(t / s)
    if alpha == 1:
        return s * torch.log(s / t)
    m = alpha * t + (1 - alpha) * s
    return alpha * t * torch.log(t / m) + (1 - alpha) * s * torch.log(s / m)


def from_teacher(r: Response, a: Tensor, n: Numbers, chosen: Tensor) -> Tensor:
    """Minus the divergence from the teacher: every candidate's share, and of the sampled token, if
    it is none of them, its own over the probability by which it was sampled; slopes less those
    where both agree, which are those of all tokens, and add up to nothing. oxRL, after GKD,
    arXiv:2306.13649.
    """
    terms = []
    for t in range(len(r)):
        told = ~r.teacher_top[t].isnan()
        ours = [*r.top[t][told]]
        theirs = [*r.teacher_top[t][told]]
        counts = [1.0] * len(ours)
        if not r.flags[t]:
            ours.append(r.logprobs[t])
            theirs.append(torch.tensor(r.teacher[t], dtype=torch.float64))
            counts.append(1 / math.exp(r.sampler[t].item()))
        total = torch.zeros((), dtype=torch.float64)
        for logprob, teacher, count in zip(ours, theirs, counts, strict=True):
            p = logprob.exp()
            slopes = []
            for at in (p.detach(), teacher.exp()):
                s = at.clone().requires_grad_()
                share = divergence_share(s, teacher.exp(), n["divergence_alpha"])
                slopes.append(torch.autograd.grad(share, s)[0])
            value = divergence_share(p.detach(), teacher.exp(), n["divergence_alpha"])
            total = total + count * (value + (slopes[0] - slopes[1]) * (p - p.detach()))
        terms.append(-total)
    return torch.stack(terms)


# --- KL to the reference in the loss, d = log pi - log pi_ref


def k2(r: Response) -> Tensor:
    """d^2 / 2: J. Schulman, "Approximating KL divergence"."""
    return (r.logprobs - r.reference) ** 2 / 2


def k3(r: Response) -> Tensor:
    """exp(-d) - 1 + d: GRPO, arXiv:2402.03300, Eq. 4."""
    d = r.logprobs - r.reference
    return torch.exp(-d) - 1 + d


def k3_straight_through(r: Response) -> Tensor:
    """The value of k3 with the gradient of k2: verl's low_var_kl+."""
    return (k3(r) - k2(r)).detach() + k2(r)


def k3_by_ratio(r: Response) -> Tensor:
    """pi / pi_sampler * k3, both attached: DeepSeek-V3.2, arXiv:2512.02556, unbiased KL."""
    return over_sampler(r).exp() * k3(r)


# --- the rows


@dataclass(frozen=True)
class Paper:
    """What the source of a row says; `kl` is added with kl_coeff, k1 goes into the reward. The
    expectation of a `centered` surrogate under the sampler is subtracted from it.
    """

    source: str
    advantage: Advantage
    surrogate: Surrogate
    average: Weighting
    correction: Correction | None = None
    chosen: Choice | None = None
    kl: Kl | None = None
    kl_in_reward: bool = False
    centered: bool = False


GROUP = Paper(
    "GRPO, arXiv:2402.03300, with the token mean of DAPO, arXiv:2503.14476",
    batchwise.z_score,
    ppo,
    batchwise.mean_of_tokens,
)
REINFORCE = Paper("Williams 1992", batchwise.returns, reinforce, batchwise.mean_of_tokens)


def _like(paper: Paper, source: str, **changes: object) -> Paper:
    return replace(paper, source=source, **changes)


def _papers() -> dict[str, Paper]:
    b = batchwise
    critic = _like(GROUP, "PPO, arXiv:1707.06347, Eq. 7; GAE, arXiv:1506.02438", advantage=b.gae)
    return {
        "ppo": critic,
        "ppo_rlhf": _like(
            critic, "arXiv:1909.08593, Eq. 2; InstructGPT, arXiv:2203.02155", kl_in_reward=True
        ),
        "vapo": _like(critic, "VAPO, arXiv:2504.05118", advantage=b.length_adaptive_gae),
        "reinforce_plus_plus": _like(
            GROUP, "arXiv:2501.03262", advantage=b.whitened_returns, kl_in_reward=True
        ),
        "reinforce_plus_plus_baseline": _like(
            GROUP, "arXiv:2501.03262", advantage=b.centered_then_whitened, kl=k2
        ),
        "decoupled_ppo": _like(
            GROUP, "arXiv:2110.00641; AReaL, arXiv:2505.24298, Eq. 5", correction=b.truncated
        ),
        "a3po": _like(
            GROUP,
            "A-3PO, arXiv:2512.06547; AReaL, areal/trainer/ppo/actor.py",
            surrogate=ppo_interpolated,
            correction=b.interpolated_weight,
        ),
        "sgrpo": _like(GROUP, "oxRL, after arXiv:2402.03300", kl=k3_straight_through),
        "sgrpo_centered": _like(
            GROUP, "sgrpo; arXiv:2609.20807", kl=k3_straight_through, centered=True
        ),
        "turn_grpo": _like(GROUP, "arXiv:2505.10978, Eq. 6 and 7", advantage=b.turn_z_score),
        "grpo": _like(
            GROUP, "arXiv:2402.03300, Eq. 3 and 4", average=b.mean_of_response_means, kl=k3
        ),
        "gdpo": _like(GROUP, "arXiv:2601.05242", advantage=b.parts_by_themselves),
        "iqr_grpo": _like(GROUP, "oxRL, after arXiv:2402.03300", advantage=b.by_quartiles),
        "dr_grpo": _like(GROUP, "arXiv:2503.20783", advantage=b.centered, average=b.by_longest),
        "lite_ppo": _like(GROUP, "arXiv:2508.08221", advantage=b.over_batch_deviation),
        "dapo": _like(GROUP, "arXiv:2503.14476, Eq. 8"),
        "prorl": _like(GROUP, "arXiv:2505.24864", kl=k3_straight_through),
        "scale_rl": _like(
            GROUP,
            "arXiv:2510.13786",
            advantage=b.over_own_deviation,
            surrogate=scale_rl,
            average=b.mean_of_prompt_means,
        ),
        "lambda_grpo": _like(GROUP, "arXiv:2510.06870", average=b.by_length_preference),
        "maxrl": _like(
            GROUP,
            "arXiv:2602.02710",
            advantage=b.towards_likelihood,
            average=b.mean_of_response_sums,
        ),
        "pkpo": _like(
            GROUP, "arXiv:2505.15201", advantage=b.pass_at_k, average=b.mean_of_response_sums
        ),
        "pass_k_training": _like(GROUP, "arXiv:2503.19595", advantage=b.lead),
        "cispo": _like(GROUP, "arXiv:2506.13585", surrogate=cispo),
        "cispo_centered": _like(
            GROUP, "arXiv:2506.13585; arXiv:2609.20807", surrogate=cispo, centered=True
        ),
        "sapo": _like(GROUP, "arXiv:2511.20347", surrogate=sapo, average=b.mean_of_response_means),
        "rgpo_like": _like(GROUP, "after arXiv:2604.14895", surrogate=rgpo_like),
        "kimi": _like(
            GROUP,
            "arXiv:2501.12599, Eq. 3; DRO, arXiv:2405.19107",
            advantage=b.centered,
            surrogate=kimi,
            average=b.mean_of_response_sums,
        ),
        "dro": _like(GROUP, "DRO, arXiv:2405.19107; verl", advantage=b.centered, surrogate=dro),
        "fipo": _like(GROUP, "arXiv:2603.19835; modelscope/ms-swift", surrogate=fipo),
        "simko": _like(GROUP, "arXiv:2510.14807", surrogate=simko),
        "clip_cov": _like(
            GROUP, "arXiv:2505.22617", surrogate=clip_cov, chosen=b.some_high_covariances
        ),
        "kl_cov": _like(GROUP, "arXiv:2505.22617", surrogate=kl_cov, chosen=b.largest_covariances),
        "gad": _like(GROUP, "arXiv:2511.10643: GRPO, a discriminator being the reward"),
        "r3": _like(GROUP, "arXiv:2510.11370: GRPO, the routing being replayed"),
        "kdrl": _like(GROUP, "arXiv:2506.02208", advantage=b.z_score_and_teacher),
        **_distilled(),
        **_of_responses(),
        **_without_ratio(),
        **_corrected(),
        **_against_sampler(),
    }


def _of_responses() -> dict[str, Paper]:
    """Rows whose ratio belongs to the whole response."""
    by_response = replace(GROUP, average=batchwise.mean_of_response_means)
    return {
        "gspo": _like(by_response, "arXiv:2507.18071, Eq. 5", surrogate=gspo),
        "gspo_token": _like(by_response, "arXiv:2507.18071, Eq. 13", surrogate=gspo_token),
        "luspo": _like(
            GROUP,
            "arXiv:2602.05261: GSPO's loss of a response times its length",
            surrogate=gspo,
            average=batchwise.mean_of_response_sums,
        ),
        "gmpo": _like(by_response, "arXiv:2507.20673", surrogate=gmpo),
        "rspo": _like(by_response, "arXiv:2510.23027", surrogate=rspo),
    }


def _without_ratio() -> dict[str, Paper]:
    b = batchwise
    summed = replace(REINFORCE, average=b.mean_of_response_sums)
    return {
        "reinforce": summed,
        "reinforce_baseline": _like(REINFORCE, "Williams 1992", advantage=b.minus_batch_mean),
        "otb": _like(REINFORCE, "arXiv:2602.07078; verl", advantage=b.least_variance),
        "a2c": _like(REINFORCE, "arXiv:1602.01783", advantage=b.gae),
        "rloo": _like(
            summed, "arXiv:2402.14740, Eq. 6", advantage=b.leave_one_out, kl_in_reward=True
        ),
        "remax": _like(summed, "arXiv:2310.10505", advantage=b.minus_greedy, kl_in_reward=True),
        "opo": _like(REINFORCE, "arXiv:2505.23585", advantage=b.minus_length_weighted_mean),
        "gpg": _like(REINFORCE, "arXiv:2504.02546", advantage=b.rescaled),
        "opd": _like(REINFORCE, "arXiv:2306.13649, arXiv:2306.08543", advantage=b.weighted_gap),
        "minillm": _like(REINFORCE, "arXiv:2306.08543, Eq. 4", advantage=b.gaps_to_come),
        "iw_opd": _like(REINFORCE, "arXiv:2606.22600", advantage=b.gap_after_prefix),
    }


def _distilled() -> dict[str, Paper]:
    """Rows whose loss is a divergence from a teacher, who differ in who that is."""
    plain = replace(GROUP, advantage=batchwise.nothing, surrogate=from_teacher)
    return {
        "opd_topk": _like(plain, "oxRL, after GKD, arXiv:2306.13649"),
        "gkd": _like(plain, "GKD, arXiv:2306.13649, of what the policy samples"),
        "opsd": _like(plain, "arXiv:2601.18734, with the estimate of opd_topk"),
        "sdpo": _like(plain, "arXiv:2601.20802, with the estimate of opd_topk"),
        "prompt_distil": _like(plain, "arXiv:2209.15189, with the estimate of opd_topk"),
    }


def _corrected() -> dict[str, Paper]:
    """GRPO with a correction of the mismatch between sampler and trainer."""
    b = batchwise
    return {
        "tis": _like(GROUP, "Yao et al. 2025", correction=b.truncated),
        "mis": _like(GROUP, "Liu et al. 2025; TRL's sequence_mask", correction=b.masked),
        "icepop": _like(GROUP, "arXiv:2510.18855", correction=b.masked),
        "geometric_rejection": _like(GROUP, "verl, rollout_corr_helper.py", correction=b.rejected),
        "k3_rejection": _like(GROUP, "verl, rollout_corr_helper.py", correction=b.rejected_by_k3),
        "veto": _like(GROUP, "slime; verl, rollout_corr_helper.py", correction=b.vetoed),
        # The source averages each response first; the row declares that it does not.
        "opsm": _like(
            GROUP,
            "DeepSeek-V3.2, arXiv:2512.02556; TRL, get_off_policy_mask",
            advantage=b.centered,
            correction=b.unlike_failures_dropped,
            kl=k3_by_ratio,
        ),
        "m2po": _like(
            GROUP, "arXiv:2510.01161", surrogate=m2po, correction=b.second_moment_bounded
        ),
    }


def _against_sampler() -> dict[str, Paper]:
    """Rows that measure the current policy against the sampler, whatever lies between."""
    tv, kl = total_variation, divergence_from_sampler
    dppo = "DPPO, arXiv:2602.04879; sail-sg/Stable-RL"
    return {
        "dppo_tv": _like(GROUP, dppo, surrogate=_dppo(tv, top=False)),
        "dppo_kl": _like(GROUP, dppo, surrogate=_dppo(kl, top=False)),
        "dppo_topk_tv": _like(GROUP, dppo, surrogate=_dppo(tv, top=True)),
        "dppo_topk_kl": _like(GROUP, dppo, surrogate=_dppo(kl, top=True)),
        "drpo": _like(GROUP, "DRPO, arXiv:2606.09821; Tencent-Hunyuan/UniRL", surrogate=drpo),
        "vespo": _like(GROUP, "arXiv:2602.10693; FloyedShen/VESPO", surrogate=vespo),
    }


PAPERS: dict[str, Paper] = _papers()


def without_expectation(surrogate: Surrogate, response: Response, a: Tensor, n: Numbers) -> Tensor:
    """S(y) - sum_v q(v) S(v), A of y in all: score centering, arXiv:2609.20807, the last v being
    the tail, which stands for y where y is of it.
    """
    nothing = torch.zeros(len(response), dtype=torch.float64)
    count = response.outcomes.shape[1]
    of_each = []
    for v in range(count):
        instead = replace(
            response,
            logprobs=response.outcomes[:, v],
            old=response.old_outcomes[:, v],
            sampler=response.sampler_outcomes[:, v],
        )
        of_each.append(surrogate(instead, a, n, nothing))
    plain = surrogate(response, a, n, nothing)
    found = []
    for t in range(len(response)):
        own = plain[t] if response.flags[t] else of_each[-1][t]
        for v in range(count):
            own = own - math.exp(response.sampler_outcomes[t, v]) * of_each[v][t]
        found.append(own)
    return torch.stack(found)


def with_kl_in_rewards(batch: Responses, n: Numbers) -> list[Response]:
    """R_t - beta (log pi_old - log pi_ref): InstructGPT, arXiv:2203.02155, Eq. 2."""
    found = []
    for response in batch:
        differences = (response.old - response.reference).tolist()
        penalties = [n["kl_coeff"] * d for d in differences]
        pairs = zip(response.token_rewards, penalties, strict=True)
        rewards = [reward - penalty for reward, penalty in pairs]
        total = response.reward - math.fsum(penalties)
        found.append(replace(response, reward=total, token_rewards=rewards))
    return found


def literal_loss(name: str, batch: Responses, n: Numbers) -> Tensor:
    """The loss of the row `name` on a batch: minus the sum of its averaged surrogates, plus its KL.

    Args:
        name: of the row.
        batch: responses; those without a trained token count in the statistics of rewards only.
        n: the numbers that the row reads, by name.
    """
    paper = PAPERS[name]
    if paper.kl_in_reward:
        batch = with_kl_in_rewards(batch, n)
    advantages = paper.advantage(batch, n)
    averages = paper.average(batch, n)
    corrections = paper.correction(batch, advantages, n) if paper.correction else None
    chosen = paper.chosen(batch, advantages, n) if paper.chosen else set[tuple[int, int]]()
    loss = torch.zeros((), dtype=torch.float64)
    for i, response in enumerate(batch):
        if not len(response):
            continue
        a = torch.tensor(advantages[i], dtype=torch.float64)
        marks = [float((i, t) in chosen) for t in range(len(response))]
        surrogate = paper.surrogate(response, a, n, torch.tensor(marks, dtype=torch.float64))
        if paper.centered:
            surrogate = without_expectation(paper.surrogate, response, a, n)
        if corrections is not None:
            surrogate = torch.tensor(corrections[i], dtype=torch.float64) * surrogate
        terms = -surrogate
        if paper.kl is not None:
            terms = terms + n["kl_coeff"] * paper.kl(response)
        loss = loss + (torch.tensor(averages[i], dtype=torch.float64) * terms).sum()
    return loss
