"""What every training loop does around its maths: the run directory, records, checkpoints, signals,
the console.
"""

from __future__ import annotations

import collections
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from oxrl.config import Config, dump_config
from oxrl.data.hub import identity, locate
from oxrl.engines.train.base import Saved, TrainEngine
from oxrl.engines.train.ranks import ALONE, Ranks
from oxrl.errors import CheckpointWriteError, DataError, Interrupted, NonFiniteError
from oxrl.runs.checkpoint import latest_checkpoint, save_checkpoint
from oxrl.runs.console import Console, run_logging
from oxrl.runs.directory import open_run
from oxrl.runs.files import pretty_json, read_records, write_atomically
from oxrl.runs.recorder import Recorder
from oxrl.runs.stop import StopRequest
from oxrl.runs.tracker import MLflowTracker
from oxrl.types import Metrics

log = logging.getLogger(__name__)
Progress = dict[str, Any]
PINS_FILE = "data.json"


class Session:
    """One run, from opening its directory to closing it. Use as a context manager.

    A loop calls `restore` once, `record` per optimizer step and `boundary` wherever a checkpoint
    may lie: between two rollout steps, when no sample is in flight.
    """

    def __init__(self, cfg: Config, *, resume: bool, ranks: Ranks = ALONE) -> None:
        self.ranks, self._cfg, self._resume = ranks, cfg, resume
        self._stack = ExitStack()
        self._skipped_in_a_row, self._saved_step = 0, -1
        self._clock: Metrics = {}
        self._step_started = time.monotonic()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            cfg = self._cfg
            self.run = stack.enter_context(
                open_run(cfg.run.directory, dump_config(cfg), resume=self._resume)
            )
            stack.enter_context(run_logging(self.run.path / "run.log"))
            self.stop = stack.enter_context(StopRequest())
            self.recorder = stack.enter_context(Recorder(self.run))
            self._console = stack.enter_context(Console(cfg.run.steps, cfg.run.name))
            mirrored = cfg.run.mlflow and not self.run.finished
            self._tracker = stack.enter_context(MLflowTracker(self.run)) if mirrored else None
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def closing(self, close: Callable[[], None]) -> None:
        self._stack.callback(close)

    def message(self, text: str) -> None:
        self._console.message(text)

    def with_data(self) -> Config:
        """The configuration with files of the hub located, the same bytes at every start of the run
        or a DataError.
        """
        data, pins = self._cfg.data, self.ranks.agree(self._pins() if self.ranks.first else {})
        paths = {name: str(locate(name, pin)) for name, pin in pins.items()}
        train = (
            paths[data.train]
            if isinstance(data.train, str)
            else {paths[n]: s for n, s in data.train.items()}
        )
        if not isinstance(data.train, str) and len(train) < len(data.train):
            raise DataError(
                f"data.train: two of {', '.join(data.train)} are one file; give it one share"
            )
        located = data.model_copy(update={"train": train, "eval": data.eval and paths[data.eval]})
        return self._cfg.model_copy(update={"data": located})

    def _pins(self) -> dict[str, str]:
        known, pins, data = read_pins(self.run.path), dict[str, str](), self._cfg.data
        for name in filter(None, (*data.train_files, data.eval)):
            then = known.get(name)
            pins[name] = identity(name, locate(name, then))
            if then not in (None, pins[name]):
                raise DataError(
                    f"{name} has changed since this run started (sha256 {then:.12} then, {pins[name]:.12} now). Put the"
                    f" old file back, start a new run, or delete {self.run.path / PINS_FILE} to go on with the new rows"
                )
        write_atomically(self.run.path / PINS_FILE, pretty_json(pins))
        return pins

    def restore(self, engines: Mapping[str, Saved], fresh: Progress) -> Progress:
        """Where to go on: the newest whole checkpoint's progress, engines loaded and records cut
        back to it.

        Without one, `fresh`, after writing it as the first checkpoint. `engines` maps a
        subdirectory to its engine.
        """
        resuming = self.ranks.first and self.run.resuming
        found = self.ranks.agree(latest_checkpoint(self.run.checkpoints) if resuming else None)
        if found is not None:
            for name, engine in engines.items():
                engine.load(found.path / name)
        if self.ranks.first:
            self.recorder.truncate({} if found is None else found.offsets)
        if found is None:
            self._save(engines, dict(fresh))
            return dict(fresh)
        progress = dict(found.state)
        self._skipped_in_a_row = progress.pop("skipped_in_a_row")
        self._saved_step = found.step
        self.message(f"resuming after step {found.step} from {found.path}")
        self._step_started = time.monotonic()
        return progress

    @contextmanager
    def phase(self, key: str) -> Iterator[None]:
        """Add the seconds spent inside to metric `key` of the next recorded step."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._clock[key] = self._clock.get(key, 0.0) + time.monotonic() - start

    def record(self, step: int, metrics: Metrics, *, tokens: float) -> None:
        """Write the line of optimizer step `step`. `tokens` were processed for it, for the
        throughput.

        Raises:
            NonFiniteError: more than `train.max_skipped_steps` steps in a row were refused.
        """
        now = time.monotonic()
        seconds, self._step_started = now - self._step_started, now
        timed = self._clock | {
            "time/step_s": seconds,
            "throughput/tokens_per_s": tokens / max(seconds, 1e-9),
        }
        timed["system/rss_mb"] = resident_mb()
        self._clock = {}
        self.recorder.record_step(step, metrics | timed)
        self._console.step(step, metrics | timed)
        if self._tracker is not None:
            self._tracker.check()
        # A minibatch may be left without rows where the rollout batch has some: nothing is wrong
        # with the others.
        if not (metrics.get("data/empty_steps") and metrics.get("data/tokens")):
            self._skipped_in_a_row = (
                self._skipped_in_a_row + 1 if metrics.get("update/skipped") else 0
            )
        if self._skipped_in_a_row > self._cfg.train.max_skipped_steps:
            why = f"NaN or infinite values, batches in {self.run.path / 'dumps'}. Lower train.lr or train.max_grad_norm"
            if metrics.get("data/empty_steps"):
                why = "no token to train on (data/empty_steps). Look at the data and at the rewards that failed"
            raise NonFiniteError(
                f"{self._skipped_in_a_row} optimizer steps in a row were refused, more than train.max_skipped_steps="
                f"{self._cfg.train.max_skipped_steps}: {why}"
            )

    def dump(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the batch of a refused step for inspection: dumps/step_<8 digits>.safetensors."""
        folder = self.run.path / "dumps"
        folder.mkdir(exist_ok=True)
        path = folder / f"step_{step:08d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        log.warning(
            "step %d has NaN or infinite values and is not applied; its batch is in %s", step, path
        )

    def keep_best(self, engine: TrainEngine) -> None:
        """Write the weights as they are to `best/`, which appears whole or not at all."""
        partial, best = self.run.path / ".best.partial", self.run.path / "best"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        engine.save(partial)
        shutil.rmtree(
            best, ignore_errors=True
        )  # not before the next one is written: there should always be one
        partial.rename(best)

    def eval_due(self, before: int, step: int) -> bool:
        """Whether an evaluation belongs between `before` and `step` (exclusive, inclusive)
        optimizer steps.
        """
        return step >= self._cfg.run.steps or crossed(self._cfg.run.eval_every, before, step)

    def boundary(self, engines: Mapping[str, Saved], progress: Progress) -> None:
        """Save if it is time, the run is complete, or a signal asked to stop.

        Raises:
            Interrupted: a signal asked to stop and everything is saved.
        """
        step = int(progress["step"])
        due = (
            crossed(self._cfg.run.checkpoint_every, self._saved_step, step)
            or step >= self._cfg.run.steps
        )
        due, stop = self.ranks.agree(
            (step != self._saved_step and (due or bool(self.stop)), self.stop.requested)
        )
        if due:
            with self.phase("time/checkpoint_s"):
                try:
                    self._save(engines, progress)
                except CheckpointWriteError as error:
                    if stop or step >= self._cfg.run.steps:
                        raise
                    # The previous checkpoint is intact, so a full disk costs safety, not the run.
                    log.warning(
                        "no checkpoint at step %d, trying again at the next boundary: %s",
                        step,
                        error,
                    )
        if stop and step < self._cfg.run.steps:
            raise Interrupted(
                f"stopped by {stop} after step {step}; everything is saved. Continue with --resume"
            )

    def finish(self, step: int) -> None:
        """Mark the run complete; `--resume` then has nothing to do."""
        last = collections.deque(read_records(self.run.metrics), maxlen=1)
        self.run.finish(step, dict(last[0]) if last else {})
        self.message(f"done: {step} steps, everything is in {self.run.path}")

    def _save(self, engines: Mapping[str, Saved], progress: Progress) -> None:
        def write(directory: Path) -> None:
            writing.append(self.ranks.agree(True))
            for name, engine in engines.items():
                (directory / name).mkdir(exist_ok=True)
                engine.save(directory / name)

        step = int(progress["step"])
        writing: list[bool] = []
        try:
            save_checkpoint(
                self.run.checkpoints,
                step,
                write,
                state={**progress, "skipped_in_a_row": self._skipped_in_a_row},
                offsets=self.recorder.offsets(),
                keep=self._cfg.run.keep_checkpoints,
            )
        finally:
            if not writing:
                self.ranks.agree(False)
        self._saved_step = step


