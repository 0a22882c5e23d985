"""What is decided about a batch before its loss, once more, as the sources write it.

Advantages, weights of tokens, weights against the sampler, and tokens chosen by a rule: numbers
only, in plain loops over responses. Nothing here, and nothing in literal.py, calls the functions
that it is compared with; a formula is changed from its source, never to match them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Numbers = Mapping[str, Any]
# One number per trained token of every response.
PerToken = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response as a paper speaks of it: its trained tokens only, in their order.

    Tensors are [n] float64, or [n, ...]; `logprobs`, `top` and `outcomes` carry a gradient.
    """

    prompt: int
    reward: float
    parts: tuple[float, ...]  # of the reward; NaN for one that failed
    part_weights: tuple[float, ...]
    greedy: float  # reward of the greedy response to the same prompt
    bootstrap: float  # the critic's value after the last token
    cut: bool  # by the token limit
    next_turn: bool  # cut where another turn would have begun
    turns: list[int]  # of an episode, in which each token was sampled
    places: list[int]  # of the tokens in the row, which may have holes
    token_rewards: list[float]
    logprobs: Tensor
    old: Tensor
    squares: list[float]  # sum over the vocabulary of p^2, of the old policy
    sampler: Tensor
    reference: Tensor
    teacher: list[float]
    done: float  # share of the run's steps that were taken before
    values: list[float]
    entropy: list[float]
    noise: list[float]
    ages: list[int]  # rollout batches since each token was sampled
    flags: list[bool]
    top: Tensor  # [n, K]
    old_top: Tensor  # [n, K]
    teacher_top: Tensor  # [n, K], NaN where it told fewer
    # Of what could have been sampled, the last being all other tokens: [n, K + 1], `outcomes` with
    # a gradient.
    outcomes: Tensor
    old_outcomes: Tensor
    sampler_outcomes: Tensor
    routers: Tensor  # [n, layers, K]
    old_routers: Tensor  # [n, layers, K]

    def __len__(self) -> int:
        return len(self.token_rewards)


Responses = Sequence[Response]
Advantage = Callable[[Responses, Numbers], PerToken]
Correction = Callable[[Responses, PerToken, Numbers], PerToken]
Weighting = Callable[[Responses, Numbers], PerToken]


# --- statistics


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Unbiased standard deviation; 0 where there is nothing to compare."""
    if len(values) < 2:
        return 0.0
    middle = mean(values)
    return math.sqrt(math.fsum((x - middle) ** 2 for x in values) / (len(values) - 1))


def ratio_or_zero(numerator: float, denominator: float) -> float:
    """0 for 0 / 0, which the papers leave open: equal rewards teach nothing."""
    if abs(numerator) < 1e-12:
        return 0.0
    return numerator / denominator


def same_prompt(batch: Responses, response: Response) -> list[Response]:
    return [other for other in batch if other.prompt == response.prompt]


def rewards_of(batch: Responses) -> list[float]:
    return [response.reward for response in batch]


def everywhere(batch: Responses, per_response: Sequence[float]) -> PerToken:
    """The advantage of a response, for each of its tokens."""
    return [[a] * len(response) for response, a in zip(batch, per_response, strict=True)]


def centered_on_prompt(batch: Responses) -> list[float]:
    centered = []
    for response in batch:
        centered.append(response.reward - mean(rewards_of(same_prompt(batch, response))))
    return centered


# --- advantages


def z_score(batch: Responses, n: Numbers) -> PerToken:
    """(R - mean) / std over the responses to one prompt: GRPO, arXiv:2402.03300, section 4.1.2."""
    scores = []
    for response, centered in zip(batch, centered_on_prompt(batch), strict=True):
        spread = deviation(rewards_of(same_prompt(batch, response)))
        scores.append(ratio_or_zero(centered, spread))
    return everywhere(batch, scores)


def parts_by_themselves(batch: Responses, n: Numbers) -> PerToken:
    """Each reward's z-score over the responses to one prompt that have it, times its weight,
    summed; then z-scored over all responses of the batch: GDPO, arXiv:2601.05242; NVlabs/GDPO,
    trl-GDPO/trl-0.18.0-gdpo/trl/trainer/grpo_trainer.py.
    """
    sums = []
    for response in batch:
        terms = []
        for k, weight in enumerate(response.part_weights):
            own = response.parts[k]
            known = [r.parts[k] for r in same_prompt(batch, response) if not math.isnan(r.parts[k])]
            if not math.isnan(own):
                terms.append(weight * ratio_or_zero(own - mean(known), deviation(known)))
        sums.append(math.fsum(terms))
    middle = mean(sums)
    spread = deviation(sums)
    return everywhere(batch, [ratio_or_zero(s - middle, spread) for s in sums])


def centered(batch: Responses, n: Numbers) -> PerToken:
    """R - mean over the responses to one prompt: Dr.GRPO, arXiv:2503.20783; Kimi k1.5,
    arXiv:2501.12599, Eq. 3; DeepSeek-V3.2, arXiv:2512.02556.
    """
    return everywhere(batch, centered_on_prompt(batch))


def over_batch_deviation(batch: Responses, n: Numbers) -> PerToken:
    """(R - mean of the prompt) / std of the batch's rewards: Lite PPO, arXiv:2508.08221."""
    spread = deviation(rewards_of(batch))
    return everywhere(batch, [ratio_or_zero(a, spread) for a in centered_on_prompt(batch)])


