"""One rollout step after the other: sample, score, hand over. The default.

`RolloutSource` is what the training loop asks; `ahead.py` answers the same calls while sampling
ahead of training, and is imported only where that is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oxrl.engines.sample.base import Heard, RolloutEngine, generate, unheard
from oxrl.rewards.base import GroupScorer
from oxrl.rollouts.groups import EveryGroup, GroupChoice
from oxrl.rollouts.requests import PromptRequests
from oxrl.rollouts.scoring import check_error_rate, score_groups
from oxrl.runs.clock import Clock
from oxrl.runs.patience import Patience, StopAsked
from oxrl.types import Completion, Metrics, Request, Rollout


@dataclass(kw_only=True)
class RolloutStep:
    """What one rollout step sampled and scored, in the order of the data.

    step: optimizer steps done when it began. start, end: positions [start, end) of the data order
    that were sampled.
    rollouts: the groups, as many in a row per prompt; baselines: greedy responses, one per prompt.
    rounds: times that prompts were drawn for it.
    groups: positions whose groups are trained on; next_draw: where the next step goes on.
    dispatched: samples that were sent to the sampler since the step before.
    sampler: the sampler's counters since the step before.
    compared_parts: of the reward, that advantages compare one by one; empty: their sum.
    """

    step: int
    start: int
    end: int
    rollouts: list[Rollout] = field(default_factory=list[Rollout])
    baselines: list[Rollout] = field(default_factory=list[Rollout])
    rounds: int = 0
    groups: tuple[int, ...] = ()
    next_draw: int = 0
    dispatched: int = 0
    sampler: Metrics = field(default_factory=dict[str, float])
    compared_parts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What every source of rollouts works with.

    requests: of positions in the data order. prompts_per_step: groups that a step trains on.
    choice: which groups those are. deadline_s: longest wait for a sample or a score, in seconds.
    max_error_rate: share of failed rewards that stops the run.
    compared_parts: see RolloutStep. heard: is told of every response when it is finished.
    """

    sampler: RolloutEngine
    scorer: GroupScorer
    requests: PromptRequests
    clock: Clock
    prompts_per_step: int
    deadline_s: float
    max_error_rate: float
    choice: GroupChoice = EveryGroup()
    compared_parts: tuple[str, ...] = ()
    heard: Heard = unheard


class RolloutSource(Protocol):
    """Where the training loop gets its rollouts."""

    @property
    def idle(self) -> bool:
        """Nothing is in flight: the sampler takes the newest weights before `next`."""
        ...

    @property
    def in_flight(self) -> int:
        """Samples that are dispatched and not yet handed over."""
        ...

    def next(self, draw: int, *, step: int, stop: StopAsked) -> RolloutStep:
        """The scored rollouts of the next rollout step.

        Args:
            draw: position in the data order where it begins.
            step: optimizer steps done, the newest weight version.
            stop: asked while waiting.

        Raises:
            Stopped: a signal asked to stop; as if nothing had been asked for.
        """
        ...

    def settle(self, stop: StopAsked) -> None:
        """Wait until the sampler is free for something else, an evaluation for example.

        Raises:
            Stopped: a signal asked to stop.
        """
        ...

    def close(self) -> None: ...


class SyncRollouts:
    """A source that samples only when it is asked, and has nothing in flight in between."""

    idle = True
    in_flight = 0

    def __init__(self, parts: RolloutParts) -> None:
        self.parts = parts

    def next(self, draw: int, *, step: int, stop: StopAsked) -> RolloutStep:
        """See RolloutSource."""
        found = RolloutStep(step=step, start=draw, end=draw)
        missing = self.parts.prompts_per_step
        while missing:
            requests = self.parts.requests.at(range(found.end, found.end + missing))
            with self.parts.clock.phase("time/rollout_s"):
                deadline_s = self.parts.deadline_s
                sampler = self.parts.sampler
                heard = self.parts.heard
                completions = generate(
                    sampler, requests, deadline_s=deadline_s, stop=stop, heard=heard
                )
            found.dispatched += len(requests)
            sampled = list(zip(requests, completions, strict=True))
            missing = add_round(found, self.parts, sampled, stop)
        found.sampler = self.parts.sampler.metrics()
        return found

    def settle(self, stop: StopAsked) -> None: ...

    def close(self) -> None: ...


def add_round(
    step: RolloutStep,
    parts: RolloutParts,
    sampled: Sequence[tuple[Request, Completion]],
    stop: StopAsked,
) -> int:
    """Score what one round sampled, and say how many prompts more the step needs.

    Raises:
        RewardError: too many rewards failed.
        DeadlineError: no reward answered for too long.
        Stopped: a signal asked to stop.
    """
    patience = Patience(stop, parts.deadline_s)
    size = parts.requests.samples
    groups = [pair for pair in sampled if pair[0].sample < size]
    greedy = [pair for pair in sampled if pair[0].sample >= size]
    with parts.clock.phase("time/reward_s"):
        rollouts = score_groups(parts.scorer, groups, patience, samples=size)
        baselines = score_groups(parts.scorer, greedy, patience, samples=1)
    scores = [rollout.score for rollout in (*rollouts, *baselines)]
    check_error_rate(scores, parts.max_error_rate)
    step.rollouts += rollouts
    step.baselines += baselines
    step.end += len(groups) // size
    step.rounds += 1
    step.compared_parts = parts.compared_parts
    missing = parts.choice.missing(step.rollouts, wanted=parts.prompts_per_step, rounds=step.rounds)
    if not missing:
        chosen = parts.choice.groups(step.rollouts, wanted=parts.prompts_per_step)
        step.groups = chosen
        whole = len(chosen) == parts.prompts_per_step
        step.next_draw = chosen[-1] + 1 if whole else step.end
    return missing
