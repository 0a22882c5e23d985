"""Which of the sampled groups a rollout step trains on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from oxrl.types import Rollout


class GroupChoice(Protocol):
    """Decides from scored rollouts, in the order of the data, never from who finished first."""

    @property
    def rounds(self) -> int:
        """Most rounds of sampling per rollout step."""
        ...

    def missing(self, rollouts: Sequence[Rollout], *, wanted: int, rounds: int) -> int:
        """How many prompts more are to be sampled; 0: it is enough after `rounds` rounds."""
        ...

    def groups(self, rollouts: Sequence[Rollout], *, wanted: int) -> tuple[int, ...]:
        """Group ids that are trained on, ascending; at most `wanted`."""
        ...


class EveryGroup:
    """All groups are trained on, and one round is enough."""

    rounds = 1

    def missing(self, rollouts: Sequence[Rollout], *, wanted: int, rounds: int) -> int:
        return 0

    def groups(self, rollouts: Sequence[Rollout], *, wanted: int) -> tuple[int, ...]:
        return tuple(dict.fromkeys(rollout.group_id for rollout in rollouts))
