"""The table of preference methods. Pure data, like `policy.py`; a recipe resolves the names in
`oxrl.functional`.

Not here, because they are a row on other data: SPIN (own samples as rejected), online DPO, XPO,
TPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from oxrl.tables.numbers import (
    ALPHA,
    ALPHA_DPO_ALPHA,
    ALPHA_DPO_BETA,
    ALPHA_DPO_GAMMA,
    ALPHA_PO_ALPHA,
    ALPHA_PO_BETA,
    AOT_BETA,
    BALANCE,
    BCO_BETA,
    BETA,
    BETA_SCALE,
    CAL_DPO_BETA,
    CALIBRATION_COEFF,
    DESIRABLE_COEFF,
    DISCOPOP_BETA,
    DROP_FRAC,
    EXO_LABEL_NOISE,
    FOCAL_PO_GAMMA,
    H_DPO_ALPHA,
    LABEL_NOISE,
    LENGTH_COEFF,
    MARGIN_GAMMA,
    MASS_COEFF,
    NCA_BETA,
    NLL_COEFF,
    ODDS_COEFF,
    PENALTY_COEFF,
    POWER_BETA,
    POWER_NLL_COEFF,
    REFERENCE_SYNC_RATE,
    REFERENCE_SYNC_STEPS,
    REJECTED_SCALE,
    ROBUSTNESS,
    RPO_BETA,
    RPO_NLL_COEFF,
    SIGMOID_NORM_BETA,
    SIMPO_BETA,
    SIMPO_GAMMA,
    SPPO_BETA,
    TAIL_COEFF,
    TAU,
    TR_DPO_BETA,
    UNDESIRABLE_COEFF,
    WPO_BETA,
    Numbers,
)


@dataclass(frozen=True, eq=False)
class Method:
    """One preference method: a loss, its numbers, and what it reads beside a pair.

    Args:
        loss: function of `oxrl.functional.preference_losses`, or "" for a weighted sum of methods.
        source: arXiv id.
        summary: what it is, in half a line.
        reads: keyword arguments of the loss, with this method's defaults.
        around: numbers of what surrounds the loss.
        extras: what the loss takes beside the pair: the data column `offsets`, or statistics of the
            global batch.
        reference: whether a reference is needed.
        per_token: log-probabilities are divided by lengths in the margin.
        unpaired: on single completions with a verdict; pairs are read as two.
        parts: method -> weight, of a sum.
    """

    loss: str
    source: str
    summary: str
    _: KW_ONLY
    reads: Numbers = ()
    around: Numbers = ()
    extras: tuple[str, ...] = ()
    reference: bool = True
    per_token: bool = False
    unpaired: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float]:
        """Keyword argument of the loss -> its default."""
        return {number.name: number.default for number in self.reads}

    @property
    def moves_reference(self) -> bool:
        """True if the reference follows the policy."""
        return REFERENCE_SYNC_RATE in self.around

    @property
    def addable(self) -> bool:
        """True if `train.mix` may add it: it takes a pair and numbers, and nothing else."""
        return not (self.unpaired or self.extras or self.around or self.parts)


METHODS: dict[str, Method] = {
    "dpo": Method(
        "dpo",
        "2305.18290",
        "the chosen answer becomes likelier than the rejected one, measured against the reference",
        reads=(BETA,),
    ),
    "cdpo": Method(
        "cdpo",
        "2305.18290",
        "DPO that takes a share of the pairs to be labeled the wrong way",
        reads=(BETA, LABEL_NOISE),
    ),
    "robust_dpo": Method(
        "robust_dpo",
        "2403.00409",
        "DPO whose mean loss is that of clean labels although a known share is flipped",
        reads=(BETA, LABEL_NOISE),
    ),
    "ipo": Method(
        "ipo",
        "2310.12036",
        "squared distance of the margin per token to a target, so that it stays bounded",
        reads=(BETA,),
        per_token=True,
    ),
    "ipo_sum": Method(
        "ipo_sum",
        "2310.12036",
        "IPO on sums of log-probabilities, as in the text of its paper",
        reads=(BETA,),
    ),
    "hinge": Method(
        "hinge",
        "2305.10425",
        "pushes the margin up to 1 and no further (SLiC)",
        reads=(BETA,),
    ),
    "rso": Method(
        "hinge",
        "2309.06657",
        "the hinge loss at the beta of statistical rejection sampling",
        reads=(BETA.at(0.05, "RSO, arXiv:2309.06657"),),
    ),
    "sigmoid_norm": Method(
        "sigmoid_norm",
        "2411.15124",
        "DPO per token, so that long answers do not weigh more",
        reads=(SIGMOID_NORM_BETA,),
        per_token=True,
    ),
    "exo": Method(
        "exo",
        "2402.00856",
        "reverse KL from the policy's preference to the label, instead of DPO's forward one",
        reads=(BETA, EXO_LABEL_NOISE),
    ),
    "discopop": Method(
        "discopop",
        "2406.08414",
        "the loss that a language model found: logistic where a pair is wrong, else exponential",
        reads=(DISCOPOP_BETA, TAU),
    ),
    "gpo_exponential": Method(
        "gpo_exponential",
        "2402.05749",
        "exponential loss of the margin: the worst pairs pull hardest",
        reads=(BETA,),
    ),
    "gpo_squared_hinge": Method(
        "gpo_squared_hinge",
        "2402.05749",
        "squared hinge of the margin: no gradient beyond 1",
        reads=(BETA,),
    ),
    "gpo_savage": Method(
        "gpo_savage",
        "2402.05749",
        "bounded loss of the margin: little gradient on pairs that are far wrong",
        reads=(BETA,),
    ),
    "focal_po": Method(
        "focal_po",
        "2501.06645",
        "DPO with less weight on pairs that the policy cannot order yet",
        reads=(BETA, FOCAL_PO_GAMMA),
    ),
    "nca": Method(
        "nca",
        "2402.05369",
        "raises the chosen answer, and keeps both log ratios from growing without end",
        reads=(NCA_BETA,),
    ),
    "bco": Method(
        "bco",
        "2404.04656",
        "tells chosen from rejected answers by their rewards, around the mean reward so far",
        reads=(BCO_BETA,),
        extras=("reward_shift",),
    ),
    "sppo": Method(
        "sppo",
        "2405.00675",
        "pulls both log ratios to fixed targets, as if the chosen answer always won",
        reads=(SPPO_BETA,),
    ),
    "apo_zero": Method(
        "apo_zero",
        "2408.06266",
        "raises the chosen and lowers the rejected: for chosen answers better than the model's",
        reads=(BETA,),
    ),
    "apo_down": Method(
        "apo_down",
        "2408.06266",
        "lowers both, the rejected one more: for chosen answers worse than the model's",
        reads=(BETA,),
    ),
    "cal_dpo": Method(
        "cal_dpo",
        "2412.14516",
        "DPO with both log ratios pulled to fixed targets",
        reads=(CAL_DPO_BETA, CALIBRATION_COEFF),
    ),
    "f_dpo_forward_kl": Method(
        "f_dpo_forward_kl",
        "2309.16240",
        "DPO with the forward KL to the reference: mass-covering",
        reads=(BETA,),
    ),
    "f_dpo_jensen_shannon": Method(
        "f_dpo_jensen_shannon",
        "2309.16240",
        "DPO with the Jensen-Shannon divergence to the reference",
        reads=(BETA,),
    ),
    "f_dpo_alpha": Method(
        "f_dpo_alpha",
        "2309.16240",
        "DPO with an alpha divergence to the reference, between the two KLs",
        reads=(BETA, ALPHA),
    ),
    "chi_po": Method(
        "chi_po",
        "2407.13399",
        "DPO with a chi-squared term against log ratios that grow far",
        reads=(BETA,),
    ),
    "h_dpo": Method(
        "h_dpo",
        "2411.07595",
        "DPO towards a policy of lower entropy, or of higher",
        reads=(BETA, H_DPO_ALPHA),
    ),
    "odpo": Method(
        "odpo",
        "2402.10571",
        "DPO with an offset: the margin has to exceed the difference of the pair's scores",
        reads=(BETA,),
        extras=("offsets",),
    ),
    "r_dpo": Method(
        "r_dpo",
        "2403.19159",
        "DPO with a length penalty: a price per token",
        reads=(BETA, LENGTH_COEFF),
    ),
    "dpop": Method(
        "dpop",
        "2402.13228",
        "DPO that keeps the chosen answer at least as likely as under the reference",
        reads=(BETA, PENALTY_COEFF),
    ),
    "dpo_shift": Method(
        "dpo_shift",
        "2502.07599",
        "DPO in which the rejected answer counts less, so that the chosen one falls less",
        reads=(BETA, REJECTED_SCALE),
    ),
    "bpo": Method(
        "bpo",
        "2506.03557",
        "DPO on the smaller of the two gains, so that neither side does all the work",
        reads=(BETA, BALANCE),
    ),
    "minor_dpo": Method(
        "minor_dpo",
        "2408.09834",
        "DPO that stops pushing the rejected answer once it is below the reference",
        reads=(BETA,),
    ),
    "c2_dpo": Method(
        "c2_dpo",
        "2502.17507",
        "DPO that moves probability between the two answers, not away from both",
        reads=(BETA, MASS_COEFF),
    ),
    "rpo": Method(
        "rpo",
        "2405.16436",
        "DPO plus a likelihood term for the chosen answer, small by default",
        reads=(RPO_BETA, RPO_NLL_COEFF),
    ),
    "irpo": Method(
        "rpo",
        "2404.19733",
        "DPO plus a likelihood term for the chosen answer: for chains of reasoning",
        reads=(BETA, NLL_COEFF),
    ),
    "aot": Method(
        "aot",
        "2406.05882",
        "makes the margins as a whole larger than the reference's, in sorted order",
        reads=(AOT_BETA,),
        extras=("matched_ref_margins",),
    ),
    "aot_unpaired": Method(
        "aot_unpaired",
        "2406.05882",
        "makes chosen answers as a whole likelier than rejected ones, in sorted order",
        reads=(AOT_BETA,),
        extras=("matched_rejected", "matched_chosen"),
    ),
    "beta_dpo": Method(
        "beta_dpo",
        "2407.08639",
        "DPO with a beta that the batch's own margins decide",
        around=(BETA, BETA_SCALE, DROP_FRAC),
        extras=("batch_beta",),
    ),
    "dr_dpo": Method(
        "dr_dpo",
        "2407.07880",
        "DPO against the worst weighting of the pairs: for labels that may be wrong",
        reads=(BETA, ROBUSTNESS),
        extras=("log_mean",),
    ),
    "wpo": Method(
        "wpo",
        "2406.11827",
        "DPO with pairs weighted by their probability under the policy",
        reads=(WPO_BETA,),
        extras=("pair_weights",),
    ),
    "alpha_dpo": Method(
        "alpha_dpo",
        "2410.10148",
        "SimPO with a target margin that follows how far the pair is ahead already",
        reads=(ALPHA_DPO_BETA, ALPHA_DPO_GAMMA, ALPHA_DPO_ALPHA),
        extras=("standardized_gaps",),
        per_token=True,
    ),
    "simpo": Method(
        "simpo",
        "2405.14734",
        "no reference: the chosen answer becomes likelier per token by a target margin",
        reads=(SIMPO_BETA, SIMPO_GAMMA),
        reference=False,
        per_token=True,
    ),
    "alpha_po": Method(
        "alpha_po",
        "2501.03884",
        "no reference: SimPO on a reward between log-probability and probability",
        reads=(ALPHA_PO_BETA, MARGIN_GAMMA, ALPHA_PO_ALPHA),
        reference=False,
        per_token=True,
    ),
    "cpo": Method(
        "cpo",
        "2401.08417",
        "no reference: the chosen answer becomes likelier than the rejected one, and likely",
        reads=(BETA, NLL_COEFF),
        reference=False,
    ),
    "orpo": Method(
        "orpo",
        "2403.07691",
        "no reference: supervised learning with an odds ratio against the rejected answer",
        reads=(ODDS_COEFF,),
        reference=False,
        per_token=True,
    ),
    "power": Method(
        "power",
        "2412.09544",
        "no reference: rewards corrected for length, with the chosen answer's likelihood",
        reads=(POWER_BETA, POWER_NLL_COEFF),
        reference=False,
        per_token=True,
    ),
    "kto": Method(
        "kto",
        "2402.01306",
        "single answers judged good or bad, against what the policy gains on average",
        reads=(BETA, DESIRABLE_COEFF, UNDESIRABLE_COEFF),
        extras=("kl_baseline",),
        unpaired=True,
    ),
    "bco_unpaired": Method(
        "bco_unpaired",
        "2404.04656",
        "single answers told apart by their rewards, around the mean reward so far",
        reads=(BCO_BETA,),
        extras=("reward_shift",),
        unpaired=True,
    ),
    # The supervised anchor of the sums below.
    "nll": Method(
        "nll",
        "",
        "likelihood of the chosen answer alone",
        reference=False,
        per_token=True,
    ),
    # Sums of rows: a number of theirs goes to every part that takes it.
    "mpo": Method(
        "",
        "2411.10442",
        "DPO, BCO and likelihood of the chosen answer, added up",
        reads=(BETA,),
        extras=("reward_shift",),
        parts={"dpo": 0.8, "bco": 0.2, "nll": 1.0},
    ),
    "cpo_simpo": Method(
        "",
        "2405.14734",
        "SimPO plus the likelihood of the chosen answer",
        reads=(SIMPO_BETA, SIMPO_GAMMA),
        reference=False,
        per_token=True,
        parts={"simpo": 1.0, "nll": 1.0},
    ),
    # DPO on other sums of log-probabilities, on as many tokens of both completions, or against a
    # moving reference.
    "ld_dpo": Method(
        "dpo",
        "2409.06411",
        "DPO in which the tokens beyond the shorter answer's length count less",
        reads=(BETA,),
        around=(TAIL_COEFF,),
    ),
    "sampo": Method(
        "dpo",
        "2406.10957",
        "DPO on equally many tokens of both answers, against length bias",
        reads=(BETA,),
    ),
    "tr_dpo": Method(
        "dpo",
        "2404.09656",
        "DPO against a reference that follows the policy",
        reads=(TR_DPO_BETA,),
        around=(REFERENCE_SYNC_STEPS, REFERENCE_SYNC_RATE),
    ),
}
