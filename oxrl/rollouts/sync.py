"""One rollout step after the other: ask, sample, score, hand over. The default.

`RolloutSource` is what the training loop asks. `rounds.py` samples until enough groups teach
something, `continuous.py` while training goes on; either is imported where it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from oxrl.data.order import RowSource
from oxrl.engines.delivery import Delivery
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.sampler import OnFinished, generate, ignore
from oxrl.errors import RewardError
from oxrl.rewards.pools import GroupScorer
from oxrl.runs.clock import Clock
from oxrl.runs.waiting import Patience, StopAsked
from oxrl.seeds import sample_seed, stable_seed
from oxrl.tables.columns import Columns
from oxrl.types import (
    Completion,
    Group,
    Metrics,
    Prompt,
    Request,
    Rollout,
    Rollouts,
    Sampling,
    Score,
    Scores,
)


@dataclass(kw_only=True)
class RolloutStep:
    """The samples and scores of one rollout step, in the order of the data.

    step: optimizer steps done when it began. start, end: positions [start, end) of the data order
    that were sampled.
    rollouts: the groups, as many in a row per prompt; baselines: greedy responses, one per prompt.
    rounds: times that prompts were drawn for it.
    groups: positions whose groups are trained on; next_draw: where the next step goes on.
    dispatched: samples that were sent to the sampler since the step before.
    sampler: the sampler's counters since the step before. delivered: what it cost to deliver the
    weights that it was sampled with, `sync/...`.
    compared_parts: of the reward, that advantages compare one by one; empty: their sum.
    """

    step: int
    start: int
    end: int
    rollouts: list[Rollout] = field(default_factory=list)
    baselines: list[Rollout] = field(default_factory=list)
    rounds: int = 0
    groups: tuple[int, ...] = ()
    next_draw: int = 0
    dispatched: int = 0
    sampler: Metrics = field(default_factory=Metrics)
    delivered: Metrics = field(default_factory=Metrics)
    compared_parts: tuple[str, ...] = ()


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
class RolloutParts:
    """The objects that every source of rollouts works with.

    delivery: of the policy's weights to the sampler; in a run nobody else calls it.
    requests: of positions in the data order. prompts_per_step: groups that a step trains on.
    stop: whether the run was asked to stop; looked at while waiting.
    deadline_s: longest wait for a sample or a score, in seconds.
    max_error_rate: share of failed rewards that stops the run.
    compared_parts: see RolloutStep. on_finished: is told of every response when it is finished.
    choice: of the groups that are trained on; None: all of them.
    columns: that the sampler records of every token.
    slots: rows that the samplers decode at once, all together; 0: nobody asks.
    """

    sampler: RolloutEngine
    delivery: Delivery
    scorer: GroupScorer
    requests: PromptRequests
    clock: Clock
    prompts_per_step: int
    stop: StopAsked
    deadline_s: float
    max_error_rate: float
    compared_parts: tuple[str, ...] = ()
    on_finished: OnFinished = ignore
    choice: GroupChoice | None = None
    columns: Columns = field(default_factory=dict)
    slots: int = 0


class RolloutSource(Protocol):
    """A source of rollouts for the training loop, and the owner of the sampler: it brings the
    weights that are sampled with.
    """

    @property
    def in_flight(self) -> int:
        """Samples that are dispatched and not yet handed over."""
        ...

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """The scored rollouts of the next rollout step.

        The weights are delivered, and proved, before the first request of a step or round.

        Args:
            draw: position in the data order where it begins.
            step: optimizer steps done, the newest weight version.

        Raises:
            Stopped: a signal asked to stop; as if nothing had been asked for.
            WeightSyncError: the sampler provably does not hold the weights.
        """
        ...

    def lend(self, step: int) -> None:
        """Free the sampler for an evaluation, and leave it with the newest weights.

        What is in flight is put aside. The sampler has to be idle again when `next` is asked, which
        hands over the same as without this.

        Args:
            step: optimizer steps done, the newest weight version.

        Raises:
            Stopped: a signal asked to stop.
            WeightSyncError: the sampler provably does not hold the weights.
        """

    def close(self) -> None: ...


class SyncRollouts:
    """A source that samples only when it is asked, and has nothing in flight in between."""

    in_flight = 0

    def __init__(self, parts: RolloutParts) -> None:
        self.parts = parts

    def next(self, draw: int, *, step: int) -> RolloutStep:
        """See RolloutSource."""
        parts = self.parts
        with parts.clock.phase("time/rollout_s"):
            parts.delivery.deliver(step)
        found = RolloutStep(step=step, start=draw, end=draw)
        self._fill(found)
        found.sampler = parts.sampler.metrics()
        found.delivered = parts.delivery.remember(found.rollouts)
        return found

    def _fill(self, found: RolloutStep) -> None:
        """Sample the groups of a step; every one is trained on."""
        self._sample(found, self.parts.prompts_per_step)
        found.groups = tuple(range(found.start, found.end))
        found.next_draw = found.end

    def _sample(self, step: RolloutStep, prompts: int) -> None:
        """Sample and score the next prompts."""
        parts = self.parts
        requests = parts.requests.at(range(step.end, step.end + prompts))
        with parts.clock.phase("time/rollout_s"):
            completions = generate(
                parts.sampler,
                requests,
                deadline_s=parts.deadline_s,
                stop=parts.stop,
                on_finished=parts.on_finished,
            )
        step.dispatched += len(requests)
        add_scored(step, parts, list(zip(requests, completions, strict=True)))

    def lend(self, step: int) -> None:
        """See RolloutSource; nothing is in flight."""
        self.parts.delivery.deliver(step)

    def close(self) -> None: ...


class PromptRequests:
    """The requests of positions in the data order, the same ones every time they are asked for.

    Args:
        prompts: where the prompt of a position comes from.
        samples: responses per prompt that are trained on, the group.
        sampling: how they are sampled.
        run_seed: `run.seed`.
        baseline: ask for one greedy response per prompt more, numbered `samples`.
    """

    def __init__(
        self,
        prompts: RowSource[Prompt],
        *,
        samples: int,
        sampling: Sampling,
        run_seed: int,
        baseline: bool,
    ) -> None:
        self.samples = samples
        self.per_prompt = samples + int(baseline)
        self._prompts = prompts
        self._sampling = sampling
        self._run_seed = run_seed
        self._greedy = replace(sampling, temperature=0.0) if baseline else None

    def at(self, draws: Sequence[int]) -> list[Request]:
        """Every group of `draws`, then the greedy request of each, where there are any."""
        seed = self._run_seed
        drawn = [(draw, self._prompts.at(draw, seed=seed)) for draw in draws]
        requests = make_requests(
            drawn, samples=self.samples, sampling=self._sampling, run_seed=seed
        )
        if self._greedy is None:
            return requests
        greedy = make_requests(
            drawn, samples=1, first=self.samples, sampling=self._greedy, run_seed=seed
        )
        return requests + greedy


def make_requests(
    draws: Sequence[tuple[int, Prompt]],
    *,
    samples: int,
    sampling: Sampling,
    run_seed: int,
    first: int = 0,
) -> list[Request]:
    """Ask `samples` times for every prompt, with seeds that depend on nothing else.

    Args:
        draws: (global position in the data order, prompt at that position).
        samples: requests per prompt, numbered from `first`.
        sampling: temperature and limits, the same for all.
        run_seed: `run.seed`.
        first: number of each prompt's first request.

    Returns:
        The requests of the first prompt, then those of the second, and so on.
    """
    requests: list[Request] = []
    for draw, prompt in draws:
        for sample in range(first, first + samples):
            request = Request(
                id=f"{draw}/{sample}",
                prompt=prompt,
                draw=draw,
                sample=sample,
                sampling=sampling,
                seed=sample_seed(run_seed, draw, sample),
                group_seed=stable_seed("environment", run_seed, draw),
            )
            requests.append(request)
    return requests


def add_scored(
    step: RolloutStep, parts: RolloutParts, sampled: Sequence[tuple[Request, Completion]]
) -> None:
    """Score what one round sampled, and add it to the step.

    Raises:
        RewardError: too many rewards failed.
        DeadlineError: no reward answered for too long.
        Stopped: a signal asked to stop.
    """
    patience = Patience(parts.stop, parts.deadline_s)
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


def score_groups(
    pool: GroupScorer,
    sampled: Sequence[tuple[Request, Completion]],
    patience: Patience,
    *,
    samples: int,
) -> list[Rollout]:
    """Score the `samples` completions of each prompt together.

    Args:
        pool: scores them.
        sampled: requests with their completions, `samples` in a row per prompt.
        patience: how long to wait for each next score.
        samples: completions per prompt.

    Returns:
        Scored rollouts, in the order given.

    Raises:
        DeadlineError: no reward answered for too long.
        Stopped: a signal asked to stop.
    """
    groups: list[Group] = []
    for start in range(0, len(sampled), samples):
        group = sampled[start : start + samples]
        prompt = group[0][0].prompt
        groups.append((prompt, [completion for _, completion in group]))
    scores = [score for group_scores in pool.score(groups, patience) for score in group_scores]
    return [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            score=score,
            group_id=request.draw,
            sample=request.sample,
            seed=request.seed,
        )
        for (request, completion), score in zip(sampled, scores, strict=True)
    ]


@dataclass(frozen=True)
class BareScorer:
    """A GroupScorer that gives responses to another one without the columns of their tokens."""

    scorer: GroupScorer

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """See GroupScorer."""
        bare = [(prompt, [one.bare for one in completions]) for prompt, completions in groups]
        return self.scorer.score(bare, patience)


def check_error_rate(scores: Sequence[Score], max_error_rate: float) -> None:
    """Stop the run when most rewards fail: what is left is not the data meant to be trained on.

    Raises:
        RewardError: more than `max_error_rate` of the scores are not ok; shows the first reason.
    """
    failed = [score for score in scores if score.status not in ("ok", "none")]
    if len(failed) > max_error_rate * len(scores):
        raise RewardError(
            f"the reward failed on {len(failed)} of {len(scores)} samples, more than "
            f"reward.max_error_rate={max_error_rate}; the first says: "
            f"{failed[0].status}: {failed[0].reason}"
        )
