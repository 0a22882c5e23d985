"""Every number of an algorithm, declared once: its name, default, bounds, unit, meaning and source.

A function of `oxrl.functional` takes its default from here (`clip_low: float = CLIP_LOW.default`),
a cell of the tables names the numbers it reads, and a field of `oxrl/config/sections/train.py` is
made of one (`weight_min: float = number(declared.WEIGHT_MIN)`). A cell with a default of its own
has a constant of its own, made by `at`. Pure data: imports nothing of oxRL.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T", bound="float | str | None")
Value = float | int | str | bool | None
Level = Literal["token", "sequence", "geometric"]
# What becomes of the tokens of which a teacher has told nothing.
Rest = Literal["sampled", "truncated", "renormalised", "tail_bucket"]
Tail = Literal["event", "token"]


def head_chunk(vocabulary: int) -> int:
    """Positions whose logits exist at a time: about two million logits, 64 to 4096 positions."""
    return max(64, min(4096, 2**21 // vocabulary))


# Field of `train` -> the number as it was first declared.
NUMBERS: dict[str, AnyNumber] = {}


@dataclass(frozen=True)
class Number(Generic[T]):
    """One number that a cell, a method or a feature reads.

    Args:
        name: keyword argument of the function, and field of `train` unless `field` says otherwise.
        default: what it is where nobody sets it.
        meaning: one or two sentences for who writes the YAML.
        unit: of the value; empty for plain ratios, weights and shares.
        source: where the default comes from; empty where it is oxRL's choice.
        ge, gt, le, lt: bounds of valid values.
        field: YAML field under `train`, where `name` means something else there.
    """

    name: str
    default: T
    meaning: str
    _: KW_ONLY
    unit: str = ""
    source: str = ""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    field: str = ""

    def __post_init__(self) -> None:
        NUMBERS.setdefault(self.key, self)

    def at(self, default: T, source: str = "") -> Number[T]:
        """Return the same number with the default of another cell.

        Args:
            default: of that cell.
            source: where that default comes from.
        """
        return replace(self, default=default, source=source)

    @property
    def key(self) -> str:
        """Field of `train` in the YAML file."""
        return self.field or self.name


AnyNumber = Number[Any]
# What a cell, a method or a feature reads.
Numbers = tuple[AnyNumber, ...]

# --- Gates: how far a token may move.
CLIP_LOW = Number(
    "clip_low",
    0.2,
    "Clip below 1 - clip_low. A sign is dropped with a warning.",
    gt=-1,
    lt=1,
    source="PPO, arXiv:1707.06347",
)
CLIP_HIGH = Number(
    "clip_high",
    0.2,
    "Clip above 1 + clip_high. A sign is dropped with a warning.",
    source="PPO, arXiv:1707.06347",
)
GEOMETRIC_CLIP_LOW = CLIP_LOW.at(3e-4, "GSPO, arXiv:2507.18071")
GEOMETRIC_CLIP_HIGH = CLIP_HIGH.at(4e-4, "GSPO, arXiv:2507.18071")
DAPO_CLIP_HIGH = CLIP_HIGH.at(0.28, "DAPO, arXiv:2503.14476")
GMPO_CLIP_LOW = CLIP_LOW.at(0.4, "GMPO, arXiv:2507.20673; on log r")
GMPO_CLIP_HIGH = CLIP_HIGH.at(0.4, "GMPO, arXiv:2507.20673; on log r")
CLIP_DUAL: Number[float | None] = Number(
    "clip_dual",
    None,
    "Ratio above which a negative advantage stops pulling; null: none.",
    gt=1,
    source="arXiv:1912.09729, where it is 3",
)
WEIGHT_MIN = Number(
    "weight_min",
    0.0,
    "Lower bound of the detached importance weight; 0: none.",
    ge=0,
    source="CISPO, arXiv:2506.13585: inactive",
)
WEIGHT_MAX = Number(
    "weight_max",
    5.0,
    "Upper bound of the detached importance weight.",
    gt=0,
    source="CISPO as TRL runs it",
)
DPPO_WEIGHT_MAX = WEIGHT_MAX.at(
    20.0, "DPPO as verl runs it; the authors have 10, 3 and none in function, config and script"
)
SAPO_POSITIVE = Number(
    "sapo_positive",
    1.0,
    "Sharpness of the soft gate where the advantage is positive.",
    gt=0,
    source="SAPO, arXiv:2511.20347",
)
SAPO_NEGATIVE = Number(
    "sapo_negative",
    1.05,
    "Sharpness of the soft gate where it is negative.",
    gt=0,
    source="SAPO, arXiv:2511.20347",
)
GATE_SHARPNESS = Number("gate_sharpness", 1.0, "Sharpness of the sigmoid acceptance.", gt=0)
DPPO_LOW = Number(
    "dppo_low",
    0.15,
    "Largest divergence of a token that is pushed down.",
    ge=0,
    source="DPPO's authors, for total variation: their script in verl, dppo_trainer",
)
DPPO_HIGH = Number(
    "dppo_high",
    0.15,
    "Largest divergence of a token that is pushed up.",
    ge=0,
    source="DPPO's authors, for total variation: their script in verl, dppo_trainer",
)
DPPO_KL_LOW = DPPO_LOW.at(0.05, "DPPO's authors, for the KL: their script in verl, dppo_trainer")
DPPO_KL_HIGH = DPPO_HIGH.at(0.05, "DPPO's authors, for the KL: their script in verl, dppo_trainer")
PROXIMAL_COEFF = Number(
    "proximal_coeff",
    0.01,
    "Weight of half the squared log-ratio of a response, in dro of a token; 0: none.",
    ge=0,
    source="OpenKimi, as pmd_tau; Kimi k1.5, arXiv:2501.12599, states none",
)
DRO_COEFF = PROXIMAL_COEFF.at(1.0)
DRPO_DELTA = Number(
    "drpo_delta",
    0.15,
    "Change of a token's probability, as favored, beyond which it is pulled back.",
    gt=0,
    le=1,
    source="DPPO's bound of the same change; the authors' 12.5 bounds nothing",
)
SPO = Number("spo", False, "drpo_delta bounds the ratio's distance from 1, as SPO does.")
INFLUENCE_RANGE = Number(
    "influence_range",
    0.2,
    "Most by which what follows a token enlarges its advantage, as a share; 0: nothing does.",
    ge=0,
    source="FIPO, arXiv:2603.19835; ms-swift",
)
INFLUENCE_HALF_LIFE = Number(
    "influence_half_life",
    32.0,
    "Distance over which the log-ratio of a later token loses half of its influence.",
    gt=0,
    unit="tokens",
    source="FIPO, arXiv:2603.19835; ms-swift",
)
INFLUENCE_RATIO_MAX = Number(
    "influence_ratio_max",
    4.0,
    "Ratio above which a negative advantage is not enlarged.",
    gt=1,
    source="ms-swift; 10 in a script of the authors",
)
SIMKO_ALPHA = Number(
    "simko_alpha",
    0.01,
    "Share of a right token's gradient that its likely alternatives get.",
    ge=0,
    le=1,
    source="the authors' code of SimKO, arXiv:2510.14807",
)
SIMKO_BOOST = Number(
    "simko_boost",
    1.1,
    "Factor on the advantage of wrong tokens that were the most likely.",
    ge=1,
    source="the authors' code of SimKO, arXiv:2510.14807",
)
TOP_CANDIDATES = Number(
    "top_candidates",
    3,
    "Most likely tokens that are looked at: K.",
    ge=1,
    unit="tokens",
    source="the authors' code of SimKO, arXiv:2510.14807",
)
DPPO_TOP_CANDIDATES = TOP_CANDIDATES.at(20)
EXPLORE_QUANTILE = Number(
    "explore_quantile",
    0.8,
    "Tokens above this quantile of their row's entropy are treated.",
    ge=0,
    lt=1,
    source="the authors' code of SimKO, arXiv:2510.14807",
)
COV_FRACTION = Number(
    "cov_fraction",
    2e-4,
    "Share of tokens chosen by their covariance.",
    ge=0,
    le=1,
    source="arXiv:2505.22617",
)
COV_LOW = Number(
    "cov_low", 1.0, "Smallest covariance of a chosen token.", unit="nats", source="arXiv:2505.22617"
)
COV_HIGH = Number(
    "cov_high", 5.0, "Largest covariance of a chosen token.", unit="nats", source="arXiv:2505.22617"
)
KL_COV_COEFF = Number(
    "kl_cov_coeff",
    1.0,
    "Weight of |log-ratio| on chosen tokens.",
    ge=0,
    source="arXiv:2505.22617; 0.1 in verl",
)

# --- Advantages.
GAMMA = Number("gamma", 1.0, "Discount per token; 1: none.", ge=0, le=1, source="verl, slime")
GAE_LAMBDA = Number(
    "gae_lambda", 1.0, "GAE: 0 trusts the critic, 1 the return.", ge=0, le=1, source="verl, slime"
)
TURN_GAMMA: Number[float | None] = Number(
    "turn_gamma",
    None,
    "Discount from a turn of an episode to the next; null: as between two tokens of a turn.",
    ge=0,
    le=1,
)
STEP_GAMMA = TURN_GAMMA.at(1.0)
TURN_LAMBDA: Number[float | None] = Number(
    "turn_lambda",
    None,
    "GAE's lambda from a turn of an episode to the next; null: as between two tokens of a turn.",
    ge=0,
    le=1,
)
LENGTH_ALPHA = Number(
    "length_alpha",
    0.05,
    "GAE with lambda = 1 - 1 / (length_alpha x length).",
    gt=0,
    source="VAPO, arXiv:2504.05118",
)
WHITEN = Number(
    "whiten",
    True,
    "Scale advantages to mean 0 and variance 1 over the tokens of the step.",
)
BOOTSTRAP_ON_TRUNCATION = Number(
    "bootstrap_on_truncation",
    False,
    "A cut response goes on with the critic's value, not 0.",
)
PASS_K = Number(
    "pass_k",
    2,
    "Tries that count as one: k of pass@k, at most rollout.n_samples.",
    ge=1,
    unit="samples",
)
IQR_FLOOR = Number(
    "iqr_floor",
    0.5,
    "Least inter-quartile range that rewards of a group are divided by.",
    gt=0,
    unit="of the reward",
)
MAXRL_ORDER: Number[int | None] = Number(
    "maxrl_order",
    None,
    "Terms of the series from pass@1 (1) to maximum likelihood; null: n_samples - 1, the most.",
    ge=1,
    unit="terms",
    source="MaxRL, arXiv:2602.02710",
)

# --- Corrections of the mismatch between sampler and trainer.
CORRECTION_LEVEL: Number[Level] = Number(
    "correction_level",
    "token",
    "What is compared: each token, a row's product or its geometric mean.",
)
CORRECTION_MAX = Number(
    "correction_max",
    2.0,
    "Upper bound of the correction weight.",
    gt=0,
    source="TIS, Yao et al. 2025; slime",
)
CORRECTION_MIN = Number(
    "correction_min",
    0.5,
    "Below it the correction drops what it judges.",
    ge=0,
    source="IcePop, arXiv:2510.18855",
)
REJECT_LEVEL: Number[Level] = CORRECTION_LEVEL.at("geometric", "verl's geometric preset")
REJECT_MAX = CORRECTION_MAX.at(1.001, "verl's geometric preset")
REJECT_MIN = CORRECTION_MIN.at(0.999, "verl's geometric preset")
CORRECTION_K3_MAX = Number(
    "correction_k3_max",
    0.01,
    "Rows with a larger mean k3 mismatch are dropped.",
    ge=0,
    unit="nats",
    source="verl's k3 preset",
)
CORRECTION_VETO = Number(
    "correction_veto",
    1e-4,
    "A row with a token below this ratio is dropped.",
    ge=0,
    source="slime, verl",
)
DRIFT_MAX = Number(
    "drift_max",
    0.5,
    "Bad rows that the policy has moved away from by more nats per token are dropped.",
    unit="nats per token",
    source="TRL's example of arXiv:2512.02556",
)
SECOND_MOMENT_MAX = Number(
    "second_moment_max",
    0.04,
    "Tokens are dropped until the mean squared log-ratio is below this.",
    gt=0,
    unit="nats squared",
    source="M2PO, arXiv:2510.01161",
)

# --- Score centering.
CENTER_TOP = Number(
    "center_top",
    64,
    "The sampler's likeliest tokens, recorded with every token, over which the expectation of its "
    "loss is taken one by one; all others are one event.",
    ge=1,
    unit="tokens",
)
CENTER_TAIL: Number[Tail] = Number(
    "center_tail",
    "event",
    "What a sampled token that is none of center_top is trained as: event: all of these together, "
    "without drift; token: itself, as in arXiv:2609.20807, with drift while they have probability.",
)

# --- The KL to the reference, and the loss weights.
KL_COEFF = Number("kl_coeff", 0.0, "Weight of the KL term; 0: no reference model is loaded.", ge=0)
LENGTH_POWER = Number(
    "length_power",
    1.0,
    "Preference for long (positive) or short rows of a group; 0: none.",
    source="lambda-GRPO, arXiv:2510.06870, where it is learned",
)
WEIGHTS_LENGTH: Number[int | None] = Number(
    "weights_length",
    None,
    "Length that divides every row's sum; null: rollout.max_tokens.",
    ge=1,
    unit="tokens",
    source="Dr.GRPO, arXiv:2503.20783",
)

# --- Features of reinforcement learning.
KL_TARGET = Number(
    "kl_target",
    6.0,
    "KL to the reference, in nats per response, that kl_coeff is steered to.",
    gt=0,
    unit="nats per response",
    source="Ziegler et al., arXiv:1909.08593",
)
KL_HORIZON = Number(
    "kl_horizon",
    10000.0,
    "Responses over which an error of 20 % changes kl_coeff by 20 %.",
    gt=0,
    unit="responses",
    source="Ziegler et al., arXiv:1909.08593",
)
SAMPLING_ROUNDS = Number(
    "sampling_rounds",
    10,
    "Most rounds of sampling per step until enough groups differ in reward.",
    ge=1,
    unit="rounds",
)
OVERLONG_BUFFER: Number[int | None] = Number(
    "overlong_buffer",
    None,
    "Tokens before the limit in which the penalty grows; null: 20 %.",
    ge=1,
    unit="tokens",
    source="DAPO, arXiv:2503.14476",
)
CRITIC_LR = Number(
    "critic_lr",
    1e-5,
    "Peak learning rate of the critic; with adapters 1e-4 by default.",
    ge=0,
    le=1,
)
VALUE_CLIP: Number[float | None] = Number(
    "value_clip",
    0.2,
    "Values move at most this far per batch; null: no clip.",
    gt=0,
    source="PPO's reference implementation; arXiv:2005.12729",
)
CRITIC_WARMUP_STEPS = Number(
    "critic_warmup_steps",
    0,
    "First optimizer steps that train the critic alone.",
    ge=0,
    unit="optimizer steps",
)

# --- Preference losses.
BETA = Number(
    "beta",
    0.1,
    "Preference losses: scale of the log-ratios, or of the margin.",
    gt=0,
    unit="per nat",
    source="DPO, arXiv:2305.18290",
)
SIGMOID_NORM_BETA = BETA.at(5.0, "Tulu 3, arXiv:2411.15124")
DISCOPOP_BETA = BETA.at(0.05, "arXiv:2406.08414")
NCA_BETA = BETA.at(0.01, "arXiv:2402.05369, appendix C")
SPPO_BETA = BETA.at(0.001, "arXiv:2405.00675, where 1 / beta is eta = 1e3; the authors' script")
CAL_DPO_BETA = BETA.at(0.001, "the authors' script of Cal-DPO, arXiv:2412.14516")
RPO_BETA = BETA.at(0.01, "RPO, arXiv:2405.16436, appendix E.1")
WPO_BETA = BETA.at(0.01, "WPO, arXiv:2406.11827, section 4; the authors' configs")
TR_DPO_BETA = BETA.at(0.05, "TR-DPO, arXiv:2404.09656, table 1")
BCO_BETA = BETA.at(0.01, "arXiv:2404.04656")
AOT_BETA = BETA.at(0.01, "arXiv:2406.05882")
ALPHA_DPO_BETA = BETA.at(2.5, "the authors' Llama-3 config of alpha-DPO, arXiv:2410.10148")
SIMPO_BETA = BETA.at(2.5, "arXiv:2405.14734")
ALPHA_PO_BETA = BETA.at(2.5, "arXiv:2501.03884")
POWER_BETA = BETA.at(2.0, "arXiv:2412.09544")
LABEL_NOISE = Number(
    "label_noise",
    0.1,
    "Share of pairs assumed to be labeled the wrong way.",
    ge=0,
    lt=0.5,
    source="Mitchell's note on DPO",
)
EXO_LABEL_NOISE = LABEL_NOISE.at(1e-3, "arXiv:2402.00856")
ALPHA = Number(
    "alpha",
    0.5,
    "alpha of f-DPO, H-DPO, AlphaPO and alpha-DPO.",
    gt=0,
    field="preference_alpha",
    source="f-DPO, arXiv:2309.16240",
)
H_DPO_ALPHA = ALPHA.at(0.9, "arXiv:2411.07595")
ALPHA_DPO_ALPHA = ALPHA.at(0.2, "the authors' Llama-3 config of alpha-DPO, arXiv:2410.10148")
ALPHA_PO_ALPHA = ALPHA.at(0.25, "arXiv:2501.03884")
MARGIN_GAMMA = Number(
    "gamma",
    0.1,
    "gamma: SimPO's target margin, FocalPO's focus.",
    ge=0,
    field="preference_gamma",
    source="AlphaPO, arXiv:2501.03884, table 3, Mistral-Instruct, by TRL's index of papers",
)
FOCAL_PO_GAMMA = MARGIN_GAMMA.at(0.05, "arXiv:2501.06645")
ALPHA_DPO_GAMMA = MARGIN_GAMMA.at(0.6, "the authors' Llama-3 config, where beta is 2.5 too")
SIMPO_GAMMA = MARGIN_GAMMA.at(1.375, "the authors' Llama-3 config: gamma / beta 0.55")
TAU = Number(
    "tau",
    0.05,
    "tau of DiscoPOP's blend.",
    gt=0,
    field="preference_tau",
    source="arXiv:2406.08414",
)
CALIBRATION_COEFF = Number(
    "calibration_coeff",
    1.0,
    "cal-DPO: weight of the calibration term.",
    ge=0,
    source="arXiv:2412.14516",
)
LENGTH_COEFF = Number(
    "length_coeff",
    0.01,
    "R-DPO: price of a token in the reward.",
    ge=0,
    unit="nats per token",
    source="the authors of SamPO, arXiv:2406.10957, run R-DPO with it",
)
PENALTY_COEFF = Number(
    "penalty_coeff",
    5.0,
    "DPOP: price of a chosen log-ratio below zero.",
    ge=0,
    source="arXiv:2402.13228; 50 for some of its runs",
)
REJECTED_SCALE = Number(
    "rejected_scale",
    0.95,
    "DPO-Shift: scale of the rejected log-ratio; 1 is DPO.",
    gt=0,
    le=1,
    source="arXiv:2502.07599",
)
BALANCE = Number(
    "balance", 1.0, "BPO: scale of the rejected side.", gt=0, source="arXiv:2506.03557"
)
MASS_COEFF = Number(
    "mass_coeff", 1e-3, "C2-DPO: weight of the squared sum of both log-ratios.", ge=0
)
NLL_COEFF = Number(
    "nll_coeff",
    1.0,
    "Weight of the likelihood of chosen completions, or of right responses.",
    ge=0,
    source="CPO, arXiv:2401.08417",
)
RPO_NLL_COEFF = NLL_COEFF.at(0.005, "RPO, arXiv:2405.16436")
POWER_NLL_COEFF = NLL_COEFF.at(5e-4, "arXiv:2412.09544")
ROBUSTNESS = Number(
    "robustness",
    1.0,
    "Dr.DPO: temperature of the log-mean-exp over pairs.",
    gt=0,
    source="arXiv:2407.07880",
)
ODDS_COEFF = Number(
    "odds_coeff", 0.1, "ORPO: weight of the odds ratio.", ge=0, source="arXiv:2403.07691"
)
DESIRABLE_COEFF = Number(
    "desirable_coeff", 1.0, "KTO: weight of desirable rows.", ge=0, source="arXiv:2402.01306"
)
UNDESIRABLE_COEFF = Number(
    "undesirable_coeff", 1.0, "KTO: weight of undesirable rows.", ge=0, source="arXiv:2402.01306"
)
BETA_SCALE = Number(
    "beta_scale",
    0.6,
    "beta-DPO: how far beta follows the batch's margins.",
    ge=0,
    source="arXiv:2407.08639",
)
DROP_FRAC = Number(
    "drop_frac",
    0.2,
    "beta-DPO: share of pairs with odd margins that is left out.",
    ge=0,
    lt=1,
    source="arXiv:2407.08639",
)
TAIL_COEFF = Number(
    "tail_coeff",
    0.5,
    "LD-DPO: weight of tokens past the shorter completion.",
    ge=0,
    le=1,
    source="LD-DPO, arXiv:2409.06411, which allows 0 to 1",
)
REFERENCE_SYNC_STEPS = Number(
    "reference_sync_steps",
    512,
    "Steps between updates of the reference: TR-DPO, ProRL.",
    ge=1,
    unit="optimizer steps",
    source="TR-DPO, arXiv:2404.09656",
)
REFERENCE_SYNC_RATE = Number(
    "reference_sync_rate",
    0.6,
    "TR-DPO: share of the policy in the new reference.",
    gt=0,
    le=1,
    source="TR-DPO, arXiv:2404.09656",
)

# --- Teachers.
TEACHER_COEFF = Number("teacher_coeff", 1.0, "Weight of the teacher in the advantage.", ge=0)
KDRL_TEACHER_COEFF = TEACHER_COEFF.at(5e-3)
TEACHER_COEFF_END: Number[float | None] = Number(
    "teacher_coeff_end",
    None,
    "Weight of the teacher at the end of the run, to which it moves along a line; null: it stays.",
    ge=0,
)
KDRL_TEACHER_COEFF_END = TEACHER_COEFF_END.at(1e-3)
TEACHER_GAMMA = Number(
    "teacher_gamma",
    1.0,
    "How much of the teacher's next gap counts for a token; 0: its own alone, as opd.",
    ge=0,
    le=1,
    source="MiniLLM, arXiv:2306.08543",
)
TEACHER_MEAN = Number(
    "teacher_mean",
    False,
    "Whether a token counts the mean of the gaps from there on, MiniLLM's length normalisation, "
    "instead of their sum.",
)
PREFIX_COEFF = Number(
    "prefix_coeff",
    0.5,
    "IW-OPD: how much more the first tokens count than the last; 0: as opd.",
    ge=0,
    source="arXiv:2606.22600",
)
TEACHER_CANDIDATES = Number(
    "teacher_candidates",
    16,
    "Most likely tokens of the teacher, whose share of the divergence is exact.",
    ge=1,
    unit="tokens",
)
# From this to 1 minus this a Jensen-Shannon divergence is not yet nearly a multiple of a KL.
LEAST_ALPHA = 0.01
DIVERGENCE_ALPHA = Number(
    "divergence_alpha",
    1.0,
    "Which divergence from the teacher: 1: KL(policy || teacher); 0: KL(teacher || policy); "
    "from 0.01 to 0.99: Jensen-Shannon.",
    ge=0,
    le=1,
)
GKD_ALPHA = DIVERGENCE_ALPHA.at(0.5, "GKD, arXiv:2306.13649")
GKD_LAMBDA = Number(
    "gkd_lambda",
    0.5,
    "Share of the rows of a step, and of its loss, that are the policy's own samples; the others "
    "are rows of data.given_rows. 1: all are.",
    gt=0,
    le=1,
    source="GKD, arXiv:2306.13649; TRL",
)
CANDIDATES_REST: Number[Rest] = Number(
    "candidates_rest",
    "sampled",
    "All tokens that are no candidates: sampled: estimated from the sampled token, without bias; "
    "with bias, to compare with: truncated: left out; renormalised: left out, and both models "
    "scaled up to 1 without them; tail_bucket: one token with all their probability.",
)
DISCRIMINATOR_LR = Number(
    "discriminator_lr", 1e-5, "Peak learning rate of the discriminator.", ge=0, le=1
)
DISCRIMINATOR_WARMUP_STEPS = Number(
    "discriminator_warmup_steps",
    0,
    "First optimizer steps that train the discriminator alone.",
    ge=0,
    unit="optimizer steps",
)

# --- Rejection-sampling fine-tuning, and reward models.
KEEP_REWARD = Number("keep_reward", 1.0, "rft: a response is kept from this reward on.")
KEEP_PER_PROMPT: Number[int | None] = Number(
    "keep_per_prompt",
    None,
    "rft: only so many of a prompt's best; null: all that are good.",
    ge=1,
    unit="responses",
)
CENTER_COEFF = Number(
    "center_coeff", 0.0, "Reward model: weight of the squared sum of a pair's scores.", ge=0
)
