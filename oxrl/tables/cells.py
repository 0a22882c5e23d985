"""The cells of a policy-gradient row, and the features of a recipe that they need. Pure data.

A cell names a function in `oxrl.functional` (ADVANTAGES, RATIOS, GATES, SELECTIONS, CORRECTIONS,
KLS, WEIGHTS there) and says which numbers it reads, with its own defaults, and what it cannot do
without. Because that belongs to cells, it holds for rows composed by hand as well.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from oxrl.tables.numbers import (
    BOOTSTRAP_ON_TRUNCATION,
    CANDIDATES_REST,
    CENTER_TAIL,
    CENTER_TOP,
    CLIP_DUAL,
    CLIP_HIGH,
    CLIP_LOW,
    CORRECTION_K3_MAX,
    CORRECTION_LEVEL,
    CORRECTION_MAX,
    CORRECTION_MIN,
    CORRECTION_VETO,
    COV_FRACTION,
    COV_HIGH,
    COV_LOW,
    CRITIC_LR,
    CRITIC_WARMUP_STEPS,
    DISCRIMINATOR_LR,
    DISCRIMINATOR_WARMUP_STEPS,
    DIVERGENCE_ALPHA,
    DPPO_HIGH,
    DPPO_KL_HIGH,
    DPPO_KL_LOW,
    DPPO_LOW,
    DPPO_TOP_CANDIDATES,
    DPPO_WEIGHT_MAX,
    DRIFT_MAX,
    DRO_COEFF,
    DRPO_DELTA,
    EXPLORE_QUANTILE,
    GAE_LAMBDA,
    GAMMA,
    GATE_SHARPNESS,
    GEOMETRIC_CLIP_HIGH,
    GEOMETRIC_CLIP_LOW,
    GKD_LAMBDA,
    GMPO_CLIP_HIGH,
    GMPO_CLIP_LOW,
    INFLUENCE_HALF_LIFE,
    INFLUENCE_RANGE,
    INFLUENCE_RATIO_MAX,
    IQR_FLOOR,
    KL_COEFF,
    KL_COV_COEFF,
    KL_HORIZON,
    KL_TARGET,
    LENGTH_ALPHA,
    LENGTH_POWER,
    MAXRL_ORDER,
    NLL_COEFF,
    OVERLONG_BUFFER,
    PASS_K,
    PREFIX_COEFF,
    PROXIMAL_COEFF,
    REFERENCE_SYNC_STEPS,
    REJECT_LEVEL,
    REJECT_MAX,
    REJECT_MIN,
    SAMPLING_ROUNDS,
    SAPO_NEGATIVE,
    SAPO_POSITIVE,
    SECOND_MOMENT_MAX,
    SIMKO_ALPHA,
    SIMKO_BOOST,
    SPO,
    STEP_GAMMA,
    TEACHER_CANDIDATES,
    TEACHER_COEFF,
    TEACHER_COEFF_END,
    TEACHER_GAMMA,
    TEACHER_MEAN,
    TOP_CANDIDATES,
    TURN_GAMMA,
    TURN_LAMBDA,
    VALUE_CLIP,
    WEIGHT_MAX,
    WEIGHT_MIN,
    WEIGHTS_LENGTH,
    WHITEN,
    Numbers,
)


@dataclass(frozen=True)
class Feature:
    """A part of a recipe beside the cells, which a row or one of its cells asks for.

    Args:
        name: of its class in `oxrl.recipes.features`, where it is one.
        meaning: what the recipe does, or what a run must have.
        numbers: what it reads.
        built: whether the recipes deliver it; a row that needs more is refused by the config.
        rewards: it says itself what responses are worth, in place of a reward.
    """

    name: str
    meaning: str
    _: KW_ONLY
    numbers: Numbers = ()
    built: bool = True
    rewards: bool = False


@dataclass(frozen=True)
class Cell:
    """One choice for one place of a row.

    Args:
        kind: advantage, ratio, gate, selection (what a gate reads of the whole step), correction,
            centering, kl or weights.
        name: of the function in `oxrl.functional`.
        numbers: keyword arguments of that function, with this cell's defaults. A ratio's are bounds
            that take the place of the gate's.
        needs: what it cannot do without.
        rewarded: it reads rewards, where it is an advantage.
        uncentered: why score centering does not work with it; empty: it does. What works gives the
            loss of a token from that token and its advantage alone.
    """

    kind: str
    name: str
    _: KW_ONLY
    numbers: Numbers = ()
    needs: tuple[Feature, ...] = ()
    rewarded: bool = True
    uncentered: str = ""


# --- Features.
CRITIC = Feature(
    "critic",
    "a value model trained beside the policy",
    numbers=(CRITIC_LR, VALUE_CLIP, CRITIC_WARMUP_STEPS),
)
GROUPS = Feature("groups", "at least two samples per prompt")
BINARY_REWARDS = Feature("binary_rewards", "rewards that are 0 or 1")
REWARD_PARTS = Feature("reward_parts", "a reward of several parts, reward.parts")
SCORE_NORMS = Feature(
    "score_norms", "squared probabilities of the policy before the update, one more forward pass"
)
GREEDY_ROLLOUT = Feature("greedy_rollout", "one greedy response per prompt under the same weights")
TEACHER = Feature("teacher", "a teacher that scores the sampled tokens, model.teachers")
TEACHER_TOP = Feature(
    "teacher_top",
    "a teacher that also tells its most likely tokens, model.teachers",
    numbers=(TEACHER_CANDIDATES,),
)
PROMPTED_SELF = Feature(
    "prompted_self", "the policy under another prompt as its teacher, model.teachers.NAME.prompt"
)
GIVEN_ROWS = Feature(
    "given_rows",
    "given answers beside those that the policy samples, data.given_rows",
    numbers=(GKD_LAMBDA,),
)
DISCRIMINATOR = Feature(
    "discriminator",
    "a model that learns to tell responses from a teacher's texts, and rewards those that it "
    "cannot tell; the texts are teacher_answer in the rows of the data",
    numbers=(DISCRIMINATOR_LR, DISCRIMINATOR_WARMUP_STEPS),
    rewards=True,
)
TOP_LOGPROBS = Feature(
    "top_logprobs",
    "logprobs of the sampler's top tokens, with gradient",
    numbers=(TOP_CANDIDATES,),
)
DPPO_TOP_LOGPROBS = replace(TOP_LOGPROBS, numbers=(DPPO_TOP_CANDIDATES,))
SAMPLER_TOP = Feature(
    "sampler_top",
    "the sampler's likeliest tokens with their logprobs, recorded with every token",
    numbers=(CENTER_TOP,),
)
TOKEN_SELECTION = Feature(
    "token_selection", "tokens chosen over the whole step by their covariance"
)
FULL_BATCH_CORRECTION = Feature(
    "full_batch_correction", "a correction computed over the whole step, not per micro-batch"
)
CURRENT_POLICY_CORRECTION = Feature(
    "current_policy_correction",
    "a correction that sees the current policy and the advantages, in every update",
)
INTERPOLATED_ANCHOR = Feature(
    "interpolated_anchor",
    "an anchor between sampler and current policy by the age of tokens in rollout batches",
)
ROUTING = Feature(
    "routing",
    "the router's choices, recorded while sampling and replayed in training",
    built=False,
)
DYNAMIC_SAMPLING = Feature(
    "dynamic_sampling",
    "prompts resampled until every group has rewards that differ",
    numbers=(SAMPLING_ROUNDS,),
)
OVERLONG_PENALTY = Feature(
    "overlong_penalty",
    "a reward penalty that grows towards the token limit",
    numbers=(OVERLONG_BUFFER,),
)
ADAPTIVE_KL = Feature(
    "adaptive_kl", "kl_coeff steered towards a target KL", numbers=(KL_TARGET, KL_HORIZON)
)
REFERENCE_RESET = Feature(
    "reference_reset",
    "the reference replaced by the policy on a schedule",
    numbers=(REFERENCE_SYNC_STEPS,),
)
POSITIVE_NLL = Feature(
    "positive_nll", "an added likelihood term on right responses", numbers=(NLL_COEFF,)
)
FEATURES: dict[str, Feature] = {
    feature.name: feature
    for feature in (
        CRITIC,
        GROUPS,
        BINARY_REWARDS,
        REWARD_PARTS,
        SCORE_NORMS,
        GREEDY_ROLLOUT,
        TEACHER,
        TEACHER_TOP,
        PROMPTED_SELF,
        GIVEN_ROWS,
        DISCRIMINATOR,
        TOP_LOGPROBS,
        SAMPLER_TOP,
        TOKEN_SELECTION,
        FULL_BATCH_CORRECTION,
        CURRENT_POLICY_CORRECTION,
        INTERPOLATED_ANCHOR,
        ROUTING,
        DYNAMIC_SAMPLING,
        OVERLONG_PENALTY,
        ADAPTIVE_KL,
        REFERENCE_RESET,
        POSITIVE_NLL,
    )
}

# --- Cells.
_CLIP = (CLIP_LOW, CLIP_HIGH)
_GMPO_CLIP = (GMPO_CLIP_LOW, GMPO_CLIP_HIGH)
_DPPO = (DPPO_LOW, DPPO_HIGH, DPPO_WEIGHT_MAX)
_DPPO_KL = (DPPO_KL_LOW, DPPO_KL_HIGH, DPPO_WEIGHT_MAX)
_INFLUENCE = (INFLUENCE_RANGE, INFLUENCE_HALF_LIFE, INFLUENCE_RATIO_MAX)
_RETURNS = (GAMMA, TURN_GAMMA)
_GAE = (GAMMA, GAE_LAMBDA, WHITEN, BOOTSTRAP_ON_TRUNCATION, TURN_GAMMA, TURN_LAMBDA)
_LENGTH_ADAPTIVE_GAE = (GAMMA, LENGTH_ALPHA, WHITEN, BOOTSTRAP_ON_TRUNCATION, TURN_GAMMA)
# Why score centering does not work with a cell.
_OF_RESPONSE = "it looks at the whole response"
_OF_STEP = "it chooses tokens over the whole step"
_READS_TOP = "it reads other tokens of the vocabulary as well"
_CELLS = (
    Cell("advantage", "returns", numbers=_RETURNS),
    Cell("advantage", "whitened_returns", numbers=_RETURNS),
    Cell("advantage", "pass_at_k", numbers=(PASS_K,), needs=(GROUPS, BINARY_REWARDS)),
    Cell("advantage", "gae", numbers=_GAE, needs=(CRITIC,)),
    Cell("advantage", "gae_length_adaptive", numbers=_LENGTH_ADAPTIVE_GAE, needs=(CRITIC,)),
    Cell("advantage", "batch_center"),
    Cell("advantage", "group_normalize", needs=(GROUPS,)),
    Cell("advantage", "group_normalize_parts", needs=(GROUPS, REWARD_PARTS)),
    Cell("advantage", "iqr_normalize", numbers=(IQR_FLOOR,), needs=(GROUPS,)),
    Cell("advantage", "otb", needs=(GROUPS, SCORE_NORMS)),
    Cell("advantage", "turn_normalize", numbers=(STEP_GAMMA,), needs=(GROUPS,)),
    Cell("advantage", "group_center", needs=(GROUPS,)),
    Cell("advantage", "group_center_batch_std", needs=(GROUPS,)),
    Cell("advantage", "group_center_centered_std", needs=(GROUPS,)),
    Cell("advantage", "group_center_rescaled", needs=(GROUPS,)),
    Cell("advantage", "top_gap", needs=(GROUPS,)),
    Cell("advantage", "group_center_whitened", needs=(GROUPS,)),
    Cell("advantage", "leave_one_out", needs=(GROUPS,)),
    Cell("advantage", "greedy_baseline", needs=(GREEDY_ROLLOUT,)),
    Cell("advantage", "length_weighted_center", needs=(GROUPS,)),
    Cell("advantage", "mean_normalize", numbers=(MAXRL_ORDER,), needs=(GROUPS, BINARY_REWARDS)),
    Cell("advantage", "none", rewarded=False),
    Cell("advantage", "teacher_gap", numbers=(TEACHER_COEFF,), needs=(TEACHER,), rewarded=False),
    Cell(
        "advantage",
        "teacher_return",
        numbers=(TEACHER_GAMMA, TEACHER_MEAN),
        needs=(TEACHER,),
        rewarded=False,
    ),
    Cell(
        "advantage",
        "teacher_prefix_gap",
        numbers=(PREFIX_COEFF,),
        needs=(TEACHER,),
        rewarded=False,
    ),
    Cell(
        "advantage",
        "group_normalize_teacher",
        numbers=(TEACHER_COEFF, TEACHER_COEFF_END),
        needs=(GROUPS, TEACHER),
    ),
    Cell("ratio", "none"),
    Cell("ratio", "token"),
    Cell("ratio", "sequence", uncentered=_OF_RESPONSE),
    Cell(
        "ratio",
        "geometric",
        numbers=(GEOMETRIC_CLIP_LOW, GEOMETRIC_CLIP_HIGH),
        uncentered=_OF_RESPONSE,
    ),
    Cell("gate", "ppo_clip", numbers=(CLIP_LOW, CLIP_HIGH, CLIP_DUAL)),
    Cell("gate", "gmpo", numbers=_GMPO_CLIP, uncentered=_OF_RESPONSE),
    Cell("gate", "rspo", numbers=_GMPO_CLIP, needs=(ROUTING,), uncentered=_OF_RESPONSE),
    Cell("gate", "clip_cov", numbers=_CLIP, needs=(TOKEN_SELECTION,), uncentered=_OF_STEP),
    Cell(
        "gate",
        "simko",
        numbers=(CLIP_LOW, CLIP_HIGH, SIMKO_ALPHA, SIMKO_BOOST),
        needs=(TOP_LOGPROBS,),
        uncentered=_READS_TOP,
    ),
    Cell(
        "gate",
        "kl_cov",
        numbers=(KL_COV_COEFF,),
        needs=(TOKEN_SELECTION,),
        uncentered=_OF_STEP,
    ),
    Cell("gate", "cispo", numbers=(WEIGHT_MIN, WEIGHT_MAX)),
    Cell("gate", "sapo", numbers=(SAPO_POSITIVE, SAPO_NEGATIVE)),
    Cell("gate", "rgpo_like", numbers=(GATE_SHARPNESS,)),
    Cell("gate", "proximal", numbers=(PROXIMAL_COEFF,), uncentered=_OF_RESPONSE),
    Cell(
        "gate",
        "dro",
        numbers=(DRO_COEFF,),
        uncentered="its pull to the old policy is there without any advantage, and centering would "
        "take it out",
    ),
    Cell("gate", "drpo", numbers=(DRPO_DELTA, SPO)),
    Cell(
        "gate",
        "fipo",
        numbers=(*_CLIP, CLIP_DUAL, *_INFLUENCE),
        uncentered="the tokens that follow a token change its advantage",
    ),
    Cell("gate", "dppo_tv", numbers=_DPPO),
    Cell("gate", "dppo_kl", numbers=_DPPO_KL),
    Cell(
        "gate",
        "dppo_topk_tv",
        numbers=_DPPO,
        needs=(DPPO_TOP_LOGPROBS,),
        uncentered=_READS_TOP,
    ),
    Cell(
        "gate",
        "dppo_topk_kl",
        numbers=_DPPO_KL,
        needs=(DPPO_TOP_LOGPROBS,),
        uncentered=_READS_TOP,
    ),
    Cell("gate", "policy_gradient"),
    Cell("gate", "importance_sampling"),
    Cell("gate", "vespo", uncentered=_OF_RESPONSE),
    Cell(
        "gate",
        "teacher_divergence",
        numbers=(DIVERGENCE_ALPHA, CANDIDATES_REST),
        needs=(TEACHER_TOP,),
        uncentered="it is a divergence over all tokens, and reads no advantage",
    ),
    Cell("selection", "clip_cov", numbers=(COV_FRACTION, COV_LOW, COV_HIGH)),
    Cell("selection", "kl_cov", numbers=(COV_FRACTION,)),
    Cell("selection", "simko", numbers=(EXPLORE_QUANTILE,)),
    Cell("selection", "dppo_topk_tv"),
    Cell("selection", "dppo_topk_kl"),
    Cell("correction", "none"),
    Cell("correction", "truncate", numbers=(CORRECTION_LEVEL, CORRECTION_MAX)),
    Cell("correction", "mask", numbers=(CORRECTION_LEVEL, CORRECTION_MIN, CORRECTION_MAX)),
    Cell("correction", "reject", numbers=(REJECT_LEVEL, REJECT_MIN, REJECT_MAX)),
    Cell("correction", "reject_k3", numbers=(CORRECTION_K3_MAX,), uncentered=_OF_RESPONSE),
    Cell("correction", "veto", numbers=(CORRECTION_VETO,), uncentered=_OF_RESPONSE),
    Cell(
        "correction",
        "drop_drifted_failures",
        numbers=(DRIFT_MAX,),
        needs=(CURRENT_POLICY_CORRECTION,),
        uncentered=_OF_RESPONSE,
    ),
    Cell(
        "correction",
        "second_moment",
        numbers=(SECOND_MOMENT_MAX,),
        needs=(FULL_BATCH_CORRECTION,),
        uncentered=_OF_STEP,
    ),
    Cell("centering", "none"),
    Cell("centering", "score", numbers=(CENTER_TAIL,), needs=(SAMPLER_TOP,)),
    Cell("kl", "none"),
    Cell("kl", "loss_k2", numbers=(KL_COEFF,)),
    Cell("kl", "loss_k3", numbers=(KL_COEFF,)),
    Cell("kl", "loss_k3_plus", numbers=(KL_COEFF,)),
    Cell("kl", "loss_k3_ratio", numbers=(KL_COEFF,)),
    Cell("kl", "reward_k1", numbers=(KL_COEFF,)),
    Cell("weights", "token_mean"),
    Cell("weights", "sequence_mean"),
    Cell("weights", "sequence_sum"),
    Cell("weights", "prompt_mean"),
    Cell("weights", "fixed_length", numbers=(WEIGHTS_LENGTH,)),
    Cell("weights", "lambda_group", numbers=(LENGTH_POWER,)),
)
# (kind, name) -> cell.
CELLS: dict[tuple[str, str], Cell] = {(cell.kind, cell.name): cell for cell in _CELLS}


def find_cell(kind: str, name: str) -> Cell:
    """Return the cell of the table; one of a user's own has numbers of its own only.

    Args:
        kind: of the cell.
        name: in the table, or `path.py:function`.
    """
    return CELLS.get((kind, name)) or Cell(kind, name)
