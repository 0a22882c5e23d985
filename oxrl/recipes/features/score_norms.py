"""The norm of a token's score, the gradient of its logprob by the logits: what it is computed from.

Source: the optimal token baseline, arXiv:2602.07078.
"""

from __future__ import annotations

from oxrl.recipes.features.base import Feature


class ScoreNorms(Feature):
    """See the module; the advantage reads what the policy says before the update."""

    want_before = frozenset({"logprobs", "sum_p_squared"})
