"""Lines between training ranks and samplers: what is sent arrives, and nobody waits for the lost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oxrl.engines.delivery.proof import perturb
from oxrl.engines.ray.transport import call_between, seating
from oxrl.engines.train import Bucket
from oxrl.engines.transport.base import Copy, LineError
from oxrl.engines.transport.ends import Receiver, Sender, Sent, receiver
from oxrl.engines.transport.line import Meeting, Seat
from oxrl.models.fingerprints import fingerprint, joined, pieces_of

CPU = torch.device("cpu")
HERE = "127.0.0.1"
STORES = itertools.count()


def weights(count: int = 7, seed: int = 0) -> list[Bucket]:
    """Buckets of several tensors, one of them larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [
            (f"{index}.a", torch.randn(3, 5 + 400 * (index == 2), generator=generator)),
            (f"{index}.b", torch.randn(7, generator=generator)),
        ]
        for index in range(count)
    ]


class Lines:
    """Ranks and samplers that met, each in a thread of this process."""

    def __init__(self, senders: int, receivers: int, *, deadline_s: float = 20) -> None:
        self._store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
        ends = [("",)]
        counts, seats = seating(ends * senders, ends * receivers, "gloo")
        meeting = Meeting(
            HERE, self._store.port, f"test/{next(STORES)}", counts, senders, "gloo", deadline_s
        )
        self.threads = ThreadPoolExecutor(senders + receivers)
        self.senders = [Sender(rank, senders) for rank in range(senders)]
        joining = [
            self.threads.submit(s.join, meeting, Seat(i, 0), address=HERE, device=CPU)
            for i, s in enumerate(self.senders)
        ]
        coming = [
            self.threads.submit(receiver, meeting, own[0], address=HERE, device=CPU)
            for own in seats
        ]
        for meets in joining:
            meets.result()
        self.receivers = [meets.result() for meets in coming]

    def send(self, copy: Copy, given: list[Bucket] | None = None) -> list[Future[Sent]]:
        held = given or weights()
        return [self.threads.submit(s.send, iter(held), copy, by_line=True) for s in self.senders]


def taken(end: Receiver) -> dict[str, Tensor]:
    with closing(end.buckets()) as buckets:
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_every_sampler_gets_the_copy_and_ranks_share_the_sending(
    senders: int, receivers: int, strength: float
) -> None:
    lines = Lines(senders, receivers)
    copy = Copy(torch.bfloat16, strength)
    for seed in range(2):
        given = weights(seed=seed)
        sending = lines.send(copy, given)
        taking = [lines.threads.submit(taken, end) for end in lines.receivers]
        cast = {name: tensor.bfloat16() for bucket in given for name, tensor in bucket}
        right = {n: perturb(t, strength) if strength else t for n, t in cast.items()}
        for arrived in taking:
            found = arrived.result(20)
            assert list(found) == list(right)
            assert all(torch.equal(found[name], right[name]) for name in right)
        sent = [part.result(20) for part in sending]
        shares = [sender.fingerprints() for sender in lines.senders]
        noted = {name: print for share in shares for name, print in share.items()}
        assert noted == {name: fingerprint(tensor) for name, tensor in right.items()}
        assert sum(part.bytes for part in sent) == sum(t.nbytes for t in right.values())
        assert max(part.in_flight for part in sent) <= 2
        assert [part.broken for part in sent] == [""] * senders
        kept = {index for sender in lines.senders for index in sender.kept}
        assert kept == set(range(7))


def test_buckets_without_tensors_are_not_sent() -> None:
    lines = Lines(2, 1)
    sending = lines.send(Copy(torch.float32), [[], *weights(), []])
    [arrived] = [lines.threads.submit(taken, end) for end in lines.receivers]
    assert len(arrived.result(20)) == 14
    assert [part.result(20).broken for part in sending] == ["", ""]
    kept = {index for sender in lines.senders for index in sender.kept}
    assert kept == set(range(7))


