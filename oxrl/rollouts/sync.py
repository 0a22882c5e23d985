"""One rollout step after the other: sample, score, hand over. The default.

`RolloutSource` is what the training loop asks; `ahead.py` answers the same calls while sampling
ahead of training, and is imported only where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from oxrl.engines.sample.base import RolloutEngine
from oxrl.errors import DeadlineError
from oxrl.rewards.workers import RewardPool
from oxrl.rollouts.groups import EveryGroup, GroupChoice
from oxrl.rollouts.requests import PromptRequests
from oxrl.rollouts.scoring import check_error_rate, score_groups
from oxrl.runs.clock import Clock
from oxrl.types import Completion, Metrics, Request, Rollout

# Whether the run was asked to stop: anything true.
StopAsked = Callable[[], object]


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


@dataclass(frozen=True, kw_only=True)
class RolloutParts:
    """What every source of rollouts works with.

    requests: of positions in the data order. prompts_per_step: groups that a step trains on.
    choice: which groups those are. deadline_s: longest wait for a sample, in seconds.
    max_error_rate: share of failed rewards that stops the run.
    """

    sampler: RolloutEngine
    pool: RewardPool
    requests: PromptRequests
    clock: Clock
    prompts_per_step: int
    deadline_s: float
    max_error_rate: float
    choice: GroupChoice = EveryGroup()


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

    def next(self, draw: int, *, step: int, stop: StopAsked) -> RolloutStep | None:
        """The scored rollouts of the next rollout step; None when asked to stop.

        Args:
            draw: position in the data order where it begins.
            step: optimizer steps done, the newest weight version.
            stop: asked while waiting.
        """
        ...

    def settle(self) -> object:
        """Wait until the sampler is free for something else, an evaluation for example."""
        ...

    def close(self) -> None: ...


class SyncRollouts:
    """A source that samples only when it is asked, and has nothing in flight in between."""

    idle = True
    in_flight = 0

    def __init__(self, parts: RolloutParts) -> None:
        self.parts = parts

    def next(self, draw: int, *, step: int, stop: StopAsked) -> RolloutStep | None:
        """See RolloutSource."""
        found = RolloutStep(step=step, start=draw, end=draw)
        missing = self.parts.prompts_per_step
        while missing:
            requests = self.parts.requests.at(range(found.end, found.end + missing))
            with self.parts.clock.phase("time/rollout_s"):
                completions = sample(self.parts.sampler, requests, self.parts.deadline_s, stop)
            if completions is None:
                return None
            found.dispatched += len(requests)
            missing = add_round(found, self.parts, list(zip(requests, completions, strict=True)))
        found.sampler = self.parts.sampler.metrics()
        return found

    def settle(self) -> None: ...

    def close(self) -> None: ...


def sample(
    sampler: RolloutEngine, requests: Sequence[Request], deadline_s: float, stop: StopAsked
) -> list[Completion] | None:
    """The completions of `requests`, in their order; None, with nothing left, when asked to stop.

    Raises:
        DeadlineError: nothing finished for `deadline_s` seconds, or the sampler lost a request.
    """
    sampler.submit(requests)
    done: dict[str, Completion] = {}
    while missing := [request.id for request in requests if request.id not in done]:
        if stop():
            sampler.abort(missing)
            return None
        finished = sampler.poll(deadline_s)
        if not finished:
            raise DeadlineError(
                f"the sampler is idle but {len(missing)} requests never finished: {missing[:5]}"
            )
        done.update((item.request.id, item.completion) for item in finished)
    return [done[request.id] for request in requests]


def add_round(
    step: RolloutStep, parts: RolloutParts, sampled: Sequence[tuple[Request, Completion]]
) -> int:
    """Score what one round sampled, and say how many prompts more the step needs.

    Raises:
        RewardError: too many rewards failed.
    """
    size = parts.requests.samples
    groups = [pair for pair in sampled if pair[0].sample < size]
    greedy = [pair for pair in sampled if pair[0].sample >= size]
    with parts.clock.phase("time/reward_s"):
        rollouts = score_groups(parts.pool, groups, samples=size)
        baselines = score_groups(parts.pool, greedy, samples=1)
    scores = [rollout.score for rollout in (*rollouts, *baselines)]
    check_error_rate(scores, parts.max_error_rate)
    step.rollouts += rollouts
    step.baselines += baselines
    step.end += len(groups) // size
    step.rounds += 1
    missing = parts.choice.missing(step.rollouts, wanted=parts.prompts_per_step, rounds=step.rounds)
    if not missing:
        chosen = parts.choice.groups(step.rollouts, wanted=parts.prompts_per_step)
        step.groups = chosen
        whole = len(chosen) == parts.prompts_per_step
        step.next_draw = chosen[-1] + 1 if whole else step.end
    return missing
