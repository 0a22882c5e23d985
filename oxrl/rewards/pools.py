"""The interface of all pools that score, and the pool of a reward that needs no worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from oxrl.runs.waiting import Patience
from oxrl.types import Completions, Group, GroupScores, Metrics, Prompt, Scores

GroupReward = Callable[[Prompt, Completions], GroupScores]


class GroupScorer(Protocol):
    """A scorer of completions: the pool of a reward's workers, or what stands before it."""

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score the completions of every group, in their order.

        Raises:
            DeadlineError: no score came for too long.
            Stopped: a signal asked to stop.
        """
        ...


class ScoringPool(GroupScorer, Protocol):
    """The processes of a reward, or those of its parts."""

    @property
    def pools(self) -> Sequence[SinglePool]:
        """One for each reward."""
        ...

    def counters(self) -> Metrics:
        """Metrics of what scoring took since this was called last, of all rewards."""
        ...

    def start(self, patience: Patience | None = None) -> None:
        """Start each, so that a broken one fails now.

        Raises:
            RewardDefinitionError: one cannot be loaded.
            Stopped: a signal asked to stop.
        """
        ...

    def close(self) -> None:
        """Kill the workers."""
        ...


class SinglePool(ScoringPool, Protocol):
    """A pool that scores by one reward. `field`: of the config, where the reward stands."""

    name: str
    field: str
    # True if it computes in this process, where asking early wins nothing.
    inline: bool = False

    @property
    def pools(self) -> Sequence[SinglePool]:
        """Itself: the one reward."""
        return [self]

    def counters(self) -> Metrics:
        """Nothing: the time that it takes is a phase of the step."""
        return {}

    def rehearse(self, prompts: Sequence[Prompt], patience: Patience | None = None) -> None:
        """Try the reward on prompts of the data, before anything depends on it.

        Raises:
            RewardDefinitionError: it failed on every one.
            Stopped: a signal asked to stop.
        """
        ...


@runtime_checkable
class AskingPool(SinglePool, Protocol):
    """A pool that asks somebody elsewhere, who may not be there and may cost money."""

    def unreachable(self) -> str:
        """Ask for nothing but whether somebody is there.

        Returns:
            Why nobody answers, in words; empty if somebody does.
        """
        ...


class InlinePool(SinglePool):
    """Scores in this process, by a reward that cannot hang. Used as `RewardPool` is.

    Args:
        name: of the reward.
        score_group: scores the completions of one prompt.
        field: of the config, where the reward stands, for messages.
    """

    inline = True

    def __init__(self, name: str, score_group: GroupReward, field: str = "reward") -> None:
        self.name = name
        self.field = field
        self._score_group = score_group

    def start(self, patience: Patience | None = None) -> None:
        """There is nothing to start."""

    def rehearse(self, prompts: Sequence[Prompt], patience: Patience | None = None) -> None:
        """Nothing is tried: it is known to work.

        Args:
            prompts: of the data; not read.
            patience: not read.
        """

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score groups of completions, which no signal cuts short but between two of them.

        Args:
            groups: a prompt and completions of it, each.
            patience: asked after every group whether to go on.

        Returns:
            One score per completion, in the order of the input; see `Score.status`.

        Raises:
            Stopped: a signal asked to stop.
        """
        patience = patience or Patience()
        found: Scores = []
        for prompt, completions in groups:
            found.append(self._score_group(prompt, completions))
            patience.answered()
            patience.look(self.name)
        return found

    def close(self) -> None:
        """There is nothing to end."""
