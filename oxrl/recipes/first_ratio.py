"""A check of runs that ask the policy before the update; others do without."""

from __future__ import annotations

from torch import Tensor

from oxrl.errors import InvariantError


def check_first_ratio(logprobs: Tensor, old: Tensor, mask: Tensor, tolerance: float) -> None:
    """Before the first update the policy is its own old policy, so every ratio must be 1.

    Args:
        logprobs, old: [B, T] nats, of the update and of the pass before it.
        mask: [B, T] bool, trained tokens.
        tolerance: nats.

    Raises:
        InvariantError: it is not: the two passes saw other weights, temperature, or dropout.
    """
    worst = float((logprobs - old)[mask].abs().max())
    if worst > tolerance:
        raise InvariantError(
            f"the first minibatch's log-ratio to the old log-probabilities is {worst:.3g}, above "
            f"{tolerance}: the recompute pass and the update pass disagree about the same weights"
        )
