"""The record of a run: metrics.jsonl, samples.jsonl, rollouts/; on resume cut back exactly.

Every line goes to the operating system as it is made (a killed process loses nothing that was
recorded); it is forced to the disk when a checkpoint asks for the offsets, because that is where a
resumed run continues.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from oxrl.errors import OxrlError, RunDirectoryError
from oxrl.runs.directory import RunDirectory
from oxrl.runs.files import encode_line, fsync, line_starts_at
from oxrl.types import Metrics

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
ROLLOUTS = "rollouts"
ROLLOUT_NAME = re.compile(r"step_(\d{8,})\.safetensors")


class Recorder(AbstractContextManager["Recorder"]):
    """Writes the record of one run. Usable from one thread."""

    def __init__(self, run: RunDirectory) -> None:
        self._rollouts = run.rollouts
        self._rollouts.mkdir(exist_ok=True)
        # Unbuffered: one write call per record, so another process reads whole lines.
        self._files: dict[str, IO[bytes]] = {
            path.name: path.open("ab", buffering=0) for path in (run.metrics, run.samples)
        }
        self._last_rollout = -1

    def record_step(self, step: int, metrics: Metrics) -> None:
        """Append the line of one optimizer step: "step" first, the other keys sorted."""
        record = {"step": step, **dict(sorted(metrics.items()))}
        self._append(METRICS, encode_line(record))

    def record_samples(self, samples: Sequence[Mapping[str, object]]) -> None:
        """Append one line per sample, keys in the order given."""
        self._append(SAMPLES, b"".join(encode_line(sample) for sample in samples))

    def record_rollouts(self, step: int, tensors: Mapping[str, Tensor]) -> Path:
        """Write rollouts/step_<8 digits>.safetensors, whole or not at all."""
        path = self._rollouts / f"step_{step:08d}.safetensors"
        temporary = path.with_name(f".tmp-{path.name}")
        try:
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, temporary)
            fsync(temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise _cannot_record(path, error) from error
        self._last_rollout = max(self._last_rollout, step)
        return path

    def offsets(self) -> dict[str, int]:
        """Force everything recorded to the disk; say where a checkpoint taken now continues.

        Returns:
            Sizes in bytes of metrics.jsonl and samples.jsonl; under "rollouts" the highest step
            recorded, -1 if none.
        """
        try:
            fsync(self._rollouts)
            for file in self._files.values():
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_record(self._rollouts.parent, error) from error
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}
        return {**sizes, ROLLOUTS: self._last_rollout}

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Forget everything recorded after a checkpoint was taken.

        Args:
            offsets: as `offsets()` gave them then; `{}` forgets everything.

        Raises:
            RunDirectoryError: metrics.jsonl was cut or edited, so the run cannot go on where it
                was. With samples.jsonl that is a warning: deleting it to save space is a user's
                right.
        """
        for name, file in self._files.items():
            file.truncate(self._line_end(name, offsets.get(name, 0)))
        self._last_rollout = offsets.get(ROLLOUTS, -1)
        for path in self._rollouts.iterdir():
            match = ROLLOUT_NAME.fullmatch(path.name)
            if path.name.startswith(".tmp-") or (match and int(match[1]) > self._last_rollout):
                path.unlink()

    def _line_end(self, name: str, offset: int) -> int:
        """Where to cut the file called `name` that had `offset` bytes when it was checkpointed."""
        path = self._rollouts.parent / name
        if line_starts_at(path, offset):
            return offset
        if name == METRICS:
            raise RunDirectoryError(
                f"{path} has no line end at byte {offset}, where the checkpoint was taken: "
                "lines are missing. Or it was edited: restore it, or start a new run in another "
                "directory (run.dir=...)."
            )
        problem = "%s is not what the checkpoint says: it has no line end at byte %d"
        logger.warning(problem, path, offset)
        return path.read_bytes()[:offset].rfind(b"\n") + 1

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, name: str, data: bytes) -> None:
        file = self._files[name]
        rest = memoryview(data)
        try:
            while rest:  # a raw write may take only a part, on a full disk for one
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise _cannot_record(self._rollouts.parent / name, error) from error


def _cannot_record(path: Path, error: Exception) -> OxrlError:
    return OxrlError(
        f"{path} cannot be written: {error}. A run without its record is not worth going on; free "
        "space on that disk and start again with --resume: it continues from the last checkpoint."
    )
