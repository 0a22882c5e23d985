"""`oxrl replay`: go through steps of a finished or stopped run again, and compare with the record.

A run is a function of its configuration and inputs, so any step of it can be had again: load the
newest checkpoint that is not later, and let the recipe go on from there, as a resumed run would,
with a session that writes nothing and ends where it is told to. Evaluations are left out: nothing
that is learned depends on them.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from oxrl.assembly.assembly import Assembly
from oxrl.assembly.opening import session_options
from oxrl.assembly.pins import review_inputs
from oxrl.assembly.settle import settle_as_noted
from oxrl.checkpoint import SavedEngines
from oxrl.checkpoint.verify import Checkpoint, latest_checkpoint
from oxrl.commands.loop import train, training_ranks
from oxrl.config import Config, load_config
from oxrl.engines.train import TrainEngine
from oxrl.errors import Interrupted, NoCheckpointError, RunDirectoryError, shortened
from oxrl.flat_config import recorded_config
from oxrl.recipes.follower import Follower
from oxrl.recipes.session import P, Progress, SessionOptions
from oxrl.runs.checkpoints import is_run
from oxrl.runs.directory import RunDirectory
from oxrl.runs.files import Json, encode_line, read_numbers, read_records
from oxrl.runs.pins import CODE
from oxrl.runs.ranks import Ranks
from oxrl.runs.recorder import Recorder, load_tensors
from oxrl.runs.waiting import StopRequest
from oxrl.types import OF_LISTS, Metrics, Prompt, Score, TensorMap
from oxrl.usercode.given import giving, is_given, is_here

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

# Of numbers that were added up in floating point, relative.
TOLERANCE = 1e-5
# What two identical runs differ in; what is measured in evaluations, which are left out here; and
# counts of deliveries, which begin anew with every start.
NOT_COMPARED = ("time/", "throughput/", "system/", "eval/", "sync/")
# Told first.
IMPORTANT = ("update/loss", "update/grad_norm")


class Replayed(Exception):
    """The step that was asked for has been gone through."""


class Mismatch(NamedTuple):
    """One thing that was compared."""

    what: str
    recorded: str
    now: str
    equal: bool

    def __str__(self) -> str:
        if self.equal:
            return f"equal      {self.what}: {self.recorded}"
        return f"different  {self.what}: recorded {self.recorded}, now {self.now}"


class ReplaySession(Follower):
    """The session of a replay: a checkpoint to begin at, a step to end at, no file. It is its own
    recorder, and keeps in memory what a run records: `lines`, optimizer step -> its metrics;
    `samples`, step in samples.jsonl -> its lines; `rollouts`, the same -> tensors of the batch.

    Args:
        checkpoint: where it begins; None: where the run began.
        last_step: it ends when the line of this optimizer step is there,
        last_samples: or when the samples of this step are.
        tokens: whether the run records the tokens of its samples, behind these.
    """

    def __init__(
        self,
        options: SessionOptions,
        checkpoint: Checkpoint | None,
        *,
        tokens: bool,
        last_step: float,
        last_samples: float,
    ) -> None:
        super().__init__(options)
        self.lines: dict[int, Metrics] = {}
        self.samples: dict[int, list[Json]] = {}
        self.rollouts: dict[int, TensorMap] = {}
        self._tokens = tokens
        self._checkpoint = checkpoint
        self._last_step = last_step
        self._last_samples = last_samples

    def __enter__(self) -> Self:
        self.stop = self._stack.enter_context(StopRequest())
        # A place of its own for what a recipe writes beside its record.
        self.run = cast(RunDirectory, SimpleNamespace(path=self._options.directory))
        self.recorder = cast(Recorder, self)
        return self

    def record_samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """As of Recorder.

        Raises:
            Replayed: these are all that was asked for.
        """
        drawn = 0
        for sample in samples:
            line = json.loads(encode_line(sample))
            drawn = int(line["step"])
            self.samples.setdefault(drawn, []).append(line)
        if drawn >= self._last_samples and not self._tokens:
            raise Replayed

    def record_rollouts(self, step: int, tensors: TensorMap) -> None:
        """As of Recorder.

        Raises:
            Replayed: these are all that was asked for.
        """
        self.rollouts[step + 1] = dict(tensors)
        self.keep_rollouts(step)

    def keep_rollouts(self, step: int) -> None:
        """As of Recorder.

        Raises:
            Replayed: these are all that was asked for.
        """
        if step + 1 >= self._last_samples:
            raise Replayed

    def restore(self, engines: SavedEngines, fresh: P) -> P:
        """Load the checkpoint to begin at."""
        found = self._checkpoint
        if found is None:
            return fresh
        self._saver.load(found, engines)
        state = dict(found.state)
        self._skipped_in_a_row = state.pop("skipped_in_a_row")
        return type(fresh)(**state)

    def record(self, step: int, metrics: Metrics, *, tokens: float) -> None:
        """Keep the line of a step.

        Raises:
            Replayed: it is the last one that was asked for.
        """
        self.lines[step] = dict(metrics)
        self._count_skipped(metrics)
        if step >= self._last_step:
            raise Replayed

    def boundary(self, engines: SavedEngines, progress: Progress) -> None:
        """Save nothing.

        Raises:
            Interrupted: a signal asked to stop.
        """
        if self.stop:
            raise Interrupted(f"stopped by {self.stop.requested}; nothing was written")

    def work(self, what: str, done: int, total: int, *, unit: str, rate: float) -> None: ...
    def keep_best(self, engine: TrainEngine, step: int) -> None: ...

    def eval_due(self, before: int, step: int) -> bool:
        """Never."""
        return False


def replay(
    directory: Path, step: int, sample: int | None = None, *, tolerance: float | None = None
) -> list[Mismatch]:
    """Go through one step of a run again and compare it with the record.

    Args:
        directory: of the run; nothing in it is changed.
        step: the optimizer step whose update is made again; with `sample` the one that the sample
            is of, as in samples.jsonl.
        sample: place of a sample among those of its step, from 0.
        tolerance: relative, of numbers that were added up in floating point; None: TOLERANCE.

    Returns:
        What was compared: the sample, or the update with all samples that it learned from.

    Raises:
        RunDirectoryError: no such run, step or sample, or an input of the run has changed.
    """
    if tolerance is None:
        tolerance = TOLERANCE
    if not is_run(directory):
        raise RunDirectoryError(f"{directory} is no run directory: it has no config.yaml of a run")
    if sample is not None:
        recorded = recorded_samples(directory, step)
        if not 0 <= sample < len(recorded):
            raise RunDirectoryError(_no_sample(directory, step, sample, len(recorded)))
        with recorded_scores(directory) as unread:
            seen = go_through(directory, last_samples=step, unread=unread)
        return [*compare_samples(directory, seen, step, only=sample, tolerance=tolerance)]
    steps = {int(record["step"]) for record in read_numbers(directory / "metrics.jsonl")}
    if step not in steps:
        known = f"it has 1 to {max(steps)}" if steps else "it has none yet"
        raise RunDirectoryError(f"{directory / 'metrics.jsonl'} has no step {step}: {known}")
    seen = go_through(directory, last_step=step)
    return [*compare_update(directory, seen, step, tolerance=tolerance)]


def go_through(
    directory: Path,
    *,
    last_step: float = math.inf,
    last_samples: float = math.inf,
    begin: int | None = None,
    unread: str = "",
) -> ReplaySession:
    """Run again what leads to a step, from the nearest checkpoint before it.

    Args:
        directory: of the run.
        last_step: optimizer step to end with.
        last_samples: samples to end with, by their step in samples.jsonl.
        begin: after so many optimizer steps, or fewer; None: as late as possible.
        unread: an input that the record stands in for.
    """
    if begin is None:
        begin = int(min(last_step, last_samples)) - 1
    checkpoint: Checkpoint | None = None
    with suppress(NoCheckpointError):  # then it begins where the run began
        checkpoint = latest_checkpoint(directory / "checkpoints", until=begin)
    log.info("replay from %s", "the start" if checkpoint is None else checkpoint.path)
    with as_it_was(directory, unread) as (here, ranks):
        session = ReplaySession(
            session_options(here),
            checkpoint,
            tokens=here.run.record == "tokens",
            last_step=last_step,
            last_samples=last_samples,
        )
        with session, suppress(Replayed):
            train(Assembly(here, ranks, session.stopping), session)
    return session


@contextmanager
def as_it_was(directory: Path, unread: str = "") -> Iterator[tuple[Config, Ranks]]:
    """The configuration of a run, with what was settled when it began, in a folder of its own.

    Args:
        directory: of the run.
        unread: an input that the record stands in for.

    Yields:
        The configuration, and this process's place among the ranks that it asks for.

    Raises:
        RunDirectoryError: an input of the run has changed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told when the run began
        cfg = load_config(directory / "config.yaml")
    review = review_inputs(cfg, directory)
    for change in review.changes:
        if change.name == unread:
            continue
        if change.name == CODE:  # to see what it changes is what one replays for
            log.warning("%s: %s then, %s now", CODE, change.then, change.now)
            continue
        raise RunDirectoryError(
            f"{change.name} is not what it was when {directory} was started: {change.then}, now "
            f"{change.now}. A replay needs the same inputs: put them back"
        )
    with _scratch(directory) as scratch, training_ranks(cfg) as ranks:
        here = cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": str(scratch)})})
        yield settle_as_noted(here, review.noted, ranks, directory), ranks


