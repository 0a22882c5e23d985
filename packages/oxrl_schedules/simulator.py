"""Sampling and training on a clock of numbers: who waits for whom under which schedule.

A response of n tokens is decoded in n rounds. All rows that have a slot are decoded in one round,
which takes some seconds and a little more for every row. Several samplers are taken to share the
work evenly. Left out are the reading of prompts, and scores that are waited for.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf
from statistics import fmean
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Work:
    """Responses to sample, batches to train, and how long both take.

    lengths: rounds of every response, in the order in which they are asked for. rows: responses of
    a batch. slots: rows that are decoded at once. overlaps: whether sampling goes on while a batch
    trains. round_s: seconds of a round without rows. row_s: what each row adds. train_s: seconds
    that a batch trains. edges: count the batches at the start and the end, which are unlike others.

    Raises:
        ValueError: a response has no token, or there is no whole batch.
    """

    lengths: Sequence[int]
    rows: int
    slots: int
    round_s: float
    row_s: float
    train_s: float
    overlaps: bool = True
    edges: bool = False

    def __post_init__(self) -> None:
        shortest = min(self.lengths, default=0)
        if shortest < 1 or len(self.lengths) < self.rows:
            raise ValueError(
                f"{len(self.lengths)} responses, the shortest of {shortest} tokens, are no batch "
                f"of {self.rows} with a token or more in each"
            )

    @property
    def ideal_rounds(self) -> float:
        """Full rounds of the longer one of sampling and training a batch: nobody waits there."""
        sampled = self.rows * fmean(self.lengths) / self.slots
        return max(sampled, self.train_s / self.full_round_s)

    @property
    def full_round_s(self) -> float:
        """Seconds of a round with all slots in use."""
        return self.round_s + self.row_s * self.slots


class Simulated(NamedTuple):
    """Seconds of a batch under a schedule, and who waits in them.

    seconds: of a batch. share: of the ideal; chance may make it a little more than 1.
    trainer_waits, samplers_wait: for the other one, as a share of the time.
    """

    seconds: float
    share: float
    trainer_waits: float
    samplers_wait: float


class Sampler:
    """Rows in slots, and those that wait for one, in the order in which they came.

    Args:
        work: that it samples for.
    """

    def __init__(self, work: Work) -> None:
        # Responses of each batch that have not ended.
        self.left = [work.rows] * (len(work.lengths) // work.rows)
        self.work = work
        self.begun = 0
        self.round = 0
        # The round at whose end a row ends, and its batch.
        self.ends: list[tuple[int, int]] = []

    def decode(self, batches: int, rounds: float, seconds: float = inf) -> float:
        """Decode for so many rounds, or until a round ends after so many seconds, or all there is.

        Args:
            batches: from the first one on, that are asked for.
            rounds, seconds: what is over first.

        Returns:
            The seconds that it takes.
        """
        work = self.work
        ends = self.ends
        asked = work.rows * min(batches, len(self.left))
        taken = 0.0
        while rounds and taken < seconds and (ends or self.begun < asked):
            while len(ends) < work.slots and self.begun < asked:
                length = work.lengths[self.begun]
                heappush(ends, (self.round + length, self.begun // work.rows))
                self.begun += 1
            # Nothing changes before the next row ends.
            alike = 1 if seconds < inf else min(rounds, ends[0][0] - self.round)
            rounds -= alike
            self.round += int(alike)
            taken += alike * (work.round_s + work.row_s * len(ends))
            while ends and ends[0][0] == self.round:
                self.left[heappop(ends)[1]] -= 1
        return taken


def simulate(
    work: Work, before: int, after: int, rounds: float, beside: float, seconds: float = inf
) -> Simulated:
    """Go through the batches: ask for some, wait for the next one, train it beside sampling.

    Args:
        work: to be done.
        before: batches beyond the next one that are asked for before it is there.
        after: as many when it is there.
        rounds: that are waited for at a time; inf: all that there are.
        beside: rounds for which is sampled while a batch trains.
        seconds: of that, if it is less.
    """
    sampler = Sampler(work)
    trainer: list[float] = []
    samplers: list[float] = []
    for batch in range(len(sampler.left)):
        waited = 0.0
        while sampler.left[batch]:
            waited += sampler.decode(batch + 1 + before, rounds)
        sampled = sampler.decode(batch + 1 + after, beside, seconds)
        hidden = min(sampled, work.train_s) if work.overlaps else 0.0
        trainer.append(waited + sampled - hidden)
        samplers.append(work.train_s - hidden)
    edge = 0 if work.edges else after + 1
    inner = slice(edge, len(trainer) - edge)
    waits = fmean(trainer[inner] or trainer)
    idle = fmean(samplers[inner] or samplers)
    took = work.train_s + waits
    return Simulated(took, work.ideal_rounds * work.full_round_s / took, waits / took, idle / took)


def sequential(work: Work) -> Simulated:
    """Sample a batch, train it, and sample the next one.

    Args:
        work: to be done.
    """
    return simulate(work, 0, 0, inf, 0)


def blocks(work: Work, lag: int) -> Simulated:
    """Sample blocks of batches, each by one set of weights while the block before it trains.

    Args:
        work: to be done.
        lag: most batches that a row may be behind, 1 or more; 2 is as 1, and 4 as 3.
    """
    size = (lag + 1) // 2
    block = replace(work, rows=size * work.rows, train_s=size * work.train_s)
    found = simulate(block, 0, 1, inf, inf)
    return found._replace(seconds=found.seconds / size)


def logical(work: Work, lag: int, rounds: int) -> Simulated:
    """Keep slots full while a batch trains for so many rounds: the clock decides nothing.

    Args:
        work: to be done.
        lag: most batches that a row may be behind.
        rounds: of a batch's training; a batch that is not complete is waited for as many at a time.
    """
    return simulate(work, lag, lag, rounds, rounds)


def free(work: Work, lag: int) -> Simulated:
    """Keep slots full, and train a batch as soon as it is complete: the clock decides.

    Args:
        work: to be done.
        lag: most batches that a row may be behind.
    """
    return simulate(work, lag, lag, 1, inf, work.train_s if work.overlaps else 0.0)


def propose_rounds(work: Work, lag: int) -> int:
    """Find the decode rounds that a batch should train for under the logical schedule.

    Args:
        work: to be done.
        lag: most batches that a row may be behind.

    Returns:
        Of some numbers around the rounds of an ideal batch, the one that makes batches shortest.
    """
    tried = [max(1, round(part * work.ideal_rounds)) for part in (0.5, 0.75, 1.0, 1.25)]
    return min(tried, key=lambda rounds: logical(work, lag, rounds).seconds)


def continuous(work: Work, lag: int) -> Simulated:
    """Run the logical schedule with the rounds that are proposed for it.

    Args:
        work: to be done.
        lag: most batches that a row may be behind.
    """
    return logical(work, lag, propose_rounds(work, lag))


def lognormal(count: int, *, median: float, cap: int, seed: int) -> list[int]:
    """Draw lengths from a lognormal with sigma 1: most are short, and few are long.

    Args:
        count: of them.
        median: of the distribution.
        cap: the longest; the shortest is 1.
        seed: the same one draws the same lengths.
    """
    rng = random.Random(seed)
    drawn = [median * rng.lognormvariate(0.0, 1.0) for _ in range(count)]
    return [max(1, min(cap, round(length))) for length in drawn]
