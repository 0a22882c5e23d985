"""The table: an algorithm is a row of named cells. Pure data; imports neither torch nor config.

    rewards -> advantage -> ratio (level, denominator) -> gate -> correction -> KL -> loss weights

A cell names a function in `oxrl/functional` (ADVANTAGES, RATIOS, GATES, CORRECTIONS, KLS, WEIGHTS there, and by a
gate's name SELECTIONS: what it reads of the whole step); a recipe resolves the names once, when it is built.
`PARAMETERS` says which `train.*` fields each cell reads: the config refuses any other. `NEEDS` says what a cell cannot
do without, `BUILT` which of these the recipes deliver: a row that needs more is listed, proved and documented, but
refused by the config (`Row.unsupported`). All of that holds for rows composed by hand as well, because it belongs to
cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oxrl.preference_methods import METHODS

Value = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One algorithm.

    `extras` are features of the recipe beyond its cells; `defaults` values of `train.*` fields that differ from the
    schema's; `deviation` what differs from the source, and why; `shared_weight` why a token's effective weight depends
    on other tokens or reaches other tokens (empty for token-local rows); `exempt` maps a proof to the reason why it
    does not apply.
    """

    name: str
    summary: str
    source: str
    use: str = ""
    deviation: str = ""
    recipe: Literal["rl", "supervised", "rejection", "preference", "reward_model"] = "rl"
    # Fields of `train` that the row itself reads, beside those of its cells.
    numbers: tuple[str, ...] = ()
    advantage: str = "group_normalize"
    ratio: Literal["none", "token", "sequence", "geometric"] = "token"
    denominator: Literal["old", "rollout"] = "old"
    gate: str = "ppo_clip"
    correction: str = "none"
    kl: str = "none"
    weights: str = "token_mean"
    extras: tuple[str, ...] = ()
    defaults: Mapping[str, Value] = field(default_factory=dict[str, Value])
    shared_weight: str = ""
    exempt: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """(kind, name) of every cell that names a function."""
        kinds = ("advantage", "gate", "correction", "kl", "weights")
        return tuple((kind, getattr(self, kind)) for kind in kinds) if self.recipe == "rl" else ()

    @property
    def needs(self) -> tuple[str, ...]:
        """What the cells and extras need, each once: keys of `FEATURES`."""
        found = [need for cell in self.cells for need in NEEDS.get(cell, ())] + list(self.extras)
        return tuple(dict.fromkeys(found))

    @property
    def unsupported(self) -> str:
        """Empty if the recipes can run this row, else what is missing."""
        missing = [f"{need} ({FEATURES[need]})" for need in self.needs if need not in BUILT]
        return f"{self.name} needs {', '.join(missing)}: not part of a recipe yet" if missing else ""


# What a cell or an extra can need -> what a recipe does to deliver it.
FEATURES: dict[str, str] = {
    "critic": "a value model trained beside the policy",
    "groups": "at least two samples per prompt",
    "binary_rewards": "rewards that are 0 or 1",
    "greedy_rollout": "one greedy response per prompt under the same weights",
    "teacher": "a teacher that scores the sampled tokens",
    "top_logprobs": "logprobs of the sampler's top tokens, with gradient",
    "token_selection": "tokens chosen over the whole step by their covariance",
    "full_batch_correction": "a correction computed over the whole step, not per micro-batch",
    "advantages_in_correction": "a correction that sees the advantages",
    "interpolated_anchor": "an anchor between sampler and current policy by token age",
    "routing": "the router's choices, recorded while sampling and replayed in training",
    "dynamic_sampling": "prompts resampled until every group has rewards that differ",
    "overlong_penalty": "a reward penalty that grows towards the token limit",
    "adaptive_kl": "kl_coeff steered towards a target KL",
    "reference_reset": "the reference replaced by the policy on a schedule",
    "positive_nll": "an added likelihood term on right responses",
}
BUILT = frozenset(FEATURES) - {"teacher", "routing"}