class Follower(Session):
    """The session of every rank but the first: the same calls, rank 0's decisions, no file and no
    output.
    """

    def __enter__(self) -> Self:
        # A signal reaches all ranks; rank 0 decides where the run stops.
        self.stop = self._stack.enter_context(StopRequest())
        logging.getLogger("oxrl").addHandler(
            logging.NullHandler()
        )  # else warnings go to stderr, once per rank
        return self

    def message(self, text: str) -> None: ...
    def record(self, step: int, metrics: Metrics, *, tokens: float) -> None: ...
    def finish(self, step: int) -> None: ...
    def dump(self, step: int, tensors: Mapping[str, Tensor]) -> None: ...

    def keep_best(self, engine: TrainEngine) -> None:
        engine.save(self._cfg.run.directory)

    def _save(self, engines: Mapping[str, Saved], progress: Progress) -> None:
        if self.ranks.agree(False):
            for engine in engines.values():
                engine.save(self._cfg.run.directory)


def read_pins(run: Path) -> dict[str, str]:
    """`identity` of each data file when the run in `run` started; nothing where no run did."""
    path = run / PINS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def crossed(every: int, before: int, after: int) -> bool:
    """Whether a multiple of `every` lies in (before, after]; 0 means never."""
    return every > 0 and after // every > max(before, 0) // every


def resident_mb() -> float:
    """Resident memory of this process right now, in MB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def all_finite(*tensors: Tensor | None, mask: Tensor) -> bool:
    """No NaN and no infinity at the masked-in positions of any of the [B, T] tensors given."""
    return all(bool(torch.isfinite(tensor[mask]).all()) for tensor in tensors if tensor is not None)
