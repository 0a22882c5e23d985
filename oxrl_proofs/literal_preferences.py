"""Every preference, reward-model, value and supervised loss once more, as its source writes it.

One pair at a time, in decimal numbers of 60 digits: nothing here overflows, so nothing is clamped
or bounded, and gradients are difference quotients. Written from the papers alone; what
they compare with is another implementation, so a change here names the source that asks for it.

A loss is a function of a `Pair` and of `held`, the same pair where the source holds it constant
(stop-gradient), which is the pair itself for the value of the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

DIGITS = Context(prec=60)
# Of difference quotients: its square is far below what float64 resolves.
STEP = Decimal("1e-18")
Numbers = Mapping[str, Decimal]


@dataclass(frozen=True)
class Pair:
    """One chosen and one rejected completion.

    w, l: summed log-probabilities under the policy, nats; rw, rl: under the reference.
    nw, nl: tokens of both.
    extras: what the loss reads beside the pair, in the order of its arguments.
    """

    w: Decimal
    l: Decimal
    rw: Decimal
    rl: Decimal
    nw: Decimal
    nl: Decimal
    extras: tuple[Decimal, ...] = ()

    @property
    def u(self) -> Decimal:
        """log pi(y_w) / pi_ref(y_w)."""
        return self.w - self.rw

    @property
    def v(self) -> Decimal:
        """log pi(y_l) / pi_ref(y_l)."""
        return self.l - self.rl


Loss = Callable[[Pair, Numbers, Pair], Decimal]


def sigma(x: Decimal) -> Decimal:
    """The logistic function."""
    return 1 / (1 + (-x).exp())


def log_sigma(x: Decimal) -> Decimal:
    """Its logarithm, of which exp(-x) and exp(x) may be too large even for these numbers."""
    return -(1 + (-x).exp()).ln() if x > 0 else x - (1 + x.exp()).ln()


def dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2305.18290, Eq. 7."""
    return -log_sigma(n["beta"] * p.u - n["beta"] * p.v)


def cdpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """Mitchell's note on conservative DPO: labels flipped with probability epsilon."""
    epsilon = n["label_noise"]
    flipped = dataclasses.replace(p, w=p.l, l=p.w, rw=p.rl, rl=p.rw)
    return (1 - epsilon) * dpo(p, n, held) + epsilon * dpo(flipped, n, held)


def robust_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2403.00409: the loss of the pair and of the flipped pair, made unbiased."""
    epsilon = n["label_noise"]
    flipped = dataclasses.replace(p, w=p.l, l=p.w, rw=p.rl, rl=p.rw)
    told = (1 - epsilon) * dpo(p, n, held) - epsilon * dpo(flipped, n, held)
    return told / (1 - 2 * epsilon)


def ipo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2310.12036, Eq. 17, on log-ratios per token, as its authors told TRL they run it."""
    return (p.u / p.nw - p.v / p.nl - 1 / (2 * n["beta"])) ** 2


