"""Checkpoints of a run: written while training waits, or while it goes on.

The first one may name the models that a run began with, instead of holding a copy of them:

reference.json   {"format", "model", "dtype", "seed", "pins": {field: its commit and hashes}}

Every start of a run builds the same models anyway: from the same files, which are pinned, or from
the same seed. So before the first step there is nothing else to store of them, and nothing to load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from oxrl.checkpoint import Saved, SavedByRanks, SavedEngines
from oxrl.checkpoint.shares import FLUSH_BYTES
from oxrl.checkpoint.writer import CheckpointWriter
from oxrl.errors import CheckpointError, CheckpointWriteError, DeadlineError
from oxrl.modelfiles.folder import REFERENCE_FILE
from oxrl.runs.files import Json, pretty_json, read_json, size_of
from oxrl.runs.pins import INPUTS_FILE, read_noted
from oxrl.runs.ranks import Ranks
from oxrl.tables.watch import Deadlines

if TYPE_CHECKING:
    from oxrl.checkpoint.verify import Checkpoint
    from oxrl.models.exact_contract import Contract

log = logging.getLogger(__name__)

# Of reference.json.
REFERENCE_FORMAT = "oxrl-reference-1"
# Between two looks at a checkpoint that is waited for, and between two words about it, in seconds.
LOOK_S = 0.02
SLOWEST_LOOK_S = 0.5
SAY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The names and files that the models of a run are built from.

    run: its directory, where the inputs of the models are noted. model: its name. dtype: of the
    weights. seed: of those that are random.
    """

    run: Path
    model: str
    dtype: str
    seed: int

    def write(self, directory: Path) -> None:
        """Name it in `directory`."""
        (directory / REFERENCE_FILE).write_text(pretty_json(self._content()), encoding="utf-8")

    def is_named(self, directory: Path) -> bool:
        """Tell whether `directory` only names what the models are built from, and holds none.

        Raises:
            CheckpointError: it names something else.
        """
        file = directory / REFERENCE_FILE
        if not file.is_file():
            return False
        then = read_json(file) or {}
        now = self._content()
        if not now["pins"] and "pins" in then:
            # A replay, which has compared every input itself.
            now["pins"] = then["pins"]
        for key, value in now.items():
            if then.get(key) != value:
                raise CheckpointError(
                    f"{directory} is a reference to the model that the run began with, and its "
                    f"{key} was {then.get(key)!r}: now it is {value!r}. Put it back, or begin a "
                    "new run"
                )
        log.info("%s: the model as it was built", directory)
        return True

    def _content(self) -> Json:
        pins: Json = {}
        for field, found in read_noted(self.run, INPUTS_FILE).items():
            if field.startswith("model."):
                hashes = {name: file["sha256"] for name, file in found["files"].items()}
                pins[field] = {"commit": found["commit"], "files": hashes}
        return {
            "format": REFERENCE_FORMAT,
            "model": self.model,
            "dtype": self.dtype,
            "seed": self.seed,
            "pins": pins,
        }


@dataclass(frozen=True, kw_only=True)
class SavingOptions:
    """Settings of how the checkpoints of a run are written.

    background: training goes on meanwhile, and a checkpoint gets its name at a later look.
    waits: the longest time without a single byte written.
    origin: what the models of the run are built from.
    first_refers: the first checkpoint names that, instead of holding the models.
    contract: what `run.exact` promises; None where it promises nothing.
    """

    background: bool
    waits: Deadlines
    origin: Origin
    first_refers: bool
    contract: Contract | None = None


