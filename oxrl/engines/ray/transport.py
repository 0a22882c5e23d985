"""RayTransport: from training ranks to rollout actors without the driver, which sees digests only.

The ranks gather a bucket at a time. They take turns at sending one, to every process that samples,
over lines that they and the samplers meet on; while one is on its way the next is gathered. Where
no line can be, or none holds, each rank puts its share into the object store and the actors fetch
it from there: so does an actor that is replaced later, of what was sent last.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from oxrl.engines.delivery.proof import Forwards, Probe
from oxrl.engines.ray.cluster import Passed
from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.ray.trainer import Brought, NewImages, NewModel, RankGroup
from oxrl.engines.train import Fingerprints
from oxrl.engines.transport.base import Copy
from oxrl.engines.transport.ends import Devices, Sent
from oxrl.engines.transport.line import Call, Meeting, Seat
from oxrl.errors import required
from oxrl.tables.roles import POLICY
from oxrl.tables.watch import Deadline
from oxrl.types import Metrics

log = logging.getLogger(__name__)

# How often lines are laid again before the object store has to do.
ATTEMPTS = 3


class RayTransport:
    """See WeightTransport.

    Args:
        group: the training ranks.
        rollouts: the actors that sample.
        new_model: a model of the policy's architecture, made on rank 0; picklable.
        new_images: an image store there, of a model that reads images; None: it reads none.
    """

    def __init__(
        self,
        group: RankGroup,
        rollouts: RayRollouts,
        new_model: NewModel,
        new_images: NewImages | None = None,
    ) -> None:
        self._group = group
        self._rollouts = rollouts
        self._new_model = new_model
        self._new_images = new_images
        self._meetings = itertools.count()
        # The actors that have met the ranks; None: whoever is there has to meet them first.
        self._met: list[Any] | None = None
        self._no_line = False
        # Of the last delivery, by rank.
        self._sent: Sequence[Sent] = ()
        self._passed = Passed.bytes

    def deliver(self, version: int, copy: Copy) -> Fingerprints:
        why = ""
        for _ in range(ATTEMPTS):
            if self._no_line:
                break
            why = self._meet()
            if not why:
                found, why = self._by_line(version, copy)
                if found is not None:
                    return found
            self._met = None
        if not self._no_line:
            log.warning(
                "weights go through Ray's object store from now on, which takes longer: after %d "
                "attempts ranks and samplers are not connected (%s)",
                ATTEMPTS,
                why,
            )
        self._no_line = True
        return self._by_store(version, copy)

    def sent(self) -> Fingerprints:
        asked = self._group.begin("sent")
        found = self._group.finish(asked, "read what they sent", self._deadline)
        return dict(itertools.chain.from_iterable(own.items() for own in found))

    def score(self, probe: Probe, copy: Copy) -> Forwards:
        group = self._group
        load = group.waits.of("load", group.sizes[POLICY])
        group.finish(group.begin("make_model", self._new_model), "make a model", load)
        images = self._brought(probe)
        sync = self._deadline
        begun = group.begin("score_copy", POLICY, probe, copy, images, sync)
        scored: Forwards | None = group.finish(begun, "score a copy of its weights", sync)[0]
        return required(scored, "scores of rank 0")

    @property
    def _deadline(self) -> Deadline:
        """The deadline of a delivery, or of a part of one."""
        return self._group.waits.of("sync", self._group.sizes[POLICY])

    def metrics(self) -> Metrics:
        passed = Passed.bytes - self._passed
        self._passed = Passed.bytes
        sizes = [part.bytes for part in self._sent]
        return {
            "sync/sent_bytes": float(sum(sizes)),
            "sync/sent_bytes_rank_max": float(max(sizes, default=0)),
            "sync/buckets_in_flight": float(max((p.in_flight for p in self._sent), default=0)),
            # Of everything since the last delivery, perturbed copies and limits included.
            "sync/driver_bytes": float(passed),
        }

    def _brought(self, probe: Probe) -> Brought | None:
        """Return the images that the probe shows, for rank 0."""
        if self._new_images is None:
            return None
        names = dict.fromkeys(name for images in probe.shown for name in images)
        store = required(self._rollouts.images, "images of the prompts")
        return Brought(self._new_images, store.contents(names))

    def _meet(self) -> str:
        """Lay lines between ranks and actors, where there are none; return why that failed."""
        rollouts = self._rollouts
        here = [worker.actor for worker in rollouts.workers]
        if self._met is not None and self._met == here:
            return ""
        receivers, broken = rollouts.finish_each(
            [actor.where.remote() for actor in here], "say where it is"
        )
        if broken:
            return broken
        senders = self._group.finish(
            self._group.begin("where"), "say where they are", self._deadline
        )
        call = call_between(senders, receivers)
        if call is None:
            self._no_line = True
            return "they are on devices of different kinds"
        name = f"weights/{next(self._meetings)}"
        host, port = self._group.store
        counts, seats = seating(senders, receivers, call)
        turns = 1 if call == "ipc" else len(senders)
        meeting = Meeting(host, port, name, counts, turns, call, self._deadline.seconds)
        joining = self._group.begin("join", meeting)
        ends = zip(here, seats, strict=True)
        coming = [actor.join.remote(meeting, places) for actor, places in ends]
        joined = self._group.finish(joining, "meet the samplers", self._deadline)
        refused = [why for why in joined if why]
        _, broken = rollouts.finish_each(coming, "meet the training ranks")
        if not (refused or broken):
            self._met = here
            log.info("weights go from %d ranks to %d actors by %s", len(senders), len(here), call)
        return broken or "; ".join(refused)

    def _by_line(self, version: int, copy: Copy) -> tuple[Fingerprints | None, str]:
        """Deliver over lines; return the fingerprints, or else the reason why the lines broke."""
        rollouts = self._rollouts
        rollouts.begin_update(version)
        sending = self._group.begin("send", POLICY, copy, True, self._deadline)
        receiving = [worker.actor.receive.remote(version) for worker in rollouts.workers]
        sent: list[Sent] = self._group.finish(sending, "send weights", self._deadline)
        answers, broken = rollouts.finish_each(receiving, "receive weights")
        refused = "; ".join(part.broken for part in sent if part.broken)
        if broken or refused:
            return None, broken or refused
        self._sent = sent
        return rollouts.received(answers, self._kept), ""

    def _by_store(self, version: int, copy: Copy) -> Fingerprints:
        self._rollouts.begin_update(version)
        sending = self._group.begin("send", POLICY, copy, False, self._deadline)
        self._sent = self._group.finish(sending, "lay out weights", self._deadline)
        return self._rollouts.load(self._kept)

    def _kept(self) -> list[Any]:
        """Return the references to what the ranks sent last, in its order."""
        # A rank answers between two calls of training, however long these take.
        step = self._group.waits.of("step")
        longest = replace(self._deadline, base_s=self._deadline.base_s + step.seconds)
        found = self._group.finish(self._group.begin("kept"), "give what they sent", longest)
        indexed: dict[int, Any] = dict(itertools.chain.from_iterable(found))
        return [indexed[index] for index in sorted(indexed)]


def call_between(senders: Sequence[Devices], receivers: Sequence[Devices]) -> Call | None:
    """Choose the call that moves tensors from these ranks to these samplers; None: no line can."""
    leave = list(itertools.chain(*senders))
    arrive = list(itertools.chain(*receivers))
    if not any(leave) and not any(arrive):
        return "gloo"
    if not (all(leave) and all(arrive)):
        return None
    if set(arrive) <= set(leave):
        return "ipc"
    # NCCL has no two places on one GPU.
    apart = len({*leave, *arrive}) == len(leave) + len(arrive)
    return "nccl" if apart else None


def seating(
    senders: Sequence[Devices], receivers: Sequence[Devices], call: Call
) -> tuple[list[int], list[list[list[Seat]]]]:
    """Give each process a seat on each of its lines; every rank has a line.

    Returns:
        (how many receive on each line, the seats of each process of each receiver).
    """
    lines = range(len(senders))
    counts = [0] * len(senders)
    seats: list[list[list[Seat]]] = []
    for devices in receivers:
        own: list[list[Seat]] = []
        for device in devices:
            on = [line for line in lines if call != "ipc" or device in senders[line]]
            for line in on:
                counts[line] += 1
            own.append([Seat(line, counts[line]) for line in on])
        seats.append(own)
    return counts, seats
