"""The table of preference methods: which loss, what it reads, where it comes from.

A recipe resolves a row once, by name, calls `row.function(*tensors, *extras, **numbers)` with `row.numbers` overridden
by the config, and adds rows with weights when it mixes them (`MIXTURES`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oxrl.functional import preference_losses as losses
from oxrl.functional.preference_pairs import Loss


@dataclass(frozen=True, kw_only=True)
class Preference:
    """One row.

    function: pair loss, or, if `unpaired`, a loss on (logprobs, ref_logprobs, desirable, loss_weights, extras).
    source: arXiv id, in the docstring of the function too.
    needs_reference: without it the two reference tensors may be None.
    length_normalized: log-probabilities are divided by lengths somewhere in the margin.
    anchor: name of the term added to the margin loss.
    extras: names of the tensors after `loss_weights`; `note` says where they come from.
    defaults: numbers that differ from the function's own defaults.
    """

    function: Callable[..., Loss]
    source: str
    needs_reference: bool = True
    length_normalized: bool = False
    unpaired: bool = False
    anchor: str = ""
    extras: tuple[str, ...] = ()
    defaults: Mapping[str, float] = field(default_factory=dict[str, float])
    note: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        """Every number the loss takes, with its default."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} | dict(self.defaults)

    @property
    def needs_lengths(self) -> bool:
        """Whether chosen_lengths and rejected_lengths must be given."""
        return self.length_normalized or self.anchor in ("nll", "length")


def _row(function: Callable[..., Loss], source: str, **cells: Any) -> Preference:
    return Preference(function=function, source=source, **cells)


