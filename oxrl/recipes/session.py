"""The surroundings of every training loop's maths: records, checkpoints, signals, the console, and
the progress that a checkpoint keeps beside weights.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from oxrl.checkpoint import SavedEngines
from oxrl.checkpoint.saving import Saver, SavingOptions
from oxrl.checkpoint.writer import CheckpointWriter, remove_old, save_best
from oxrl.engines.train import TrainEngine
from oxrl.errors import Stopped
from oxrl.rewards.pools import ScoringPool
from oxrl.runs.checkpoints import CHECKPOINTS
from oxrl.runs.clock import Clock, resident_mb
from oxrl.runs.console import Console, Mode, run_logging
from oxrl.runs.directory import RunDirectory
from oxrl.runs.files import read_records
from oxrl.runs.health import Health, end_of_run, too_many_in_a_row
from oxrl.runs.ranks import ALONE, Ranks
from oxrl.runs.recorder import Recorder, keep_batch
from oxrl.runs.waiting import StopRequest
from oxrl.types import Metrics, TensorMap

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """The progress of every run.

    step: optimizer steps done. draw: next position in the data order. line: the metrics of `step`
    until they are recorded; a signal during its evaluation leaves them here. tokens: of `line`.
    good_enough: whether an evaluation was as good as `run.stop_at` asks for.
    """

    step: int = 0
    draw: int = 0
    line: Metrics = field(default_factory=Metrics)
    tokens: float = 0.0
    good_enough: bool = False


@dataclass(kw_only=True)
class RolloutProgress(Progress):
    """The progress of reinforcement learning.

    rollout_step: rollout steps done. samples: what became of every sample so far.
    kl_coeff: of the KL in the reward, which a feature may steer.
    """

    rollout_step: int = 0
    samples: dict[str, int] = field(default_factory=dict)
    kl_coeff: float = 0.0


P = TypeVar("P", bound=Progress)


def crossed(every: int, before: int, after: int) -> bool:
    """True if a multiple of `every` lies in (before, after]; 0 means never."""
    return every > 0 and after // every > max(before, 0) // every


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """Settings of what surrounds the loop of a run.

    open: opens the directory of the run, with what its inputs and its machine are noted there.
    directory: of the run, also on ranks that open none.
    name: of the run, on the console.
    steps: optimizer steps of the whole run.
    console: how the console shows it.
    eval_every, checkpoint_every: optimizer steps; 0: never.
    stop_at: a score of the evaluation that is good enough; None: there is none.
    keep_checkpoints: how many stay.
    saving: how they are written.
    max_skipped_steps: more refused steps in a row end the run.
    trackers: names of those that show the run.
    vocabulary: tokens of the model; 0 where that is not known.
    health: name of a sign -> what it does.
    """

    open: Callable[[], RunDirectory]
    directory: Path
    name: str
    steps: int
    console: Mode
    eval_every: int
    checkpoint_every: int
    stop_at: float | None
    keep_checkpoints: int
    saving: SavingOptions
    max_skipped_steps: int
    trackers: Sequence[str]
    vocabulary: int
    health: Mapping[str, str]


class Session:
    """One run, from opening its directory to closing it. Use as a context manager.

    A loop calls `restore` once, `record` per optimizer step and `boundary` wherever a checkpoint
    may lie: between two rollout steps, when no sample is half trained on. `pool` is a reward that
    was tried before the run began.
    """

    pool: ScoringPool | None = None

    def __init__(self, options: SessionOptions, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.clock = Clock()
        self._options = options
        self._stack = ExitStack()
        self._skipped_in_a_row = 0
        self._saver = Saver(ranks, options.saving, say=self.message)
        self._stack.callback(self._saver.drop)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # The directory first, then what writes into it.
            options = self._options
            self.run = stack.enter_context(options.open())
            stack.enter_context(run_logging(self.run.path / "run.log", options.console))
            self.run.log_remarks()
            self.stop = stack.enter_context(StopRequest())
            self.recorder = stack.enter_context(Recorder(self.run))
            self._health = Health(options.vocabulary, options.health)
            console = Console(options.steps, options.name, mode=options.console)
            self._console = stack.enter_context(console)
            if options.trackers:
                from oxrl.runs.mirrors import Trackers  # processes, of which most runs have none

                self._trackers = stack.enter_context(Trackers(self.run, options.trackers))
            console.watch(self.clock, self.recorder)
            stack.callback(self._saver.drop)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def closing(self, close: Callable[[], None]) -> None:
        """Call `close` when the run ends, however it ends."""
        self._stack.callback(close)

    def message(self, text: str) -> None:
        """Tell the user something, above the progress line."""
        self._console.message(text)

    def work(self, what: str, done: int, total: int, *, unit: str, rate: float) -> None:
        """Show how far a long piece of work outside of the steps is; see the console."""
        if self.ranks.first:
            self._console.work(what, done, total, unit=unit, rate=rate)

    def stopping(self) -> bool:
        """True if a signal asked the run to stop."""
        return self.stop.requested is not None

    def restore(self, engines: SavedEngines, fresh: P) -> P:
        """Find where to go on: load the newest whole checkpoint, and cut records back to it.

        Args:
            engines: subdirectory of a checkpoint -> what is stored there.
            fresh: where a run begins; without a checkpoint it is written as the first one.
        """
        # What was imported and built lives as long as the run: no use in looking through all of it
        # for garbage every few steps, which takes as long as a small step.
        gc.freeze()
        self.closing(gc.unfreeze)
        found = None
        if self.ranks.agree(self.ranks.first and self.run.resuming):
            found = self._saver.newest(self._options.directory / CHECKPOINTS, engines)
        if found is None:
            if self.ranks.first:
                self.recorder.begin()
            # Waited for: lines of metrics without any checkpoint belong to no run that can go on.
            self._save(engines, fresh, wait=True)
            return fresh
        self._saver.load(found, engines)
        if self.ranks.first:
            self.recorder.truncate(found.offsets)
            self._health.remember(read_records(self.run.metrics))
            # A kill may have come before the last save had removed what it replaced.
            remove_old(self.run.checkpoints, found.step, self._options.keep_checkpoints)
        state = dict(found.state)
        self._skipped_in_a_row = state.pop("skipped_in_a_row")
        progress = type(fresh)(**state)
        # With its line a checkpoint is not yet that of a complete step: it is written again.
        self._saver.step = -1 if progress.line else found.step
        self.message(f"resuming after step {found.step} from {found.path}")
        self.clock.restart()
        return progress

    def record(self, step: int, metrics: Metrics, *, tokens: float) -> None:
        """Write the line of optimizer step `step`.

        Args:
            tokens: processed for it, for the throughput.

        Raises:
            NonFiniteError: more than `train.max_skipped_steps` steps in a row were refused.
        """
        timed = self.clock.take()
        timed["throughput/tokens_per_s"] = tokens / max(timed["time/step_s"], 1e-9)
        timed["system/rss_mb"] = resident_mb()
        line = metrics | timed
        self.recorder.record_step(step, line)
        self._console.step(step, line)
        stop = self._health.look(line)
        if stop:
            self.stop.requested = stop
        if self._options.trackers:
            self._trackers.check()
        self._count_skipped(metrics)

    def record_line(self, progress: Progress) -> None:
        """Write the line of a step that is complete with its evaluation."""
        self.record(progress.step, progress.line, tokens=progress.tokens)
        progress.line = {}
        progress.tokens = 0.0

    def _count_skipped(self, metrics: Metrics) -> None:
        # A step without a token to train on is no broken one; of many the sign nothing-trained
        # tells.
        if metrics.get("data/empty_steps"):
            return
        self._skipped_in_a_row += 1
        if not metrics.get("update/skipped"):
            self._skipped_in_a_row = 0
        most = self._options.max_skipped_steps
        if self._skipped_in_a_row > most:
            raise too_many_in_a_row(self.run.path, self._skipped_in_a_row, most)

    def dump(self, step: int, tensors: TensorMap) -> None:
        """Keep the batch of a refused step for inspection: dumps/step_<8 digits>.safetensors."""
        keep_batch(self.run.path, step, tensors)

    def keep_best(self, engine: TrainEngine, step: int) -> None:
        """Write the weights of `step` to `best/`, which appears whole or not at all."""
        save_best(self.run.path, step, engine.save)

    def eval_due(self, before: int, step: int) -> bool:
        """True if an evaluation belongs between optimizer steps `before` and `step`."""
        return step >= self._options.steps or crossed(self._options.eval_every, before, step)

    def note_score(self, progress: Progress, found: float | None, *, lower: bool = False) -> None:
        """Look at what an evaluation found, and tell where it is as good as `run.stop_at` asks for.

        Args:
            found: the score that decides; None where nothing was evaluated.
            lower: whether a lower one is the better one.
        """
        wanted = self._options.stop_at
        if wanted is None or found is None:
            return
        # NaN never meets stop_at.
        met = found <= wanted if lower else found >= wanted
        progress.good_enough = self.ranks.agree(met)
        if progress.good_enough:
            told = f"run.stop_at = {wanted:g} is reached: {found:.4g} at step {progress.step}"
            self.message(told)

    def boundary(self, engines: SavedEngines, progress: Progress) -> None:
        """Save if it is time, the run is complete, or a signal asked to stop.

        Raises:
            Interrupted: a signal asked to stop and everything is saved.
            NothingTrainedError: the same, of a run that has nothing to learn from.
        """
        step = progress.step
        last = step >= self._options.steps or progress.good_enough
        stop = self.ranks.agree(self.stop.requested)
        wait = last or bool(stop)
        self._saver.settle(wait=wait)
        saved = self._saver.step
        scheduled = crossed(self._options.checkpoint_every, saved, step)
        if self.ranks.agree(step != saved and (scheduled or wait)):
            with self.clock.phase("time/checkpoint_s"):
                self._save(engines, progress, wait=wait)
        if stop and not last:
            raise end_of_run(stop, step)

    @contextmanager
    def saved_if_stopped(self, engines: SavedEngines, progress: Progress) -> Iterator[None]:
        """Inside, a signal may cut the work short; then `progress` as it is gets saved.

        Raises:
            Interrupted: that happened.
        """
        try:
            yield
        except Stopped:
            self.boundary(engines, progress)
            raise

    def look(self) -> None:
        """Between two pieces of work of an evaluation.

        Raises:
            Stopped: a signal asked to stop; on every rank.
        """
        if self.ranks.agree(self.stopping()):
            raise Stopped

    def finish(self, step: int) -> None:
        """Mark the run complete; `--resume` then has nothing to do."""
        last = deque(read_records(self.run.metrics), maxlen=1)
        self.run.finish(step, dict(last[0]) if last else {})
        self.message(f"done at step {step}, everything is in {self.run.path}")

    def _save(self, engines: SavedEngines, progress: Progress, *, wait: bool) -> None:
        state = asdict(progress)
        state["skipped_in_a_row"] = self._skipped_in_a_row

        def new_writer() -> CheckpointWriter:
            return CheckpointWriter(
                self.run.checkpoints,
                progress.step,
                state=state,
                offsets=self.recorder.offsets(),
                keep=self._options.keep_checkpoints,
            )

        self._saver.save(engines, progress.step, new_writer, wait=wait)