# fmt: off
_NEEDED = (  # feature, cell kind, cells that need it
    ("groups", "advantage", "group_normalize group_center group_center_batch_std group_center_rescaled top_gap "
     "group_center_whitened leave_one_out length_weighted_center mean_normalize pass_at_k group_normalize_teacher"),
    ("binary_rewards", "advantage", "mean_normalize pass_at_k"),
    ("critic", "advantage", "gae gae_length_adaptive"),
    ("greedy_rollout", "advantage", "greedy_baseline"),
    ("teacher", "advantage", "teacher_gap group_normalize_teacher"),
    ("top_logprobs", "gate", "dppo_topk_tv dppo_topk_kl simko"),
    ("token_selection", "gate", "clip_cov kl_cov"),
    ("routing", "gate", "rspo"),
    ("full_batch_correction", "correction", "second_moment"),
    ("advantages_in_correction", "correction", "drop_drifted_failures"),
)
_READ = (  # cell kind, cells, the train fields they read: the keyword-only numbers of the functions of those names
    ("advantage", "returns whitened_returns", "gamma"),
    ("advantage", "pass_at_k", "pass_k"),
    ("advantage", "gae", "gamma gae_lambda whiten bootstrap_on_truncation"),
    ("advantage", "gae_length_adaptive", "gamma length_alpha whiten bootstrap_on_truncation"),
    ("advantage", "batch_center group_normalize group_center group_center_batch_std group_center_rescaled top_gap "
     "group_center_whitened leave_one_out greedy_baseline length_weighted_center mean_normalize teacher_gap "
     "group_normalize_teacher", ""),
    ("gate", "ppo_clip", "clip_low clip_high clip_dual"),
    ("gate", "gmpo rspo clip_cov", "clip_low clip_high"),
    ("gate", "simko", "clip_low clip_high simko_alpha simko_boost"),
    ("gate", "kl_cov", "clip_low clip_high kl_cov_coeff"),
    ("gate", "cispo", "weight_min weight_max"),
    ("gate", "sapo", "sapo_positive sapo_negative"),
    ("gate", "rgpo_like", "gate_sharpness"),
    ("gate", "proximal", "proximal_coeff"),
    ("gate", "dppo_tv dppo_kl dppo_topk_tv dppo_topk_kl", "dppo_low dppo_high weight_max"),
    ("gate", "policy_gradient vespo", ""),
    ("correction", "truncate", "correction_level correction_max"),
    ("correction", "mask reject", "correction_level correction_min correction_max"),
    ("correction", "reject_k3", "correction_k3_max"),
    ("correction", "veto", "correction_veto"),
    ("correction", "drop_drifted_failures", "drift_max"),
    ("correction", "second_moment", "second_moment_max"),
    ("correction", "none", ""),
    ("kl", "loss_k2 loss_k3 loss_k3_plus loss_k3_ratio reward_k1", "kl_coeff"),
    ("kl", "none", ""),
    ("weights", "fixed_length", "weights_length"),
    ("weights", "lambda_group", "length_power"),
    ("weights", "token_mean sequence_mean sequence_sum prompt_mean", ""),
    ("extra", " ".join(FEATURES), ""),
    ("extra", "critic", "critic_lr value_clip critic_warmup_steps"),
    ("extra", "adaptive_kl", "kl_target kl_horizon"),
    ("extra", "reference_reset", "reference_sync_steps"),
    ("extra", "positive_nll", "nll_coeff"),
    ("extra", "top_logprobs", "top_candidates"),
    ("selection", "clip_cov", "cov_fraction cov_low cov_high"),
    ("selection", "kl_cov", "cov_fraction"),
    ("selection", "simko", "explore_quantile"),
    ("selection", "dppo_topk_tv dppo_topk_kl", ""),
    ("extra", "dynamic_sampling", "sampling_rounds"),
    ("extra", "overlong_penalty", "overlong_buffer"),
)
# fmt: on
# (cell kind, cell name) -> keys of FEATURES.
NEEDS: dict[tuple[str, str], tuple[str, ...]] = {}
for _feature, _kind, _cells in _NEEDED:
    for _cell in _cells.split():
        NEEDS[_kind, _cell] = (*NEEDS.get((_kind, _cell), ()), _feature)
# (cell kind, cell name) -> fields of `train`.
PARAMETERS: dict[tuple[str, str], tuple[str, ...]] = {
    (kind, cell): tuple(fields.split()) for kind, cells, fields in _READ for cell in cells.split()
}

# Where a source says nothing, the upper bound is DAPO's: rare tokens keep room to grow.
_HIGHER: Mapping[str, Value] = {"clip_high": 0.28}
_GSPO_CLIP: Mapping[str, Value] = {"clip_low": 3e-4, "clip_high": 4e-4}

_SHARED = "a row's ratio is a mean over its tokens, and the row is clipped as a whole"

