"""Rounds of sampling: prompts are drawn until enough groups are there that are trained on.

Where every group is trained on one round is enough, and nothing of this is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from oxrl.rollouts.sync import RolloutParts, RolloutStep, SyncRollouts
from oxrl.runs.waiting import StopAsked
from oxrl.types import Rollouts


class GroupChoice(Protocol):
    """Decides from scored rollouts, in the order of the data, never from who finished first."""

    @property
    def rounds(self) -> int:
        """Most rounds of sampling per rollout step."""
        ...

    def missing(self, rollouts: Rollouts, *, wanted: int, rounds: int) -> int:
        """Count the prompts that are still to be sampled; 0: it is enough after `rounds` rounds."""
        ...

    def groups(self, rollouts: Rollouts, *, wanted: int) -> tuple[int, ...]:
        """Group ids that are trained on, ascending; at most `wanted`."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundParts(RolloutParts):
    """The parts of a source that does not train on every group; `choice` says on which."""

    choice: GroupChoice


class RoundRollouts(SyncRollouts):
    """A RolloutSource that samples in rounds."""

    def next(self, draw: int, *, step: int, stop: StopAsked) -> RolloutStep:
        """See RolloutSource."""
        found = RolloutStep(step=step, start=draw, end=draw)
        missing = self.parts.prompts_per_step
        while missing:
            self._sample(found, missing, stop)
            missing = still_missing(found, self.parts)
        choose_groups(found, self.parts)
        found.sampler = self.parts.sampler.metrics()
        return found


def still_missing(step: RolloutStep, parts: RolloutParts) -> int:
    """Count the prompts that a step still needs."""
    if not isinstance(parts, RoundParts):
        return 0
    wanted = parts.prompts_per_step
    return parts.choice.missing(step.rollouts, wanted=wanted, rounds=step.rounds)


def choose_groups(step: RolloutStep, parts: RolloutParts) -> None:
    """Say which groups of a step are trained on, and where the next one goes on."""
    wanted = parts.prompts_per_step
    chosen = tuple(dict.fromkeys(rollout.group_id for rollout in step.rollouts))
    if isinstance(parts, RoundParts):
        chosen = parts.choice.groups(step.rollouts, wanted=wanted)
    step.groups = chosen
    whole = len(chosen) == wanted
    step.next_draw = chosen[-1] + 1 if whole else step.end


def most_rounds(parts: RolloutParts) -> int:
    """Most rounds of sampling per rollout step."""
    return parts.choice.rounds if isinstance(parts, RoundParts) else 1
