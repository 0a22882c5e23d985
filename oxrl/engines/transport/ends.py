"""The two ends of lines: a training rank that sends, a worker that receives."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from typing import Any, NamedTuple, Protocol, cast

import torch

from oxrl.engines.sample import RolloutEngine
from oxrl.engines.train import Bucket, Fingerprints, OneRanksBucket
from oxrl.engines.transport.base import LINE_BROKE, Copy, LineError, copied
from oxrl.engines.transport.line import Action, Line, Meeting, Seat, Seats
from oxrl.models.fingerprints import fingerprint
from oxrl.models.weights import Whole, in_one_piece

# Of an end of lines, the GPU of each process there; "" for a CPU.
Devices = tuple[str, ...]


class Sent(NamedTuple):
    """A report of what a rank has sent.

    bytes: of tensors. in_flight: the most buckets that it held at a time.
    broken: why it stopped; empty: it did not.
    """

    bytes: int
    in_flight: int
    broken: str


class Sender:
    """One training rank's end: of the buckets that all ranks gather, it sends its share.

    Args:
        rank, world: of the training ranks.
    """

    def __init__(self, rank: int, world: int) -> None:
        self._share = (rank, world)
        self._turn = (rank, world)
        self._line: Line | None = None
        # For who is lost and replaced: this rank's share of what was sent last, on the CPU.
        self.kept: dict[int, Bucket] = {}

    def join(self, meeting: Meeting, seat: Seat, *, address: str, device: torch.device) -> None:
        """Meet those who receive.

        Raises:
            LineError: they did not come.
        """
        self._line = None
        self._turn = (seat.line % meeting.turns, meeting.turns)
        self._line = Line(meeting, seat, address=address, device=device)

    @property
    def sends_all(self) -> bool:
        """True if this rank needs every bucket, and not only those that are its turn to keep."""
        _, turns = self._turn
        return turns == 1

    def fingerprints(self) -> dict[str, str]:
        """Fingerprint this rank's share of what was sent last."""
        kept = self.kept.values()
        return {name: fingerprint(tensor) for bucket in kept for name, tensor in bucket}

    def send(self, weights: Iterator[OneRanksBucket], copy: Copy, *, by_line: bool) -> Sent:
        """Send this rank's share of a copy.

        While a bucket is on its way the ranks gather the next one, and no more. A line that breaks
        is no reason to leave the others alone in that.

        Args:
            weights: of the policy; those in one piece are cast, as the copy has them, and None is
                another rank's. Collective across ranks.
            by_line: otherwise its share is only kept, to be fetched.
        """
        self.kept = {}
        line = self._line if by_line else None
        try:
            return self._send(weights, copy, line, "it met nobody" if by_line and not line else "")
        except BaseException:
            if line:
                line.cut()  # who receives need not wait for what will not come
            raise

    def _send(
        self, weights: Iterator[OneRanksBucket], copy: Copy, line: Line | None, broken: str
    ) -> Sent:
        waiting: list[Action] = []
        size = most = count = 0
        filled = (bucket for bucket in weights if bucket is None or bucket)
        for index, bucket in enumerate(filled):
            count = index + 1
            mine = _is_turn(index, self._turn)
            keep = _is_turn(index, self._share)
            if bucket is None or not (mine or keep):
                continue
            whole = _made(bucket, copy)
            if keep:
                self.kept[index] = [(name, tensor.cpu()) for name, tensor in whole.bucket]
            if not mine:
                continue
            most = max(most, 1 + len(waiting))
            if line and not broken:
                broken = self._settle(waiting) or _begin(line, whole, waiting)
            size += whole.memory.nbytes
        broken = broken or self._settle(waiting)
        if line and not broken and _is_turn(count, self._turn):
            broken = _why_broken(line.finish)
        return Sent(size, most, broken)

    def _settle(self, waiting: list[Action]) -> str:
        """Wait until what was sent has arrived; return why it broke, or nothing."""
        broken = ""
        while waiting and not broken:
            broken = _why_broken(waiting.pop())
        if broken:
            self._line = None
            waiting.clear()
        return broken


def _is_turn(index: int, turn: tuple[int, int]) -> bool:
    first, of = turn
    return index % of == first


def _made(given: Bucket | Whole, copy: Copy) -> Whole:
    """Make a bucket of a copy, in memory of its own."""
    if isinstance(given, Whole):
        if not copy.strength:
            return given
        given = given.bucket
    return in_one_piece(next(copied(iter([given]), copy)))


def _begin(line: Line, whole: Whole, waiting: list[Action]) -> str:
    """Begin to send a bucket; return why it broke, or nothing."""
    return _why_broken(lambda: waiting.append(line.send(whole)))


def _why_broken(work: Callable[[], object]) -> str:
    try:
        work()
    except LineError as error:
        return str(error)
    return ""


class Receiver:
    """One worker's end: what all ranks send, in order.

    Args:
        lines: in the order in which their ranks take turns.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def buckets(self) -> Generator[Bucket]:
        """Yield every bucket; while one is used the next one arrives, and no more.

        To be closed: what has not been taken then still arrives, and is thrown away, because who
        sends waits for it.

        Raises:
            LineError: the connection broke.
        """
        lines = cycle(self._lines)
        with ThreadPoolExecutor(1, "weights") as thread:
            arriving = thread.submit(next(lines).receive)
            try:
                while (bucket := arriving.result()) is not None:
                    arriving = thread.submit(next(lines).receive)
                    yield bucket
            finally:
                while not arriving.exception() and arriving.result() is not None:
                    arriving = thread.submit(next(lines).receive)
                if arriving.exception():
                    self.cut()

    def cut(self) -> None:
        """Leave every line, so that nobody waits for this end."""
        for line in self._lines:
            line.cut()


class Receives(Protocol):
    """An engine as one end of lines."""

    @property
    def devices(self) -> Devices:
        """The GPU of each process that receives; "" for a CPU."""
        ...

    def join(self, meeting: Meeting, seats: Seats, address: str) -> None:
        """Meet the ranks.

        Args:
            seats: of each process, on the lines on which it receives.
        """
        ...

    def receive(self, version: int) -> Fingerprints:
        """As `update_weights`, of what the ranks send."""
        ...


class InProcess:
    """The end of an engine that holds a `model` in this very process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._receiver: Receiver | None = None

    @property
    def devices(self) -> Devices:
        return (name_of(self._device()),)

    def _device(self) -> torch.device:
        model = cast("Any", self._engine).model
        return next(model.parameters()).device

    def join(self, meeting: Meeting, seats: Seats, address: str) -> None:
        self._receiver = None
        self._receiver = receiver(meeting, seats[0], address=address, device=self._device())

    def receive(self, version: int) -> Fingerprints:
        if self._receiver is None:
            raise LineError(f"{LINE_BROKE} is not laid")
        with closing(self._receiver.buckets()) as buckets:
            return self._engine.update_weights(buckets, version)


def receiver(
    meeting: Meeting, seats: Sequence[Seat], *, address: str, device: torch.device
) -> Receiver:
    """Make the receiving end of one process.

    Raises:
        LineError: the others did not come.
    """
    return Receiver([Line(meeting, seat, address=address, device=device) for seat in seats])


def name_of(device: torch.device) -> str:
    """Return the name that tells a GPU from all others; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)
