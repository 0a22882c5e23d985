"""Table B: the preference methods. Pure data, like `algorithms.py`; a recipe resolves the names in
`oxrl.functional`.

`train.<field>` of a number is `FIELDS.get(number, number)`: what means something else in
reinforcement learning gets a prefix. Not here, because they are a row on other data: SPIN (own
samples as rejected), online DPO, XPO, TPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FIELDS = {"alpha": "preference_alpha", "gamma": "preference_gamma", "tau": "preference_tau"}


class Method:
    """One row.

    loss: function of `oxrl.functional.preference_losses`, or "" for a weighted sum of rows
    (`parts`).
    source: arXiv id. numbers: the loss's keyword arguments with their defaults. knobs: numbers of
    what surrounds it.
    reference: whether a reference is needed. per_token: log-probabilities are divided by lengths in
    the margin.
    unpaired: on single completions with a verdict; pairs are read as two.
    extras: what the loss takes beside the pair: the data column `offsets`, or statistics of the
    global batch.
    """

    def __init__(
        self,
        loss: str,
        source: str,
        *extras: str,
        reference: bool = True,
        per_token: bool = False,
        unpaired: bool = False,
        knobs: Mapping[str, float] = MappingProxyType({}),
        parts: Mapping[str, float] = MappingProxyType({}),
        **numbers: float,
    ) -> None:
        self.loss, self.source, self.extras, self.numbers = loss, source, extras, numbers
        self.reference, self.per_token, self.unpaired = reference, per_token, unpaired
        self.knobs, self.parts = knobs, parts

    @property
    def addable(self) -> bool:
        """Whether `train.mix` may add it to another row: it takes a pair and numbers, and nothing
        else.
        """
        return not (self.unpaired or self.extras or self.knobs or self.parts)

    @property
    def fields(self) -> dict[str, float]:
        """Every `train` field the row reads, with its default."""
        return {
            FIELDS.get(name, name): value for name, value in {**self.numbers, **self.knobs}.items()
        }


METHODS: dict[str, Method] = {
    "dpo": Method("dpo", "2305.18290", beta=0.1),
    "cdpo": Method("cdpo", "2305.18290", beta=0.1, label_noise=0.1),
    "robust_dpo": Method("robust_dpo", "2403.00409", beta=0.1, label_noise=0.1),
    "ipo": Method("ipo", "2310.12036", per_token=True, beta=0.1),
    "ipo_sum": Method("ipo_sum", "2310.12036", beta=0.1),
    "hinge": Method("hinge", "2305.10425", beta=0.1),
    "rso": Method("hinge", "2309.06657", beta=0.05),
    "sigmoid_norm": Method("sigmoid_norm", "2411.15124", per_token=True, beta=5.0),
    "exo": Method("exo", "2402.00856", beta=0.1, label_noise=1e-3),
    "discopop": Method("discopop", "2406.08414", beta=0.05, tau=0.05),
    "gpo_exponential": Method("gpo_exponential", "2402.05749", beta=0.1),
    "gpo_squared_hinge": Method("gpo_squared_hinge", "2402.05749", beta=0.1),
    "gpo_savage": Method("gpo_savage", "2402.05749", beta=0.1),
    "focal_po": Method("focal_po", "2501.06645", beta=0.1, gamma=0.05),
    "nca": Method("nca", "2402.05369", beta=0.01),
    "bco": Method("bco", "2404.04656", "reward_shift", beta=0.01),
    "sppo": Method("sppo", "2405.00675", beta=0.1),
    "apo_zero": Method("apo_zero", "2408.06266", beta=0.1),
    "apo_down": Method("apo_down", "2408.06266", beta=0.1),
    "cal_dpo": Method("cal_dpo", "2412.14516", beta=0.1, calibration_coeff=1.0),
    "f_dpo_forward_kl": Method("f_dpo_forward_kl", "2309.16240", beta=0.1),
    "f_dpo_jensen_shannon": Method("f_dpo_jensen_shannon", "2309.16240", beta=0.1),
    "f_dpo_alpha": Method("f_dpo_alpha", "2309.16240", beta=0.1, alpha=0.5),
    "chi_po": Method("chi_po", "2407.13399", beta=0.1),
    "h_dpo": Method("h_dpo", "2411.07595", beta=0.1, alpha=0.9),
    "odpo": Method("odpo", "2402.10571", "offsets", beta=0.1),
    "r_dpo": Method("r_dpo", "2403.19159", beta=0.1, length_coeff=0.01),
    "dpop": Method("dpop", "2402.13228", beta=0.1, penalty_coeff=5.0),
    "dpo_shift": Method("dpo_shift", "2502.07599", beta=0.1, rejected_scale=0.95),
    "bpo": Method("bpo", "2506.03557", beta=0.1, balance=1.0),
    "minor_dpo": Method("minor_dpo", "2408.09834", beta=0.1),
    "c2_dpo": Method("c2_dpo", "2502.17507", beta=0.1, mass_coeff=1e-3),
    "rpo": Method("rpo", "2405.16436", beta=0.1, nll_coeff=0.005),
    "irpo": Method("rpo", "2404.19733", beta=0.1, nll_coeff=1.0),
    "aot": Method("aot", "2406.05882", "matched_ref_margins", beta=0.01),
    "aot_unpaired": Method(
        "aot_unpaired", "2406.05882", "matched_rejected", "matched_chosen", beta=0.01
    ),
    "beta_dpo": Method(
        "beta_dpo",
        "2407.08639",
        "batch_beta",
        knobs={"beta": 0.1, "beta_scale": 0.6, "drop_frac": 0.2},
    ),
    "dr_dpo": Method("dr_dpo", "2407.07880", "log_mean", beta=0.1, robustness=1.0),
    "wpo": Method("wpo", "2406.11827", "pair_weights", beta=0.1),
    "alpha_dpo": Method(
        "alpha_dpo",
        "2410.10148",
        "standardized_gaps",
        per_token=True,
        beta=2.5,
        gamma=0.3,
        alpha=0.1,
    ),
    "simpo": Method("simpo", "2405.14734", reference=False, per_token=True, beta=2.5, gamma=1.375),
    "alpha_po": Method(
        "alpha_po", "2501.03884", reference=False, per_token=True, beta=2.5, gamma=0.5, alpha=0.25
    ),
    "cpo": Method("cpo", "2401.08417", reference=False, beta=0.1, nll_coeff=1.0),
    "orpo": Method("orpo", "2403.07691", reference=False, per_token=True, odds_coeff=0.1),
    "power": Method(
        "power", "2412.09544", reference=False, per_token=True, beta=2.0, nll_coeff=5e-4
    ),
    "kto": Method(
        "kto",
        "2402.01306",
        "kl_baseline",
        unpaired=True,
        beta=0.1,
        desirable_coeff=1.0,
        undesirable_coeff=1.0,
    ),
    "bco_unpaired": Method("bco_unpaired", "2404.04656", "reward_shift", unpaired=True, beta=0.01),
    # The supervised anchor of the sums below.
    "nll": Method("nll", "", reference=False, per_token=True),
    # Sums of rows: a number of theirs goes to every part that takes it.
    "mpo": Method(
        "", "2411.10442", "reward_shift", parts={"dpo": 0.8, "bco": 0.2, "nll": 1.0}, beta=0.1
    ),
    "cpo_simpo": Method(
        "",
        "2405.14734",
        reference=False,
        per_token=True,
        parts={"simpo": 1.0, "nll": 1.0},
        beta=2.5,
        gamma=1.375,
    ),
    # DPO on other sums of log-probabilities, on as many tokens of both completions, or against a
    # moving reference.
    "ld_dpo": Method("dpo", "2409.06411", knobs={"tail_coeff": 0.5}, beta=0.1),
    "sampo": Method("dpo", "2406.10957", beta=0.1),
    "tr_dpo": Method(
        "dpo",
        "2404.09656",
        knobs={"reference_sync_steps": 512, "reference_sync_rate": 0.6},
        beta=0.1,
    ),
}
