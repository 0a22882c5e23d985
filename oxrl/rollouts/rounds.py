"""Rounds of sampling: prompts are drawn until enough groups are there that are trained on.

Where every group is trained on one round is enough, and nothing of this is imported.
"""

from __future__ import annotations

from oxrl.rollouts.sync import RolloutParts, RolloutStep, SyncRollouts


class RoundRollouts(SyncRollouts):
    """A RolloutSource that samples in rounds."""

    def _fill(self, found: RolloutStep) -> None:
        """Sample round after round, and choose among the groups of all of them."""
        missing = self.parts.prompts_per_step
        while missing:
            self._sample(found, missing)
            missing = still_missing(found, self.parts)
        choose_groups(found, self.parts)


def still_missing(step: RolloutStep, parts: RolloutParts) -> int:
    """Count the prompts that a step still needs."""
    if parts.choice is None:
        return 0
    wanted = parts.prompts_per_step
    return parts.choice.missing(step.rollouts, wanted=wanted, rounds=step.rounds)


def choose_groups(step: RolloutStep, parts: RolloutParts) -> None:
    """Say which groups of a step are trained on, and where the next one goes on."""
    wanted = parts.prompts_per_step
    chosen = tuple(dict.fromkeys(rollout.group_id for rollout in step.rollouts))
    if parts.choice is not None:
        chosen = parts.choice.groups(step.rollouts, wanted=wanted)
    step.groups = chosen
    whole = len(chosen) == wanted
    step.next_draw = chosen[-1] + 1 if whole else step.end