@contextmanager
def recorded_scores(directory: Path) -> Iterator[str]:
    """Let the record score, while open, in place of a reward that Python gave and that is not here.

    Yields:
        The field of that reward; empty where the run has another one.
    """
    name = str(recorded_config(directory).get("reward.name"))
    if not is_given(name) or is_here(name):
        yield ""
        return
    lines = read_records(directory / "samples.jsonl")
    # Its method alone: a mapping would be named in a warning, as something that the reward reads.
    find = {(line.get("uid"), line.get("response")): line for line in lines}.get

    def recorded(prompt: Prompt, completion: str) -> Score:
        line = find((prompt.uid, completion))
        if line is None:
            return Score(value=None, status="invalid", reason="the record has no such sample")
        return Score(value=line["reward"], status=line["status"], reason=line["reason"])

    with giving({name: recorded}):
        yield "reward.name"


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A temporary run directory, with what a recipe wrote beside its record and reads again."""
    with tempfile.TemporaryDirectory(prefix="oxrl-replay-") as folder:
        kept = directory / "kept.jsonl"
        if kept.is_file():
            shutil.copyfile(kept, Path(folder) / kept.name)
        yield Path(folder)


def recorded_samples(directory: Path, step: int) -> list[Json]:
    """The lines of samples.jsonl that optimizer step `step` was the first to learn from."""
    return [line for line in read_records(directory / "samples.jsonl") if line.get("step") == step]


def _no_sample(directory: Path, step: int, sample: int, count: int) -> str:
    file = directory / "samples.jsonl"
    if count:
        return f"{file} has {count} samples of step {step}, 0 to {count - 1}; --sample is {sample}"
    steps = sorted({int(line["step"]) for line in read_records(file)})
    known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
    return f"{file} has no sample of step {step}: {known}"


def compare_samples(
    directory: Path, seen: ReplaySession, step: int, *, only: int | None = None, tolerance: float
) -> Iterator[Mismatch]:
    """Compare the recorded samples of a step with those that were drawn now.

    Args:
        directory: of the run.
        seen: what the replay went through.
        step: the optimizer step that learned from them first.
        only: one of them; None: all.
        tolerance: of numbers.
    """
    recorded = recorded_samples(directory, step)
    now = seen.samples.get(step, [])
    if len(recorded) != len(now):
        yield Mismatch(f"samples of step {step}", f"{len(recorded)}", f"{len(now)}", False)
        return
    file = directory / "rollouts" / f"step_{step - 1:08d}.safetensors"
    kept = load_tensors(file) if file.is_file() else None
    told = "text; run.record: tokens would compare tokens" if kept is None else "text and tokens"
    rows = token_rows(recorded)
    tokens_now = seen.rollouts.get(step)
    for place in range(len(recorded)) if only is None else (only,):
        what = f"sample {place} of step {step}"
        wrong = list(compare_lines(what, recorded[place], now[place], tolerance))
        row = rows.get(place)
        if kept is not None and tokens_now is not None and row is not None:
            wrong += _compare_tensors(what, kept, tokens_now, row, tolerance)
        if not wrong:
            text = json.dumps(recorded[place].get("response"), ensure_ascii=False)
            yield Mismatch(f"{what} ({told})", text[:60], text[:60], True)
        yield from wrong


def token_rows(lines: Sequence[Json]) -> dict[int, int]:
    """Row in the tensors of each sample that has one, by its place: of what is trained on."""
    trained = [place for place, line in enumerate(lines) if line.get("advantage") is not None]
    return {place: row for row, place in enumerate(trained)}


def compare_lines(what: str, recorded: Json, now: Json, tolerance: float) -> Iterator[Mismatch]:
    """Compare a line of samples.jsonl with what it is now; yields what is another.

    Args:
        what: of which sample, for messages.
        recorded: the line.
        now: the line of now.
        tolerance: relative, of numbers.
    """
    for name, value in recorded.items():
        if name == "reason":  # may tell of a process
            continue
        other = now.get(name)
        if not _same(value, other, tolerance):
            yield Mismatch(f"{what}, {name}", _short(value), _short(other), False)


def _compare_tensors(
    what: str,
    recorded: TensorMap,
    now: TensorMap,
    row: int,
    tolerance: float,
) -> Iterator[Mismatch]:
    """One row of the tensors of a batch."""
    for name, tensor in recorded.items():
        other = now.get(name)
        of_list = name.endswith(OF_LISTS)
        if of_list and other is not None:
            tensor = _list_of_row(recorded, name, row)
            other = _list_of_row(now, name, row)
        if other is None or other.shape != tensor.shape or not tensor.ndim:
            yield Mismatch(f"{what}, {name}", f"shape {tuple(tensor.shape)}", "another", False)
            continue
        before = (tensor if of_list else tensor[row]).double()
        after = (other if of_list else other[row]).double()
        limit = tolerance if tensor.is_floating_point() else 0.0
        if not before.allclose(after, rtol=limit, atol=limit, equal_nan=True):
            apart = (before - after).abs().max().item()
            yield Mismatch(f"{what}, {name} per token", "as recorded", f"{apart:.3g} apart", False)


def _list_of_row(tensors: TensorMap, name: str, row: int) -> Tensor:
    """Return the numbers of a ragged column that one row of a batch has."""
    ends = tensors[name.removesuffix(OF_LISTS)].sum(1).cumsum(0)
    first = 0 if row == 0 else int(ends[row - 1])
    return tensors[name][first : int(ends[row])]


def compare_update(
    directory: Path, seen: ReplaySession, step: int, *, tolerance: float
) -> Iterator[Mismatch]:
    """Compare the record of an update and its samples with what came of them now."""
    drawn = max((first for first in seen.samples if first <= step), default=None)
    if drawn is not None:
        found = list(compare_samples(directory, seen, drawn, tolerance=tolerance))
        wrong = [finding for finding in found if not finding.equal]
        if not wrong:
            told = found[0].what.rpartition("(")[2].rstrip(")") if found else "none"
            what = f"{len(found)} samples of step {drawn} ({told})"
            yield Mismatch(what, "as recorded", "as recorded", True)
        yield from wrong
    lines = read_numbers(directory / "metrics.jsonl")
    record = next(line for line in lines if line["step"] == step)
    yield from compare_metrics(record, seen.lines.get(step, {}), step, tolerance=tolerance)


def compare_metrics(
    record: Json,
    now: Metrics,
    step: int,
    *,
    tolerance: float,
    not_compared: tuple[str, ...] = NOT_COMPARED,
) -> Iterator[Mismatch]:
    """Compare the line of a step with its metrics now; of those that are equal the important ones.

    Args:
        record: the line.
        now: the metrics.
        step: of the line.
        tolerance: relative.
        not_compared: how the names of others begin.
    """
    for name in dict.fromkeys((*IMPORTANT, *record)):
        if name not in record or name == "step" or name.startswith(not_compared):
            continue
        before = float(record[name])
        after = float(now.get(name, math.nan))
        equal = _same(before, after, tolerance) or (name not in now and name not in IMPORTANT)
        if not equal or name in IMPORTANT:
            yield Mismatch(f"update of step {step}, {name}", f"{before:.9g}", f"{after:.9g}", equal)


def _same(one: Any, other: Any, tolerance: float) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        if not (isinstance(one, int | float) and isinstance(other, int | float)):
            return False
        if math.isnan(one) and math.isnan(other):
            return True
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-9)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_same(one.get(name), other.get(name), tolerance) for name in {*one, *other})
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(a, b, tolerance) for a, b in pairs)
    return one == other


def _short(value: object) -> str:
    return shortened(json.dumps(value, ensure_ascii=False))
