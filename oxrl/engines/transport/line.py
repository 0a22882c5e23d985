"""A line: one process that sends buckets of weights to several that receive them.

Each line is a process group of its own, beside those of training ranks and of vLLM. A header over
gloo says what comes, then the tensors of the bucket come in one piece: broadcast by gloo or NCCL,
or as a CUDA IPC handle to a process on the same device. Everything but that call is one code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from oxrl.engines.train import Bucket
from oxrl.engines.transport.base import LINE_BROKE, LineError
from oxrl.models.weights import Whole, room_for

# How the tensors of a bucket cross: "gloo" between CPUs, "nccl" between GPUs, "ipc" on one GPU.
Call = Literal["gloo", "nccl", "ipc"]
# Waits until a tensor has crossed, or begins to send it.
Action = Callable[[], None]
# Who sends has the first place on a line.
SENDER = 0


class Meeting(NamedTuple):
    """The meeting place of those on some lines.

    host, port: of the store of the training ranks. name: of these lines, never used before.
    receivers: for each line how many receive on it. turns: 1 if every line carries all buckets,
    else the lines take turns, and this is how many there are. call: how tensors cross.
    """

    host: str
    port: int
    name: str
    receivers: Sequence[int]
    turns: int
    call: Call
    deadline_s: float


class Seat(NamedTuple):
    """A place on a line: SENDER, or from 1 on those who receive."""

    line: int
    place: int


# Of each end, its places.
Seats = Sequence[Sequence[Seat]]


class Line:
    """A place on one line; every failure of the connection is a LineError, and cuts it.

    Args:
        meeting: where.
        seat: which.
        address: of this process's node, as the others reach it.
        device: where tensors lie on this side.
    """

    def __init__(self, meeting: Meeting, seat: Seat, *, address: str, device: torch.device) -> None:
        self._device = device
        self._call = meeting.call
        size = 1 + meeting.receivers[seat.line]
        wait = timedelta(seconds=meeting.deadline_s)
        self._headers: Any = None
        self._tensors: Any = None

        def meet() -> None:
            store = dist.TCPStore(meeting.host, meeting.port, timeout=wait)
            own = dist.PrefixStore(f"oxrl/{meeting.name}/{seat.line}", store)
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore
            options._timeout = wait
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # pyright: ignore
            self._headers = dist.ProcessGroupGloo(own, seat.place, size, options)
            self._tensors = self._headers
            if meeting.call == "nccl":
                beside = dist.PrefixStore("nccl", own)
                self._tensors = dist.ProcessGroupNCCL(beside, seat.place, size, wait)  # pyright: ignore

        self._careful(meet)

    def send(self, whole: Whole) -> Action:
        """Begin to send a bucket; return what waits until it has arrived."""
        shapes = [(name, list(tensor.shape)) for name, tensor in whole.bucket]
        dtype = str(whole.memory.dtype).removeprefix("torch.")
        header = json.dumps({"dtype": dtype, "tensors": shapes}).encode()

        def begin() -> Action:
            self._say(header)
            return self._give(whole.memory.view(torch.uint8))

        arrive = self._careful(begin)
        return lambda: self._careful(arrive)

    def finish(self) -> None:
        """Say that no bucket follows."""
        self._careful(lambda: self._say(b""))

    def receive(self) -> Bucket | None:
        """Receive the next bucket, on this side's device; None at the end."""
        return self._careful(self._next)

    def cut(self) -> None:
        """Leave the line, which ends whatever others wait for on it."""
        self._headers = None
        self._tensors = None

    def _next(self) -> Bucket | None:
        header = self._hear()
        if not header:
            return None
        said = json.loads(header)
        dtype = getattr(torch, said["dtype"])
        whole = room_for(said["tensors"], dtype, self._device)
        self._take(whole.memory.view(torch.uint8))
        return whole.bucket

    def _careful(self, work: Callable[[], Any]) -> Any:
        """Call something that talks to the others.

        Raises:
            LineError: it failed; the line is cut, so that it fails at the others too.
        """
        try:
            return work()
        except (RuntimeError, AttributeError) as error:
            gone = self._headers is None
            self.cut()
            reason = "it was cut before" if gone else str(error).strip().splitlines()[0][:300]
            raise LineError(f"{LINE_BROKE} broke: {reason}") from error

    def _say(self, text: bytes) -> None:
        length = torch.tensor([len(text)])
        self._headers.broadcast(length, SENDER).wait()
        if text:
            self._headers.broadcast(
                torch.frombuffer(bytearray(text), dtype=torch.uint8), SENDER
            ).wait()

    def _hear(self) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._headers.broadcast(length, SENDER).wait()
        text = torch.empty(int(length), dtype=torch.uint8)
        if len(text):
            self._headers.broadcast(text, SENDER).wait()
        return text.numpy().tobytes()

    def _give(self, payload: Tensor) -> Action:
        """Send the tensors themselves; return what waits until that is done."""
        if self._call == "ipc":
            self._say(_handle(payload))
            return lambda: self._headers.barrier().wait()
        return self._tensors.broadcast(payload, SENDER).wait

    def _take(self, payload: Tensor) -> None:
        """Receive the tensors themselves."""
        if self._call == "ipc":
            payload.copy_(_opened(self._hear(), payload.device, len(payload)))
            torch.cuda.synchronize()
            self._headers.barrier().wait()
            return
        self._tensors.broadcast(payload, SENDER).wait()
        if payload.is_cuda:
            torch.cuda.current_stream().synchronize()


def _handle(payload: Tensor) -> bytes:
    """Make the handle by which another process on the same GPU opens this memory.

    The memory begins its storage.
    """
    torch.cuda.current_stream().synchronize()
    _, *parts = payload.untyped_storage()._share_cuda_()  # pyright: ignore
    # Bytes as text, numbers as they are.
    said = [part.hex() if isinstance(part, bytes) else part for part in parts]
    return json.dumps(said).encode()


def _opened(handle: bytes, device: torch.device, size: int) -> Tensor:
    """Open the memory that a handle is of, as a number of bytes on this process's device."""
    said = json.loads(handle)
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in said]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts)  # pyright: ignore
    whole = torch.empty(0, dtype=torch.uint8, device=device)
    return whole.set_(storage, 0, (size,))  # pyright: ignore