PREFERENCES: dict[str, Preference] = {
    "dpo": _row(losses.dpo, "2305.18290"),
    "cdpo": _row(losses.cdpo, "2305.18290", note="what other code calls label smoothing"),
    "robust_dpo": _row(losses.robust_dpo, "2403.00409"),
    "ipo": _row(losses.ipo, "2310.12036", length_normalized=True),
    "ipo_sum": _row(losses.ipo_sum, "2310.12036"),
    "hinge": _row(losses.hinge, "2305.10425"),
    "rso": _row(losses.hinge, "2309.06657", defaults={"beta": 0.05}, note="on rejection-sampled pairs"),
    "sigmoid_norm": _row(losses.sigmoid_norm, "2411.15124", length_normalized=True, note="LN-DPO"),
    "exo": _row(losses.exo, "2402.00856"),
    "discopop": _row(losses.discopop, "2406.08414"),
    "gpo_exponential": _row(losses.gpo_exponential, "2402.05749"),
    "gpo_squared_hinge": _row(losses.gpo_squared_hinge, "2402.05749"),
    "gpo_savage": _row(losses.gpo_savage, "2402.05749"),
    "focal_po": _row(losses.focal_po, "2501.06645"),
    "nca": _row(losses.nca, "2402.05369"),
    "bco": _row(losses.bco, "2404.04656", extras=("reward_shift",), note="bco_reward_shift, or 0"),
    "sppo": _row(losses.sppo, "2405.00675", note="the paper runs beta 0.001 on its own scale"),
    "apo_zero": _row(losses.apo_zero, "2408.06266"),
    "apo_down": _row(losses.apo_down, "2408.06266"),
    "cal_dpo": _row(losses.cal_dpo, "2412.14516", anchor="calibration"),
    "f_dpo_forward_kl": _row(losses.f_dpo_forward_kl, "2309.16240"),
    "f_dpo_jensen_shannon": _row(losses.f_dpo_jensen_shannon, "2309.16240"),
    "f_dpo_alpha": _row(losses.f_dpo_alpha, "2309.16240"),
    "chi_po": _row(losses.chi_po, "2407.13399"),
    "h_dpo": _row(losses.h_dpo, "2411.07595"),
    "odpo": _row(losses.odpo, "2402.10571", extras=("offsets",), note="a data column"),
    "r_dpo": _row(losses.r_dpo, "2403.19159", anchor="length"),
    "dpop": _row(losses.dpop, "2402.13228", note="Smaug; the paper uses 50 in places"),
    "dpo_shift": _row(losses.dpo_shift, "2502.07599", note="rejected_scale fixed, or linear over training"),
    "bpo": _row(losses.bpo, "2506.03557"),
    "minor_dpo": _row(losses.minor_dpo, "2408.09834"),
    "c2_dpo": _row(losses.c2_dpo, "2502.17507", anchor="mass"),
    "rpo": _row(losses.rpo, "2405.16436", anchor="nll"),
    "irpo": _row(losses.rpo, "2404.19733", anchor="nll", defaults={"nll_coeff": 1.0}),
    "aot": _row(losses.aot, "2406.05882", extras=("matched_ref_margins",), note="rank_match"),
    "aot_unpaired": _row(
        losses.aot_unpaired, "2406.05882", extras=("matched_rejected", "matched_chosen"), note="rank_match, both ways"
    ),
    "beta_dpo": _row(losses.beta_dpo, "2407.08639", extras=("batch_beta",), note="beta_dpo_selection, beta_dpo_beta"),
    "dr_dpo": _row(losses.dr_dpo, "2407.07880", extras=("log_mean",), note="dr_dpo_log_mean"),
    "wpo": _row(losses.wpo, "2406.11827", extras=("pair_weights",), note="wpo_weights of both, multiplied"),
    "alpha_dpo": _row(
        losses.alpha_dpo, "2410.10148", length_normalized=True, extras=("standardized_gaps",), note="standardize"
    ),
    "simpo": _row(losses.simpo, "2405.14734", needs_reference=False, length_normalized=True),
    "alpha_po": _row(losses.alpha_po, "2501.03884", needs_reference=False, length_normalized=True),
    "cpo": _row(losses.cpo, "2401.08417", needs_reference=False, anchor="nll"),
    "orpo": _row(losses.orpo, "2403.07691", needs_reference=False, length_normalized=True, anchor="nll"),
    "power": _row(losses.power, "2412.09544", needs_reference=False, length_normalized=True, anchor="nll"),
    "nll": _row(losses.nll, "", needs_reference=False, length_normalized=True, note="an anchor, to mix in"),
    "kto": _row(losses.kto, "2402.01306", unpaired=True, extras=("kl_baseline",), note="kto_baseline"),
    "bco_unpaired": _row(
        losses.bco_unpaired, "2404.04656", unpaired=True, extras=("reward_shift",), note="bco_reward_shift"
    ),
}

# Methods that are a weighted sum of rows.
MIXTURES: dict[str, dict[str, float]] = {
    "mpo": {"dpo": 0.8, "bco": 0.2, "nll": 1.0},  # arXiv:2411.10442
    "cpo_simpo": {"simpo": 1.0, "nll": 1.0},  # arXiv:2401.08417 with arXiv:2405.14734
}

# Methods that are a row above on other log-probabilities, other data or a moving reference: no loss of their own.
SCHEDULES: dict[str, str] = {
    "ld_dpo": "arXiv:2409.06411: dpo on length_desensitized_logprobs of policy and reference",
    "sampo": "arXiv:2406.10957: dpo on sequence_logprobs over subsampled_mask, one mask for policy and reference",
    "tr_dpo": "arXiv:2404.09656: any row; every 512 steps reference = 0.6 policy + 0.4 reference",
    "spin": "arXiv:2401.01335: dpo with data as chosen, own samples as rejected, the previous iterate as reference",
    "online_dpo": "arXiv:2402.04792: dpo on fresh pairs of own samples, labeled by a judge or a reward model",
    "xpo": "arXiv:2405.21046: online_dpo + 1e-5 * summed policy log-probability of the reference's samples",
    "tpo": "arXiv:2405.16681: cpo or simpo on the pair + nll on a third, gold completion",
}
