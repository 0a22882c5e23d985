"""The inputs that every advantage is computed from, and the tensors that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from oxrl.functional.masks import OptionalTensor


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """Everything an advantage may be computed from: the whole rollout batch, valid rows only."""

    rewards: Tensor  # [B]
    token_rewards: Tensor  # [B, T], the same rewards placed on tokens
    response_mask: Tensor  # [B, T] bool, trained tokens
    group_ids: Tensor  # [B], shared by the responses to one prompt
    values: OptionalTensor = None  # [B, T], the critic's
    bootstrap: OptionalTensor = None  # [B], the critic's value after the last token
    truncated: OptionalTensor = None  # [B] bool, cut by the token limit
    greedy_rewards: OptionalTensor = None  # [B], of the prompt's greedy response
    part_rewards: OptionalTensor = None  # [B, K], of the parts of the reward, NaN for none
    part_weights: OptionalTensor = None  # [K], theirs
    old_logprobs: OptionalTensor = None  # [B, T] nats of the sampled tokens
    teacher_logprobs: OptionalTensor = None  # [B, T] nats of the sampled tokens
    turns: OptionalTensor = None  # [B, T] int64, turn of an episode in which a token was sampled
    next_turn: OptionalTensor = None  # [B] bool, the episode was cut where a turn would begin

    def need(self, name: str) -> Tensor:
        """The field `name`, which the chosen advantage cannot do without.

        Args:
            name: of a field that may be None.

        Returns:
            The field, as it is described above.

        Raises:
            ValueError: it is None.
        """
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"this advantage needs {name}, which nothing in this run computes")
        return tensor


# Advantages [B, T], and what the critic learns to predict, [B, T], or None.
AdvantagesAndReturns = tuple[Tensor, OptionalTensor]


class Estimator(Protocol):
    """A cell of `ADVANTAGES`; its numbers come by keyword."""

    def __call__(self, x: AdvantageInputs, *args: Any, **numbers: Any) -> AdvantagesAndReturns:
        """Advantages of the whole batch of a step.

        Args:
            x: what there is to estimate them from.
            args: none; they let type checkers accept what a cell takes besides.
            numbers: of the cell.

        Returns:
            Advantages [B, T], and what a critic learns to predict [B, T], None where there is no
            critic.

        Raises:
            ValueError: `x` lacks what the cell reads.
        """
        ...
