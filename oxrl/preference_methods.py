"""Table B: the preference methods. Pure data, like `algorithms.py`; a recipe resolves the names in `oxrl.functional`.

`train.<field>` of a number is `FIELDS.get(number, number)`: what means something else in reinforcement learning gets a
prefix. Not here, because they are a row on other data: SPIN (own samples as rejected), online DPO, XPO, TPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FIELDS = {"alpha": "preference_alpha", "gamma": "preference_gamma", "tau": "preference_tau"}


# Rows are compared by identity: they hold mappings, and serve as keys.
@dataclass(frozen=True, kw_only=True, eq=False)
class Method:
    """One row.

    loss: function of `oxrl.functional.preference_losses`, or "" for a weighted sum of rows (`parts`).
    source: arXiv id. numbers: the loss's keyword arguments with their defaults. knobs: numbers of what surrounds it.
    reference: whether a reference is needed. per_token: log-probabilities are divided by lengths in the margin.
    unpaired: on single completions with a verdict; pairs are read as two.
    extras: what the loss takes beside the pair: the data column `offsets`, or statistics of the global batch.
    """

    loss: str
    source: str
    numbers: Mapping[str, float]
    knobs: Mapping[str, float] = field(default_factory=dict[str, float])
    reference: bool = True
    per_token: bool = False
    unpaired: bool = False
    extras: tuple[str, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def fields(self) -> dict[str, float]:
        """Every `train` field the row reads, with its default."""
        return {FIELDS.get(name, name): value for name, value in {**self.numbers, **self.knobs}.items()}


def _row(
    loss: str,
    source: str,
    *extras: str,
    reference: bool = True,
    per_token: bool = False,
    unpaired: bool = False,
    knobs: Mapping[str, float] | None = None,
    parts: Mapping[str, float] | None = None,
    **numbers: float,
) -> Method:
    cells = {"reference": reference, "per_token": per_token, "unpaired": unpaired}
    return Method(
        loss=loss, source=source, numbers=numbers, extras=extras, knobs=knobs or {}, parts=parts or {}, **cells
    )


METHODS: dict[str, Method] = {
    "dpo": _row("dpo", "2305.18290", beta=0.1),
    "cdpo": _row("cdpo", "2305.18290", beta=0.1, label_noise=0.1),
    "robust_dpo": _row("robust_dpo", "2403.00409", beta=0.1, label_noise=0.1),
    "ipo": _row("ipo", "2310.12036", per_token=True, beta=0.1),
    "ipo_sum": _row("ipo_sum", "2310.12036", beta=0.1),
    "hinge": _row("hinge", "2305.10425", beta=0.1),
    "rso": _row("hinge", "2309.06657", beta=0.05),
    "sigmoid_norm": _row("sigmoid_norm", "2411.15124", per_token=True, beta=5.0),
    "exo": _row("exo", "2402.00856", beta=0.1, label_noise=1e-3),
    "discopop": _row("discopop", "2406.08414", beta=0.05, tau=0.05),
    "gpo_exponential": _row("gpo_exponential", "2402.05749", beta=0.1),
    "gpo_squared_hinge": _row("gpo_squared_hinge", "2402.05749", beta=0.1),
    "gpo_savage": _row("gpo_savage", "2402.05749", beta=0.1),
    "focal_po": _row("focal_po", "2501.06645", beta=0.1, gamma=0.05),
    "nca": _row("nca", "2402.05369", beta=0.01),
    "bco": _row("bco", "2404.04656", "reward_shift", beta=0.01),
    "sppo": _row("sppo", "2405.00675", beta=0.1),
    "apo_zero": _row("apo_zero", "2408.06266", beta=0.1),
    "apo_down": _row("apo_down", "2408.06266", beta=0.1),
    "cal_dpo": _row("cal_dpo", "2412.14516", beta=0.1, calibration_coeff=1.0),
    "f_dpo_forward_kl": _row("f_dpo_forward_kl", "2309.16240", beta=0.1),
    "f_dpo_jensen_shannon": _row("f_dpo_jensen_shannon", "2309.16240", beta=0.1),
    "f_dpo_alpha": _row("f_dpo_alpha", "2309.16240", beta=0.1, alpha=0.5),
    "chi_po": _row("chi_po", "2407.13399", beta=0.1),
    "h_dpo": _row("h_dpo", "2411.07595", beta=0.1, alpha=0.9),
    "odpo": _row("odpo", "2402.10571", "offsets", beta=0.1),
    "r_dpo": _row("r_dpo", "2403.19159", beta=0.1, length_coeff=0.01),
    "dpop": _row("dpop", "2402.13228", beta=0.1, penalty_coeff=5.0),
    "dpo_shift": _row("dpo_shift", "2502.07599", beta=0.1, rejected_scale=0.95),
    "bpo": _row("bpo", "2506.03557", beta=0.1, balance=1.0),
    "minor_dpo": _row("minor_dpo", "2408.09834", beta=0.1),
    "c2_dpo": _row("c2_dpo", "2502.17507", beta=0.1, mass_coeff=1e-3),
    "rpo": _row("rpo", "2405.16436", beta=0.1, nll_coeff=0.005),
    "irpo": _row("rpo", "2404.19733", beta=0.1, nll_coeff=1.0),
    "aot": _row("aot", "2406.05882", "matched_ref_margins", beta=0.01),
    "aot_unpaired": _row("aot_unpaired", "2406.05882", "matched_rejected", "matched_chosen", beta=0.01),
    "beta_dpo": _row("beta_dpo", "2407.08639", "batch_beta", knobs={"beta": 0.1, "beta_scale": 0.6, "drop_frac": 0.2}),
    "dr_dpo": _row("dr_dpo", "2407.07880", "log_mean", beta=0.1, robustness=1.0),
    "wpo": _row("wpo", "2406.11827", "pair_weights", beta=0.1),
    "alpha_dpo": _row("alpha_dpo", "2410.10148", "standardized_gaps", per_token=True, beta=2.5, gamma=0.3, alpha=0.1),
    "simpo": _row("simpo", "2405.14734", reference=False, per_token=True, beta=2.5, gamma=1.375),
    "alpha_po": _row("alpha_po", "2501.03884", reference=False, per_token=True, beta=2.5, gamma=0.5, alpha=0.25),
    "cpo": _row("cpo", "2401.08417", reference=False, beta=0.1, nll_coeff=1.0),
    "orpo": _row("orpo", "2403.07691", reference=False, per_token=True, odds_coeff=0.1),
    "power": _row("power", "2412.09544", reference=False, per_token=True, beta=2.0, nll_coeff=5e-4),
    "kto": _row(
        "kto", "2402.01306", "kl_baseline", unpaired=True, beta=0.1, desirable_coeff=1.0, undesirable_coeff=1.0
    ),
    "bco_unpaired": _row("bco_unpaired", "2404.04656", "reward_shift", unpaired=True, beta=0.01),
    # The supervised anchor of the sums below.
    "nll": _row("nll", "", reference=False, per_token=True),
    # Sums of rows: a number of theirs goes to every part that takes it.
    "mpo": _row("", "2411.10442", "reward_shift", parts={"dpo": 0.8, "bco": 0.2, "nll": 1.0}, beta=0.1),
    "cpo_simpo": _row(
        "", "2405.14734", reference=False, per_token=True, parts={"simpo": 1.0, "nll": 1.0}, beta=2.5, gamma=1.375
    ),
    # DPO on other sums of log-probabilities, on as many tokens of both completions, or against a moving reference.
    "ld_dpo": _row("dpo", "2409.06411", knobs={"tail_coeff": 0.5}, beta=0.1),
    "sampo": _row("dpo", "2406.10957", beta=0.1),
    "tr_dpo": _row("dpo", "2404.09656", knobs={"reference_sync_steps": 512, "reference_sync_rate": 0.6}, beta=0.1),
}