def over_own_deviation(batch: Responses, n: Numbers) -> PerToken:
    """A / std of the batch's A, A = R - mean of the prompt: ScaleRL, arXiv:2510.13786."""
    differences = centered_on_prompt(batch)
    spread = deviation(differences)
    return everywhere(batch, [ratio_or_zero(a, spread) for a in differences])


def leave_one_out(batch: Responses, n: Numbers) -> PerToken:
    """R minus the mean of the prompt's other rewards: RLOO, arXiv:2402.14740."""
    found = []
    for response in batch:
        others = [r.reward for r in same_prompt(batch, response) if r is not response]
        found.append(response.reward - mean(others) if others else 0.0)
    return everywhere(batch, found)


def minus_greedy(batch: Responses, n: Numbers) -> PerToken:
    """R minus the reward of the greedy response: ReMax, arXiv:2310.10505, Eq. 8."""
    return everywhere(batch, [response.reward - response.greedy for response in batch])


def minus_batch_mean(batch: Responses, n: Numbers) -> PerToken:
    """R minus the batch's mean: REINFORCE with a baseline, Williams 1992."""
    average = mean(rewards_of(batch))
    return everywhere(batch, [response.reward - average for response in batch])


def minus_length_weighted_mean(batch: Responses, n: Numbers) -> PerToken:
    """R minus sum of length * R / sum of lengths over the prompt: OPO, arXiv:2505.23585."""
    found = []
    for response in batch:
        group = same_prompt(batch, response)
        total = sum(len(r) for r in group)
        weighted = sum(len(r) * r.reward for r in group)
        found.append(response.reward - weighted / total)
    return everywhere(batch, found)


def rescaled(batch: Responses, n: Numbers) -> PerToken:
    """alpha * (R - mean), alpha = responses / those to prompts whose rewards differ: GPG,
    arXiv:2504.02546.
    """
    teaching = [r for r in batch if len(set(rewards_of(same_prompt(batch, r)))) > 1]
    alpha = len(batch) / max(len(teaching), 1)
    return everywhere(batch, [alpha * a for a in centered_on_prompt(batch)])


def relative_to_success(batch: Responses) -> list[float]:
    """(R - mean) / (mean + 1e-6): MaxRL, arXiv:2602.02710; tajwarfahim/maxrl,
    verl/trainer/ppo/core_algos.py, compute_maxrl_outcome_advantage.
    """
    found = []
    for response, difference in zip(batch, centered_on_prompt(batch), strict=True):
        rate = mean(rewards_of(same_prompt(batch, response)))
        found.append(difference / (rate + 1e-6))
    return found


