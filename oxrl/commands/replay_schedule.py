"""`oxrl replay RUN --schedule`: go through a run that went by the clock, without one.

The run is trained again from its beginning, on the batches that it recorded. Before each of them
what the record has of its version of the weights is sampled again and compared, token by token.
schedule.jsonl is compared with the samples first: it says when what was decided.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.opening import session_options
from oxrl.commands.loop import train
from oxrl.commands.replay import (
    NOT_COMPARED,
    TOLERANCE,
    Mismatch,
    Replayed,
    ReplaySession,
    as_it_was,
    compare_lines,
    compare_metrics,
    recorded_scores,
)
from oxrl.config import Config
from oxrl.errors import ConfigError, RunDirectoryError, required
from oxrl.recipes.session import SessionOptions
from oxrl.rollouts.replayed_schedule import ReplayedSchedule
from oxrl.rollouts.schedule import (
    SCHEDULE,
    RecordedBatch,
    Schedule,
    WrongLine,
    read_schedule,
    wrong_lines,
)
from oxrl.rollouts.sync import RolloutParts, RolloutSource
from oxrl.rollouts.whole_samples import read_step, whole_samples
from oxrl.runs.checkpoints import is_run
from oxrl.runs.directory import ROLLOUTS, WHOLE_SAMPLES
from oxrl.runs.files import Json, encode_line, read_numbers, read_records
from oxrl.runs.recorder import load_tensors
from oxrl.types import Metrics, TensorMap

# Of the sampler's work and of what waits for its batch, which go by the clock.
BY_THE_CLOCK = (*NOT_COMPARED, "rollout/", "samples/", "sampling/", "waste/", "work/")
Findings = list[Mismatch | WrongLine]


class ScheduleSession(ReplaySession):
    """The session of such a replay: compares every batch and every update as it comes.

    Args:
        directory: of the run.
        last_step: optimizer step to end with.
        tolerance: relative, of numbers.
    """

    def __init__(
        self, options: SessionOptions, directory: Path, *, last_step: float, tolerance: float
    ) -> None:
        super().__init__(options, None, tokens=True, last_step=last_step, last_samples=inf)
        self._directory = directory
        self._tolerance = tolerance
        self._samples = _of_steps(directory / "samples.jsonl")
        self._metrics = _of_steps(directory / "metrics.jsonl")
        self._stack.callback(self._samples.close)
        self._stack.callback(self._metrics.close)
        self.wrong: list[Mismatch] = []
        self.trained = 0

    def record_samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """As of Recorder."""
        for place, sample in enumerate(samples):
            recorded = next(self._samples, {"step": None})
            now = json.loads(encode_line(sample))
            what = f"line of sample {place} of step {now['step']} in samples.jsonl"
            self.wrong += compare_lines(what, recorded, now, self._tolerance)

    def record_rollouts(self, step: int, tensors: TensorMap) -> None:
        """As of Recorder."""
        path = self._directory / ROLLOUTS / f"step_{step:08d}.safetensors"
        self.wrong += _compare_batch(load_tensors(path), tensors, step, self._tolerance)

    def keep_rollouts(self, step: int) -> None:
        """As of Recorder: nothing is kept."""

    def record(self, step: int, metrics: Metrics, *, tokens: float) -> None:
        """Compare the line of a step.

        Raises:
            Replayed: it is the last one.
        """
        recorded = next(self._metrics, {})
        found = compare_metrics(
            recorded, metrics, step, tolerance=self._tolerance, not_compared=BY_THE_CLOCK
        )
        self.wrong += [one for one in found if not one.equal]
        self.trained = step
        self._count_skipped(metrics)
        if step >= self._last_step:
            raise Replayed


def _of_steps(path: Path) -> Generator[Json]:
    """Yield the lines of a file one by one, as they are compared: those of optimizer steps."""
    for line in read_records(path):
        if line.get("step"):
            yield line


def replay_schedule(
    directory: Path, last_step: int | None = None, *, tolerance: float | None = None
) -> Findings:
    """Go through a run that went by the clock, and compare it with its record.

    Args:
        directory: of the run; nothing in it is changed.
        last_step: optimizer step to end with; None: all that are recorded.
        tolerance: of log-probabilities, and relative of what was added up; None: TOLERANCE.

    Returns:
        What was compared. Lines of schedule.jsonl that say something else than the samples come
        alone: nothing is gone through then.

    Raises:
        RunDirectoryError: no such run, no schedule, no tokens, or a file that is not what a run
            writes; or an input of the run has changed.
        ConfigError: nothing of it can be sampled again.
    """
    if tolerance is None:
        tolerance = TOLERANCE
    if not is_run(directory):
        raise RunDirectoryError(f"{directory} is no run directory: it has no config.yaml of a run")
    schedule = read_schedule(directory / SCHEDULE)
    steps = recorded_steps(directory)
    wrong = [*wrong_lines(schedule, recorded_batches(directory / ROLLOUTS, steps))]
    if wrong:
        return [*wrong]
    trained = [int(line["step"]) for line in read_numbers(directory / "metrics.jsonl")]
    last = min(last_step or inf, max(trained, default=0))
    if last_step is not None and last_step not in trained:
        known = f"it has 1 to {max(trained)}" if trained else "it has none yet"
        raise RunDirectoryError(f"{directory / 'metrics.jsonl'} has no step {last_step}: {known}")
    sources: list[ReplayedSchedule] = []

    def source(cfg: Config, parts: RolloutParts) -> RolloutSource:
        replayed = ReplayedSchedule(
            directory / ROLLOUTS,
            parts,
            steps=steps,
            lag=cfg.rollout.max_staleness,
            tolerance=required(tolerance, "tolerance"),
        )
        sources.append(replayed)
        return replayed

    with recorded_scores(directory) as unread, as_it_was(directory, unread) as (here, ranks):
        _refuse_kept_caches(here)
        options = session_options(here)
        session = ScheduleSession(options, directory, last_step=last, tolerance=tolerance)
        with session, suppress(Replayed):
            assembly = Assembly(here, ranks, session.stopping)
            assembly.source = partial(source, here)
            train(assembly, session)
    return _all_findings(schedule, sources[0], session)


def _refuse_kept_caches(cfg: Config) -> None:
    """Refuse a run of which nothing can be sampled again.

    Raises:
        ConfigError: its sampler kept what older weights had computed.
    """
    if cfg.rollout.swap == "keep":
        raise ConfigError(
            "rollout.swap was keep: tokens were sampled from keys and values of several versions "
            "of the weights, so none of them can sample these tokens again. Only runs with "
            "rollout.swap=recompute are replayed"
        )


def recorded_steps(directory: Path) -> list[int]:
    """Every step after which a run sampled, as far as its samples are kept whole.

    Raises:
        RunDirectoryError: none is.
    """
    folder = directory / ROLLOUTS
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    found = [match for name in names if (match := WHOLE_SAMPLES.fullmatch(name))]
    if not found:
        raise RunDirectoryError(
            f"{folder} has no samples with their tokens: a schedule is replayed of runs with "
            "run.record=tokens"
        )
    return sorted(int(match[1]) for match in found)


def recorded_batches(folder: Path, steps: Sequence[int]) -> Iterator[RecordedBatch]:
    """The draws of every batch, which ends where the next one begins; of the last one nobody knows.

    Args:
        folder: `rollouts` of a run.
        steps: of its batches.
    """
    starts = [read_step(whole_samples(folder, step)).start for step in steps]
    for step, start, end in zip(steps, starts, [*starts[1:], None], strict=True):
        yield RecordedBatch(step, start, end)


def _compare_batch(
    recorded: TensorMap, now: TensorMap, step: int, tolerance: float
) -> Iterator[Mismatch]:
    """Yield what is another in a batch that was trained on."""
    for name, tensor in recorded.items():
        what = f"batch of step {step}, {name}"
        other = now.get(name)
        if other is None or other.shape != tensor.shape:
            shape = "none" if other is None else f"{tuple(other.shape)}"
            yield Mismatch(what, f"{tuple(tensor.shape)}", shape, False)
            continue
        limit = tolerance if tensor.is_floating_point() else 0.0
        before = tensor.double()
        after = other.double()
        if not before.allclose(after, rtol=limit, atol=limit, equal_nan=True):
            apart = (before - after).abs().max().item()
            yield Mismatch(what, "as recorded", f"{apart:.3g} apart", False)


def _all_findings(
    schedule: Schedule, source: ReplayedSchedule, session: ScheduleSession
) -> Findings:
    """Put together what was compared: what is equal in a line each, all that is not."""
    sampled = [Mismatch(*found) for found in source.found]
    versions = f"{len(source.batches)} versions"
    found: Findings = [finding for finding in sampled if finding.equal]
    if len(found) == len(sampled):
        tokens = f"{source.tokens} tokens that {versions} sampled"
        apart = f"log-probabilities at most {source.apart:.2g} nats apart"
        found.append(Mismatch(tokens, apart, apart, True))
    if not session.wrong:
        what = f"{len(source.batches)} batches and {session.trained} updates"
        found.append(Mismatch(what, "as recorded", "as recorded", True))
    last = source.batches[-1:]
    lines = [line for line in schedule.lines if last and line.says.get("batch") == last[0].step]
    ends = [Mismatch(*_end(line.says, batch)) for line in lines for batch in last]
    wrong = [one for one in (*sampled, *session.wrong, *ends) if not one.equal]
    return found + wrong


def _end(says: Json, batch: RecordedBatch) -> tuple[str, str, str, bool]:
    """Compare where the last batch ends, which only its groups say."""
    recorded = json.dumps(says["draws"])
    now = json.dumps([batch.start, batch.end])
    return f"draws of the batch of step {batch.step}", recorded, now, recorded == now
