"""Preference losses on sequence log-probabilities: f(margin) x reference x length normalization x anchors.

The calling convention (tensors, weights, metrics, what raises) is that of `preference_pairs.py`; here stands each
loss's formula, one number per pair, with its source. `oxrl/preference_methods.py` is the table of all of them.

    loss, metrics = dpo(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs, ref_rejected_logprobs,
                        chosen_lengths, rejected_lengths, loss_weights, beta=0.1)

Symbols: L, R log-probability under policy and reference, w chosen, l rejected; u = L_w - R_w, v = L_l - R_l,
margin = u - v, x = beta * margin, n a length, c a coefficient. log sigmoid is always F.logsigmoid: it never underflows.
The statistics that some losses take as extra tensors come from `preference_statistics.py`.

The losses of single completions (`kto`, `bco_unpaired`) take [B] tensors: summed log-probabilities of policy and
reference, bool `desirable`, and `loss_weights` 1 / (rows of the global batch); their metrics are baseline,
desirable_reward and undesirable_reward. ValueError where shapes differ or `desirable` is not bool.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from oxrl.functional.masks import at_least_float32
from oxrl.functional.preference_pairs import Loss, Pairs, filled, pair_loss, weighted_loss

# exp of more than this times a coefficient overflows float32; beyond it the slope of an exponential term is 0.
MAX_EXPONENT = 80.0


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, by whichever form does not cancel (Maechler 2012)."""
    return torch.where(x > -math.log(2.0), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def _exp(x: Tensor) -> Tensor:
    return x.clamp(max=MAX_EXPONENT).exp()


# --- The margin under one convex or bounded f. ---
@pair_loss
def dpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """Direct preference optimization: -log sigmoid(x). arXiv:2305.18290, Eq. 7."""
    return -F.logsigmoid(beta * pairs.margin)


@pair_loss
def cdpo(pairs: Pairs, *, beta: float = 0.1, label_noise: float = 0.1) -> Tensor:
    """Labels smoothed by e (Mitchell's note on DPO): -(1-e) log sigmoid(x) - e log sigmoid(-x). arXiv:2305.18290."""
    x = beta * pairs.margin
    return -(1 - label_noise) * F.logsigmoid(x) - label_noise * F.logsigmoid(-x)


@pair_loss
def robust_dpo(pairs: Pairs, *, beta: float = 0.1, label_noise: float = 0.1) -> Tensor:
    """Unbiased at flip rate e, unbounded: [-(1-e) log sigmoid(x) + e log sigmoid(-x)] / (1-2e). arXiv:2403.00409."""
    if not 0 <= label_noise < 0.5:
        raise ValueError(f"label_noise={label_noise} must be in [0, 0.5): at 0.5 labels say nothing; lower label_noise")
    x = beta * pairs.margin
    return (-(1 - label_noise) * F.logsigmoid(x) + label_noise * F.logsigmoid(-x)) / (1 - 2 * label_noise)


@pair_loss
def ipo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """(mean_margin - 1/(2 beta))**2. arXiv:2310.12036, Eq. 17, on per-token means as its authors run it (and TRL)."""
    return (pairs.mean_margin - 1 / (2 * beta)).square()


@pair_loss
def ipo_sum(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """(margin - 1/(2 beta))**2 on sums, the literal text: beta depends on the length. arXiv:2310.12036, Eq. 17."""
    return (pairs.margin - 1 / (2 * beta)).square()


@pair_loss
def hinge(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """max(0, 1 - x). SLiC, arXiv:2305.10425 (which has no reference); RSO, arXiv:2309.06657."""
    return (1 - beta * pairs.margin).relu()


@pair_loss
def sigmoid_norm(pairs: Pairs, *, beta: float = 5.0) -> Tensor:
    """Length-normalized DPO: -log sigmoid(beta * mean_margin). Tulu 3, arXiv:2411.15124."""
    return -F.logsigmoid(beta * pairs.mean_margin)


@pair_loss
def exo(pairs: Pairs, *, beta: float = 0.1, label_noise: float = 1e-3) -> Tensor:
    """Reverse KL of q = sigmoid(x): q log(q/(1-e)) + (1-q) log((1-q)/e). arXiv:2402.00856, Eq. 16."""
    if not 0 < label_noise < 1:
        raise ValueError(f"label_noise={label_noise} must be in (0, 1): exo takes its logarithm; 0.001 is usual")
    x = beta * pairs.margin
    win = x.sigmoid() * (F.logsigmoid(x) - math.log1p(-label_noise))
    return win + (-x).sigmoid() * (F.logsigmoid(-x) - math.log(label_noise))


@pair_loss
def discopop(pairs: Pairs, *, beta: float = 0.05, tau: float = 0.05) -> Tensor:
    """(1-s)(-log sigmoid(x)) + s exp(-x), s = sigmoid(x/tau) with gradient. arXiv:2406.08414, Eq. 5. Not convex."""
    x = beta * pairs.margin  # s exp(-x) is taken as exp(log s - x): finite where s * exp(-x) is 0 * inf.
    return -(-x / tau).sigmoid() * F.logsigmoid(x) + _exp(F.logsigmoid(x / tau) - x)


@pair_loss
def gpo_exponential(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """exp(-x). GPO, arXiv:2402.05749; its logistic member is `dpo`, its hinge is `hinge`."""
    return _exp(-beta * pairs.margin)


@pair_loss
def gpo_squared_hinge(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """max(0, 1 - x)**2. GPO, arXiv:2402.05749."""
    return (1 - beta * pairs.margin).relu().square()


@pair_loss
def gpo_savage(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """sigmoid(-x)**2. GPO, arXiv:2402.05749."""
    return (-beta * pairs.margin).sigmoid().square()


@pair_loss
def focal_po(pairs: Pairs, *, beta: float = 0.1, gamma: float = 0.05) -> Tensor:
    """-sg(sigmoid(x)**gamma) log sigmoid(x): less weight on pairs it cannot order yet. arXiv:2501.06645."""
    log_win = F.logsigmoid(beta * pairs.margin)
    return -(gamma * log_win).exp().detach() * log_win


# --- Absolute levels: chosen and rejected each against the reference. ---
@pair_loss
def nca(pairs: Pairs, *, beta: float = 0.01) -> Tensor:
    """-log sigmoid(beta u) - log sigmoid(-beta u)/2 - log sigmoid(-beta v)/2. arXiv:2402.05369, pair form."""
    chosen, rejected = beta * pairs.chosen_ratio, beta * pairs.rejected_ratio
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


@pair_loss
def bco(pairs: Pairs, reward_shift: Tensor, *, beta: float = 0.01) -> Tensor:
    """-log sigmoid(beta u - d) - log sigmoid(-(beta v - d)), d from `bco_reward_shift` (TRL: 0). arXiv:2404.04656."""
    chosen, rejected = beta * pairs.chosen_ratio - reward_shift, beta * pairs.rejected_ratio - reward_shift
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


@pair_loss
def sppo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """(u - 1/(2 beta))**2 + (v + 1/(2 beta))**2: win probabilities 1 and 0. arXiv:2405.00675, Eq. 4.7."""
    return (pairs.chosen_ratio - 0.5 / beta).square() + (pairs.rejected_ratio + 0.5 / beta).square()


@pair_loss
def apo_zero(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """1 - sigmoid(beta u) + sigmoid(beta v), for chosen better than the model. arXiv:2408.06266, Eq. 7."""
    return (-beta * pairs.chosen_ratio).sigmoid() + (beta * pairs.rejected_ratio).sigmoid()


@pair_loss
def apo_down(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """sigmoid(beta u) + 1 - sigmoid(x), for chosen worse than the model. arXiv:2408.06266, Eq. 8."""
    return (beta * pairs.chosen_ratio).sigmoid() + (-beta * pairs.margin).sigmoid()


@pair_loss
def cal_dpo(pairs: Pairs, *, beta: float = 0.1, calibration_coeff: float = 1.0) -> Tensor:
    """-log sigmoid(margin) + c [(u - 1/(2 beta))**2 + (v + 1/(2 beta))**2]. arXiv:2412.14516."""
    levels = (pairs.chosen_ratio - 0.5 / beta).square() + (pairs.rejected_ratio + 0.5 / beta).square()
    return -F.logsigmoid(pairs.margin) + calibration_coeff * levels


# --- Another link between log ratio and reward. ---
@pair_loss
def f_dpo_forward_kl(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta (phi(u) - phi(v))), phi = -exp(-.). f-DPO, arXiv:2309.16240; its reverse KL is `dpo`."""
    return -F.logsigmoid(beta * (_exp(-pairs.rejected_ratio) - _exp(-pairs.chosen_ratio)))


@pair_loss
def f_dpo_jensen_shannon(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta (phi(u) - phi(v))), phi = log sigmoid. f-DPO, arXiv:2309.16240."""
    return -F.logsigmoid(beta * (F.logsigmoid(pairs.chosen_ratio) - F.logsigmoid(pairs.rejected_ratio)))


@pair_loss
def f_dpo_alpha(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.5) -> Tensor:
    """-log sigmoid(beta (phi(u) - phi(v))), phi = exp((alpha-1) .)/(alpha-1). f-DPO, arXiv:2309.16240."""
    if alpha == 1:
        raise ValueError("alpha=1 is the limit in which the alpha divergence is the reverse KL; use dpo")
    chosen, rejected = _exp((alpha - 1) * pairs.chosen_ratio), _exp((alpha - 1) * pairs.rejected_ratio)
    return -F.logsigmoid(beta * (chosen - rejected) / (alpha - 1))


@pair_loss
def chi_po(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta (phi(u) - phi(v))), phi = . + exp(.), exponent within +-20. arXiv:2407.13399."""
    chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
    return -F.logsigmoid(beta * (pairs.margin + chosen.clamp(-20, 20).exp() - rejected.clamp(-20, 20).exp()))


@pair_loss
def h_dpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.9) -> Tensor:
    """-log sigmoid(alpha beta (L_w - L_l) - beta (R_w - R_l)); alpha < 1 is sharper. arXiv:2411.07595."""
    return -F.logsigmoid(beta * (pairs.margin + (alpha - 1) * (pairs.chosen - pairs.rejected)))


# --- Margins changed per pair: offsets, penalties and caps against likelihood displacement. ---
@pair_loss
def odpo(pairs: Pairs, offsets: Tensor, *, beta: float = 0.1) -> Tensor:
    """-log sigmoid(x - offset), `offsets` [N] from the gap between two scores. arXiv:2402.10571."""
    return -F.logsigmoid(beta * pairs.margin - offsets)


@pair_loss
def r_dpo(pairs: Pairs, *, beta: float = 0.1, length_coeff: float = 0.01) -> Tensor:
    """-log sigmoid(x - c (n_w - n_l)): a longer chosen completion has to win by more. arXiv:2403.19159."""
    return -F.logsigmoid(beta * pairs.margin - length_coeff * (pairs.chosen_lengths - pairs.rejected_lengths))


@pair_loss
def dpop(pairs: Pairs, *, beta: float = 0.1, penalty_coeff: float = 5.0) -> Tensor:
    """-log sigmoid(beta (u - v - c max(0, -u))): keeps the chosen one above the reference. arXiv:2402.13228."""
    return -F.logsigmoid(beta * (pairs.margin - penalty_coeff * (-pairs.chosen_ratio).relu()))


@pair_loss
def dpo_shift(pairs: Pairs, *, beta: float = 0.1, rejected_scale: float = 0.95) -> Tensor:
    """-log sigmoid(beta (u - f v)), f in (0, 1], fixed or scheduled by the caller; 1 is DPO. arXiv:2502.07599."""
    return -F.logsigmoid(beta * (pairs.chosen_ratio - rejected_scale * pairs.rejected_ratio))


@pair_loss
def bpo(pairs: Pairs, *, beta: float = 0.1, balance: float = 1.0) -> Tensor:
    """-log sigmoid(beta min(u, -k v)): the smaller of the two gains. arXiv:2506.03557."""
    return -F.logsigmoid(beta * torch.minimum(pairs.chosen_ratio, -balance * pairs.rejected_ratio))


@pair_loss
def minor_dpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """-log sigmoid(beta (u - max(0, v))): stops pushing the rejected one below the reference. arXiv:2408.09834."""
    return -F.logsigmoid(beta * (pairs.chosen_ratio - pairs.rejected_ratio.relu()))


@pair_loss
def c2_dpo(pairs: Pairs, *, beta: float = 0.1, mass_coeff: float = 1e-3) -> Tensor:
    """DPO + c (u + v)**2: mass moves between the two, not away from both. arXiv:2502.17507. Our default c."""
    return -F.logsigmoid(beta * pairs.margin) + mass_coeff * (pairs.chosen_ratio + pairs.rejected_ratio).square()


@pair_loss
def rpo(pairs: Pairs, *, beta: float = 0.1, nll_coeff: float = 0.005) -> Tensor:
    """DPO + c * per-token NLL of the chosen one. RPO, arXiv:2405.16436 (c 0.005); IRPO, arXiv:2404.19733 (c 1)."""
    return -F.logsigmoid(beta * pairs.margin) - nll_coeff * pairs.mean_chosen


# --- A statistic of the global batch, or of the sampling policy, as an extra tensor. ---
@pair_loss
def aot(pairs: Pairs, matched_ref_margins: Tensor, *, beta: float = 0.01) -> Tensor:
    """-log sigmoid(beta (L_w - L_l - m)), m [N] the reference margin of equal rank (`rank_match`). arXiv:2406.05882.

    Keep the nonzero `loss_weights` equal: sorting breaks the pairing, so the source forbids per-pair weights.
    """
    return -F.logsigmoid(beta * (pairs.chosen - pairs.rejected - matched_ref_margins))


@pair_loss
def aot_unpaired(pairs: Pairs, matched_rejected: Tensor, matched_chosen: Tensor, *, beta: float = 0.01) -> Tensor:
    """-log sigmoid(beta (sort(u) - sort(v))), the [N] extras are the v and u of equal rank. arXiv:2406.05882."""
    # The two of a sorted pair may be in different micro-batches: the value counts where u is, v adds its gradient only.
    value = -F.logsigmoid(beta * (pairs.chosen_ratio - matched_rejected))
    mirrored = -F.logsigmoid(beta * (matched_chosen - pairs.rejected_ratio))
    return value + mirrored - mirrored.detach()


@pair_loss
def beta_dpo(pairs: Pairs, batch_beta: Tensor) -> Tensor:
    """DPO with the batch's own beta (`beta_dpo_beta`), pairs left out by `beta_dpo_selection`. arXiv:2407.08639."""
    return -F.logsigmoid(batch_beta * pairs.margin)


@pair_loss
def dr_dpo(pairs: Pairs, log_mean: Tensor, *, beta: float = 0.1, robustness: float = 1.0) -> Tensor:
    """-b log mean exp(-l / b) of the global batch's DPO losses l, b = `robustness`. arXiv:2407.07880."""
    # Each pair enters with its exact gradient coefficient; with weights 1/N the value is the formula's too.
    losses = -F.logsigmoid(beta * pairs.margin)
    coefficients = (-losses.detach() / robustness - log_mean).exp()
    return coefficients * (losses - losses.detach()) - robustness * log_mean


@pair_loss
def wpo(pairs: Pairs, pair_weights: Tensor, *, beta: float = 0.1) -> Tensor:
    """DPO * w_w w_l, `pair_weights` [N] the product of two `wpo_weights`. arXiv:2406.11827, Eq. 2."""
    return -pair_weights * F.logsigmoid(beta * pairs.margin)


@pair_loss
def alpha_dpo(
    pairs: Pairs, standardized_gaps: Tensor, *, beta: float = 2.5, gamma: float = 0.3, alpha: float = 0.1
) -> Tensor:
    """-log sigmoid(beta (mean L_w - mean L_l - gamma - alpha z)), z [N] the z-scored margin. arXiv:2410.10148."""
    return -F.logsigmoid(beta * (pairs.mean_chosen - pairs.mean_rejected - gamma - alpha * standardized_gaps))


# --- Without a reference. ---
@pair_loss
def simpo(pairs: Pairs, *, beta: float = 2.5, gamma: float = 1.375) -> Tensor:
    """-log sigmoid(beta (mean L_w - mean L_l) - gamma). arXiv:2405.14734; gamma / beta 0.3 to 0.55 there."""
    return -F.logsigmoid(beta * (pairs.mean_chosen - pairs.mean_rejected) - gamma)


@pair_loss
def alpha_po(pairs: Pairs, *, beta: float = 2.5, gamma: float = 0.5, alpha: float = 0.25) -> Tensor:
    """SimPO on rewards (1 - p**-alpha) / alpha, p = exp(mean L). arXiv:2501.03884; alpha to 0 is SimPO."""
    if alpha == 0:
        raise ValueError("alpha=0 is the limit in which AlphaPO is SimPO; use simpo")
    chosen, rejected = _exp(-alpha * pairs.mean_chosen), _exp(-alpha * pairs.mean_rejected)
    return -F.logsigmoid(beta * (rejected - chosen) / alpha - gamma)


@pair_loss
def cpo(pairs: Pairs, *, beta: float = 0.1, nll_coeff: float = 1.0) -> Tensor:
    """-log sigmoid(beta (L_w - L_l)) + c * per-token NLL of the chosen one. arXiv:2401.08417."""
    return -F.logsigmoid(beta * (pairs.chosen - pairs.rejected)) - nll_coeff * pairs.mean_chosen


@pair_loss
def orpo(pairs: Pairs, *, odds_coeff: float = 0.1) -> Tensor:
    """NLL_w - c log sigmoid(log odds_w - log odds_l), log odds = mean L - log(1 - exp(mean L)). arXiv:2403.07691."""
    # At probability 1 the odds are infinite. The NLL leaves the prompt out (TRL's does not).
    chosen, rejected = pairs.mean_chosen.clamp(max=-1e-6), pairs.mean_rejected.clamp(max=-1e-6)
    log_odds = (chosen - log1mexp(chosen)) - (rejected - log1mexp(rejected))
    return -pairs.mean_chosen - odds_coeff * F.logsigmoid(log_odds)


@pair_loss
def power(pairs: Pairs, *, beta: float = 2.0, nll_coeff: float = 5e-4) -> Tensor:
    """-log sigmoid(beta [a (L_w + 1) - b (L_l + 1)]) - c beta a L_w, a = 1/n_w, b = 1/n_l. arXiv:2412.09544."""
    # Without the source's dynamic labels.
    margin = pairs.mean_chosen - pairs.mean_rejected + 1 / pairs.chosen_lengths - 1 / pairs.rejected_lengths
    return -F.logsigmoid(beta * margin) - nll_coeff * beta * pairs.mean_chosen


@pair_loss
def nll(pairs: Pairs) -> Tensor:
    """Per-token NLL of the chosen completion: the supervised anchor to mix in. Mean over pairs, not over tokens."""
    return -pairs.mean_chosen


# --- Single completions with a thumb up or down. ---
def _single(
    logprobs: Tensor, ref_logprobs: Tensor, desirable: Tensor, loss_weights: Tensor, shift: Tensor, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Signed reward above `shift`, + for desirable rows, [B]; and metrics."""
    trained = loss_weights != 0
    rewards = beta * (filled(logprobs, trained, "logprobs") - filled(ref_logprobs.detach(), trained, "ref_logprobs"))
    if desirable.dtype != torch.bool or desirable.shape != rewards.shape:
        given = f"{desirable.dtype} of shape {tuple(desirable.shape)}"
        raise ValueError(f"desirable must be bool of shape {tuple(rewards.shape)}, got {given}")
    with torch.no_grad():
        metrics = {"preference/baseline": shift.detach()}
        for name, rows in (("desirable_reward", desirable & trained), ("undesirable_reward", ~desirable & trained)):
            metrics[f"preference/{name}"] = torch.where(rows, rewards, 0.0).sum() / rows.sum().clamp(min=1)
    above = rewards - shift.detach()
    return torch.where(desirable, above, -above), metrics


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
    """c_D sigmoid(-beta (u - z)) or, undesirable, c_U sigmoid(beta (u - z)), z by `kto_baseline`. arXiv:2402.01306.

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
    """-log sigmoid(+-(beta u - d)), d by `bco_reward_shift`; density ratios go in the weights. arXiv:2404.04656."""
    reward, metrics = _single(logprobs, ref_logprobs, desirable, loss_weights, at_least_float32(reward_shift), beta)
    return weighted_loss(-F.logsigmoid(reward), loss_weights), metrics