def ipo_sum(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2310.12036, Eq. 17: h = log (pi(w) ref(l)) / (pi(l) ref(w)), tau = beta."""
    h = p.w + p.rl - p.l - p.rw
    return (h - 1 / (2 * n["beta"])) ** 2


def hinge(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """RSO, arXiv:2309.06657: hinge-norm, gamma = beta."""
    return max(Decimal(0), 1 - (n["beta"] * p.u - n["beta"] * p.v))


def sigmoid_norm(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """Tulu 3, arXiv:2411.15124: length-normalized DPO."""
    return -log_sigma(n["beta"] / p.nw * p.u - n["beta"] / p.nl * p.v)


def exo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2402.00856, Eq. 16: KL(p_f || p_r), p_f the softmax of beta times both log-ratios."""
    total = (n["beta"] * p.u).exp() + (n["beta"] * p.v).exp()
    policy = ((n["beta"] * p.u).exp() / total, (n["beta"] * p.v).exp() / total)
    labels = (1 - n["label_noise"], n["label_noise"])
    terms = [q * (q.ln() - label.ln()) for q, label in zip(policy, labels, strict=True)]
    return sum(terms, Decimal(0))


def discopop(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2406.08414, log-ratio modulated loss: f = (1 - m) logistic + m exponential."""
    rho = p.u - p.v
    m = sigma(n["beta"] * rho / n["tau"])
    return -(1 - m) * log_sigma(n["beta"] * rho) + m * (-n["beta"] * rho).exp()


def gpo_exponential(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """GPO, arXiv:2402.05749: f = exp(-x)."""
    return (-n["beta"] * (p.u - p.v)).exp()


def gpo_squared_hinge(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """GPO, arXiv:2402.05749: f = max(0, 1 - x)^2."""
    return max(Decimal(0), 1 - n["beta"] * (p.u - p.v)) ** 2


def gpo_savage(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """GPO, arXiv:2402.05749: f = 1 / (1 + exp(x))^2."""
    return 1 / (1 + (n["beta"] * (p.u - p.v)).exp()) ** 2


def focal_po(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2501.06645: the factor sigma^gamma is held, so it weighs the gradient."""
    factor = (n["gamma"] * log_sigma(n["beta"] * (held.u - held.v))).exp()
    return -factor * log_sigma(n["beta"] * (p.u - p.v))


def nca(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2402.05369 of two completions, the preferred one with all of the softmax."""
    chosen = n["beta"] * p.u
    rejected = n["beta"] * p.v
    return -log_sigma(chosen) - (log_sigma(-chosen) + log_sigma(-rejected)) / 2


def bco(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2404.04656, a chosen and a rejected completion: the reward shift is held."""
    (delta,) = p.extras
    return -log_sigma(n["beta"] * p.u - delta) - log_sigma(-(n["beta"] * p.v - delta))


def sppo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2405.00675, with P(w > l) = 1 and eta = 1 / beta: targets of eta (P - 1/2)."""
    eta = 1 / n["beta"]
    half = Decimal("0.5")
    return (p.u - eta * (1 - half)) ** 2 + (p.v - eta * (0 - half)) ** 2


def apo_zero(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2408.06266, plus 1."""
    return 1 - sigma(n["beta"] * p.u) + sigma(n["beta"] * p.v)


def apo_down(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2408.06266, plus 1."""
    return 1 + sigma(n["beta"] * p.u) - sigma(n["beta"] * p.u - n["beta"] * p.v)


def cal_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2412.14516: the order of the log-ratios, and their calibration."""
    target = 1 / (2 * n["beta"])
    calibration = (p.u - target) ** 2 + (p.v + target) ** 2
    return -log_sigma(p.u - p.v) + n["calibration_coeff"] * calibration


def f_dpo(derivative: Callable[[Decimal, Numbers], Decimal]) -> Loss:
    """arXiv:2309.16240, Theorem 1: the reward is beta f'(pi / ref); constants cancel."""

    def loss(p: Pair, n: Numbers, held: Pair) -> Decimal:
        chosen = derivative(p.u.exp(), n)
        rejected = derivative(p.v.exp(), n)
        return -log_sigma(n["beta"] * chosen - n["beta"] * rejected)

    return loss


def forward_kl(t: Decimal, n: Numbers) -> Decimal:
    """f = -log t, arXiv:2309.16240."""
    return -1 / t


def jensen_shannon(t: Decimal, n: Numbers) -> Decimal:
    """f = t log t - (t + 1) log((t + 1) / 2), arXiv:2309.16240."""
    return (2 * t / (1 + t)).ln()


def alpha_divergence(t: Decimal, n: Numbers) -> Decimal:
    """f' = (1 - t^-a) / a, arXiv:2309.16240; oxRL and TRL count alpha = 1 - a."""
    a = 1 - n["alpha"]
    return (1 - (-a * t.ln()).exp()) / a


def chi_po(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2407.13399: phi(z) = z + log z."""
    chosen = p.u.exp() + p.u
    rejected = p.v.exp() + p.v
    return -log_sigma(n["beta"] * chosen - n["beta"] * rejected)


def h_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2411.07595"""
    policy = n["alpha"] * n["beta"] * (p.w - p.l)
    return -log_sigma(policy - n["beta"] * (p.rw - p.rl))


def odpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2402.10571: the estimated rewards differ by more than the offset."""
    (offset,) = p.extras
    return -log_sigma(n["beta"] * p.u - n["beta"] * p.v - offset)


def r_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2403.19159, section 3: E[r - alpha |y|] - beta KL is largest for a policy of which
    r = beta log pi / ref + alpha |y| + c(x); Bradley-Terry on this r.
    """
    chosen = n["beta"] * p.u + n["length_coeff"] * p.nw
    rejected = n["beta"] * p.v + n["length_coeff"] * p.nl
    return -log_sigma(chosen - rejected)


def dpop(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2402.13228"""
    fallen = max(Decimal(0), p.rw - p.w)
    return -log_sigma(n["beta"] * (p.u - p.v - n["penalty_coeff"] * fallen))


def dpo_shift(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2502.07599: f scales the rejected reward."""
    return -log_sigma(n["beta"] * p.u - n["rejected_scale"] * n["beta"] * p.v)


def bpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2506.03557: the smaller of the gain and of the scaled fall."""
    return -log_sigma(n["beta"] * min(p.u, -n["balance"] * p.v))


def minor_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2408.09834"""
    return -log_sigma(n["beta"] * (p.u - max(Decimal(0), p.v)))


def c2_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2502.17507: DPO, and a quadratic price of the mass that leaves the pair."""
    return dpo(p, n, held) + n["mass_coeff"] * (p.w + p.l - p.rw - p.rl) ** 2


def rpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2405.16436, with the likelihood per token of arXiv:2404.19733"""
    return dpo(p, n, held) - n["nll_coeff"] * p.w / p.nw


def aot(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2406.05882, section 3: policy and reference gap of one rank; ranks are held."""
    (matched,) = p.extras
    return -log_sigma(n["beta"] * (p.w - p.l - matched))


def beta_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2407.08639: DPO with the batch's beta, which is held."""
    (beta,) = p.extras
    return -log_sigma(beta * (p.u - p.v))


def wpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2406.11827, Eq. 2: DPO times the held weight of the pair."""
    (weight,) = p.extras
    return weight * dpo(p, n, held)


def alpha_dpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2410.10148: SimPO with a margin that is held; gamma in nats per token."""
    (z,) = p.extras
    margin = n["gamma"] + n["alpha"] * z
    return -log_sigma(n["beta"] * (p.w / p.nw - p.l / p.nl - margin))


def simpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2405.14734"""
    return -log_sigma(n["beta"] / p.nw * p.w - n["beta"] / p.nl * p.l - n["gamma"])


def alpha_po(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2501.03884: r = beta (1 - p^-alpha) / alpha, p the mean probability."""
    chosen = n["beta"] * (1 - (-n["alpha"] * p.w / p.nw).exp()) / n["alpha"]
    rejected = n["beta"] * (1 - (-n["alpha"] * p.l / p.nl).exp()) / n["alpha"]
    return -log_sigma(chosen - rejected - n["gamma"])


def cpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2401.08417: preference without a reference, and the likelihood, per token."""
    return -log_sigma(n["beta"] * p.w - n["beta"] * p.l) - n["nll_coeff"] * p.w / p.nw


def orpo(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2403.07691: odds of the geometric mean probability."""
    chosen = (p.w / p.nw).exp()
    rejected = (p.l / p.nl).exp()
    ratio = (chosen / (1 - chosen)) / (rejected / (1 - rejected))
    return -p.w / p.nw - n["odds_coeff"] * log_sigma(ratio.ln())


def power(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """arXiv:2412.09544, with w(y) = 1 / |y| and without dynamic labels."""
    chosen = n["beta"] / p.nw * (p.w + 1)
    rejected = n["beta"] / p.nl * (p.l + 1)
    return -log_sigma(chosen - rejected) - n["nll_coeff"] * n["beta"] / p.nw * p.w


def nll(p: Pair, n: Numbers, held: Pair) -> Decimal:
    """Maximum likelihood, per token."""
    return -p.w / p.nw


# Name of the loss -> its formula of one pair. aot_unpaired and dr_dpo are of a whole batch: below.
LITERAL: dict[str, Loss] = {
    "dpo": dpo,
    "cdpo": cdpo,
    "robust_dpo": robust_dpo,
    "ipo": ipo,
    "ipo_sum": ipo_sum,
    "hinge": hinge,
    "sigmoid_norm": sigmoid_norm,
    "exo": exo,
    "discopop": discopop,
    "gpo_exponential": gpo_exponential,
    "gpo_squared_hinge": gpo_squared_hinge,
    "gpo_savage": gpo_savage,
    "focal_po": focal_po,
    "nca": nca,
    "bco": bco,
    "sppo": sppo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "cal_dpo": cal_dpo,
    "f_dpo_forward_kl": f_dpo(forward_kl),
    "f_dpo_jensen_shannon": f_dpo(jensen_shannon),
    "f_dpo_alpha": f_dpo(alpha_divergence),
    "chi_po": chi_po,
    "h_dpo": h_dpo,
    "odpo": odpo,
    "r_dpo": r_dpo,
    "dpop": dpop,
    "dpo_shift": dpo_shift,
    "bpo": bpo,
    "minor_dpo": minor_dpo,
    "c2_dpo": c2_dpo,
    "rpo": rpo,
    "aot": aot,
    "beta_dpo": beta_dpo,
    "wpo": wpo,
    "alpha_dpo": alpha_dpo,
    "simpo": simpo,
    "alpha_po": alpha_po,
    "cpo": cpo,
    "orpo": orpo,
    "power": power,
    "nll": nll,
}


def value_and_slopes(name: str, pair: Pair, numbers: Numbers) -> tuple[Decimal, Decimal, Decimal]:
    """The loss of one pair, and its derivatives by both log-probabilities.

    Args:
        name: of the loss, in `LITERAL`.
        pair: where.
        numbers: keyword argument of the loss -> value.
    """
    with localcontext(DIGITS):
        loss = LITERAL[name]

        def at(w: Decimal, l: Decimal) -> Decimal:
            return loss(dataclasses.replace(pair, w=w, l=l), numbers, pair)

        by_w = (at(pair.w + STEP, pair.l) - at(pair.w - STEP, pair.l)) / (2 * STEP)
        by_l = (at(pair.w, pair.l + STEP) - at(pair.w, pair.l - STEP)) / (2 * STEP)
        return at(pair.w, pair.l), by_w, by_l


def aot_unpaired(pairs: Sequence[Pair], numbers: Numbers) -> Decimal:
    """arXiv:2406.05882: mean over ranks of both log-ratios, each sorted by itself."""
    chosen = sorted(pair.u for pair in pairs)
    rejected = sorted(pair.v for pair in pairs)
    terms = [-log_sigma(numbers["beta"] * (u - v)) for u, v in zip(chosen, rejected, strict=True)]
    return sum(terms, Decimal(0)) / len(pairs)


def dr_dpo(pairs: Sequence[Pair], numbers: Numbers) -> Decimal:
    """arXiv:2407.07880: -b' log E exp(log sigma / b')."""
    b = numbers["robustness"]
    terms = [(-dpo(pair, numbers, pair) / b).exp() for pair in pairs]
    return -b * (sum(terms, Decimal(0)) / len(pairs)).ln()


def slopes_of_batch(
    loss: Callable[[Sequence[Pair], Numbers], Decimal], pairs: Sequence[Pair], numbers: Numbers
) -> tuple[Decimal, list[Decimal], list[Decimal]]:
    """The loss of a batch, and its derivatives by every chosen and every rejected completion."""
    with localcontext(DIGITS):
        found: dict[str, list[Decimal]] = {"w": [], "l": []}
        for side, slopes in found.items():
            for i, pair in enumerate(pairs):
                moved = []
                for step in (STEP, -STEP):
                    other = dataclasses.replace(pair, **{side: getattr(pair, side) + step})
                    moved.append(loss([*pairs[:i], other, *pairs[i + 1 :]], numbers))
                slopes.append((moved[0] - moved[1]) / (2 * STEP))
        return loss(pairs, numbers), found["w"], found["l"]


def kto(log_ratio: Decimal, z: Decimal, desirable: bool, numbers: Numbers) -> Decimal:
    """arXiv:2402.01306: lambda_y - v(x, y), with z0 held."""
    if desirable:
        value = numbers["desirable_coeff"] * sigma(numbers["beta"] * (log_ratio - z))
        return numbers["desirable_coeff"] - value
    value = numbers["undesirable_coeff"] * sigma(numbers["beta"] * (z - log_ratio))
    return numbers["undesirable_coeff"] - value


def bco_single(log_ratio: Decimal, delta: Decimal, desirable: bool, numbers: Numbers) -> Decimal:
    """arXiv:2404.04656: a classifier of rewards around the held shift."""
    reward = numbers["beta"] * log_ratio
    return -log_sigma(reward - delta) if desirable else -log_sigma(-(reward - delta))


def bradley_terry(s_w: Decimal, s_l: Decimal, margin: Decimal, center: Decimal) -> Decimal:
    """arXiv:2203.02155, Eq. 1; margin: arXiv:2307.09288, Eq. 2; centering: arXiv:2312.09244."""
    return -log_sigma(s_w - s_l - margin) + center * (s_w + s_l) ** 2


def process_reward(score: Decimal, label: Decimal) -> Decimal:
    """arXiv:2211.14275: cross-entropy of the label of a step."""
    right = sigma(score)
    return -(label * right.ln() + (1 - label) * (1 - right).ln())


def value_loss(value: Decimal, old: Decimal, target: Decimal, clip: Decimal | None) -> Decimal:
    """Half the larger squared error, of the value and of the value within `clip` of the old one:
    the code of arXiv:1909.08593, and arXiv:2005.12729, section 3.
    """
    error = (value - target) ** 2
    if clip is not None:
        near = min(max(value, old - clip), old + clip)
        error = max(error, (near - target) ** 2)
    return error / 2


def supervised(logprobs: Sequence[Decimal]) -> Decimal:
    """Maximum likelihood: the mean negative log-probability of the target tokens."""
    return -sum(logprobs, Decimal(0)) / len(logprobs)
