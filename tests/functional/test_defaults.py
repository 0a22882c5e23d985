"""Every numeric default beside what its source states: where a source states a number, that is the
default, or a reason stands here. Asked first is the paper, then its authors' code, then a second
implementation. `by` says who answered; what nobody was found to state is oxRL's own choice.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from oxrl.tables.cells import CELLS, FEATURES
from oxrl.tables.policy import ROWS
from oxrl.tables.preference import METHODS

Key = tuple[str, str]  # (cell, feature, row or method; number)


class Stated(NamedTuple):
    """One default. `differs`: why ours is another, empty where it is not."""

    where: str
    number: str
    ours: float | None
    theirs: float
    by: str
    differs: str = ""


LLM = "a discount of .99 forgets a reward at the end of a response of some hundred tokens"
NO_REFERENCE_BY_CELL = "a cell that was chosen by hand asks for no reference; rows that do say so"
STATED = [
    # Cells.
    Stated("advantage gae", "gamma", 1.0, 0.99, "paper 1707.06347, table 3; 1 in the code of 1909.08593", LLM),
    Stated("advantage gae", "gae_lambda", 1.0, 0.95, "paper 1707.06347, table 3",
           "of GAE chosen by hand, as in verl and OpenRLHF; the rows ppo and ppo_rlhf have .95"),
    Stated("advantage returns", "gamma", 1.0, 1.0, "verl, OpenRLHF"),
    Stated("advantage whitened_returns", "gamma", 1.0, 1.0, "authors: OpenRLHF, algo.advantage.gamma"),
    Stated("advantage gae_length_adaptive", "gamma", 1.0, 1.0, "paper 2504.05118"),
    Stated("advantage gae_length_adaptive", "length_alpha", 0.05, 0.05, "paper 2504.05118"),
    Stated("advantage teacher_return", "teacher_gamma", 1.0, 0.0, "second: TRL, MiniLLMConfig",
           "0 is the row opd; with 1 it is the divergence of whole responses, which the paper is about"),
    Stated("advantage teacher_prefix_gap", "prefix_coeff", 0.5, 0.5, "paper 2606.22600, algorithm 1 and appendix C.3, by TRL's index"),
    Stated("ratio geometric", "clip_low", 3e-4, 3e-4, "paper 2507.18071, section 5.1"),
    Stated("ratio geometric", "clip_high", 4e-4, 4e-4, "paper 2507.18071, section 5.1"),
    Stated("gate ppo_clip", "clip_low", 0.2, 0.2, "paper 1707.06347, table 3"),
    Stated("gate ppo_clip", "clip_high", 0.2, 0.2, "paper 1707.06347, table 3"),
    Stated("gate ppo_clip", "clip_dual", None, 3.0, "paper 1912.09729", "PPO has no second clip"),
    Stated("gate clip_cov", "clip_low", 0.2, 0.2, "second: verl, clip_ratio_low"),
    Stated("gate clip_cov", "clip_high", 0.2, 0.2, "second: verl, clip_ratio_high"),
    Stated("gate simko", "clip_low", 0.2, 0.2, "second: verl, on which the authors' code builds"),
    Stated("gate simko", "clip_high", 0.2, 0.2, "second: verl, on which the authors' code builds"),
    Stated("gate simko", "simko_alpha", 0.01, 0.01, "authors: code of 2510.14807"),
    Stated("gate simko", "simko_boost", 1.1, 1.1, "authors: code of 2510.14807"),
    Stated("gate gmpo", "clip_low", 0.4, 0.4, "paper 2507.20673, section 4; verl's example"),
    Stated("gate gmpo", "clip_high", 0.4, 0.4, "paper 2507.20673, section 4; verl's example"),
    Stated("gate rspo", "clip_low", 0.4, 0.4, "paper 2507.20673, whose gate it is"),
    Stated("gate rspo", "clip_high", 0.4, 0.4, "paper 2507.20673, whose gate it is"),
    Stated("gate kl_cov", "kl_cov_coeff", 1.0, 1.0, "paper 2505.22617; verl's config has .1"),
    Stated("gate cispo", "weight_min", 0.0, 0.0, "paper 2506.13585: no lower bound in effect"),
    Stated("gate cispo", "weight_max", 5.0, 5.0, "second: TRL's index of papers, epsilon_high of 2510.13786"),
    Stated("gate sapo", "sapo_positive", 1.0, 1.0, "paper 2511.20347; TRL"),
    Stated("gate sapo", "sapo_negative", 1.05, 1.05, "paper 2511.20347; TRL"),
    Stated("gate proximal", "proximal_coeff", 0.01, 0.01, "second: OpenKimi, pmd_tau"),
    Stated("gate drpo", "drpo_delta", 0.15, 12.5, "paper 2606.09821, section 4; UniRL",
           "a change of probability is at most 1, and 12.5 bounds none of them; .15 is DPPO's bound"),
    Stated("gate fipo", "clip_low", 0.2, 0.2, "authors: a script of FIPO, clip_ratio_low"),
    Stated("gate fipo", "clip_high", 0.2, 0.28, "authors: a script of FIPO, clip_ratio_high", "the row has the .28, and the cell PPO's"),
    Stated("gate fipo", "clip_dual", None, 3.0, "authors: clip_ratio_c of the function",
           "ms-swift has none, and safety at 4 would have nothing to do"),
    Stated("gate fipo", "influence_range", 0.2, 0.2, "authors: a script of FIPO; ms-swift"),
    Stated("gate fipo", "influence_half_life", 32.0, 32.0, "authors: a script of FIPO, decay_rate; ms-swift"),
    Stated("gate fipo", "influence_ratio_max", 4.0, 4.0, "authors: safety_thresh of the function; ms-swift"),
    Stated("row fipo", "clip_high", 0.28, 0.28, "authors: a script of FIPO, clip_ratio_high"),
    *(
        Stated(f"gate {gate}", number, value, value, "authors: script in verl, dppo_trainer")
        for gate, value in (("dppo_tv", 0.15), ("dppo_topk_tv", 0.15), ("dppo_kl", 0.05), ("dppo_topk_kl", 0.05))
        for number in ("dppo_low", "dppo_high")
    ),
    *(
        Stated(f"gate {gate}", "weight_max", 20.0, 10.0, "authors: Stable-RL, clip_ratio_c of the function",
               "the authors' config has 3 and their script in verl switches it off; 20 is verl's")
        for gate in ("dppo_tv", "dppo_kl", "dppo_topk_tv", "dppo_topk_kl")
    ),
    Stated("selection clip_cov", "cov_fraction", 2e-4, 2e-4, "paper 2505.22617; verl"),
    Stated("selection clip_cov", "cov_low", 1.0, 1.0, "paper 2505.22617; verl"),
    Stated("selection clip_cov", "cov_high", 5.0, 5.0, "paper 2505.22617; verl"),
    Stated("selection kl_cov", "cov_fraction", 2e-4, 2e-4, "paper 2505.22617, 32B; 2e-3 for 7B; verl"),
    Stated("selection simko", "explore_quantile", 0.8, 0.8, "authors: code of 2510.14807"),
    Stated("feature top_logprobs", "top_candidates", 3, 3, "authors: code of 2510.14807"),
    Stated("correction truncate", "correction_max", 2.0, 2.0, "authors: Yao et al. 2025; verl, TRL's index"),
    Stated("correction mask", "correction_min", 0.5, 0.5, "paper 2510.18855; TRL's index"),
    Stated("correction mask", "correction_max", 2.0, 2.0, "second: TRL's index, masked importance sampling"),
    Stated("correction reject", "correction_min", 0.999, 0.999, "second: verl's geometric preset"),
    Stated("correction reject", "correction_max", 1.001, 1.001, "second: verl's geometric preset"),
    Stated("correction reject_k3", "correction_k3_max", 0.01, 0.01, "second: verl's k3 preset"),
    Stated("correction veto", "correction_veto", 1e-4, 1e-4, "second: slime"),
    Stated("correction drop_drifted_failures", "drift_max", 0.5, 0.5, "second: TRL's index; the paper has none"),
    Stated("correction second_moment", "second_moment_max", 0.04, 0.04, "second: AReaL, m2_threshold"),
    Stated("feature critic", "value_clip", 0.2, 0.2, "authors: code of 1909.08593, cliprange_value"),
    Stated("feature adaptive_kl", "kl_target", 6.0, 6.0, "authors: launch.py of 1909.08593"),
    Stated("feature adaptive_kl", "kl_horizon", 10000.0, 10000.0, "authors: code of 1909.08593"),
    Stated("feature reference_reset", "reference_sync_steps", 512, 512, "paper 2404.09656, table 1; ProRL resets by hand"),
    # Rows.
    Stated("row ppo", "gae_lambda", 0.95, 0.95, "paper 1707.06347, table 3"),
    Stated("row ppo_rlhf", "gae_lambda", 0.95, 0.95, "authors: code of 1909.08593"),
    Stated("row ppo_rlhf", "kl_coeff", 0.15, 0.15, "authors: launch.py of 1909.08593, adaptive"),
    Stated("row vapo", "clip_high", 0.28, 0.28, "paper 2504.05118"),
    Stated("row vapo", "nll_coeff", 0.1, 0.1, "paper 2504.05118; NeMo-RL's recipe"),
    Stated("row vapo", "critic_warmup_steps", 50, 50, "paper 2504.05118, second-hand"),
    Stated("row reinforce_plus_plus", "clip_high", 0.2, 0.2, "authors: OpenRLHF, actor.eps_clip"),
    Stated("row reinforce_plus_plus", "kl_coeff", 0.01, 0.01, "authors: OpenRLHF, algo.kl.init_coef"),
    Stated("row reinforce_plus_plus_baseline", "clip_high", 0.2, 0.2, "authors: OpenRLHF, actor.eps_clip"),
    Stated("row reinforce_plus_plus_baseline", "kl_coeff", 1e-5, 1e-5, "authors: OpenRLHF, train_reinforce_baseline"),
    Stated("row decoupled_ppo", "clip_high", 0.2, 0.2, "authors: AReaL, eps_clip"),
    Stated("row decoupled_ppo", "correction_max", 5.0, 5.0, "authors: AReaL, behav_imp_weight_cap"),
    Stated("row a3po", "clip_high", 0.2, 0.2, "second: AReaL, eps_clip"),
    Stated("row a3po", "correction_max", 5.0, 5.0, "second: AReaL, behav_imp_weight_cap"),
    Stated("row sgrpo", "kl_coeff", 0.0, 0.04, "paper 2402.03300", "a verifier cannot be over-optimised as a learned reward can"),
    Stated("row grpo", "kl_coeff", 0.04, 0.04, "paper 2402.03300"),
    Stated("row gdpo", "clip_high", 0.2, 0.2, "authors: NVlabs/GDPO, clip_ratio of verl"),
    Stated("row dr_grpo", "clip_high", 0.2, 0.2, "authors: oat's PPO arguments, on which their code runs"),
    Stated("row lite_ppo", "clip_high", 0.2, 0.2, "paper 2508.08221: vanilla PPO loss"),
    Stated("row dapo", "clip_high", 0.28, 0.28, "paper 2503.14476, section 4.1"),
    Stated("row luspo", "clip_low", 2e-3, 2e-3, "paper 2602.05261, section 5.1"),
    Stated("row luspo", "clip_high", 2.5e-3, 2.5e-3, "paper 2602.05261, section 5.1"),
    Stated("row rloo", "kl_coeff", 0.03, 0.03, "paper 2402.14740, appendix C"),
    Stated("row remax", "kl_coeff", 0.05, 0.05, "authors: ReMax, run_llama2_7b.sh"),
    Stated("row mis", "correction_max", 3.0, 3.0, "second: TRL, vllm_importance_sampling_clip_max"),
    Stated("row icepop", "correction_max", 5.0, 5.0, "paper 2510.18855"),
    Stated("row gkd", "divergence_alpha", 0.5, 0.5, "second: TRL, GKDConfig, beta"),
    Stated("feature given_rows", "gkd_lambda", 0.5, 0.5, "second: TRL, GKDConfig, lmbda"),
    Stated("row kdrl", "teacher_coeff", 5e-3, 5e-3, "paper 2506.02208, second-hand"),
    Stated("row kdrl", "teacher_coeff_end", 1e-3, 1e-3, "paper 2506.02208, second-hand"),
    Stated("row sdpo", "divergence_alpha", 0.5, 0.5, "paper 2601.20802, by TRL's index; 1 in TRL's config"),
    Stated("row sdpo", "teacher_candidates", 100, 100, "paper 2601.20802, by TRL's index"),
    Stated("row lambda_grpo", "clip_high", 0.28, 0.28, "paper 2503.14476, whose loss it weights"),
    # Methods.
    Stated("method dpo", "beta", 0.1, 0.1, "paper 2305.18290, appendix B"),
    Stated("method robust_dpo", "beta", 0.1, 0.1, "paper 2403.00409, appendix B"),
    Stated("method robust_dpo", "label_noise", 0.1, 0.1, "paper 2403.00409, section 6"),
    Stated("method rso", "beta", 0.05, 0.05, "paper 2309.06657, where it is gamma"),
    Stated("method sigmoid_norm", "beta", 5.0, 5.0, "paper 2411.15124"),
    Stated("method exo", "beta", 0.1, 0.1, "paper 2402.00856, appendix B, by TRL's index; .5 on HH in the authors' script"),
    Stated("method exo", "label_noise", 1e-3, 4.54e-5, "authors: log_epsilon -10",
           "TRL's: pairs that are labeled the wrong way cost at most 6.9 nats instead of 10"),
    Stated("method discopop", "beta", 0.05, 0.05, "paper 2406.08414, section B.1"),
    Stated("method discopop", "tau", 0.05, 0.05, "paper 2406.08414, section E"),
    Stated("method focal_po", "gamma", 0.05, 0.05, "paper 2501.06645"),
    Stated("method nca", "beta", 0.01, 0.01, "paper 2402.05369, appendix C"),
    Stated("method bco", "beta", 0.01, 0.01, "paper 2404.04656, by TRL's index"),
    Stated("method bco_unpaired", "beta", 0.01, 0.01, "paper 2404.04656, by TRL's index"),
    Stated("method sppo", "beta", 0.001, 0.001, "paper 2405.00675, eta = 1e3; the authors' pipeline.sh"),
    Stated("method apo_zero", "beta", 0.1, 0.1, "paper 2408.06266, section 5.2"),
    Stated("method apo_down", "beta", 0.1, 0.1, "paper 2408.06266, section 5.2"),
    Stated("method cal_dpo", "beta", 0.001, 0.001, "authors: run/beta001_sametokenize.sh"),
    Stated("method cal_dpo", "calibration_coeff", 1.0, 1.0, "paper 2412.14516: the two terms are added"),
    Stated("method f_dpo_forward_kl", "beta", 0.1, 0.1, "second: TRL's index"),
    Stated("method f_dpo_jensen_shannon", "beta", 0.1, 0.1, "second: TRL's index"),
    Stated("method f_dpo_alpha", "beta", 0.1, 0.1, "second: TRL's index"),
    Stated("method f_dpo_alpha", "alpha", 0.5, 0.5, "second: TRL's index"),
    Stated("method r_dpo", "beta", 0.1, 0.1, "second: the authors of SamPO, dpo.sh"),
    Stated("method r_dpo", "length_coeff", 0.01, 0.01, "second: the authors of SamPO, dpo.sh"),
    Stated("method dpop", "penalty_coeff", 5.0, 50.0, "second: the authors of SamPO, dpo.sh",
           "the paper has both 5 and 50; 50 is for pairs that differ in a few tokens"),
    Stated("method dpo_shift", "rejected_scale", 0.95, 0.95, "authors: one of the fixed scales that they release"),
    Stated("method rpo", "beta", 0.01, 0.01, "paper 2405.16436, appendix E.1"),
    Stated("method rpo", "nll_coeff", 0.005, 0.005, "paper 2405.16436"),
    Stated("method irpo", "nll_coeff", 1.0, 1.0, "paper 2404.19733, alpha"),
    Stated("method aot", "beta", 0.01, 0.01, "paper 2406.05882, figure 2"),
    Stated("method aot_unpaired", "beta", 0.01, 0.01, "paper 2406.05882, figure 2"),
    Stated("method beta_dpo", "beta", 0.1, 0.1, "authors: code of 2407.08639"),
    Stated("method beta_dpo", "beta_scale", 0.6, 0.6, "authors: code of 2407.08639"),
    Stated("method beta_dpo", "drop_frac", 0.2, 0.2, "authors: code of 2407.08639"),
    Stated("method dr_dpo", "robustness", 1.0, 1.0, "paper 2407.07880"),
    Stated("method wpo", "beta", 0.01, 0.01, "paper 2406.11827, section 4; the authors' configs"),
    Stated("method alpha_dpo", "beta", 2.5, 2.5, "authors: llama-3-8b-instruct-alpha-dpo.yaml"),
    Stated("method alpha_dpo", "gamma", 0.6, 0.6, "authors: llama-3-8b-instruct-alpha-dpo.yaml"),
    Stated("method alpha_dpo", "alpha", 0.2, 0.2, "authors: llama-3-8b-instruct-alpha-dpo.yaml"),
    Stated("method simpo", "beta", 2.5, 2.5, "authors: llama-3-8b-instruct-simpo.yaml"),
    Stated("method simpo", "gamma", 1.375, 1.375, "authors: gamma / beta .55, llama-3-8b-instruct-simpo.yaml"),
    Stated("method cpo_simpo", "beta", 2.5, 2.5, "authors: llama-3-8b-instruct-simpo.yaml"),
    Stated("method cpo_simpo", "gamma", 1.375, 1.375, "authors: llama-3-8b-instruct-simpo.yaml"),
    Stated("method alpha_po", "beta", 2.5, 2.5, "paper 2501.03884, table 3, by TRL's index"),
    Stated("method alpha_po", "gamma", 0.1, 0.1, "paper 2501.03884, table 3, by TRL's index"),
    Stated("method alpha_po", "alpha", 0.25, 0.25, "paper 2501.03884, table 3, by TRL's index"),
    Stated("method cpo", "beta", 0.1, 0.1, "paper 2401.08417, section 4.2"),
    Stated("method cpo", "nll_coeff", 1.0, 1.0, "paper 2401.08417, section 3"),
    Stated("method orpo", "odds_coeff", 0.1, 0.1, "paper 2403.07691, table 7"),
    Stated("method kto", "beta", 0.1, 0.1, "paper 2402.01306"),
    Stated("method kto", "desirable_coeff", 1.0, 1.0, "paper 2402.01306"),
    Stated("method kto", "undesirable_coeff", 1.0, 1.0, "paper 2402.01306"),
    Stated("method ld_dpo", "tail_coeff", 0.5, 0.5, "paper 2409.06411, by TRL's index"),
    Stated("method sampo", "beta", 0.1, 0.1, "authors: dpo.sh of 2406.10957"),
    Stated("method tr_dpo", "beta", 0.05, 0.05, "paper 2404.09656, table 1"),
    Stated("method tr_dpo", "reference_sync_steps", 512, 512, "paper 2404.09656"),
    Stated("method tr_dpo", "reference_sync_rate", 0.6, 0.6, "paper 2404.09656, table 1"),
    Stated("row reward_model", "center_coeff", 0.0, 0.01, "paper 2312.09244",
           "Bradley-Terry as InstructGPT writes it has no such term"),
]  # fmt: skip
# Where no source was found that states the number: what the choice rests on.
DPO_BETA = "DPO's; what the source ran with was not found"
CLIP_HIGHER = "the source states none: DAPO's, so that rare tokens keep room to grow"
NO_NUMBER = "of a switch or a task, no number of a paper"
OWN: dict[Key, str] = {
    **{
        (f"advantage {name}", "turn_gamma"): "none of its own: what stands within a turn"
        for name in ("returns", "whitened_returns", "gae", "gae_length_adaptive")
    },
    ("advantage gae", "turn_lambda"): "none of its own: what stands within a turn",
    ("advantage iqr_normalize", "iqr_floor"): "half of what a right answer is worth",
    ("centering score", "center_tail"): "the one without drift; the paper's is token",
    ("feature sampler_top", "center_top"): "so many that little is left, in 516 bytes a token",
    ("advantage mean_normalize", "maxrl_order"): "none: as many terms as a group has, as its authors",
    ("advantage turn_normalize", "turn_gamma"): "none: rewards of turns are of one size",
    ("advantage pass_at_k", "pass_k"): "the least that is not pass@1",
    ("advantage teacher_gap", "teacher_coeff"): "1: the divergence itself",
    ("advantage group_normalize_teacher", "teacher_coeff"): "1 of the cell; the row kdrl has its own",
    ("advantage group_normalize_teacher", "teacher_coeff_end"): "none of the cell: it stays",
    ("gate teacher_divergence", "divergence_alpha"): "the divergence of opd, with less noise",
    ("feature teacher_top", "teacher_candidates"): "vLLM tells 20 unless it is started otherwise",
    ("gate dro", "proximal_coeff"): "verl asks for one; a token rests where its log-ratio is A",
    ("gate rgpo_like", "gate_sharpness"): "the paper's gate was not verified",
    ("feature critic", "critic_lr"): NO_NUMBER,
    ("feature critic", "critic_warmup_steps"): NO_NUMBER,
    ("feature dynamic_sampling", "sampling_rounds"): "a bound on what a step may cost",
    ("feature discriminator", "discriminator_lr"): NO_NUMBER,
    ("feature discriminator", "discriminator_warmup_steps"): NO_NUMBER,
    ("feature overlong_penalty", "overlong_buffer"): "DAPO's share of its own limit, 4096 / 20480",
    ("feature positive_nll", "nll_coeff"): "a row with the feature brings its own",
    ("feature top_logprobs", "top_candidates"): "of SimKO above; DPPO's needs more",
    ("weights fixed_length", "weights_length"): "the run's longest response",
    ("weights lambda_group", "length_power"): "learned in the paper",
    ("row vapo", "critic_warmup_steps"): "see above",
    ("row prorl", "clip_high"): "from memory of the paper",
    ("row prorl", "kl_coeff"): "1e-4 with k2 in the authors' second version; the first states none",
    ("row mis", "correction_min"): "no lower bound, as TRL's default",
    **{
        (f"row {name}", "clip_high"): CLIP_HIGHER
        for name in (
            "maxrl", "pkpo", "iqr_grpo", "pass_k_training", "tis", "mis", "icepop", "geometric_rejection",
            "k3_rejection", "veto", "opsm", "r3", "kdrl", "gad",
        )
    },
    **{("kl " + name, "kl_coeff"): NO_REFERENCE_BY_CELL
       for name in ("loss_k2", "loss_k3", "loss_k3_plus", "loss_k3_ratio", "reward_k1")},
    ("row rft", "keep_reward"): NO_NUMBER,
    ("row rft", "keep_per_prompt"): NO_NUMBER,
    **{
        (f"method {name}", "beta"): DPO_BETA
        for name in (
            "cdpo", "ipo", "ipo_sum", "hinge", "gpo_exponential", "gpo_squared_hinge", "gpo_savage",
            "focal_po", "chi_po", "h_dpo", "odpo", "dpop", "dpo_shift", "bpo", "minor_dpo", "c2_dpo",
            "irpo", "dr_dpo", "mpo", "ld_dpo",
        )
    },
    ("method cdpo", "label_noise"): "the note states none: the one of robust DPO",
    ("method h_dpo", "alpha"): "from the design; the paper's was not verified",
    ("method bpo", "balance"): "both sides alike",
    ("method c2_dpo", "mass_coeff"): "the paper's was not verified",
    ("method power", "beta"): "from the design; the paper's was not verified",
    ("method power", "nll_coeff"): "from the design; the paper's was not verified",
}  # fmt: skip


def defaults() -> dict[Key, list[object]]:
    """Every number of the tables with its default; a feature may stand for several cells."""
    found: dict[Key, list[object]] = {}
    parts = [(f"{kind} {name}", cell.numbers) for (kind, name), cell in CELLS.items()]
    for cell in CELLS.values():
        parts += [(f"feature {feature.name}", feature.numbers) for feature in cell.needs]
    parts += [(f"feature {feature.name}", feature.numbers) for feature in FEATURES.values()]
    for name, row in ROWS.items():
        if row.recipe != "preference":
            parts.append((f"row {name}", (*row.numbers, *row.overrides)))
    for name, method in METHODS.items():
        parts.append((f"method {name}", (*method.reads, *method.around)))
    for where, numbers in parts:
        for number in numbers:
            if isinstance(number.default, bool | str):
                continue
            values = found.setdefault((where, number.name), [])
            if number.default not in values:
                values.append(number.default)
    return found


@pytest.mark.parametrize("stated", STATED, ids=lambda stated: f"{stated.where}: {stated.number}")
def test_a_default_is_what_its_source_states_or_says_why_not(stated: Stated) -> None:
    kind, _, name = stated.where.partition(" ")
    found = defaults().get((stated.where, stated.number))
    if kind == "row":
        # As the row resolves it, its own override or its cell's.
        found = [ROWS[name].defaults[stated.number]]
    assert found is not None and stated.ours in found
    assert stated.by
    if stated.ours != stated.theirs:
        assert len(stated.differs) > 15, "a default that is not the source's needs a reason"
    else:
        assert not stated.differs


def test_every_numeric_default_of_the_tables_is_listed_with_its_source_or_as_our_own() -> None:
    listed = {(stated.where, stated.number) for stated in STATED} | set(OWN)
    assert set(defaults()) - listed == set()


def test_a_reference_is_loaded_by_the_defaults_of_these_rows_and_of_no_other() -> None:
    """Whoever names one of them is told by the plan and at the start of the run."""
    asking = {name for name, row in ROWS.items() if row.defaults.get("kl_coeff")}
    assert asking == {
        "grpo", "ppo_rlhf", "prorl", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
        "remax", "rloo",
    }  # fmt: skip