def test_a_sampler_that_refuses_a_bucket_takes_the_rest_so_that_ranks_can_go_on() -> None:
    lines = Lines(2, 2)
    sending = lines.send(Copy(torch.float32))
    other = lines.threads.submit(taken, lines.receivers[1])
    with closing(lines.receivers[0].buckets()) as buckets:
        next(buckets)
    assert len(other.result(20)) == 14
    assert [part.result(20).broken for part in sending] == ["", ""]
    # The lines are as good as before.
    again = lines.send(Copy(torch.float32))
    taking = [lines.threads.submit(taken, end) for end in lines.receivers]
    assert [len(arrived.result(20)) for arrived in taking] == [14, 14]
    assert [part.result(20).broken for part in again] == ["", ""]


def test_a_sampler_that_is_lost_stops_nobody_for_long_and_ranks_gather_to_the_end() -> None:
    lines = Lines(2, 2)
    gathered: list[int] = []

    def counted() -> Iterator[Bucket]:
        for index, bucket in enumerate(weights()):
            gathered.append(index)
            yield bucket

    started = time.monotonic()
    lines.receivers[1].cut()
    sending = [
        lines.threads.submit(s.send, counted(), Copy(torch.float32), by_line=True)
        for s in lines.senders
    ]
    with pytest.raises(LineError, match="line between ranks and samplers broke"):
        taken(lines.receivers[0])
    sent = [part.result(20) for part in sending]
    assert any(part.broken for part in sent)
    assert sorted(gathered) == sorted([*range(7), *range(7)])
    assert time.monotonic() - started < 10
    # What was sent can be had all the same.
    assert {index for sender in lines.senders for index in sender.kept} == set(range(7))


def test_a_rank_that_fails_in_the_middle_says_why_and_leaves_no_sampler_waiting() -> None:
    lines = Lines(1, 1, deadline_s=5)  # for which the sampler waits

    def failing() -> Iterator[Bucket]:
        yield from weights(2)
        raise FloatingPointError("this weight is not a number")

    sending = lines.threads.submit(
        lines.senders[0].send, failing(), Copy(torch.float32), by_line=True
    )
    with pytest.raises(LineError):
        taken(lines.receivers[0])
    with pytest.raises(FloatingPointError, match="not a number"):
        sending.result(20)


def test_who_does_not_come_is_waited_for_until_the_deadline() -> None:
    store = dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    meeting = Meeting(HERE, store.port, "nobody", [1], 1, "gloo", 1.0)
    started = time.monotonic()
    with pytest.raises(LineError):
        Sender(0, 1).join(meeting, Seat(0, 0), address=HERE, device=CPU)
    assert time.monotonic() - started < 8


def test_the_call_follows_from_where_the_ends_are() -> None:
    cpu = ("",)
    first, second, both = ("a",), ("b",), ("a", "b")
    other = ("c", "d")
    assert call_between([cpu, cpu], [cpu]) == "gloo"
    assert call_between([first, second], [other]) == "nccl"
    assert call_between([first, second], [both]) == "ipc"
    assert call_between([first, second], [first, second]) == "ipc"
    assert call_between([first], [cpu]) is None
    # Some share a device and some do not: NCCL refuses that, and IPC does not reach.
    assert call_between([first], [both]) is None
    # A line for each rank; workers of one model each have their own place on all of them.
    assert seating([first, second], [other], "nccl") == (
        [2, 2],
        [[[Seat(0, 1), Seat(1, 1)], [Seat(0, 2), Seat(1, 2)]]],
    )
    # On one device, the line of the rank that is there.
    assert seating([first, second], [both], "ipc") == ([1, 1], [[[Seat(0, 1)], [Seat(1, 1)]]])


@pytest.mark.parametrize("shape", [(), (11,), (4, 6), (5, 3, 2), (1, 8)])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_parts_of_a_weight_that_begin_and_end_anywhere_add_up_to_it(
    shape: tuple[int, ...], world: int
) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for dtype in (torch.float32, torch.bfloat16):
        values = whole.to(dtype).reshape(-1)
        size = -(-len(values) // world)
        parts = [values[rank * size : (rank + 1) * size] for rank in range(world)]
        found = [
            piece
            for rank, part in enumerate(parts)
            for piece in pieces_of(part, whole.shape, min(rank * size, len(values)))
        ]
        assert joined(found) == fingerprint(whole.to(dtype))
        moved = [piece for part in parts[:1] for piece in pieces_of(part, whole.shape, 1)]
        assert len(values) == 1 or joined([*moved, *found[1:]]) != joined(found)
