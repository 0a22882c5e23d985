"""The record of a run: metrics.jsonl, samples.jsonl, rollouts/; on resume cut back exactly.

Every line goes to the operating system as it is made (a killed process loses nothing that was
recorded); it is forced to the disk when a checkpoint asks for the offsets, because that is where a
resumed run continues.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from oxrl.errors import OxrlError, RunDirectoryError
from oxrl.runs.directory import ROLLOUTS, RunDirectory
from oxrl.runs.files import (
    Chain,
    Record,
    clear,
    first_break,
    fsync,
    line_starts_at,
    make_folder,
    open_own,
    write_atomically,
    write_records,
)
from oxrl.types import Metrics, TensorMap, Tensors

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
CHAIN = "chain"
ROLLOUT_NAME = re.compile(r"step_(\d{8,})(?:(?:\.update)?\.safetensors|\.samples\.jsonl)")
RESTORE = (
    "Restore it from a copy, or start a new run in another directory (run.dir=...); a checkpoint "
    "is a model, and model.name takes its path"
)


def _nobody(samples: Sequence[Record]) -> None:
    """Ignore the samples: nobody looks at them."""


class Recorder(AbstractContextManager["Recorder"]):
    """Writes the record of one run. Usable from one thread.

    Raises:
        OxrlError: its files cannot be written.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._folder = run.path
        self._rollouts = run.rollouts
        self._files: dict[str, IO[bytes]] = {}
        self._chain = Chain()
        self._last_rollout = -1
        # Is shown every sample.
        self.show: Callable[[Sequence[Record]], None] = _nobody
        try:
            self._place = os.stat(self._folder)
            make_folder(self._rollouts)
            for path in (run.metrics, run.samples):
                self._files[path.name] = open_own(path, "a+b")
        except OSError as error:
            self.close()
            raise _cannot_record(self._folder, error) from error

    def record_step(self, step: int, metrics: Metrics) -> None:
        """Append the line of one optimizer step.

        "step" comes first, the other keys are sorted, and the last is the running hash.
        """
        record = {"step": step, **dict(sorted(metrics.items()))}
        self._append(METRICS, [record], self._chain)

    def record_samples(self, samples: Sequence[Record]) -> None:
        """Append one line per sample, keys in the order given."""
        self._append(SAMPLES, samples)
        self.show(samples)

    def record_rollouts(self, step: int, tensors: TensorMap) -> None:
        """Write rollouts/step_<8 digits>.safetensors, whole or not at all."""
        path = self._rollouts / f"step_{step:08d}.safetensors"
        try:
            make_folder(self._rollouts)
            save_tensors(tensors, path)
        except OSError as error:
            raise _cannot_record(path, error) from error
        self.keep_rollouts(step)

    def keep_rollouts(self, step: int) -> None:
        """Say that what is in rollouts/ of `step` is complete, and stays there on a resume."""
        self._last_rollout = max(self._last_rollout, step)

    def offsets(self) -> dict[str, int]:
        """Force everything recorded to the disk; say where a checkpoint taken now continues.

        Returns:
            Sizes in bytes of metrics.jsonl and samples.jsonl; under "chain" the running hash of the
            former; under "rollouts" the highest step recorded, -1 if none.
        """
        try:
            for name in self._files:
                self._keep_in_place(name)
            fsync(self._rollouts)
            for file in self._files.values():
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_record(self._folder, error) from error
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}
        return {**sizes, CHAIN: self._chain.value(), ROLLOUTS: self._last_rollout}

    def begin(self) -> None:
        """Start with an empty record, where no checkpoint was ever taken.

        Raises:
            RunDirectoryError: steps are recorded. The first checkpoint is older than the first
                step, so it was there and is gone.
        """
        steps = self._read(METRICS, None).count(b"\n")
        if steps:
            raise RunDirectoryError(
                f"{self._folder / METRICS} tells of {steps} steps, and there is no checkpoint to "
                f"go on from: {self._folder / 'checkpoints'} lost them. {RESTORE}"
            )
        self.truncate({})

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Forget everything recorded after a checkpoint was taken.

        Args:
            offsets: as `offsets()` gave them then; `{}` forgets everything.

        Raises:
            RunDirectoryError: metrics.jsonl was cut or edited, so the run cannot go on where it
                was. With samples.jsonl that is a warning: deleting it to save space is a user's
                right.
            OxrlError: the disk refused.
        """
        ends = {name: self._line_end(name, offsets.get(name, 0)) for name in self._files}
        self._chain = Chain()
        before = self._read(METRICS, ends[METRICS])
        _require_unchanged(self._folder / METRICS, before, offsets.get(CHAIN, Chain().value()))
        self._chain.add(before)
        self._last_rollout = offsets.get(ROLLOUTS, -1)
        try:
            for name, file in self._files.items():
                file.truncate(ends[name])
            for path in self._rollouts.iterdir():
                match = ROLLOUT_NAME.fullmatch(path.name)
                if path.name.startswith(".tmp-") or (match and int(match[1]) > self._last_rollout):
                    clear(path)
        except OSError as error:
            raise _cannot_record(self._folder, error) from error

    def _line_end(self, name: str, offset: int) -> int:
        """Find where to cut the file called `name`, which had `offset` bytes at the checkpoint."""
        path = self._folder / name
        if line_starts_at(path, offset):
            return offset
        if name == METRICS:
            raise RunDirectoryError(
                f"{path} has no line end at byte {offset}, where the checkpoint was taken: "
                f"lines are missing, or it was edited. {RESTORE}."
            )
        problem = "%s is not what the checkpoint says: it has no line end at byte %d"
        logger.warning(problem, path, offset)
        return path.read_bytes()[:offset].rfind(b"\n") + 1

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, name: str, records: Sequence[Record], chain: Chain | None = None) -> None:
        try:
            self._keep_in_place(name)
            write_records(self._files[name], records, chain)
        except OSError as error:
            raise _cannot_record(self._folder / name, error) from error

    def _read(self, name: str, size: int | None) -> bytes:
        """Read the first `size` bytes of a file, all if None, also where its name is gone."""
        descriptor = self._files[name].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size if size is None else size, 0)

    def _keep_in_place(self, name: str) -> None:
        """See to it that the file is still there under its name: lines would go nowhere.

        The record of the steps is put back, as this process still has it. Samples begin anew.

        Raises:
            OxrlError: the whole directory is gone.
        """
        path = self._folder / name
        if _is(path, os.fstat(self._files[name].fileno())):
            return
        if not _is(self._folder.resolve(), self._place):
            raise OxrlError(
                f"the run directory {self._folder} was removed or moved away while the run goes "
                "on. If it was moved, go on there: run.dir=PATH --resume"
            )
        clear(path)
        lines = self._read(name, None) if name == METRICS else b""
        write_atomically(path, lines.decode("utf-8"))
        self._files[name].close()
        self._files[name] = open_own(path, "a+b")
        told = "put back as it was" if name == METRICS else "begun anew"
        logger.warning("%s was removed or replaced while the run goes on; it is %s", path, told)


def _require_unchanged(path: Path, content: bytes, chain: int) -> None:
    """Compare the lines of metrics.jsonl before a checkpoint with what was written there.

    Args:
        path: of the file, for messages.
        content: its bytes up to the checkpoint.
        chain: their running hash as the checkpoint notes it.

    Raises:
        RunDirectoryError: they are others; names the first line that does not fit.
    """
    lines = [line + b"\n" for line in content.split(b"\n")[:-1]]
    number = first_break(lines)
    if number is not None:
        raise RunDirectoryError(
            f"{path}, line {number}: it is not what was written there, it or lines before it were "
            f"edited, removed or inserted. {RESTORE}."
        )
    found = Chain()
    found.add(content)
    if found.value() != chain:
        raise RunDirectoryError(
            f"{path}: its lines fit each other, but not what the checkpoint notes of them: they "
            f"were written again. {RESTORE}."
        )


def _is(path: Path, known: os.stat_result) -> bool:
    """True if a path, not followed if it is a link, is the file that `known` was taken of."""
    try:
        return os.path.samestat(os.lstat(path), known)
    except OSError:
        return False


def _cannot_record(path: Path, error: Exception) -> OxrlError:
    return OxrlError(
        f"{path} cannot be written: {error}. A run without its record is not worth going on; free "
        "space on that disk and start again with --resume: it continues from the last checkpoint."
    )


def save_tensors(tensors: TensorMap, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors, and what is to be said of them, to `path`, in place of what is there.

    Raises:
        OSError: the disk refused; nothing of it is left.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    clear(temporary)
    contiguous: Tensors = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        # One tensor under two names would be refused: what is compared may be the sampler's own.
        contiguous[name] = tensor.clone() if tensor.data_ptr() in taken else tensor.contiguous()
        taken.add(tensor.data_ptr())
    try:
        save_file(contiguous, temporary, None if metadata is None else dict(metadata))
        fsync(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        clear(temporary)
        if isinstance(error, SafetensorError):
            # Its own error for a full disk, as for everything else that a disk can do.
            raise OSError(errno.EIO, str(error), str(path)) from error
        raise


def load_tensors(path: Path) -> Tensors:
    """Read what `save_tensors` wrote.

    Raises:
        RunDirectoryError: it is not what was written there.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunDirectoryError(
            f"{path} is no file of tensors as it was written: {error}"
        ) from error


def keep_batch(run: Path, step: int, tensors: TensorMap) -> None:
    """Keep the batch of a refused step for inspection: dumps/step_<8 digits>.safetensors.

    Args:
        run: the run directory.
        step: the optimizer step.
        tensors: of its batch.
    """
    path = run / "dumps" / f"step_{step:08d}.safetensors"
    where = f"its batch is in {path}"
    try:
        make_folder(path.parent)
        save_tensors(tensors, path)
    except OSError as error:
        # A full disk: the batch would only have been looked at, the run may go on.
        where = f"its batch could not be written to {path}: {error}"
    logger.warning("step %d is skipped: it has NaN or infinite values; %s", step, where)