class Saver:
    """Writes checkpoints, and finds the newest; every rank calls the same methods.

    Engines that can write in another thread (`begin_save`) do so, each rank its share. A disk may
    be slow: it is waited for as long as bytes get written.

    Args:
        ranks: of training; the first of them owns the directory.
        options: how checkpoints are written.
        say: tells the user something.
    """

    def __init__(self, ranks: Ranks, options: SavingOptions, *, say: Callable[[str], None]) -> None:
        self.step = -1  # of the newest checkpoint that was begun
        self._ranks = ranks
        self._options = options
        self._say = say
        self._engines: list[SavedByRanks] = []
        self._writer: CheckpointWriter | None = None
        self._step_before = -1

    def save(
        self,
        engines: SavedEngines,
        step: int,
        new_writer: Callable[[], CheckpointWriter],
        *,
        wait: bool,
    ) -> None:
        """Write a checkpoint; collective.

        Args:
            engines: subdirectory -> what is stored there.
            step: optimizer steps applied.
            new_writer: called on the first rank.
            wait: return once it has its name, whatever `background` says; a run cannot go on
                without it.

        Raises:
            CheckpointWriteError: the disk refused, and it was to `wait`; on the first rank.
        """
        self.settle(wait=True)
        background = self._options.background and not wait
        refers = step == 0 and self._options.first_refers
        write = partial(self._write, engines, background, refers)
        with self._within():
            try:
                if self._ranks.first:
                    self._begin(new_writer(), write)
                elif self._ranks.agree(""):
                    write(Path())  # the first rank knows where
                if not background:
                    self._complete()
            except CheckpointWriteError as error:
                if wait:
                    raise
                self._warn(step, error)
                return
        self._step_before = self.step
        self.step = step

    def _within(self) -> AbstractContextManager[None]:
        """Other ranks are waited for as long as the disk is."""
        return self._ranks.within(
            self._options.waits.of("checkpoint"), "a checkpoint to be written"
        )

    def _warn(self, step: int, error: CheckpointWriteError) -> None:
        # The previous checkpoint is intact: a full disk costs safety, not the run.
        log.warning("no checkpoint at step %d, trying again at the next boundary: %s", step, error)

    def load(self, found: Checkpoint, engines: SavedEngines) -> None:
        """Restore engines from a checkpoint; on every rank.

        Raises:
            CheckpointError: it is of another machine than a run with `run.exact` can go on.
        """
        contract = self._options.contract
        if contract is not None:
            contract.check_resumed(found.path)
        wait = self._options.waits.of("load", size_of(found.path))
        with self._ranks.within(wait, "a checkpoint"):
            for name, engine in engines.items():
                if not self._options.origin.is_named(found.path / name):
                    engine.load(found.path / name)

    def settle(self, *, wait: bool = False) -> None:
        """Give a checkpoint its name that was written meanwhile; collective.

        Args:
            wait: until it is written.
        """
        if not self._engines and self._writer is None:
            return
        if not wait and not self._progress()[1]:
            return
        try:
            with self._within():
                self._complete()
        except CheckpointWriteError as error:
            self._warn(self.step, error)
            self.step = self._step_before

    def drop(self) -> None:
        """End what is being written; it never becomes a checkpoint."""
        for engine in self._engines:
            engine.drop_save()
        self._engines = []
        if self._writer is not None:
            self._writer.drop()
            self._writer = None

    def newest(self, root: Path, engines: SavedEngines) -> Checkpoint | None:
        """The newest whole checkpoint, at whose parts all ranks look; collective."""
        from oxrl.checkpoint.verify import latest_checkpoint  # a run that begins has none

        if self._ranks.first:

            def look(path: Path) -> list[str]:
                self._ranks.agree(str(path))
                return _problems(path, engines)

            found = latest_checkpoint(root, look_at_parts=look)
            self._ranks.agree("")
        else:
            found = None
            while path := self._ranks.agree(""):
                _problems(Path(path), engines)
        return self._ranks.agree(found)

    def _begin(self, writer: CheckpointWriter, write: Callable[[Path], None]) -> None:
        begun = False

        def fill(directory: Path) -> None:
            nonlocal begun
            begun = True
            self._ranks.agree("begin")
            write(directory)

        self._writer = writer
        try:
            writer.fill(fill)
        except BaseException:
            self.drop()
            raise
        finally:
            if not begun:
                # The other ranks wait to hear whether there is anything to write.
                self._ranks.agree("")

    def _write(
        self, engines: SavedEngines, background: bool, refers: bool, directory: Path
    ) -> None:
        """Begin to write what is stored; the first rank writes what is small, whole.

        Args:
            refers: the models of the run are named instead; they are as they were built.
        """
        for name, engine in engines.items():
            folder = directory / name
            if self._ranks.first:
                folder.mkdir(exist_ok=True)
            if _is_by_ranks(engine) and not refers:
                if not engine.begin_save(folder, background):  # the first rank's disk refused
                    self.drop()
                    return
                self._engines.append(engine)
            elif self._ranks.first:
                write = self._options.origin.write if _is_by_ranks(engine) else engine.save
                write(folder)
        if self._ranks.first and self._options.contract is not None:
            self._options.contract.write(directory)

    def _complete(self) -> None:
        writer = self._writer
        try:
            if writer is None:
                self._end()
            else:
                writer.complete(self._end)
        except BaseException:
            self.drop()
            raise
        self._engines = []
        self._writer = None

    def _end(self) -> None:
        """Wait until every rank has written its share of every engine."""
        self._wait()
        refused: Exception | None = None
        for engine in self._engines:
            try:
                engine.end_save()
            except Exception as error:  # noqa: BLE001  (raised below: every rank ends every engine)
                refused = refused or error
        if refused is not None:
            raise refused

    def _progress(self) -> tuple[int, bool]:
        """Bytes written by all ranks of all engines, and whether they are done."""
        found = [engine.save_progress() for engine in self._engines]
        return sum(count for count, _ in found), all(done for _, done in found)

    def _wait(self) -> None:
        begun = time.monotonic()
        said = begun
        moved = begun
        before = -1
        pause = LOOK_S
        while True:
            written, done = self._progress()
            if done:
                return
            now = time.monotonic()
            if written != before:
                before = written
                moved = now
            # A disk may take what a process hands it at once, and then be silent.
            at_once = min(written, self._ranks.world * FLUSH_BYTES)
            deadline = self._options.waits.of("checkpoint", at_once)
            if self._ranks.agree(now - moved > deadline.seconds):
                raise DeadlineError(
                    f"no byte of the checkpoint was written for {deadline}, after "
                    f"{written / 1e6:.1f} MB: the disk hangs. The one before is untouched; raise "
                    f"{deadline.field} if it is only slow"
                )
            if now - said > SAY_S:
                said = now
                speed = written / 1e6 / (now - begun)
                self._say(f"writing the checkpoint: {written / 1e6:.0f} MB, {speed:.1f} MB/s")
            time.sleep(pause)
            pause = min(2 * pause, SLOWEST_LOOK_S)


def _is_by_ranks(engine: Saved) -> TypeGuard[SavedByRanks]:
    """Tell whether ranks write it together: a training engine, not what is small."""
    return hasattr(engine, "begin_save")


def _problems(path: Path, engines: SavedEngines) -> list[str]:
    found: list[str] = []
    for name, engine in engines.items():
        if _is_by_ranks(engine):
            found += engine.part_problems(path / name)
    return found
