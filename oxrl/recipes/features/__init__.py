"""The additions of rows to the loop beyond their cells, one file each; `FEATURES` names them.

A new feature is a class here, a name in `FEATURES`, and its meaning in `oxrl.tables.policy`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oxrl.recipes.features.base import Feature, FeatureInputs

# Need of a row -> where its class is; only those of the run's row are imported.
FEATURES = {
    "dynamic_sampling": "dynamic_sampling:DynamicSampling",
    "reward_parts": "reward_parts:RewardParts",
    "greedy_rollout": "greedy_baseline:GreedyBaseline",
    "overlong_penalty": "overlong_penalty:OverlongPenalty",
    "critic": "critic:Critic",
    "adaptive_kl": "adaptive_kl:AdaptiveKL",
    "reference_reset": "reference_reset:ReferenceReset",
    "positive_nll": "positive_nll:PositiveNLL",
    "token_selection": "token_selection:TokenSelection",
    "top_logprobs": "token_selection:TopCandidates",
    "full_batch_correction": "step_correction:StepCorrection",
    "current_policy_correction": "step_correction:CurrentPolicyCorrection",
    "interpolated_anchor": "interpolated_anchor:InterpolatedAnchor",
}


def build_features(given: FeatureInputs) -> list[Feature]:
    """The features that the row asks for, in the order of the table."""
    features: list[Feature] = []
    for need in given.row.needs:
        if need in FEATURES:
            module, _, name = FEATURES[need].partition(":")
            kind = getattr(import_module(f"{__name__}.{module}"), name)
            features.append(kind(given))
    return features
