"""The class of every feature that a row of the table may need, of the core or beside it."""

from __future__ import annotations

from oxrl.entry_points import ROW_FEATURES, own_function
from oxrl.recipes.features.adaptive_kl import AdaptiveKL
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.recipes.features.critic import Critic
from oxrl.recipes.features.dynamic_sampling import DynamicSampling
from oxrl.recipes.features.greedy_baseline import GreedyBaseline
from oxrl.recipes.features.interpolated_anchor import InterpolatedAnchor
from oxrl.recipes.features.overlong_penalty import OverlongPenalty
from oxrl.recipes.features.positive_nll import PositiveNLL
from oxrl.recipes.features.reference_reset import ReferenceReset
from oxrl.recipes.features.reward_parts import RewardParts
from oxrl.recipes.features.sampler_top import SamplerTop
from oxrl.recipes.features.score_norms import ScoreNorms
from oxrl.recipes.features.step_correction import CurrentPolicyCorrection, StepCorrection
from oxrl.recipes.features.token_selection import TokenSelection, TopCandidates

# Need of a row -> its class.
FEATURES: dict[str, type[Feature]] = {
    "dynamic_sampling": DynamicSampling,
    "reward_parts": RewardParts,
    "greedy_rollout": GreedyBaseline,
    "score_norms": ScoreNorms,
    "overlong_penalty": OverlongPenalty,
    "critic": Critic,
    "adaptive_kl": AdaptiveKL,
    "reference_reset": ReferenceReset,
    "positive_nll": PositiveNLL,
    "token_selection": TokenSelection,
    "top_logprobs": TopCandidates,
    "sampler_top": SamplerTop,
    "full_batch_correction": StepCorrection,
    "current_policy_correction": CurrentPolicyCorrection,
    "interpolated_anchor": InterpolatedAnchor,
}


def build_features(given: FeatureInputs) -> list[Feature]:
    """The features that the row asks for, in the order of its needs."""
    made = [FEATURES.get(need) or own_function(ROW_FEATURES, need) for need in given.row.needs]
    return [make(given) for make in made if make is not None]
