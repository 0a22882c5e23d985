"""Lines of `oxrl plan` that say who waits for whom."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from oxrl.plan.recorded_run import RecordedRun
from oxrl_schedules import simulator

LAGS = (1, 2, 4, 8)


def plan_schedule(fields: Mapping[str, Any], like: RecordedRun | None) -> Iterator[tuple[str, str]]:
    """Say how much of the time a run would wait, with its own lag and with others.

    Args:
        fields: of its configuration.
        like: a run whose lengths and seconds are taken. None: only what is true of all of them.

    Yields:
        Labels and texts.
    """
    staleness = fields.get("rollout.max_staleness", 0)
    processes = fields.get("inference_engine.processes", 0)
    others = processes + fields.get("inference_engine.actors", 0)
    if not others and (staleness or like):
        yield (
            "overlap",
            "none, whatever rollout.max_staleness is: one process samples, then trains; "
            "inference_engine.processes=1 has another one sample meanwhile",
        )
    if like is None:
        return
    updates = fields["train.epochs"] * fields["train.minibatches"]
    lag = staleness // updates
    free = fields.get("rollout.schedule") == "free"
    schedule = simulator.free if free else simulator.continuous
    lags = sorted({*LAGS, lag} - {0})
    samplers = max(1, others)
    rows = fields["data.prompts_per_step"] * fields["rollout.n_samples"]
    batches = 24 + 4 * lags[-1]
    work = simulator.Work(
        lengths=random.Random(0).choices(like.lengths, k=batches * rows),
        rows=rows,
        slots=samplers * fields["inference_engine.max_rows"],
        round_s=like.round_s,
        row_s=like.row_s / samplers,
        train_s=like.train_s,
        overlaps=others > 0,
    )
    yield (
        "schedule",
        f"by {len(like.lengths):,} responses of {like.folder}, of {fmean(like.lengths):.1f} tokens "
        f"in the mean and at most {max(like.lengths):,}: a full round {work.full_round_s:.2g} s, "
        f"training {like.train_s:.2g} s a batch",
    )
    yield "", told("rollout.max_staleness=0", simulator.sequential(work))
    for ahead in lags:
        yield "", told(f"rollout.max_staleness={ahead * updates}", schedule(work, ahead))
    if lag and not free:
        yield from rounds_lines(work, lag)


def told(setting: str, found: simulator.Simulated) -> str:
    """Say what a setting makes of the time.

    Args:
        setting: `field=value`.
        found: with it.
    """
    return (
        f"{setting}: {found.seconds:.2g} s a batch, {found.share:.2f} of the ideal; the trainer "
        f"waits {found.trainer_waits:.0%} of the time for samplers, they {found.samplers_wait:.0%}"
    )


def rounds_lines(work: simulator.Work, lag: int) -> Iterator[tuple[str, str]]:
    """Say for how many decode rounds a batch should train, and which responses stay too long.

    Args:
        work: to be done.
        lag: most batches that a row may be behind.
    """
    rounds = simulator.propose_rounds(work, lag)
    yield "rounds", f"rollout.rounds={rounds}: decode rounds while a batch trains"
    reach = (lag + 1) * rounds
    beyond = sum(length > reach for length in work.lengths)
    if beyond:
        yield (
            "",
            f"{beyond / len(work.lengths):.1%} of the responses have more than {reach} tokens, "
            f"(lag {lag} + 1) x {rounds}, and cannot be hidden: raise rollout.max_staleness or "
            "data.prompts_per_step, lower rollout.max_tokens, or take fewer samplers",
        )