def towards_likelihood(batch: Responses, n: Numbers) -> PerToken:
    """MaxRL; with an order T it is R sum_{k < T} m(k) - (1 - m(T)), m(k) = C(wrong others, k) /
    C(others, k), whose expectation is sum_{k <= T} 1/k of the gradient of pass@k:
    arXiv:2602.02710, Eq. 6, estimated as in PKPO, arXiv:2505.15201, Eq. 4.
    """
    if n["maxrl_order"] is None:
        return everywhere(batch, relative_to_success(batch))
    found = []
    for response in batch:
        others = [r.reward for r in same_prompt(batch, response) if r is not response]
        terms = min(n["maxrl_order"], len(others))
        wrong = len(others) - round(sum(others))
        misses = [math.comb(wrong, k) / math.comb(len(others), k) for k in range(terms + 1)]
        found.append(response.reward * math.fsum(misses[:-1]) - (1 - misses[-1]))
    return everywhere(batch, found)


def quantile(values: Sequence[float], share: float) -> float:
    """Between the two values at share * (n - 1), in a straight line."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def by_quartiles(batch: Responses, n: Numbers) -> PerToken:
    """(R - median) / max(IQR, floor) over the responses to one prompt: oxRL."""
    found = []
    for response in batch:
        rewards = rewards_of(same_prompt(batch, response))
        spread = quantile(rewards, 0.75) - quantile(rewards, 0.25)
        found.append((response.reward - quantile(rewards, 0.5)) / max(spread, n["iqr_floor"]))
    return everywhere(batch, found)


def least_variance(batch: Responses, n: Numbers) -> PerToken:
    """G_t - sum_i W_it G_it / sum_i W_it, W_t = sum_{j <= t} (1 - 2 p_j + sum p^2), over the
    responses that have a t-th token; 0 in place of the mean where there is one alone: OTB,
    arXiv:2602.07078; verl, compute_multi_turn_optimal_token_baseline_advantage.
    """
    found = []
    for response in batch:
        group = same_prompt(batch, response)
        equal = len({math.fsum(r.token_rewards) for r in group}) < 2
        per_token = []
        for t in range(len(response)):
            there = [r for r in group if len(r) > t]
            to_go = [math.fsum(r.token_rewards[t:]) for r in there]
            energies = []
            for r in there:
                ps = r.old.exp().tolist()[: t + 1]
                pairs = zip(ps, r.squares, strict=False)
                energies.append(math.fsum(1 - 2 * p + square for p, square in pairs))
            weighted = math.fsum(w * g for w, g in zip(energies, to_go, strict=True))
            baseline = weighted / math.fsum(energies) if len(there) > 1 else 0.0
            lead = math.fsum(response.token_rewards[t:]) - baseline
            per_token.append(0.0 if equal or abs(lead) < 1e-12 else lead)
        found.append(per_token)
    return found


def any_right(draws: int, right: int, k: int) -> float:
    """rho(n, c, k) = 1 - C(n - c, k) / C(n, k): PKPO, arXiv:2505.15201, Eq. 4."""
    return 1 - math.comb(draws - right, k) / math.comb(draws, k)


def pass_at_k_share(rewards: Sequence[float], k: int) -> list[float]:
    """n * s: k for a right response, k * rho(n - 1, c, k - 1) for a wrong one."""
    right = round(sum(rewards))
    missed = k * any_right(len(rewards) - 1, right, k - 1) if right < len(rewards) else 0.0
    return [float(k) if reward else missed for reward in rewards]


def pass_at_k(batch: Responses, n: Numbers) -> PerToken:
    """PKPO's contribution to pass@k minus the mean one of the prompt's other responses, computed
    without this one: arXiv:2505.15201, its leave-one-out baseline.
    """
    found = []
    for response in batch:
        group = same_prompt(batch, response)
        others = [r.reward for r in group if r is not response]
        if len({r.reward for r in group}) < 2:
            found.append(0.0)
            continue
        own = pass_at_k_share([response.reward, *others], n["pass_k"])[0]
        found.append(own - mean(pass_at_k_share(others, n["pass_k"])))
    return everywhere(batch, found)


def lead(batch: Responses, n: Numbers) -> PerToken:
    """(best - second) / (std + 1e-6) for the best response to a prompt, else 0: pass@k training,
    arXiv:2503.19595; verl, compute_grpo_passk_outcome_advantage.
    """
    found = []
    for response in batch:
        rewards = sorted(rewards_of(same_prompt(batch, response)), reverse=True)
        if len(rewards) < 2 or response.reward < rewards[0]:
            found.append(0.0)
            continue
        found.append((rewards[0] - rewards[1]) / (deviation(rewards) + 1e-6))
    return everywhere(batch, found)


def whitened(per_token: PerToken) -> PerToken:
    """(A - mean) / sqrt(var + 1e-8) over all tokens: verl's masked_whiten."""
    values = [a for tokens in per_token for a in tokens]
    middle = mean(values)
    scale = 1 / math.sqrt(deviation(values) ** 2 + 1e-8)
    return [[(a - middle) * scale for a in tokens] for tokens in per_token]


