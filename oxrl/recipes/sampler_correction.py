"""Weights of tokens against the sampler, in the loss. Imported where a row corrects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from oxrl.functional.corrections import CORRECTIONS, Correction, Level
from oxrl.functional.gates import LossInputs
from oxrl.recipes.features.base import Feature
from oxrl.tables.numbers import CORRECTION_LEVEL
from oxrl.tables.policy import Algorithm


class SamplerCorrection:
    """The correction of a row, its numbers bound.

    Args:
        algorithm: the row and its numbers.
        features: of the row; one may have the policy being updated judged, not the one before the
            update, and the advantages read.
    """

    def __init__(self, algorithm: Algorithm, features: Sequence[Feature]) -> None:
        name = algorithm.row.correction
        numbers = algorithm.numbers("correction", name)
        self.weigh: Correction = partial(CORRECTIONS[name], **numbers)
        self.current_policy = any(feature.corrects_current_policy for feature in features)

    def __call__(self, tokens: LossInputs) -> Tensor:
        """The weight of each token, [B, T].

        Args:
            tokens: [B, T].
        """
        if self.current_policy:
            now = tokens.logprobs.detach()
            return self.weigh(now, tokens.sampler, tokens.mask, advantages=tokens.advantages)
        return self.weigh(tokens.old, tokens.sampler, tokens.mask)


def bind_correction(algorithm: Algorithm, features: Sequence[Feature]) -> SamplerCorrection | None:
    """Make what weighs tokens in the loss; None where a feature decides before the update."""
    if any(feature.corrects_whole_step for feature in features):
        return None
    return SamplerCorrection(algorithm, features)


def correction_level(algorithm: Algorithm) -> Level | None:
    """Return the level of the ratios that the correction weighs by; None if weights are 0 or 1."""
    if algorithm.row.correction in ("truncate", "mask"):
        return algorithm.value(CORRECTION_LEVEL)
    return None
