"""Preference losses on sequence log-probabilities: f(margin) x reference x length normalization x
anchors.

    loss, metrics = dpo(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs,
                        ref_rejected_logprobs, chosen_lengths, rejected_lengths, loss_weights,
                        beta=0.1)

All losses of pairs are called with the same tensors, so that a recipe takes one from
`oxrl/tables/preference.py` by name, or adds several over one shared forward. Args, [N] each:
    chosen_logprobs, rejected_logprobs: nats, sums over a completion's trained tokens. Gradient
    flows here only.
    ref_chosen_logprobs, ref_rejected_logprobs: the same of the frozen reference; None where the
    loss has none.
    chosen_lengths, rejected_lengths: trained tokens (counts below 1 are read as 1); None where not
    needed.
    loss_weights: 1 / (pairs of the global batch), 0 for a pair to leave out. The loss is
        (pair_loss * loss_weights).sum(), so micro-batches and ranks add up to the same gradient.
    extras (some losses): data columns, or what depends on the whole batch, scalar or [N], detached,
        from a function of `preference_statistics.py` run once over the global batch: micro-batching
        stays exact.
    numbers: keyword only.

Returns the scalar to minimize, in at least float32, and detached metrics, means over the pairs that
count, under `preference/`: margin, chosen_reward and rejected_reward (nats, times beta if it is a
number of the loss), accuracy, chosen_logprobs (watch them: a loss on margins may lower both) and
rejected_logprobs, chosen_nll per token where lengths are given. Raises ValueError when a tensor has
another shape, or is missing.

The losses of single completions (`kto`, `bco_unpaired`) take [B] tensors: summed log-probabilities
of policy and reference, bool `desirable`, and `loss_weights` 1 / (rows of the global batch); their
metrics are baseline, desirable_reward and undesirable_reward. ValueError where shapes differ or
`desirable` is not bool.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.masks import at_least_float32, fill_masked, masked_mean

# exp of more than this times a coefficient overflows float32; beyond it the slope of an exponential
# term is 0.
MAX_EXPONENT = 80.0
P = ParamSpec("P")
Loss = tuple[Tensor, dict[str, Tensor]]
PairLoss = Callable[
    Concatenate[
        Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor, P
    ],
    Loss,
]


class Pairs(NamedTuple):
    """The tensors of a pair loss, checked, raised to float32, zeros for left-out pairs; and what
    formulas make of them.

    With L, R the log-probability under policy and reference, w chosen, l rejected, n a length: u =
    L_w - R_w, v = L_l - R_l, margin = u - v; means are per token.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor | None
    ref_rejected: Tensor | None
    chosen_lengths: Tensor | None
    rejected_lengths: Tensor | None

    @property
    def u(self) -> Tensor:
        return self.chosen - _required(self.ref_chosen, "ref_chosen_logprobs")

    @property
    def v(self) -> Tensor:
        return self.rejected - _required(self.ref_rejected, "ref_rejected_logprobs")

    @property
    def margin(self) -> Tensor:
        return self.u - self.v

    @property
    def n_w(self) -> Tensor:
        return _required(self.chosen_lengths, "chosen_lengths").clamp(min=1)

    @property
    def n_l(self) -> Tensor:
        return _required(self.rejected_lengths, "rejected_lengths").clamp(min=1)

    @property
    def mean_chosen(self) -> Tensor:
        return self.chosen / self.n_w

    @property
    def mean_rejected(self) -> Tensor:
        return self.rejected / self.n_l

    @property
    def mean_margin(self) -> Tensor:
        return self.u / self.n_w - self.v / self.n_l


def _required(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"{name} is None, but this loss reads it; pass a [N] tensor")
    return tensor


def _filled(tensor: Tensor, counted: Tensor, name: str) -> Tensor:
    """`tensor` [N] (or a scalar) with zeros where not `counted`: a left-out pair may hold nan, and
    nan * 0 is nan.
    """
    if not tensor.ndim:
        return at_least_float32(tensor)
    if tensor.shape != counted.shape:
        shapes = f"shape {tuple(tensor.shape)} but loss_weights has {tuple(counted.shape)}"
        raise ValueError(f"{name} has {shapes}; a preference loss takes one number per pair, [N]")
    return fill_masked(tensor, counted)