def centered_then_whitened(batch: Responses, n: Numbers) -> PerToken:
    """REINFORCE++ with a group baseline: arXiv:2501.03262."""
    return whitened(centered(batch, n))


def ends_turn(response: Response, t: int) -> bool:
    """Whether what follows token t is another turn."""
    if t + 1 == len(response):
        return response.next_turn
    return response.turns[t + 1] != response.turns[t]


def between(response: Response, t: int, within: float, at_turns: float | None) -> float:
    """A discount or trace from token t to what follows it."""
    if at_turns is None or not ends_turn(response, t):
        return within
    return at_turns


def returns(batch: Responses, n: Numbers) -> PerToken:
    """Discounted sum of the rewards from a token on: Williams 1992."""
    found = []
    for response in batch:
        per_token: list[float] = []
        for t in reversed(range(len(response))):
            following = per_token[0] if per_token else 0.0
            discount = between(response, t, n["gamma"], n.get("turn_gamma"))
            per_token.insert(0, response.token_rewards[t] + discount * following)
        found.append(per_token)
    return found


def turn_z_score(batch: Responses, n: Numbers) -> PerToken:
    """A^S of GiGPO, arXiv:2505.10978, Eq. 6 and 7, over the turns of one number."""
    discount = n["turn_gamma"]
    to_go: list[dict[int, float]] = []
    for response in batch:
        of_turn: dict[int, float] = {}
        for turn in sorted(set(response.turns)):
            of_turn[turn] = 0.0
            for later in range(turn, max(response.turns) + 1):
                tokens = [t for t in range(len(response)) if response.turns[t] == later]
                reward = math.fsum(response.token_rewards[t] for t in tokens)
                of_turn[turn] += discount ** (later - turn) * reward
        to_go.append(of_turn)
    found = []
    for response, own in zip(batch, to_go, strict=True):
        per_token = []
        for turn in response.turns:
            compared = [
                other[turn]
                for peer, other in zip(batch, to_go, strict=True)
                if peer.prompt == response.prompt and turn in other
            ]
            per_token.append(ratio_or_zero(own[turn] - mean(compared), deviation(compared)))
        found.append(per_token)
    return found


def whitened_returns(batch: Responses, n: Numbers) -> PerToken:
    """REINFORCE++: arXiv:2501.03262."""
    return whitened(returns(batch, n))


def _gae(response: Response, n: Numbers, trace: float) -> list[float]:
    """delta_t + (gamma * lambda) * A_{t+1}: arXiv:1506.02438, Eq. 16."""
    after = response.bootstrap if n["bootstrap_on_truncation"] and response.cut else 0.0
    advantage = 0.0
    found: list[float] = []
    for t in reversed(range(len(response))):
        value = response.values[t]
        discount = between(response, t, n["gamma"], n.get("turn_gamma"))
        delta = response.token_rewards[t] + discount * after - value
        weight = discount * between(response, t, trace, n.get("turn_lambda"))
        advantage = delta + weight * advantage
        found.insert(0, advantage)
        after = value
    return found


