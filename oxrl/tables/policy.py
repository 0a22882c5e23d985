"""The table: an algorithm is a row of named cells. Pure data; imports neither torch nor config.

    rewards -> advantage -> ratio (level, denominator) -> gate -> correction -> centering -> KL
    -> loss weights

What a cell reads and needs stands in `cells.py`; a row names its cells, and overrides what its
source does otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from oxrl.tables.cells import (
    ADAPTIVE_KL,
    CELLS,
    DISCRIMINATOR,
    DYNAMIC_SAMPLING,
    GIVEN_ROWS,
    GROUPS,
    INTERPOLATED_ANCHOR,
    OVERLONG_PENALTY,
    POSITIVE_NLL,
    PROMPTED_SELF,
    REFERENCE_RESET,
    ROUTING,
    Cell,
    Feature,
    find_cell,
)
from oxrl.tables.numbers import (
    CENTER_COEFF,
    CLIP_HIGH,
    CLIP_LOW,
    CORRECTION_LEVEL,
    CORRECTION_MAX,
    CORRECTION_MIN,
    CRITIC_WARMUP_STEPS,
    DAPO_CLIP_HIGH,
    GAE_LAMBDA,
    GKD_ALPHA,
    KDRL_TEACHER_COEFF,
    KDRL_TEACHER_COEFF_END,
    KEEP_PER_PROMPT,
    KEEP_REWARD,
    KL_COEFF,
    NLL_COEFF,
    REFERENCE_SYNC_RATE,
    TEACHER_CANDIDATES,
    Level,
    Number,
    Numbers,
    T,
    Value,
)

if TYPE_CHECKING:
    from oxrl.tables.preference import Method

Ratio = Literal["none", Level]
Denominator = Literal["old", "rollout"]


@dataclass(frozen=True)
class Row:
    """One algorithm.

    Args:
        name: as in `train.alg_name`.
        source: where it comes from.
        summary: what it is, in a line.
        use: when to choose it.
        deviation: what differs from the source, and why.
        recipe: which loop trains it.
        advantage, ratio, denominator, gate, correction, centering, kl, weights: names of its cells.
        features: what the recipe does for it beside its cells.
        numbers: what the row itself reads, beside its cells.
        overrides: numbers of its cells and features with another default than theirs.
        shared_weight: why a token's effective weight depends on other tokens or reaches them;
            empty for token-local rows.
        exempt: proof -> the reason why it does not apply.
    """

    name: str
    source: str
    summary: str
    _: KW_ONLY
    use: str = ""
    deviation: str = ""
    recipe: Literal["rl", "supervised", "rejection", "preference", "reward_model"] = "rl"
    advantage: str = "group_normalize"
    ratio: Ratio = "token"
    denominator: Denominator = "old"
    gate: str = "ppo_clip"
    correction: str = "none"
    centering: str = "none"
    kl: str = "none"
    weights: str = "token_mean"
    features: tuple[Feature, ...] = ()
    numbers: Numbers = ()
    overrides: Numbers = ()
    shared_weight: str = ""
    exempt: Mapping[str, str] = field(default_factory=dict)

    @property
    def cells(self) -> tuple[tuple[str, str], ...]:
        """(kind, name) of every cell that names a function."""
        if self.recipe != "rl":
            return ()
        return (
            ("advantage", self.advantage),
            ("gate", self.gate),
            ("correction", self.correction),
            ("centering", self.centering),
            ("kl", self.kl),
            ("weights", self.weights),
        )

    @cached_property
    def parts(self) -> tuple[Cell | Feature, ...]:
        """Everything that reads numbers: cells, what the gate selects, features."""
        cells = [find_cell(kind, name) for kind, name in self.cells]
        needed = [feature for cell in cells for feature in cell.needs]
        if self.recipe == "rl":
            cells.append(find_cell("selection", self.gate))
        return (*cells, *dict.fromkeys([*needed, *self.features]))

    @property
    def has_own_loss(self) -> bool:
        """True if its policy loss is a user's, and none of the table."""
        return ("gate", self.gate) not in CELLS

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the features that the cells and the row need, each once."""
        return tuple(part.name for part in self.parts if isinstance(part, Feature))

    @property
    def unsupported(self) -> str:
        """Empty if the recipes can run this row, else what is missing."""
        needed = [part for part in self.parts if isinstance(part, Feature) and not part.built]
        missing = ", ".join(f"{feature.name} ({feature.meaning})" for feature in needed)
        return f"{self.name} needs {missing}: not part of a recipe yet" if missing else ""

    def has(self, feature: Feature) -> bool:
        """True if the row or one of its cells needs this feature."""
        return feature.name in self.needs

    @property
    def compares_samples(self) -> bool:
        """True if the row learns from how the samples of one prompt differ."""
        return self.has(GROUPS) or self.has(DYNAMIC_SAMPLING)

    @property
    def reads_advantage(self) -> bool:
        """True if an advantage decides what a token learns."""
        return self.advantage != "none"

    @property
    def reads_rewards(self) -> bool:
        """True if what the responses earn reaches the loss, by the advantage or the reward's KL."""
        cell = find_cell("advantage", self.advantage)
        own = any(isinstance(part, Feature) and part.rewards for part in self.parts)
        reaches = cell.rewarded or self.kl.startswith("reward_")
        return self.recipe == "rl" and reaches and not own

    @property
    def moves_reference(self) -> bool:
        """True if the reference follows the policy, in all of its weights."""
        return REFERENCE_SYNC_RATE in self.numbers

    @property
    def knows_sampler(self) -> bool:
        """True if its loss already accounts for a sampler that is not the current policy."""
        interpolates = INTERPOLATED_ANCHOR in self.features
        return self.correction != "none" or self.denominator == "rollout" or interpolates

    @cached_property
    def defaults(self) -> Mapping[str, Value]:
        """Field of `train` -> default, of every number that the row reads.

        A part that the row of the table does not have was chosen by hand: its own defaults hold,
        and the row's overrides only for the others. How strong the KL is, is the row's choice,
        whichever its estimator. A ratio's clip bounds beat the gate's.
        """
        origin = ROWS.get(self.name, self)
        usual = {*origin.parts, find_cell("ratio", origin.ratio)}
        overrides = {number.key: number.default for number in origin.overrides}
        found: dict[str, Value] = {number.key: number.default for number in self.numbers}
        ratio = find_cell("ratio", self.ratio)
        for part in (*self.parts, ratio):
            for number in part.numbers:
                if part is ratio and number.key not in found:
                    continue  # The gate has no such bounds.
                found[number.key] = number.default
                if part in usual or number is KL_COEFF:
                    found[number.key] = overrides.get(number.key, number.default)
        return found


