"""Table B of preference methods as the config sees it: name -> (arXiv id, numbers with their defaults). Pure data.

A name is a row of `oxrl.functional.preferences` (PREFERENCES, MIXTURES or SCHEDULES), which holds the loss; the numbers
are its keyword arguments and those of its batch statistics (a test compares the two tables). `train.<field>` of a
number is `FIELDS.get(number, number)`: words that mean something else in reinforcement learning get a prefix.
"""

from __future__ import annotations

FIELDS = {"alpha": "preference_alpha", "gamma": "preference_gamma", "tau": "preference_tau"}

# Losses on single completions with a verdict; pairs are read as two rows.
UNPAIRED = frozenset({"kto", "bco_unpaired"})

METHODS: dict[str, tuple[str, dict[str, float]]] = {
    "dpo": ("2305.18290", {"beta": 0.1}),
    "cdpo": ("2305.18290", {"beta": 0.1, "label_noise": 0.1}),
    "robust_dpo": ("2403.00409", {"beta": 0.1, "label_noise": 0.1}),
    "ipo": ("2310.12036", {"beta": 0.1}),
    "ipo_sum": ("2310.12036", {"beta": 0.1}),
    "hinge": ("2305.10425", {"beta": 0.1}),
    "rso": ("2309.06657", {"beta": 0.05}),
    "sigmoid_norm": ("2411.15124", {"beta": 5.0}),
    "exo": ("2402.00856", {"beta": 0.1, "label_noise": 1e-3}),
    "discopop": ("2406.08414", {"beta": 0.05, "tau": 0.05}),
    "gpo_exponential": ("2402.05749", {"beta": 0.1}),
    "gpo_squared_hinge": ("2402.05749", {"beta": 0.1}),
    "gpo_savage": ("2402.05749", {"beta": 0.1}),
    "focal_po": ("2501.06645", {"beta": 0.1, "gamma": 0.05}),
    "nca": ("2402.05369", {"beta": 0.01}),
    "bco": ("2404.04656", {"beta": 0.01}),
    "sppo": ("2405.00675", {"beta": 0.1}),
    "apo_zero": ("2408.06266", {"beta": 0.1}),
    "apo_down": ("2408.06266", {"beta": 0.1}),
    "cal_dpo": ("2412.14516", {"beta": 0.1, "calibration_coeff": 1.0}),
    "f_dpo_forward_kl": ("2309.16240", {"beta": 0.1}),
    "f_dpo_jensen_shannon": ("2309.16240", {"beta": 0.1}),
    "f_dpo_alpha": ("2309.16240", {"beta": 0.1, "alpha": 0.5}),
    "chi_po": ("2407.13399", {"beta": 0.1}),
    "h_dpo": ("2411.07595", {"beta": 0.1, "alpha": 0.9}),
    "odpo": ("2402.10571", {"beta": 0.1}),
    "r_dpo": ("2403.19159", {"beta": 0.1, "length_coeff": 0.01}),
    "dpop": ("2402.13228", {"beta": 0.1, "penalty_coeff": 5.0}),
    "dpo_shift": ("2502.07599", {"beta": 0.1, "rejected_scale": 0.95}),
    "bpo": ("2506.03557", {"beta": 0.1, "balance": 1.0}),
    "minor_dpo": ("2408.09834", {"beta": 0.1}),
    "c2_dpo": ("2502.17507", {"beta": 0.1, "mass_coeff": 1e-3}),
    "rpo": ("2405.16436", {"beta": 0.1, "nll_coeff": 0.005}),
    "irpo": ("2404.19733", {"beta": 0.1, "nll_coeff": 1.0}),
    "aot": ("2406.05882", {"beta": 0.01}),
    "aot_unpaired": ("2406.05882", {"beta": 0.01}),
    "beta_dpo": ("2407.08639", {"beta": 0.1, "beta_scale": 0.6, "drop_frac": 0.2}),
    "dr_dpo": ("2407.07880", {"beta": 0.1, "robustness": 1.0}),
    "wpo": ("2406.11827", {"beta": 0.1}),
    "alpha_dpo": ("2410.10148", {"beta": 2.5, "gamma": 0.3, "alpha": 0.1}),
    "simpo": ("2405.14734", {"beta": 2.5, "gamma": 1.375}),
    "alpha_po": ("2501.03884", {"beta": 2.5, "gamma": 0.5, "alpha": 0.25}),
    "cpo": ("2401.08417", {"beta": 0.1, "nll_coeff": 1.0}),
    "orpo": ("2403.07691", {"odds_coeff": 0.1}),
    "power": ("2412.09544", {"beta": 2.0, "nll_coeff": 5e-4}),
    "kto": ("2402.01306", {"beta": 0.1, "desirable_coeff": 1.0, "undesirable_coeff": 1.0}),
    "bco_unpaired": ("2404.04656", {"beta": 0.01}),
    # Weighted sums of rows (MIXTURES): a number goes to every part that takes it.
    "mpo": ("2411.10442", {"beta": 0.1}),
    "cpo_simpo": ("2405.14734", {"beta": 2.5, "gamma": 1.375}),
    # DPO on other sums of log-probabilities or against a moving reference (SCHEDULES).
    "ld_dpo": ("2409.06411", {"beta": 0.1, "tail_coeff": 0.5}),
    "sampo": ("2406.10957", {"beta": 0.1}),
    "tr_dpo": ("2404.09656", {"beta": 0.1, "reference_sync_steps": 512, "reference_sync_rate": 0.6}),
}