def gae(batch: Responses, n: Numbers) -> PerToken:
    """PPO with a critic: arXiv:1506.02438, Eq. 16, whitened as verl does."""
    found = [_gae(response, n, n["gae_lambda"]) for response in batch]
    return whitened(found) if n["whiten"] else found


def length_adaptive_gae(batch: Responses, n: Numbers) -> PerToken:
    """lambda = 1 - 1 / (alpha * length): VAPO, arXiv:2504.05118, Eq. 7; at least 0."""
    found = []
    for response in batch:
        trace = 1 - 1 / max(n["length_alpha"] * len(response), 1.0)
        found.append(_gae(response, n, trace))
    return whitened(found) if n["whiten"] else found


def teachers_gap(batch: Responses, n: Numbers) -> PerToken:
    """log p of the teacher minus that of the student: arXiv:2306.13649, arXiv:2306.08543."""
    found = []
    for response in batch:
        old = response.old.tolist()
        found.append([t - o for t, o in zip(response.teacher, old, strict=True)])
    return found


def weighted_gap(batch: Responses, n: Numbers) -> PerToken:
    """The gap to the teacher times a coefficient: on-policy distillation, arXiv:2306.13649."""
    return [[n["teacher_coeff"] * gap for gap in gaps] for gaps in teachers_gap(batch, n)]


def gaps_to_come(batch: Responses, n: Numbers) -> PerToken:
    """sum_{i >= t} gamma^(i - t) gap_i, over sum_{i >= t} gamma^(i - t) where lengths are made
    equal: MiniLLM, arXiv:2306.08543, Eq. 4; TRL, experimental/minillm, whose text says this, and
    whose code leaves gamma^t in where it does not divide.
    """
    gamma = n["teacher_gamma"]
    found = []
    for gaps in teachers_gap(batch, n):
        per_token = []
        for t in range(len(gaps)):
            powers = [gamma ** (i - t) for i in range(t, len(gaps))]
            total = math.fsum(p * gap for p, gap in zip(powers, gaps[t:], strict=True))
            per_token.append(total / math.fsum(powers) if n["teacher_mean"] else total)
        found.append(per_token)
    return found


def gap_after_prefix(batch: Responses, n: Numbers) -> PerToken:
    """A_t (1 + gamma (1 - sum_{i < t} |A_i| / sum_i |A_i|)): IW-OPD, arXiv:2606.22600; TRL,
    experimental/iw_opd.
    """
    found = []
    for gaps in teachers_gap(batch, n):
        total = math.fsum(abs(gap) for gap in gaps)
        per_token = []
        for t, gap in enumerate(gaps):
            before = math.fsum(abs(earlier) for earlier in gaps[:t])
            per_token.append(gap * (1 + n["prefix_coeff"] * (1 - before / total)))
        found.append(per_token)
    return found


def z_score_and_teacher(batch: Responses, n: Numbers) -> PerToken:
    """The group's z-score and beta times the gap, beta falling along a line: KDRL,
    arXiv:2506.02208.
    """
    found = []
    begin = n["teacher_coeff"]
    end = begin if n["teacher_coeff_end"] is None else n["teacher_coeff_end"]
    for i, (scores, gaps) in enumerate(zip(z_score(batch, n), teachers_gap(batch, n), strict=True)):
        done = batch[i].done
        beta = (1 - done) * begin + done * end
        found.append([a + beta * gap for a, gap in zip(scores, gaps, strict=True)])
    return found


def nothing(batch: Responses, n: Numbers) -> PerToken:
    """No advantages: of losses that are divergences."""
    return [[0.0] * len(response) for response in batch]


# --- how tokens are averaged: the factor of every token's term


def mean_of_tokens(batch: Responses, n: Numbers) -> PerToken:
    """1 / tokens of the batch: DAPO, arXiv:2503.14476, Eq. 8."""
    total = sum(len(response) for response in batch)
    return [[1 / total] * len(response) for response in batch]


def mean_of_response_means(batch: Responses, n: Numbers) -> PerToken:
    """1 / (responses * length): GRPO, arXiv:2402.03300, Eq. 3."""
    count = sum(len(response) > 0 for response in batch)
    return [[1 / (count * max(len(response), 1))] * len(response) for response in batch]