class Algorithm(NamedTuple):
    """A row of the table, the cells that a run has changed put in, and its numbers.

    values: of every number, by its field of `train`. loss_numbers: of a policy loss of the user's
    own. steps: of the optimizer in the run. updates: per rollout step. old_logprobs,
    mask_truncated, entropy_coeff: as in the section `train`.
    """

    row: Row
    values: Mapping[str, Value]
    loss_numbers: Mapping[str, Value]
    steps: int
    updates: int
    old_logprobs: str
    mask_truncated: bool
    entropy_coeff: float

    def value(self, number: Number[T]) -> T:
        """Return what a number of the tables is in this run."""
        return cast(T, self.values[number.key])

    def numbers(self, kind: str, name: str) -> dict[str, Value]:
        """Return the numbers that a cell reads, by the names its function knows them by.

        Args:
            kind: advantage, ratio, gate, selection, correction, centering, kl or weights.
            name: of the cell.
        """
        if kind == "gate" and (kind, name) not in CELLS:  # a user's own
            return dict(self.loss_numbers)
        return {number.name: self.value(number) for number in find_cell(kind, name).numbers}


PPO_LAMBDA = GAE_LAMBDA.at(0.95, "PPO, arXiv:1707.06347, table 3; the code of arXiv:1909.08593")
# Of a loss without advantages.
DIVERGENCE_PROOFS = {
    "zero_advantage": "the loss reads no advantages",
    "on_policy": "the loss reads no advantages",
}
# Of score centering.
REACHES_HEAD = "the gradient also reaches tokens that could have been sampled instead"
HEAD_HAS_GRADIENT = (
    "what is subtracted has a gradient by tokens that were not sampled; over all tokens these add "
    "up to 0 by the logits: tests/functional/test_centering.py"
)
TAIL_EVENT = (
    "A sampled token that is none of the sampler's likeliest is trained as all of those together, "
    "so that nothing drifts; the source trains it as itself (train.center_tail: token)."
)
ROW_RATIO = "a row's ratio is a mean over its tokens, and the row is clipped as a whole"