def weighted_loss(losses: Tensor, loss_weights: Tensor) -> Tensor:
    """(losses * loss_weights).sum() over the entries with a weight; the others give neither value
    nor gradient.
    """
    return (fill_masked(losses, loss_weights != 0) * loss_weights.to(losses.dtype)).sum()


def pair_loss(doc: str, formula: Callable[Concatenate[Pairs, P], Tensor]) -> PairLoss[P]:
    """The loss, called as this module's docstring says, of a formula (pairs, *extras, **numbers) ->
    [N].
    """

    def loss(
        chosen_logprobs: Tensor,
        rejected_logprobs: Tensor,
        ref_chosen_logprobs: Tensor | None,
        ref_rejected_logprobs: Tensor | None,
        chosen_lengths: Tensor | None,
        rejected_lengths: Tensor | None,
        loss_weights: Tensor,
        *extras: P.args,
        **numbers: P.kwargs,
    ) -> Loss:
        counted = loss_weights != 0

        def constants(
            tensors: Sequence[Tensor | None], names: Sequence[str]
        ) -> list[Tensor | None]:
            named = zip(tensors, names, strict=True)
            return [None if x is None else _filled(x.detach(), counted, name) for x, name in named]

        own = [
            _filled(chosen_logprobs, counted, names[0]),
            _filled(rejected_logprobs, counted, names[1]),
        ]
        others = (ref_chosen_logprobs, ref_rejected_logprobs, chosen_lengths, rejected_lengths)
        pairs = Pairs(*own, *constants(others, names[2:6]))
        losses = formula(pairs, *constants(extras, names[7:]), **numbers)  # pyright: ignore
        beta = {"beta": 1.0, **(formula.__kwdefaults__ or {}), **numbers}["beta"]
        return weighted_loss(losses, loss_weights), _metrics(pairs, counted, float(beta))

    # help(dpo) shows the tensors a caller passes, not the formula's `p`.
    shared, further = (
        list(inspect.signature(function).parameters.values()) for function in (loss, formula)
    )
    parameters = [*shared[:7], *further[1:]]
    names = [
        parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    loss.__signature__ = inspect.Signature(parameters, return_annotation="Loss")  # pyright: ignore
    loss.__doc__ = doc
    return loss


@torch.no_grad()
def _metrics(pairs: Pairs, counted: Tensor, beta: float) -> dict[str, Tensor]:
    """Without a reference the rewards are the policy's own log-probabilities."""
    referenced = pairs.ref_chosen is not None and pairs.ref_rejected is not None
    chosen, rejected = (pairs.u, pairs.v) if referenced else (pairs.chosen, pairs.rejected)
    values = {
        "margin": beta * (chosen - rejected),
        "chosen_reward": beta * chosen,
        "rejected_reward": beta * rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "chosen_logprobs": pairs.chosen,
        "rejected_logprobs": pairs.rejected,
    }
    if pairs.chosen_lengths is not None:
        values["chosen_nll"] = -pairs.mean_chosen
    return {f"preference/{name}": masked_mean(value, counted) for name, value in values.items()}


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, by whichever form does not cancel (Maechler 2012)."""
    return torch.where(x > -math.log(2.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _exp(x: Tensor) -> Tensor:
    return x.clamp(max=MAX_EXPONENT).exp()


# --- One convex or bounded function of x = beta * margin. ---
dpo = pair_loss("arXiv:2305.18290, Eq. 7.", lambda p, *, beta=0.1: -logsigmoid(beta * p.margin))
cdpo = pair_loss(
    "DPO with labels smoothed by label_noise (Mitchell's note on DPO). arXiv:2305.18290.",
    lambda p, *, beta=0.1, label_noise=0.1: (
        -(1 - label_noise) * logsigmoid(beta * p.margin)
        - label_noise * logsigmoid(-beta * p.margin)
    ),
)


def _robust_dpo(p: Pairs, *, beta: float = 0.1, label_noise: float = 0.1) -> Tensor:
    if not 0 <= label_noise < 0.5:
        raise ValueError(
            f"label_noise={label_noise} must be in [0, 0.5): at 0.5 labels say nothing; lower label_noise"
        )
    x = beta * p.margin
    return (-(1 - label_noise) * logsigmoid(x) + label_noise * logsigmoid(-x)) / (
        1 - 2 * label_noise
    )


def _exo(p: Pairs, *, beta: float = 0.1, label_noise: float = 1e-3) -> Tensor:
    if not 0 < label_noise < 1:
        raise ValueError(
            f"label_noise={label_noise} must be in (0, 1): exo takes its logarithm; 0.001 is usual"
        )
    x = beta * p.margin
    win = x.sigmoid() * (logsigmoid(x) - math.log1p(-label_noise))
    return win + (-x).sigmoid() * (logsigmoid(-x) - math.log(label_noise))


def _discopop(p: Pairs, *, beta: float = 0.05, tau: float = 0.05) -> Tensor:
    x = (
        beta * p.margin
    )  # s exp(-x) is taken as exp(log s - x): finite where s * exp(-x) is 0 * inf.
    return -(-x / tau).sigmoid() * logsigmoid(x) + _exp(logsigmoid(x / tau) - x)


def _focal_po(p: Pairs, *, beta: float = 0.1, gamma: float = 0.05) -> Tensor:
    log_win = logsigmoid(beta * p.margin)
    return -(gamma * log_win).exp().detach() * log_win


robust_dpo = pair_loss(
    "Unbiased if labels are flipped at rate label_noise; unbounded. arXiv:2403.00409.", _robust_dpo
)
# IPO on per-token means, as its authors run it (and TRL); on sums, the literal text, beta depends
# on the length.
ipo = pair_loss(
    "arXiv:2310.12036, Eq. 17.", lambda p, *, beta=0.1: (p.mean_margin - 1 / (2 * beta)).square()
)
ipo_sum = pair_loss(
    "arXiv:2310.12036, Eq. 17.", lambda p, *, beta=0.1: (p.margin - 1 / (2 * beta)).square()
)
# SLiC, which has no reference; RSO draws its pairs by rejection sampling.
hinge = pair_loss(
    "arXiv:2305.10425; arXiv:2309.06657.", lambda p, *, beta=0.1: (1 - beta * p.margin).relu()
)
sigmoid_norm = pair_loss(
    "Tulu 3, arXiv:2411.15124.", lambda p, *, beta=5.0: -logsigmoid(beta * p.mean_margin)
)
exo = pair_loss(
    "Reverse KL of q = sigmoid(x): q log(q/(1-e)) + (1-q) log((1-q)/e). arXiv:2402.00856, Eq. 16.",
    _exo,
)
discopop = pair_loss(
    "(1-s)(-log sigmoid(x)) + s exp(-x), s = sigmoid(x/tau) with gradient. arXiv:2406.08414, Eq. 5. Not convex.",
    _discopop,
)
# GPO: its logistic member is `dpo`, its hinge is `hinge`.
gpo_exponential = pair_loss("GPO, arXiv:2402.05749.", lambda p, *, beta=0.1: _exp(-beta * p.margin))
gpo_squared_hinge = pair_loss(
    "GPO, arXiv:2402.05749.", lambda p, *, beta=0.1: (1 - beta * p.margin).relu().square()
)
gpo_savage = pair_loss(
    "GPO, arXiv:2402.05749.", lambda p, *, beta=0.1: (-beta * p.margin).sigmoid().square()
)
focal_po = pair_loss(
    "-sg(sigmoid(x)**gamma) log sigmoid(x): less weight on pairs it cannot order yet. arXiv:2501.06645.",
    _focal_po,
)


# --- Absolute levels: chosen and rejected each against the reference. ---
def _levels(p: Pairs, beta: float) -> Tensor:
    return (p.u - 0.5 / beta).square() + (p.v + 0.5 / beta).square()


nca = pair_loss(
    "arXiv:2402.05369, pair form.",
    lambda p, *, beta=0.01: (
        -logsigmoid(beta * p.u) - 0.5 * logsigmoid(-beta * p.u) - 0.5 * logsigmoid(-beta * p.v)
    ),
)
bco = pair_loss(
    "reward_shift from `bco_reward_shift` (TRL: 0). arXiv:2404.04656.",
    lambda p, reward_shift, *, beta=0.01: (
        -logsigmoid(beta * p.u - reward_shift) - logsigmoid(-(beta * p.v - reward_shift))
    ),
)
sppo = pair_loss(
    "Win probabilities 1 and 0. arXiv:2405.00675, Eq. 4.7.", lambda p, *, beta=0.1: _levels(p, beta)
)
apo_zero = pair_loss(
    "1 - sigmoid(beta u) + sigmoid(beta v), for chosen better than the model. arXiv:2408.06266, Eq. 7.",
    lambda p, *, beta=0.1: (-beta * p.u).sigmoid() + (beta * p.v).sigmoid(),
)
apo_down = pair_loss(
    "sigmoid(beta u) + 1 - sigmoid(x), for chosen worse than the model. arXiv:2408.06266, Eq. 8.",
    lambda p, *, beta=0.1: (beta * p.u).sigmoid() + (-beta * p.margin).sigmoid(),
)
cal_dpo = pair_loss(
    "DPO at beta 1, and the levels of SPPO. arXiv:2412.14516.",
    lambda p, *, beta=0.1, calibration_coeff=1.0: (
        -logsigmoid(p.margin) + calibration_coeff * _levels(p, beta)
    ),
)


# --- Another link phi between log ratio and reward: -log sigmoid(beta (phi(u) - phi(v))). ---
def _f_dpo_alpha(p: Pairs, *, beta: float = 0.1, alpha: float = 0.5) -> Tensor:
    if alpha == 1:
        raise ValueError(
            "alpha=1 is the limit in which the alpha divergence is the reverse KL; use dpo"
        )
    return -logsigmoid(beta * (_exp((alpha - 1) * p.u) - _exp((alpha - 1) * p.v)) / (alpha - 1))


f_dpo_forward_kl = pair_loss(
    "phi = -exp(-.). f-DPO, arXiv:2309.16240; its reverse KL is `dpo`.",
    lambda p, *, beta=0.1: -logsigmoid(beta * (_exp(-p.v) - _exp(-p.u))),
)
f_dpo_jensen_shannon = pair_loss(
    "phi = log sigmoid. f-DPO, arXiv:2309.16240.",
    lambda p, *, beta=0.1: -logsigmoid(beta * (logsigmoid(p.u) - logsigmoid(p.v))),
)
f_dpo_alpha = pair_loss("phi = exp((alpha-1) .)/(alpha-1). f-DPO, arXiv:2309.16240.", _f_dpo_alpha)
chi_po = pair_loss(
    "phi = . + exp(.), exponent within +-20. arXiv:2407.13399.",
    lambda p, *, beta=0.1: (
        -logsigmoid(beta * (p.margin + p.u.clamp(-20, 20).exp() - p.v.clamp(-20, 20).exp()))
    ),
)
h_dpo = pair_loss(
    "-log sigmoid(alpha beta (L_w - L_l) - beta (R_w - R_l)); alpha < 1 is sharper. arXiv:2411.07595.",
    lambda p, *, beta=0.1, alpha=0.9: (
        -logsigmoid(beta * (p.margin + (alpha - 1) * (p.chosen - p.rejected)))
    ),
)

# --- Margins changed per pair: offsets, penalties and caps against likelihood displacement. ---
# `offsets` [N] come from the gap between two scores.
odpo = pair_loss(
    "arXiv:2402.10571.", lambda p, offsets, *, beta=0.1: -logsigmoid(beta * p.margin - offsets)
)
r_dpo = pair_loss(
    "A longer chosen completion has to win by more. arXiv:2403.19159.",
    lambda p, *, beta=0.1, length_coeff=0.01: (
        -logsigmoid(beta * p.margin - length_coeff * (p.n_w - p.n_l))
    ),
)
dpop = pair_loss(
    "-log sigmoid(beta (u - v - c max(0, -u))): keeps the chosen one above the reference. arXiv:2402.13228.",
    lambda p, *, beta=0.1, penalty_coeff=5.0: (
        -logsigmoid(beta * (p.margin - penalty_coeff * (-p.u).relu()))
    ),
)
dpo_shift = pair_loss(
    "rejected_scale in (0, 1], fixed or scheduled by the caller; 1 is DPO. arXiv:2502.07599.",
    lambda p, *, beta=0.1, rejected_scale=0.95: -logsigmoid(beta * (p.u - rejected_scale * p.v)),
)
bpo = pair_loss(
    "The smaller of the two gains. arXiv:2506.03557.",
    lambda p, *, beta=0.1, balance=1.0: -logsigmoid(beta * torch.minimum(p.u, -balance * p.v)),
)
# Stops pushing the rejected one below the reference.
minor_dpo = pair_loss(
    "arXiv:2408.09834.", lambda p, *, beta=0.1: -logsigmoid(beta * (p.u - p.v.relu()))
)
c2_dpo = pair_loss(
    "DPO, and mass moves between the two, not away from both. arXiv:2502.17507. Our default mass_coeff.",
    lambda p, *, beta=0.1, mass_coeff=1e-3: (
        -logsigmoid(beta * p.margin) + mass_coeff * (p.u + p.v).square()
    ),
)
rpo = pair_loss(
    "DPO and the chosen one's NLL per token. RPO, arXiv:2405.16436 (0.005); IRPO, arXiv:2404.19733 (1).",
    lambda p, *, beta=0.1, nll_coeff=0.005: (
        -logsigmoid(beta * p.margin) - nll_coeff * p.mean_chosen
    ),
)


# --- A statistic of the global batch, or of the sampling policy, as an extra tensor. ---
def _aot_unpaired(
    p: Pairs, matched_rejected: Tensor, matched_chosen: Tensor, *, beta: float = 0.01
) -> Tensor:
    # The two of a sorted pair may be in different micro-batches: the value counts where u is, v
    # adds its gradient only.
    mirrored = -logsigmoid(beta * (matched_chosen - p.v))
    return -logsigmoid(beta * (p.u - matched_rejected)) + mirrored - mirrored.detach()


def _dr_dpo(p: Pairs, log_mean: Tensor, *, beta: float = 0.1, robustness: float = 1.0) -> Tensor:
    # Each pair enters with its exact gradient coefficient; with weights 1/N the value is the
    # formula's too.
    losses = -logsigmoid(beta * p.margin)
    coefficients = (-losses.detach() / robustness - log_mean).exp()
    return coefficients * (losses - losses.detach()) - robustness * log_mean


# Keep the nonzero `loss_weights` equal: sorting breaks the pairing, so the source forbids per-pair
# weights.
aot = pair_loss(
    "matched_ref_margins [N]: the reference margin of equal rank (`rank_match`). arXiv:2406.05882.",
    lambda p, matched_ref_margins, *, beta=0.01: (
        -logsigmoid(beta * (p.chosen - p.rejected - matched_ref_margins))
    ),
)
aot_unpaired = pair_loss(
    "-log sigmoid(beta (sort(u) - sort(v))), the [N] extras are the v and u of equal rank. arXiv:2406.05882.",
    _aot_unpaired,
)
# DPO with the batch's own beta (`beta_dpo_beta`), pairs left out by `beta_dpo_selection`.
beta_dpo = pair_loss("arXiv:2407.08639.", lambda p, batch_beta: -logsigmoid(batch_beta * p.margin))
dr_dpo = pair_loss(
    "-b log mean exp(-l / b) of the global batch's DPO losses l, b = `robustness`. arXiv:2407.07880.",
    _dr_dpo,
)
wpo = pair_loss(
    "DPO, `pair_weights` [N] the product of two `wpo_weights`. arXiv:2406.11827, Eq. 2.",
    lambda p, pair_weights, *, beta=0.1: -pair_weights * logsigmoid(beta * p.margin),
)
alpha_dpo = pair_loss(
    "standardized_gaps [N]: the z-scored margin. arXiv:2410.10148.",
    lambda p, standardized_gaps, *, beta=2.5, gamma=0.3, alpha=0.1: (
        -logsigmoid(beta * (p.mean_chosen - p.mean_rejected - gamma - alpha * standardized_gaps))
    ),
)


# --- Without a reference. ---
def _alpha_po(p: Pairs, *, beta: float = 2.5, gamma: float = 0.5, alpha: float = 0.25) -> Tensor:
    if alpha == 0:
        raise ValueError("alpha=0 is the limit in which AlphaPO is SimPO; use simpo")
    return -logsigmoid(
        beta * (_exp(-alpha * p.mean_rejected) - _exp(-alpha * p.mean_chosen)) / alpha - gamma
    )


def _orpo(p: Pairs, *, odds_coeff: float = 0.1) -> Tensor:
    # At probability 1 the odds are infinite. The NLL leaves the prompt out (TRL's does not).
    chosen, rejected = p.mean_chosen.clamp(max=-1e-6), p.mean_rejected.clamp(max=-1e-6)
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    return -p.mean_chosen - odds_coeff * logsigmoid(log_odds)


def _power(p: Pairs, *, beta: float = 2.0, nll_coeff: float = 5e-4) -> Tensor:
    margin = (
        p.mean_chosen - p.mean_rejected + 1 / p.n_w - 1 / p.n_l
    )  # without the source's dynamic labels
    return -logsigmoid(beta * margin) - nll_coeff * beta * p.mean_chosen


simpo = pair_loss(
    "arXiv:2405.14734; gamma / beta 0.3 to 0.55 there.",
    lambda p, *, beta=2.5, gamma=1.375: (
        -logsigmoid(beta * (p.mean_chosen - p.mean_rejected) - gamma)
    ),
)
alpha_po = pair_loss(
    "SimPO on rewards (1 - p**-alpha) / alpha, p = exp(mean L). arXiv:2501.03884; alpha to 0 is SimPO.",
    _alpha_po,
)
cpo = pair_loss(
    "Preference term, and the chosen one's NLL per token. arXiv:2401.08417.",
    lambda p, *, beta=0.1, nll_coeff=1.0: (
        -logsigmoid(beta * (p.chosen - p.rejected)) - nll_coeff * p.mean_chosen
    ),
)
orpo = pair_loss(
    "NLL_w - c log sigmoid(log odds_w - log odds_l), log odds = mean L - log(1 - exp(mean L)). arXiv:2403.07691.",
    _orpo,
)
power = pair_loss(
    "-log sigmoid(beta [a (L_w + 1) - b (L_l + 1)]) - c beta a L_w, a = 1/n_w, b = 1/n_l. arXiv:2412.09544.",
    _power,
)
nll = pair_loss(
    "The supervised anchor to mix in, a mean over pairs, not over tokens.", lambda p: -p.mean_chosen
)


# --- Single completions with a thumb up or down. ---
def _single(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    loss_weights: Tensor,
    shift: Tensor,
    beta: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Signed reward above `shift`, + for desirable rows, [B]; and metrics."""
    trained, shift = loss_weights != 0, at_least_float32(shift.detach())
    rewards = beta * (
        _filled(logprobs, trained, "logprobs")
        - _filled(ref_logprobs.detach(), trained, "ref_logprobs")
    )
    if desirable.dtype != torch.bool or desirable.shape != rewards.shape:
        given = f"{desirable.dtype} of shape {tuple(desirable.shape)}"
        raise ValueError(f"desirable must be bool of shape {tuple(rewards.shape)}, got {given}")
    metrics = {"preference/baseline": shift}
    for name, rows in (
        ("desirable_reward", desirable & trained),
        ("undesirable_reward", ~desirable & trained),
    ):
        metrics[f"preference/{name}"] = masked_mean(rewards.detach(), rows)
    return torch.where(desirable, rewards - shift, shift - rewards), metrics


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    loss_weights: Tensor,
    kl_baseline: Tensor,
    *,
    beta: float = 0.1,
    desirable_coeff: float = 1.0,
    undesirable_coeff: float = 1.0,
) -> Loss:
    """c_D sigmoid(-beta (u - z)) or, undesirable, c_U sigmoid(beta (u - z)), z by `kto_baseline`.
    arXiv:2402.01306.

    Keep c_D n_D / (c_U n_U) within 1 to 4/3. With z = 0 this is the unpaired form of APO-zero.
    """
    shift = beta * at_least_float32(kl_baseline)
    reward, metrics = _single(logprobs, ref_logprobs, desirable, loss_weights, shift, beta)
    losses = (-reward).sigmoid()
    losses = torch.where(desirable, desirable_coeff * losses, undesirable_coeff * losses)
    return weighted_loss(losses, loss_weights), metrics


def bco_unpaired(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    loss_weights: Tensor,
    reward_shift: Tensor,
    *,
    beta: float = 0.01,
) -> Loss:
    """-log sigmoid(+-(beta u - d)), d by `bco_reward_shift`; density ratios go in the weights.
    arXiv:2404.04656.
    """
    reward, metrics = _single(logprobs, ref_logprobs, desirable, loss_weights, reward_shift, beta)
    return weighted_loss(-logsigmoid(reward), loss_weights), metrics