def mean_of_response_sums(batch: Responses, n: Numbers) -> PerToken:
    """1 / responses: the expectation over responses of a sum over their tokens."""
    count = sum(len(response) > 0 for response in batch)
    return [[1 / count] * len(response) for response in batch]


def by_longest(batch: Responses, n: Numbers) -> PerToken:
    """1 / (responses * a constant length): Dr.GRPO, arXiv:2503.20783, its Listing 1."""
    return [[1 / (len(batch) * n["weights_length"])] * len(response) for response in batch]


def mean_of_prompt_means(batch: Responses, n: Numbers) -> PerToken:
    """1 / (prompts * tokens of the prompt): ScaleRL, arXiv:2510.13786."""
    prompts = {response.prompt for response in batch if len(response)}
    found = []
    for response in batch:
        tokens = sum(len(r) for r in same_prompt(batch, response))
        found.append([1 / (len(prompts) * tokens)] * len(response))
    return found


def by_length_preference(batch: Responses, n: Numbers) -> PerToken:
    """f / (prompts * tokens of the prompt), f = G softmax(h ** lambda), h = 1 + z / 9, z the
    length's z-score: lambda-GRPO, arXiv:2510.06870.
    """
    found = []
    for response, plain in zip(batch, mean_of_prompt_means(batch, n), strict=True):
        group = [r for r in same_prompt(batch, response) if len(r)]
        lengths = [float(len(r)) for r in group]
        middle = mean(lengths) if lengths else 0.0
        spread = math.sqrt(mean([(x - middle) ** 2 for x in lengths])) if lengths else 0.0

        def height(length: float, middle: float = middle, spread: float = spread) -> float:
            return math.exp((1 + ratio_or_zero(length - middle, 9 * spread)) ** n["length_power"])

        whole = sum(height(length) for length in lengths)
        share = len(group) * height(len(response)) / whole if lengths else 0.0
        found.append([share * w for w in plain])
    return found


# --- weights against the sampler


def log_rho(response: Response) -> list[float]:
    return (response.old - response.sampler).tolist()


def at_level(logs: list[float], level: str) -> list[float]:
    """The log-ratio that judges each token: its own, the response's sum, or its mean."""
    if level == "token":
        return logs
    if not logs:
        return []
    total = math.fsum(logs)
    return [total if level == "sequence" else total / len(logs)] * len(logs)