# Name, source, what it is; then the cells that are not the default ones, the numbers, and words.
# Where a source says nothing, the upper bound is DAPO's: rare tokens keep room to grow.
_ROWS = (
    # --- PPO and what grew from it
    Row(
        "ppo",
        "arXiv:1707.06347",
        "clipped surrogate with a critic and GAE",
        advantage="gae",
        overrides=(PPO_LAMBDA,),
        use="Dense or delayed rewards, and memory for a second model.",
    ),
    Row(
        "ppo_rlhf",
        "arXiv:1909.08593, arXiv:2203.02155",
        "PPO with the KL to the reference in the reward, steered to a target",
        advantage="gae",
        kl="reward_k1",
        features=(ADAPTIVE_KL,),
        overrides=(
            PPO_LAMBDA,
            KL_COEFF.at(0.15, "the authors' launch.py of arXiv:1909.08593, with the same target"),
        ),
        use="A learned reward model that must not be over-optimised.",
    ),
    Row(
        "vapo",
        "arXiv:2504.05118",
        (
            "value-based PPO for long chains: length-adaptive GAE, clip-higher, likelihood "
            "on right answers"
        ),
        advantage="gae_length_adaptive",
        features=(POSITIVE_NLL,),
        overrides=(
            CRITIC_WARMUP_STEPS.at(50, "VAPO, second-hand"),
            NLL_COEFF.at(0.1, "VAPO, confirmed by NeMo-RL's recipe"),
            DAPO_CLIP_HIGH,
        ),
        use="Long reasoning with a critic that was pretrained.",
    ),
    Row(
        "reinforce_plus_plus",
        "arXiv:2501.03262",
        "return to go, whitened over the batch, with PPO's clip and no critic",
        advantage="whitened_returns",
        kl="reward_k1",
        overrides=(KL_COEFF.at(0.01, "OpenRLHF, the author's code"),),
        use="One sample per prompt; token-level KL in the reward.",
    ),
    Row(
        "reinforce_plus_plus_baseline",
        "arXiv:2501.03262",
        "group-centered rewards, whitened over the batch",
        advantage="group_center_whitened",
        kl="loss_k2",
        overrides=(KL_COEFF.at(1e-5, "OpenRLHF, the author's code: reinforce_baseline"),),
        use="Groups of very different difficulty, which GRPO's group std would level.",
    ),
    Row(
        "decoupled_ppo",
        "arXiv:2505.24298, arXiv:2110.00641",
        "PPO around the recent policy, with a capped weight from there to the sampler",
        correction="truncate",
        overrides=(CORRECTION_MAX.at(5.0, "arXiv:2505.24298"),),
        use="Asynchronous sampling: stale tokens are weighted, not clipped away.",
        deviation="Group advantages; the source allows GAE as well (train.advantage: gae).",
    ),
    Row(
        "a3po",
        "arXiv:2512.06547",
        "decoupled PPO whose proximal policy is interpolated, at no extra forward pass",
        correction="truncate",
        features=(INTERPOLATED_ANCHOR,),
        overrides=(CORRECTION_MAX.at(5.0, "AReaL"),),
        use="As decoupled_ppo, where the recompute pass is too expensive.",
        deviation=(
            "The weight from the proximal policy to the sampler is capped at 5; AReaL drops "
            "tokens above it (train.correction: mask)."
        ),
    ),
    # --- advantages from groups
    Row(
        "sgrpo",
        "oxRL; builds on arXiv:2402.03300",
        (
            "oxRL's stable GRPO: group z-score, one token mean over the global batch, "
            "straight-through KL"
        ),
        kl="loss_k3_plus",
        use="The default for verifiable rewards.",
        deviation=(
            "Against GRPO: one weight per token instead of per row, so that long wrong "
            "answers are not under-punished; k3+ instead of k3, whose gradient belongs to "
            "the other direction; KL off by default, because a verifier cannot be "
            "over-optimised as a learned reward can. Two bugs of the first public version "
            "are gone: a negative clip_low made the interval [1.2, 1.2], so no on-policy "
            "token with a negative advantage had a gradient (magnitudes are stored now); "
            "and the loss was a mean per micro-batch, so tokens counted differently "
            "depending on what they were batched with (weights are global now)."
        ),
    ),
    Row(
        "turn_grpo",
        "GiGPO, arXiv:2505.10978, section 4.2",
        "advantage per turn: each turn of an episode against the same turn of its group",
        advantage="turn_normalize",
        use="Episodes of several turns whose rewards come turn by turn, or late and discounted.",
        deviation=(
            "GiGPO compares actions taken in the same state, and adds the episode's own "
            "advantage; here the turns of one number are compared, which needs no equal states, "
            "and nothing is added. The loss is that of sgrpo, without KL. A turn that one episode "
            "of a group alone has teaches nothing. With one turn per episode it is a group z-score."
        ),
    ),
    Row(
        "grpo",
        "arXiv:2402.03300",
        "group-relative policy optimisation",
        kl="loss_k3",
        weights="sequence_mean",
        overrides=(KL_COEFF.at(0.04, "DeepSeekMath, arXiv:2402.03300, section 4.2"),),
        use="To compare with published GRPO results.",
        deviation="Groups of equal rewards give exactly 0.",
    ),
    Row(
        "gdpo",
        "arXiv:2601.05242",
        "parts of the reward normalised in the group one by one, their sum over the batch",
        advantage="group_normalize_parts",
        overrides=(CLIP_HIGH.at(0.2, "authors: NVlabs/GDPO, clip_ratio of verl"),),
        use="Several rewards whose spreads differ, where the largest would drown the others.",
        deviation=(
            "A part that failed on a response takes no part in comparing that part; the authors' "
            "code takes it for 0. Scaled over responses, as in the paper and their TRL code; their "
            "verl code scales over tokens."
        ),
    ),
    Row(
        "iqr_grpo",
        "oxRL; builds on arXiv:2402.03300",
        "GRPO by the group's median and inter-quartile range, which one odd reward does not move",
        advantage="iqr_normalize",
        overrides=(DAPO_CLIP_HIGH,),
        use="Graded rewards with outliers: a judge that errs, a score without a bound.",
        deviation=(
            "Advantages do not sum to 0 in a group, and where more than half of its rewards are "
            "equal, those have none."
        ),
    ),
    Row(
        "otb",
        "arXiv:2602.07078",
        "a baseline per token, of returns weighted by how far responses have pushed the logits",
        advantage="otb",
        ratio="none",
        gate="policy_gradient",
        use="Long responses of unlike length and certainty, in small groups.",
        deviation=(
            "On policy: no weights against the sampler enter the baseline. Groups of equal "
            "returns, and of one response, give exactly 0."
        ),
    ),
    Row(
        "dr_grpo",
        "arXiv:2503.20783",
        "GRPO without its two normalisations: no std, no division by the response length",
        advantage="group_center",
        weights="fixed_length",
        use="When wrong answers grow longer, or hard prompts are under-trained.",
    ),
    Row(
        "lite_ppo",
        "arXiv:2508.08221",
        "group mean, batch std, token mean, PPO's clip",
        advantage="group_center_batch_std",
        use="A small recipe that ablations found sufficient.",
    ),
    Row(
        "dapo",
        "arXiv:2503.14476",
        "GRPO with clip-higher, token mean, dynamic sampling and a soft length penalty",
        features=(
            DYNAMIC_SAMPLING,
            OVERLONG_PENALTY,
        ),
        overrides=(DAPO_CLIP_HIGH,),
        use="Long reasoning with many prompts that are all right or all wrong.",
    ),
    Row(
        "prorl",
        "arXiv:2505.24864",
        (
            "prolonged training: clip-higher, KL in the loss, reference and optimizer reset "
            "on a schedule"
        ),
        kl="loss_k3_plus",
        features=(
            DYNAMIC_SAMPLING,
            REFERENCE_RESET,
        ),
        overrides=(
            CLIP_HIGH.at(0.4, "from memory of the paper"),
            KL_COEFF.at(1e-3),
        ),
        use="Thousands of steps over a diverse mix.",
        deviation="k3+ for the KL term; clip_high 0.4 is from memory of the paper.",
    ),
    Row(
        "scale_rl",
        "arXiv:2510.13786",
        "CISPO against the sampler, advantages scaled by their own std, every prompt alike",
        advantage="group_center_centered_std",
        denominator="rollout",
        gate="cispo",
        weights="prompt_mean",
        use="Large runs; the recipe of a scaling study.",
        deviation=(
            "Groups of equal rewards stay in the batch, with advantage 0: they count in the "
            "standard deviation and in the mean over prompts; the source takes them out."
        ),
    ),
    Row(
        "lambda_grpo",
        "arXiv:2510.06870",
        "GRPO with a preference for long or short responses inside each group",
        weights="lambda_group",
        overrides=(DAPO_CLIP_HIGH,),
        use="To steer response length by one number.",
        deviation=(
            "The power is a fixed number (train.length_power), not a learned one: a learned "
            "power without a target follows the loss wherever it goes. With a constant "
            "power the row is token-local."
        ),
    ),
    Row(
        "maxrl",
        "arXiv:2602.02710",
        (
            "rewards divided by the group's success rate: towards maximum likelihood of "
            "right answers"
        ),
        advantage="mean_normalize",
        weights="sequence_sum",
        overrides=(DAPO_CLIP_HIGH,),
        use="Hard prompts with rare successes, binary rewards.",
        deviation=(
            "Tokens of a response are summed, with which the estimate is unbiased; the authors' "
            "runs average over tokens (train.weights: token_mean). PPO's clip has no effect in "
            "a single update. train.maxrl_order ends the series before the group does."
        ),
    ),
    Row(
        "pkpo",
        "arXiv:2505.15201",
        "optimises pass@k instead of pass@1",
        advantage="pass_at_k",
        weights="sequence_sum",
        overrides=(DAPO_CLIP_HIGH,),
        use="To keep several ways of solving alive, binary rewards.",
        deviation=(
            "PPO's clip, which has no effect in a single update, and makes several updates safe "
            "at the price of a bias."
        ),
    ),
    Row(
        "pass_k_training",
        "arXiv:2503.19595",
        "only the group's best response has an advantage: its lead over the second",
        advantage="top_gap",
        overrides=(DAPO_CLIP_HIGH,),
        use="Graded rewards where the best of k counts.",
    ),
    # --- other gates
    Row(
        "cispo",
        "arXiv:2506.13585",
        "clipped importance weights, no token dropped",
        gate="cispo",
        use="Several updates per batch, where PPO's clip silences the rare tokens that matter.",
    ),
    Row(
        "sapo",
        "arXiv:2511.20347",
        "a soft gate instead of a clip",
        gate="sapo",
        weights="sequence_mean",
        use="Where clip fractions are high and noisy, as in mixtures of experts.",
    ),
    Row(
        "rgpo_like",
        "after arXiv:2604.14895",
        "rejection gating with a sigmoid acceptance",
        gate="rgpo_like",
        use="To try a bounded smooth weight on either side.",
        deviation=(
            "The paper's exact gate and its gate on the reference ratio could not be verified."
        ),
    ),
    Row(
        "kimi",
        "arXiv:2501.12599, arXiv:2405.19107",
        "policy gradient with a squared log-ratio penalty per response, no clip",
        advantage="group_center",
        gate="proximal",
        weights="sequence_sum",
        use="Off-policy data without clipping.",
        shared_weight="the pull on a token is that of its whole row",
        exempt={
            "zero_advantage": "the pull to the old policy does not depend on the advantage",
        },
    ),
    Row(
        "dro",
        "arXiv:2405.19107",
        "policy gradient with a squared log-ratio penalty per token, no clip",
        advantage="group_center",
        gate="dro",
        use="As kimi, where the log-ratio of a whole response is noise.",
        deviation=(
            "The baseline is the group's mean, not a learned value. Every token has a penalty of "
            "its own, as in verl; the source's is that of the response, which is kimi. With one "
            "update per batch it is the plain policy gradient, and refused."
        ),
        exempt={
            "zero_advantage": "the pull to the old policy does not depend on the advantage",
        },
    ),
    Row(
        "drpo",
        "arXiv:2606.09821",
        "a smooth trust region on the change of probability against the sampler",
        denominator="rollout",
        gate="drpo",
        use="As dppo_tv, without a cliff: what has gone too far is pulled back.",
        deviation=(
            "train.drpo_delta is 0.15, as DPPO bounds the same change; the authors' 12.5 bounds "
            "nothing. With train.spo it is SPO, a trust region on the ratio. With one update "
            "per batch of own samples it is importance_sampling, and refused. Not the "
            "DRPO of arXiv:2510.04474, which decouples rewards."
        ),
    ),
    Row(
        "fipo",
        "arXiv:2603.19835",
        "PPO's clip, with more weight on tokens after which the response became likelier",
        gate="fipo",
        overrides=(DAPO_CLIP_HIGH,),
        use="Several updates per batch on long reasoning, without a critic.",
        deviation=(
            "Weights are only raised, as the authors run large models. Responses with several "
            "tokens above train.clip_dual stay; the authors drop them. With one update per batch "
            "it is the loss of dapo, and refused."
        ),
        shared_weight="a token's weight grows with the log-ratios of the tokens that follow it",
    ),
    Row(
        "dppo_tv",
        "arXiv:2602.04879",
        "trust region on the change of probability against the sampler",
        denominator="rollout",
        gate="dppo_tv",
        use="Rare tokens may move far, likely ones may not; the mismatch is inside the ratio.",
    ),
    Row(
        "dppo_kl",
        "arXiv:2602.04879",
        "trust region on the two-bucket KL against the sampler",
        denominator="rollout",
        gate="dppo_kl",
        use="As dppo_tv, stricter near probability 1.",
    ),
    Row(
        "dppo_topk_tv",
        "arXiv:2602.04879",
        "as dppo_tv, over the sampler's top tokens",
        denominator="rollout",
        gate="dppo_topk_tv",
        use="To measure the divergence more finely; the authors report no gain.",
    ),
    Row(
        "dppo_topk_kl",
        "arXiv:2602.04879",
        "as dppo_kl, over the sampler's top tokens",
        denominator="rollout",
        gate="dppo_topk_kl",
        use="To measure the divergence more finely; the authors report no gain.",
    ),
    Row(
        "simko",
        "arXiv:2510.14807",
        (
            "right answers share their gradient with the top candidates, wrong top-1 tokens "
            "fall harder"
        ),
        gate="simko",
        use="When pass@1 rises while pass@k falls.",
        deviation=(
            "Entropy and candidates are those of the policy before the update, chosen once per "
            "step; the authors' code takes them from the policy being updated."
        ),
        shared_weight="the gradient also reaches candidates that were not sampled",
        exempt={
            "on_policy": "at ratio 1 a share of the gradient goes to other candidates, by design",
        },
    ),
    Row(
        "clip_cov",
        "arXiv:2505.22617",
        "no gradient on a few random tokens of high covariance between logprob and advantage",
        gate="clip_cov",
        use="To slow the collapse of entropy.",
        deviation=(
            "Tokens are chosen once per step over the global batch, by the policy before the "
            "update, which makes the row token-local; the source chooses per micro-batch, by "
            "the current policy."
        ),
        exempt={
            "on_policy": "the chosen tokens get no gradient, by design",
        },
    ),
    Row(
        "kl_cov",
        "arXiv:2505.22617",
        "a KL penalty on the tokens of highest covariance between logprob and advantage",
        gate="kl_cov",
        use="To slow the collapse of entropy.",
        deviation=(
            "Tokens are chosen once per step over the global batch, by the policy before the "
            "update; the source chooses per micro-batch, by the current policy."
        ),
        exempt={
            "zero_advantage": "the penalty on the chosen tokens does not depend on the advantage",
        },
    ),
    # --- one ratio per row
    Row(
        "gspo",
        "arXiv:2507.18071",
        "clip on the row's geometric-mean ratio",
        ratio="geometric",
        weights="sequence_mean",
        use="Mixtures of experts and long rows, where token ratios are noise.",
        shared_weight=ROW_RATIO,
    ),
    Row(
        "gspo_token",
        "arXiv:2507.18071",
        "GSPO's ratio with advantages per token",
        ratio="geometric",
        weights="sequence_mean",
        use="GSPO with token rewards: set train.advantage.",
        deviation=(
            "The row ratio is detached, as in the paper's token form; one advantage per row "
            "makes it gspo."
        ),
    ),
    Row(
        "luspo",
        "arXiv:2602.05261",
        "GSPO times the row's length",
        ratio="geometric",
        weights="sequence_sum",
        overrides=(
            CLIP_LOW.at(2e-3, "LUSPO, arXiv:2602.05261, section 5.1"),
            CLIP_HIGH.at(2.5e-3, "LUSPO, arXiv:2602.05261, section 5.1"),
        ),
        use="GSPO without its length bias.",
        shared_weight=ROW_RATIO,
    ),
    Row(
        "gmpo",
        "arXiv:2507.20673",
        "geometric mean of token ratios that are clipped one by one",
        gate="gmpo",
        weights="sequence_mean",
        use="GSPO's averaging with token-wise clipping and a wide bound.",
        shared_weight="a token's weight is the geometric mean over its row",
    ),
    Row(
        "rspo",
        "arXiv:2510.23027",
        "GMPO with ratios scaled down where the router's choices moved",
        gate="rspo",
        weights="sequence_mean",
        use="Mixtures of experts without routing replay.",
        deviation="gamma_min 0.8 is a third party's value.",
        shared_weight="a token's weight is the geometric mean over its row",
    ),
    Row(
        "vespo",
        "arXiv:2602.10693",
        "soft weight by the importance ratio of the whole row against the sampler",
        ratio="sequence",
        denominator="rollout",
        gate="vespo",
        use="Stale data with short rows; on long rows watch update/weight_mean.",
    ),
    # --- no ratio
    Row(
        "reinforce",
        "Williams 1992",
        "the policy gradient with the return itself",
        advantage="returns",
        ratio="none",
        gate="policy_gradient",
        weights="sequence_sum",
        use="To teach and to check others against; the variance is high.",
    ),
    Row(
        "reinforce_baseline",
        "Williams 1992",
        "the policy gradient with the batch mean as baseline",
        advantage="batch_center",
        ratio="none",
        gate="policy_gradient",
        use="One sample per prompt and no critic.",
    ),
    Row(
        "a2c",
        "arXiv:1602.01783",
        "actor-critic: the policy gradient with a critic and GAE",
        advantage="gae",
        ratio="none",
        gate="policy_gradient",
        use="One update per batch, with rewards inside the response.",
    ),
    Row(
        "rloo",
        "arXiv:2402.14740",
        "leave-one-out baseline: each sample against the mean of the others",
        advantage="leave_one_out",
        ratio="none",
        gate="policy_gradient",
        kl="reward_k1",
        weights="sequence_sum",
        overrides=(KL_COEFF.at(0.03, "arXiv:2402.14740, appendix C, TL;DR; 0.1 on HH"),),
        use="Few samples per prompt; the only group baseline that is exactly unbiased.",
    ),
    Row(
        "remax",
        "arXiv:2310.10505",
        "greedy baseline: each sample against the greedy response",
        advantage="greedy_baseline",
        ratio="none",
        gate="policy_gradient",
        kl="reward_k1",
        weights="sequence_sum",
        overrides=(KL_COEFF.at(0.05, "the authors' script of ReMax, arXiv:2310.10505"),),
        use="One sample per prompt, when a greedy decode is affordable.",
    ),
    Row(
        "opo",
        "arXiv:2505.23585",
        "length-weighted group mean as baseline, strictly on-policy",
        advantage="length_weighted_center",
        ratio="none",
        gate="policy_gradient",
        use="On-policy training without clip or KL.",
    ),
    Row(
        "gpg",
        "arXiv:2504.02546",
        "group-centered policy gradient, rescaled for groups of zero variance",
        advantage="group_center_rescaled",
        ratio="none",
        gate="policy_gradient",
        use="A baseline without clip, KL or reference.",
    ),
    # --- corrections of the mismatch between sampler and trainer
    Row(
        "tis",
        "Yao et al. 2025",
        "GRPO with truncated importance sampling against the sampler",
        correction="truncate",
        overrides=(DAPO_CLIP_HIGH,),
        use="Sampler and trainer differ a little: other kernels or precision.",
    ),
    Row(
        "mis",
        "Liu et al. 2025",
        "GRPO that drops rows whose product ratio left the bounds, and weights the others",
        correction="mask",
        overrides=(
            CORRECTION_LEVEL.at("sequence"),
            CORRECTION_MIN.at(0.0),
            CORRECTION_MAX.at(3.0, "TRL's sequence mask"),
            DAPO_CLIP_HIGH,
        ),
        use="Short rows; on long ones the product rejects by length alone.",
    ),
    Row(
        "icepop",
        "arXiv:2510.18855",
        "GRPO that drops tokens whose ratio left the bounds, and weights the others",
        correction="mask",
        overrides=(
            CORRECTION_MAX.at(5.0, "arXiv:2510.18855"),
            DAPO_CLIP_HIGH,
        ),
        use="Mixtures of experts: a flipped expert makes single tokens wild.",
    ),
    Row(
        "geometric_rejection",
        "verl's geometric preset",
        "GRPO that drops rows whose geometric-mean ratio left a narrow band",
        correction="reject",
        overrides=(DAPO_CLIP_HIGH,),
        use="Long rows; no length trap.",
    ),
    Row(
        "k3_rejection",
        "verl's k3 preset",
        "GRPO that drops rows whose mean k3 mismatch is above a bound",
        correction="reject_k3",
        overrides=(DAPO_CLIP_HIGH,),
        use="When mismatch/kl_k3 exceeds its alarm.",
    ),
    Row(
        "veto",
        "slime, verl",
        "GRPO that drops rows with a token of almost no probability under the trainer",
        correction="veto",
        overrides=(DAPO_CLIP_HIGH,),
        use="A safety net against broken rows.",
    ),
    Row(
        "opsm",
        "arXiv:2512.02556",
        "off-policy sequence masking: GRPO that drops bad rows the policy has moved away from",
        advantage="group_center",
        correction="drop_drifted_failures",
        kl="loss_k3_ratio",
        overrides=(DAPO_CLIP_HIGH,),
        use="Stale data with many wrong rows.",
        deviation=(
            "Every token weighs alike; the source takes the mean of each response first "
            "(train.weights: sequence_mean)."
        ),
    ),
    Row(
        "m2po",
        "arXiv:2510.01161",
        "drops the tokens with the largest squared log-ratio until their mean is small",
        denominator="rollout",
        gate="importance_sampling",
        correction="second_moment",
        use="Very stale data.",
        deviation=(
            "The mask is decided once per rollout batch, by the policy before the update, as "
            "AReaL decides it by its proximal policy. The authors' repository turns the same "
            "bound into one clip range for the tokens that moved as favored."
        ),
    ),
    # --- score centering
    Row(
        "sgrpo_centered",
        "sgrpo; score centering, arXiv:2609.20807",
        "sgrpo, each token's loss minus its expectation under the sampler",
        kl="loss_k3_plus",
        centering="score",
        shared_weight=REACHES_HEAD,
        exempt={"on_policy": HEAD_HAS_GRADIENT},
        use="A sampler that lastingly differs: rounded weights, other kernels, older weights.",
        deviation=TAIL_EVENT,
    ),
    Row(
        "cispo_centered",
        "CISPO, arXiv:2506.13585; score centering, arXiv:2609.20807",
        "cispo, each token's loss minus its expectation under the sampler",
        gate="cispo",
        centering="score",
        shared_weight=REACHES_HEAD,
        exempt={"on_policy": HEAD_HAS_GRADIENT},
        use="As sgrpo_centered, with several updates per batch.",
        deviation=TAIL_EVENT,
    ),
    Row(
        "r3",
        "arXiv:2510.11370",
        "GRPO that replays the sampler's routing in training",
        features=(ROUTING,),
        overrides=(DAPO_CLIP_HIGH,),
        use="Mixtures of experts: removes most of the mismatch at its source.",
    ),
    # --- a teacher
    Row(
        "opd",
        "arXiv:2306.13649, arXiv:2306.08543",
        "on-policy distillation: the teacher's logprob minus the student's is the advantage",
        advantage="teacher_gap",
        ratio="none",
        gate="policy_gradient",
        use="A stronger model with the same tokenizer is at hand.",
        deviation=(
            "Its mean is the gradient of the sum of KL(policy || teacher) of every token, those "
            "before it held fixed; a gap of more than 10 nats counts as 10, which biases it."
        ),
    ),
    Row(
        "opd_topk",
        "arXiv:2306.13649",
        "divergence from the teacher: exact over its most likely tokens, sampled for the rest",
        advantage="none",
        denominator="rollout",
        gate="teacher_divergence",
        use="As opd, with less noise: small batches learn faster.",
        deviation=(
            "The estimate is oxRL's own. Its mean is the value and the gradient of the sum of the "
            "divergences of every token, those before it held fixed, whatever the candidates are; "
            "where policy and teacher agree both are 0 for each sample. Common ways to leave out "
            "the rest are biased: train.candidates_rest."
        ),
        exempt=DIVERGENCE_PROOFS,
    ),
    Row(
        "gkd",
        "arXiv:2306.13649",
        "opd_topk by Jensen-Shannon, on given answers too",
        advantage="none",
        denominator="rollout",
        gate="teacher_divergence",
        features=(GIVEN_ROWS,),
        overrides=(GKD_ALPHA,),
        use="Good answers are at hand, and the policy alone would seldom write any like them.",
        deviation=(
            "Each step learns from both kinds of rows in their shares; the authors draw the kind "
            "of a whole step. Sampled rows have the estimate of opd_topk. Given answers were "
            "sampled by nobody known, so there all tokens that are no candidates count as one "
            "token: value and gradient are exactly those of the divergence of the two "
            "distributions over candidates and that token, a lower bound of the whole one, and "
            "the whole one where train.teacher_candidates is the vocabulary. With "
            "train.gkd_lambda 1 it is opd_topk."
        ),
        exempt=DIVERGENCE_PROOFS,
    ),
    Row(
        "gad",
        "arXiv:2511.10643",
        "GRPO whose reward is a model that learns to tell responses from a teacher's texts",
        features=(DISCRIMINATOR,),
        overrides=(DAPO_CLIP_HIGH,),
        use="A teacher of which there are texts alone, whatever its tokenizer.",
        deviation=(
            "One token mean over the global batch, as sgrpo. The authors first fine-tune the "
            "policy on the texts and train the discriminator meanwhile: here that is a run of sft "
            "before, and train.discriminator_warmup_steps."
        ),
    ),
    Row(
        "minillm",
        "arXiv:2306.08543",
        "on-policy distillation that counts for a token what the teacher says of all that follows",
        advantage="teacher_return",
        ratio="none",
        gate="policy_gradient",
        use="A small student that should stay where the teacher follows; noisier than opd.",
        deviation=(
            "With train.teacher_gamma 1 its mean is the gradient of the KL of whole responses; "
            "train.teacher_mean, the paper's length normalisation, is biased. Without the paper's "
            "mixed sampling, its split of the first step, and its language modelling term."
        ),
    ),
    Row(
        "iw_opd",
        "arXiv:2606.22600",
        "on-policy distillation that weighs a token by how far both still agreed before it",
        advantage="teacher_prefix_gap",
        ratio="none",
        gate="policy_gradient",
        use="Long responses, after whose first errors the teacher's advice is noise.",
        deviation="The weights make it biased for any divergence, on purpose.",
    ),
    Row(
        "kdrl",
        "arXiv:2506.02208",
        "group advantage plus the teacher's gap",
        advantage="group_normalize_teacher",
        overrides=(DAPO_CLIP_HIGH, KDRL_TEACHER_COEFF, KDRL_TEACHER_COEFF_END),
        use="A teacher and a verifier together.",
        deviation="The teacher's weight falls along a line over the whole run.",
    ),
    Row(
        "opsd",
        "arXiv:2601.18734",
        "divergence from the policy itself, shown more: what it does with a hint it learns without",
        advantage="none",
        denominator="rollout",
        gate="teacher_divergence",
        features=(PROMPTED_SELF,),
        use="Answers or worked solutions are at hand, and no stronger model.",
        deviation="The estimate of opd_topk.",
        exempt=DIVERGENCE_PROOFS,
    ),
    Row(
        "sdpo",
        "arXiv:2601.20802",
        "opsd whose hint is feedback on the response, or another one that succeeded",
        advantage="none",
        denominator="rollout",
        gate="teacher_divergence",
        features=(PROMPTED_SELF,),
        overrides=(GKD_ALPHA, TEACHER_CANDIDATES.at(100, "arXiv:2601.20802")),
        use="Environments and rewards that say what was wrong.",
        deviation=(
            "Jensen-Shannon over 100 candidates, as in the paper, with the estimate of opd_topk in "
            "place of its tail; TRL's defaults are reverse KL of the sampled token with a capped "
            "ratio and averaged weights of the teacher."
        ),
        exempt=DIVERGENCE_PROOFS,
    ),
    Row(
        "prompt_distil",
        "arXiv:2112.00861, arXiv:2209.15189",
        "opsd whose hint is the same for every row: what a prompt does is moved into the weights",
        advantage="none",
        denominator="rollout",
        gate="teacher_divergence",
        features=(PROMPTED_SELF,),
        use="A long system prompt that should not be paid for any more.",
        deviation="On the policy's own samples, with the estimate of opd_topk.",
        exempt=DIVERGENCE_PROOFS,
    ),
    # --- no reinforcement learning
    Row(
        "sft",
        "",
        "supervised fine-tuning",
        recipe="supervised",
        use="Given answers to imitate; the warm start of everything else.",
    ),
    Row(
        "dft",
        "arXiv:2508.05629",
        "supervised fine-tuning in which each token counts by its probability under the model",
        recipe="supervised",
        use=(
            "Given answers unlike the model's own, of which it should keep what it knows; random "
            "weights learn nothing by it."
        ),
    ),
    Row(
        "rft",
        "arXiv:2308.01825, arXiv:2304.06767",
        "rejection-sampling fine-tuning: sample, keep by reward, imitate what was kept",
        recipe="rejection",
        numbers=(
            KEEP_REWARD,
            KEEP_PER_PROMPT,
        ),
        use=(
            "A verifier and a model that sometimes succeeds: the simplest way to learn from "
            "its own answers."
        ),
    ),
    Row(
        "reward_model",
        "arXiv:2203.02155",
        "Bradley-Terry reward model",
        recipe="reward_model",
        numbers=(CENTER_COEFF,),
        use="Pairs to learn a reward from, for reinforcement learning by path.",
    ),
    Row(
        "process_reward_model",
        "arXiv:2305.20050, arXiv:2211.14275",
        "reward model of steps: is each step of a solution right",
        recipe="reward_model",
        use="Judged steps; as a reward, a response is worth its worst step.",
    ),
)


class Rows(Mapping[str, Row]):
    """The table, by name. Those of preference methods are made when one is asked for, or all are.

    Args:
        rows: all others.
    """

    def __init__(self, rows: tuple[Row, ...]) -> None:
        self._others = {row.name: row for row in rows}

    @cached_property
    def methods(self) -> Mapping[str, Method]:
        """Preference methods by name, the supervised anchor of their sums among them."""
        from oxrl.tables.preference import METHODS  # what learns from rewards does without

        return METHODS

    @cached_property
    def _all(self) -> dict[str, Row]:
        made = [
            Row(
                name,
                f"arXiv:{method.source}",
                method.summary,
                recipe="preference",
                numbers=(*method.reads, *method.around),
                use="Judged answers and no reward to sample against.",
            )
            for name, method in self.methods.items()
            if name != "nll"
        ]
        return self._others | {row.name: row for row in made}

    def __getitem__(self, name: str) -> Row:
        return self._others.get(name) or self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def of(self, recipe: str) -> list[Row]:
        """Return the rows that a recipe trains.

        Args:
            recipe: its name.
        """
        rows = self._all if recipe == "preference" else self._others
        return [row for row in rows.values() if row.recipe == recipe]


ROWS = Rows(_ROWS)