# A table is read by its columns: cells first, then words.
# fmt: off
_ROWS = (
    # --- PPO and what grew from it
    Row(name="ppo", advantage="gae",
        summary="clipped surrogate with a critic and GAE", source="arXiv:1707.06347",
        use="Dense or delayed rewards, and memory for a second model."),
    Row(name="ppo_rlhf", advantage="gae", kl="reward_k1", extras=("adaptive_kl",), defaults={"kl_coeff": 0.02},
        summary="PPO with the KL to the reference in the reward, steered to a target",
        source="arXiv:1909.08593, arXiv:2203.02155", use="A learned reward model that must not be over-optimised."),
    Row(name="vapo", advantage="gae_length_adaptive", extras=("positive_nll",),
        defaults={"critic_warmup_steps": 50, "nll_coeff": 0.1, **_HIGHER},
        summary="value-based PPO for long chains: length-adaptive GAE, clip-higher, likelihood on right answers",
        source="arXiv:2504.05118", use="Long reasoning with a critic that was pretrained."),
    Row(name="reinforce_plus_plus", advantage="whitened_returns", kl="reward_k1", defaults=_HIGHER,
        summary="return to go, whitened over the batch, with PPO's clip and no critic", source="arXiv:2501.03262",
        use="One sample per prompt; token-level KL in the reward."),
    Row(name="reinforce_plus_plus_baseline", advantage="group_center_whitened", kl="loss_k2", defaults=_HIGHER,
        summary="group-centered rewards, whitened over the batch", source="arXiv:2501.03262",
        use="Groups of very different difficulty, which GRPO's group std would level."),
    Row(name="decoupled_ppo", correction="truncate", defaults={"correction_max": 5.0, **_HIGHER},
        summary="PPO around the recent policy, with a capped weight from there to the sampler",
        source="arXiv:2505.24298, arXiv:2110.00641",
        use="Asynchronous sampling: stale tokens are weighted, not clipped away.",
        deviation="Group advantages; the source allows GAE as well (train.advantage: gae)."),
    Row(name="a3po", extras=("interpolated_anchor",), defaults=_HIGHER,
        summary="decoupled PPO whose proximal policy is interpolated, at no extra forward pass",
        source="arXiv:2512.06547", use="As decoupled_ppo, where the recompute pass is too expensive."),
    # --- advantages from groups
    Row(name="sgrpo", kl="loss_k3_plus",
        summary="oxRL's stable GRPO: group z-score, one token mean over the global batch, straight-through KL",
        source="oxRL; builds on arXiv:2402.03300", use="The default for verifiable rewards.",
        deviation="Against GRPO: one weight per token instead of per row, so that long wrong answers are not "
        "under-punished; k3+ instead of k3, whose gradient belongs to the other direction; KL off by default, because "
        "a verifier cannot be over-optimised as a learned reward can. Two bugs of the first public version are gone: "
        "a negative clip_low made the interval [1.2, 1.2], so no on-policy token with a negative advantage had a "
        "gradient (magnitudes are stored now); and the loss was a mean per micro-batch, so tokens counted differently "
        "depending on what they were batched with (weights are global now)."),
    Row(name="grpo", kl="loss_k3", weights="sequence_mean",
        summary="group-relative policy optimisation", source="arXiv:2402.03300",
        use="To compare with published GRPO results.",
        deviation="Groups of equal rewards give exactly 0; kl_coeff is 0 unless set (0.04 in the paper)."),
    Row(name="dr_grpo", advantage="group_center", weights="fixed_length", defaults=_HIGHER,
        summary="GRPO without its two normalisations: no std, no division by the response length",
        source="arXiv:2503.20783", use="When wrong answers grow longer, or hard prompts are under-trained."),
    Row(name="lite_ppo", advantage="group_center_batch_std", defaults=_HIGHER,
        summary="group mean, batch std, token mean, PPO's clip", source="arXiv:2508.08221",
        use="A small recipe that ablations found sufficient."),
    Row(name="dapo", extras=("dynamic_sampling", "overlong_penalty"), defaults=_HIGHER,
        summary="GRPO with clip-higher, token mean, dynamic sampling and a soft length penalty",
        source="arXiv:2503.14476", use="Long reasoning with many prompts that are all right or all wrong."),
    Row(name="prorl", kl="loss_k3_plus", extras=("dynamic_sampling", "reference_reset"),
        defaults={"clip_high": 0.4, "kl_coeff": 1e-3},
        summary="prolonged training: clip-higher, KL in the loss, reference and optimizer reset on a schedule",
        source="arXiv:2505.24864", use="Thousands of steps over a diverse mix.",
        deviation="k3+ for the KL term; clip_high 0.4 is from memory of the paper."),
    Row(name="scale_rl", advantage="group_center_batch_std", gate="cispo", weights="prompt_mean",
        summary="CISPO with batch-std advantages, every prompt weighted alike", source="arXiv:2510.13786",
        use="Large runs; the recipe of a scaling study.",
        deviation="Groups of equal rewards stay in the denominator, with advantage 0."),
    Row(name="lambda_grpo", weights="lambda_group", defaults=_HIGHER,
        summary="GRPO with a preference for long or short responses inside each group", source="arXiv:2510.06870",
        use="To steer response length by one number.",
        deviation="The power is a fixed number (train.length_power), not a learned one: a learned power without a "
        "target follows the loss wherever it goes. With a constant power the row is token-local."),
    Row(name="maxrl", advantage="mean_normalize", defaults=_HIGHER,
        summary="rewards divided by the group's success rate: towards maximum likelihood of right answers",
        source="arXiv:2602.02710", use="Hard prompts with rare successes, binary rewards."),
    Row(name="pkpo", advantage="pass_at_k", defaults=_HIGHER,
        summary="optimises pass@k instead of pass@1", source="arXiv:2505.15201",
        use="To keep several ways of solving alive, binary rewards."),
    Row(name="pass_k_training", advantage="top_gap", defaults=_HIGHER,
        summary="only the group's single best response learns, by its lead over the second", source="arXiv:2503.19595",
        use="Graded rewards where the best of k counts."),
    # --- other gates
    Row(name="cispo", gate="cispo",
        summary="clipped importance weights, no token dropped", source="arXiv:2506.13585",
        use="Several updates per batch, where PPO's clip silences the rare tokens that matter."),
    Row(name="sapo", gate="sapo", weights="sequence_mean",
        summary="a soft gate instead of a clip", source="arXiv:2511.20347",
        use="Where clip fractions are high and noisy, as in mixtures of experts."),
    Row(name="rgpo_like", gate="rgpo_like",
        summary="rejection gating with a sigmoid acceptance", source="after arXiv:2604.14895",
        use="To try a bounded smooth weight on either side.",
        deviation="The paper's exact gate and its gate on the reference ratio could not be verified."),
    Row(name="kimi", advantage="group_center", gate="proximal",
        summary="policy gradient with a quadratic pull to the old policy, no clip",
        source="arXiv:2501.12599, arXiv:2405.19107", use="Off-policy data without clipping.",
        exempt={"zero_advantage": "the pull to the old policy does not depend on the advantage"}),
    Row(name="dppo_tv", denominator="rollout", gate="dppo_tv", defaults={"weight_max": 20.0},
        summary="trust region on the change of probability against the sampler", source="arXiv:2602.04879",
        use="Rare tokens may move far, likely ones may not; the mismatch is inside the ratio."),
    Row(name="dppo_kl", denominator="rollout", gate="dppo_kl", defaults={"weight_max": 20.0},
        summary="trust region on the two-bucket KL against the sampler", source="arXiv:2602.04879",
        use="As dppo_tv, stricter near probability 1."),
    Row(name="dppo_topk_tv", denominator="rollout", gate="dppo_topk_tv",
        defaults={"weight_max": 20.0, "top_candidates": 20},
        summary="as dppo_tv, over the sampler's top tokens", source="arXiv:2602.04879",
        use="To measure the divergence more finely; the authors report no gain."),
    Row(name="dppo_topk_kl", denominator="rollout", gate="dppo_topk_kl",
        defaults={"weight_max": 20.0, "top_candidates": 20},
        summary="as dppo_kl, over the sampler's top tokens", source="arXiv:2602.04879",
        use="To measure the divergence more finely; the authors report no gain."),
    Row(name="simko", gate="simko",
        summary="right answers share their gradient with the top candidates, wrong top-1 tokens fall harder",
        source="arXiv:2510.14807", use="When pass@1 rises while pass@k falls.",
        shared_weight="the gradient also reaches candidates that were not sampled",
        exempt={"on_policy": "at ratio 1 a share of the gradient goes to other candidates, by design"}),
    Row(name="clip_cov", gate="clip_cov",
        summary="no gradient on a few random tokens of high covariance between logprob and advantage",
        source="arXiv:2505.22617", use="To slow the collapse of entropy.",
        deviation="Tokens are chosen once per step over the global batch, which makes the row token-local.",
        exempt={"on_policy": "the chosen tokens get no gradient, by design"}),
    Row(name="kl_cov", gate="kl_cov",
        summary="a KL penalty on the tokens of highest covariance between logprob and advantage",
        source="arXiv:2505.22617", use="To slow the collapse of entropy.",
        deviation="Tokens are chosen once per step over the global batch.",
        exempt={"zero_advantage": "the penalty on the chosen tokens does not depend on the advantage"}),
    # --- one ratio per row
    Row(name="gspo", ratio="geometric", weights="sequence_mean", defaults=_GSPO_CLIP,
        summary="clip on the row's geometric-mean ratio", source="arXiv:2507.18071",
        use="Mixtures of experts and long rows, where token ratios are noise.", shared_weight=_SHARED),
    Row(name="gspo_token", ratio="geometric", weights="sequence_mean", defaults=_GSPO_CLIP,
        summary="GSPO's ratio with advantages per token", source="arXiv:2507.18071",
        use="GSPO with token rewards: set train.advantage.",
        deviation="The row ratio is detached, as in the paper's token form; one advantage per row makes it gspo."),
    Row(name="luspo", ratio="geometric", weights="sequence_sum", defaults=_GSPO_CLIP,
        summary="GSPO times the row's length", source="arXiv:2602.05261", use="GSPO without its length bias.",
        shared_weight=_SHARED),
    Row(name="gmpo", gate="gmpo", weights="sequence_mean", defaults={"clip_low": 0.4, "clip_high": 0.4},
        summary="geometric mean of token ratios that are clipped one by one", source="arXiv:2507.20673",
        use="GSPO's averaging with token-wise clipping and a wide bound.",
        shared_weight="a token's weight is the geometric mean over its row"),
    Row(name="rspo", gate="rspo", weights="sequence_mean", defaults={"clip_low": 0.4, "clip_high": 0.4},
        summary="GMPO with ratios scaled down where the router's choices moved", source="arXiv:2510.23027",
        use="Mixtures of experts without routing replay.", deviation="gamma_min 0.8 is a third party's value.",
        shared_weight="a token's weight is the geometric mean over its row"),
    Row(name="vespo", ratio="sequence", denominator="rollout", gate="vespo",
        summary="soft weight of the whole row's ratio against the sampler", source="arXiv:2602.10693",
        use="Stale data with short rows; on long rows watch update/weight_mean."),
    # --- no ratio
    Row(name="reinforce", advantage="returns", ratio="none", gate="policy_gradient", weights="sequence_sum",
        summary="the policy gradient with the return itself", source="Williams 1992",
        use="To teach and to check others against; the variance is high."),
    Row(name="reinforce_baseline", advantage="batch_center", ratio="none", gate="policy_gradient",
        summary="the policy gradient with the batch mean as baseline", source="Williams 1992",
        use="One sample per prompt and no critic."),
    Row(name="a2c", advantage="gae", ratio="none", gate="policy_gradient",
        summary="actor-critic: the policy gradient with a critic and GAE", source="arXiv:1602.01783",
        use="One update per batch, with rewards inside the response."),
    Row(name="rloo", advantage="leave_one_out", ratio="none", gate="policy_gradient", kl="reward_k1",
        weights="sequence_sum",
        summary="each sample against the mean of the others", source="arXiv:2402.14740",
        use="Few samples per prompt; the only group baseline that is exactly unbiased."),
    Row(name="remax", advantage="greedy_baseline", ratio="none", gate="policy_gradient", kl="reward_k1",
        weights="sequence_sum",
        summary="each sample against the greedy response", source="arXiv:2310.10505",
        use="One sample per prompt, when a greedy decode is affordable."),
    Row(name="opo", advantage="length_weighted_center", ratio="none", gate="policy_gradient",
        summary="length-weighted group mean as baseline, strictly on-policy", source="arXiv:2505.23585",
        use="On-policy training without clip or KL."),
    Row(name="gpg", advantage="group_center_rescaled", ratio="none", gate="policy_gradient",
        summary="group-centered policy gradient, rescaled for groups that teach nothing", source="arXiv:2504.02546",
        use="A baseline without clip, KL or reference."),
    # --- corrections of the mismatch between sampler and trainer
    Row(name="tis", correction="truncate", defaults={"correction_max": 2.0, **_HIGHER},
        summary="GRPO with truncated importance sampling against the sampler", source="Yao et al. 2025",
        use="Sampler and trainer differ a little: other kernels or precision."),
    Row(name="mis", correction="mask",
        defaults={"correction_level": "sequence", "correction_min": 0.0, "correction_max": 3.0, **_HIGHER},
        summary="GRPO that drops rows whose product ratio left the bounds, and weights the others",
        source="Liu et al. 2025", use="Short rows; on long ones the product rejects by length alone."),
    Row(name="icepop", correction="mask",
        defaults={"correction_level": "token", "correction_min": 0.5, "correction_max": 5.0, **_HIGHER},
        summary="GRPO that drops tokens whose ratio left the bounds, and weights the others",
        source="arXiv:2510.18855", use="Mixtures of experts: a flipped expert makes single tokens wild."),
    Row(name="geometric_rejection", correction="reject",
        defaults={"correction_level": "geometric", "correction_min": 0.999, "correction_max": 1.001, **_HIGHER},
        summary="GRPO that drops rows whose geometric-mean ratio left a narrow band", source="verl's geometric preset",
        use="Long rows; no length trap."),
    Row(name="k3_rejection", correction="reject_k3", defaults=_HIGHER,
        summary="GRPO that drops rows whose mean k3 mismatch is above a bound", source="verl's k3 preset",
        use="When mismatch/kl_k3 exceeds its alarm."),
    Row(name="veto", correction="veto", defaults=_HIGHER,
        summary="GRPO that drops rows holding a token the trainer finds impossible", source="slime, verl",
        use="A safety net against broken rows."),
    Row(name="opsm", advantage="group_center", correction="drop_drifted_failures", kl="loss_k3_ratio",
        defaults=_HIGHER,
        summary="GRPO that drops bad rows the current policy has moved away from", source="arXiv:2512.02556",
        use="Stale data with many wrong rows."),
    Row(name="m2po", correction="second_moment", defaults=_HIGHER,
        summary="drops the tokens with the largest squared log-ratio until their mean is small",
        source="arXiv:2510.01161", use="Very stale data."),
    Row(name="r3", extras=("routing",), defaults=_HIGHER,
        summary="GRPO that replays the sampler's routing in training", source="arXiv:2510.11370",
        use="Mixtures of experts: removes most of the mismatch at its source."),
    # --- a teacher
    Row(name="opd", advantage="teacher_gap", ratio="none", gate="policy_gradient",
        summary="on-policy distillation: the teacher's logprob minus the student's is the advantage",
        source="arXiv:2306.13649, arXiv:2306.08543", use="A stronger model with the same tokenizer is at hand."),
    Row(name="kdrl", advantage="group_normalize_teacher", defaults=_HIGHER,
        summary="group advantage plus the teacher's gap", source="arXiv:2506.02208",
        use="A teacher and a verifier together."),
    # --- no reinforcement learning
    Row(name="sft", recipe="supervised", summary="supervised fine-tuning", source="",
        use="Given answers to imitate; the warm start of everything else."),
    Row(name="rft", recipe="rejection", numbers=("keep_reward", "keep_per_prompt"),
        summary="rejection-sampling fine-tuning: sample, keep by reward, imitate what was kept",
        source="arXiv:2308.01825, arXiv:2304.06767",
        use="A verifier and a model that sometimes succeeds: the simplest way to learn from its own answers."),
    *(Row(name=name, recipe="preference", numbers=tuple(method.fields), defaults=method.fields,
          summary="preference loss", source=f"arXiv:{method.source}",
          use="Judged answers and no reward to sample against.")
      for name, method in METHODS.items() if name != "nll"),
    Row(name="reward_model", recipe="reward_model", numbers=("center_coeff",),
        summary="Bradley-Terry reward model", source="arXiv:2203.02155",
        use="Pairs to learn a reward from, for reinforcement learning by path."),
    Row(name="process_reward_model", recipe="reward_model",
        summary="reward model of steps: is each step of a solution right", source="arXiv:2305.20050, arXiv:2211.14275",
        use="Judged steps; as a reward, a response is worth its worst step."),
)
# fmt: on
ROWS: dict[str, Row] = {row.name: row for row in _ROWS}