def truncated(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """min(rho, C): TIS, Yao et al. 2025; decoupled PPO, arXiv:2505.24298, Eq. 5."""
    found = []
    for response in batch:
        judged = at_level(log_rho(response), n["correction_level"])
        found.append([min(math.exp(x), n["correction_max"]) for x in judged])
    return found


def masked(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """rho inside [low, high], else 0: IcePop, arXiv:2510.18855."""
    found = []
    for response in batch:
        ratios = [math.exp(x) for x in at_level(log_rho(response), n["correction_level"])]
        low, high = n["correction_min"], n["correction_max"]
        found.append([rho if low <= rho <= high else 0.0 for rho in ratios])
    return found


def rejected(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """1 where rho is inside [low, high], else 0: verl, rollout_rs of its rollout correction."""
    return [[float(w > 0) for w in tokens] for tokens in masked(batch, advantages, n)]


def rejected_by_k3(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """1 where the response's mean of rho - 1 - log rho is small: verl's k3 preset."""
    found = []
    for response in batch:
        k3 = [math.exp(x) - 1 - x for x in log_rho(response)]
        near = not k3 or mean(k3) <= n["correction_k3_max"]
        found.append([float(near)] * len(response))
    return found


def vetoed(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """0 for a response with a token of rho below a bound: slime and verl."""
    found = []
    for response in batch:
        possible = all(math.exp(x) >= n["correction_veto"] for x in log_rho(response))
        found.append([float(possible)] * len(response))
    return found


def unlike_failures_dropped(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """M = 0 where A < 0 and mean(log pi_sampler - log pi_theta) > delta: DeepSeek-V3.2,
    arXiv:2512.02556, off-policy sequence masking; TRL, get_off_policy_mask.
    """
    found = []
    for response, tokens in zip(batch, advantages, strict=True):
        moved = (response.sampler - response.logprobs.detach()).tolist()
        far = bool(moved) and mean(moved) > n["drift_max"]
        found.append([0.0 if a < 0 and far else 1.0 for a in tokens])
    return found


def second_moment_bounded(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """The largest (log rho)^2 of the batch are masked until the mean of the others is below tau:
    M2PO, arXiv:2510.01161, Algorithm 1; AReaL, _get_m2po_loss_mask.
    """
    left = []
    for i, response in enumerate(batch):
        left += [(x**2, i, t) for t, x in enumerate(log_rho(response))]
    left.sort()
    while len(left) > 1 and mean([square for square, _, _ in left]) >= n["second_moment_max"]:
        left.pop()
    kept = {(i, t) for _, i, t in left}
    found = []
    for i, response in enumerate(batch):
        found.append([float((i, t) in kept) for t in range(len(response))])
    return found


def interpolated_weight(batch: Responses, advantages: PerToken, n: Numbers) -> PerToken:
    """min(prox / sampler, C) with A-3PO's prox: arXiv:2512.06547."""
    found = []
    for response in batch:
        now = response.logprobs.detach().tolist()
        sampler = response.sampler.tolist()
        logs = []
        for theta, mu, age in zip(now, sampler, response.ages, strict=True):
            logs.append(toward(age) * (theta - mu))
        judged = at_level(logs, n["correction_level"])
        found.append([min(math.exp(x), n["correction_max"]) for x in judged])
    return found


def toward(age: int) -> float:
    """How far A-3PO's proximal policy is from the sampler to the current one: (v_prox - v_behave) /
    (v_theta - v_behave) with v_prox = v_theta - 1; AReaL, compute_prox_logp_approximations.
    """
    return (age - 1) / age if age > 0 else 0.0


# --- tokens chosen by a rule


def covariances(batch: Responses, advantages: PerToken) -> list[tuple[float, int, int]]:
    """(A - mean A) * (log p - mean log p) with response and token: arXiv:2505.22617, Eq. 10."""
    mean_a = mean([a for tokens in advantages for a in tokens])
    mean_log = mean([x for response in batch for x in response.old.tolist()])
    found = []
    for i, (response, tokens) in enumerate(zip(batch, advantages, strict=True)):
        for t, (x, a) in enumerate(zip(response.old.tolist(), tokens, strict=True)):
            found.append(((a - mean_a) * (x - mean_log), i, t))
    return found


def largest_covariances(batch: Responses, advantages: PerToken, n: Numbers) -> set[tuple[int, int]]:
    """KL-Cov's tokens: PRIME-RL/Entropy-Mechanism-of-RL, compute_policy_loss_kl_cov; of equal ones
    the earlier.
    """
    found = sorted(covariances(batch, advantages), key=lambda each: -each[0])
    count = max(int(n["cov_fraction"] * len(found)), 1)
    return {(i, t) for _, i, t in found[:count]}


def some_high_covariances(
    batch: Responses, advantages: PerToken, n: Numbers
) -> set[tuple[int, int]]:
    """Clip-Cov's tokens, drawn by the example's own noise: PRIME-RL/Entropy-Mechanism-of-RL,
    compute_policy_loss_clip_cov.
    """
    found = covariances(batch, advantages)
    count = max(int(n["cov_fraction"] * len(found)), 1)
    able = [(i, t) for cov, i, t in found if n["cov_low"] < cov < n["cov_high"]]
    able.sort(key=lambda place: batch[place[0]].noise[place[1]])
    return set(able[:count])


def high_entropy(response: Response, quantile_of_row: float) -> list[bool]:
    """SimKO explores above a quantile of the response's entropies: CLR-Lab/SimKO,
    row_quantile_masked; the quantile is interpolated linearly.
    """
    bound = quantile(response.entropy, quantile_of_row)
    return [entropy > bound for entropy in response.entropy]
