"""RolloutWorkers: several rollout workers presented as one RolloutEngine.

Each worker hosts an engine in a process of its own: of this machine (`engines/sample/hosted.py`),
or a Ray actor (`engines/ray/rollouts.py`). A response depends on its request alone
(per-request seeds), so it does not matter which worker samples it, or whether another died over it
before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from safetensors.torch import load

from oxrl.engines.sample import (
    Finished,
    Responses,
    RolloutEngine,
    RowLogprobs,
    ShownImages,
    TokenRows,
)
from oxrl.engines.sample.parked import ParkingEngine, requests_in
from oxrl.engines.train import Bucket, Buckets, Fingerprints
from oxrl.errors import DeadlineError, EngineError, LostActorError, WeightSyncError
from oxrl.runs.waiting import waiting_for
from oxrl.tables.watch import Deadline, Deadlines, Phase
from oxrl.types import Completion, Metrics, Request, Requests
from oxrl.usercode.messages import Json

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
BuildEngine = Callable[[], RolloutEngine]
# How a worker is called: itself, or so that a lost actor is replaced first.
Calling = Callable[..., Any]
# What starts actors gives handles to them, and references to what they will answer and to weights.
Handle = Any
Reference = Any
# Where an actor lives.
Place = Any
# References to weights where actors find them, which are put there when somebody asks.
Weights = Callable[[], list[Reference]]
# What an actor has sampled: the id of a request, and its completion.
Answer = tuple[str, Completion]
# What it answers to a poll: what it has sampled, and its engine's round.
Polled = tuple[list[Answer], int]
# What `RolloutEngine.logprobs` is asked.
Scored = tuple[TokenRows, float, ShownImages]

# An actor reports back at least this often while it samples, so that silence means something.
POLL_S = 1.0
CLOSE_S = 5.0
# Names of what is called to deliver weights, or to prove that they arrived.
OF_SYNC = frozenset({"held", "logprobs", "score_with_images", "weight_version", "sleep", "wake"})
# Actors that hold the same weights may say this much (nats) differently of the same row: bfloat16
# rounding.
AGREEMENT = 0.1


class Laid(NamedTuple):
    """The place of a bucket, as safetensors has it: `size` bytes of a file, from byte `at` on."""

    path: str
    at: int
    size: int


class EngineActor:
    """The process around one engine, on the machine of whoever asks."""

    def build(self, directory: str, build: BuildEngine) -> int:
        """Make the engine, where the driver's relative paths mean the same; its weight version."""
        self.enter(directory)
        self._engine = cast(ParkingEngine, build())
        return self._engine.version

    def call(self, function: Calling, *inputs: Any) -> Any:
        return call_on(self._engine, function, inputs)

    def poll(self, seconds: float, until: float) -> Polled:
        engine = self._engine
        try:
            answers = _answers(engine.poll(seconds, until))
        except DeadlineError:
            answers = []  # still sampling; how long is too long is for the caller to say
        return answers, engine.round

    def update_weights(self, references: Sequence[Reference], version: int) -> Fingerprints:
        return self._engine.update_weights(map(self.fetch, references), version)

    def enter(self, directory: str) -> None:
        """Work in a directory."""
        os.chdir(directory)

    def fetch(self, reference: Reference) -> Bucket:
        """Fetch the tensors that a reference stands for."""
        found: Laid = reference
        with open(found.path, "rb") as file:
            file.seek(found.at)
            return [*load(file.read(found.size)).items()]


class Processes(Protocol):
    """Starts the processes around engines and calls them: a Ray cluster, or this machine."""

    def start(self, actor: type[EngineActor], place: Place) -> Handle:
        """Start a new actor; its handle's methods have a `remote`, which returns a reference."""
        ...

    def end(self, actor: Handle) -> None:
        """End an actor, whatever it is doing."""
        ...

    def wait(
        self, references: Sequence[Reference], *, timeout: float, count: int = 1
    ) -> tuple[list[Reference], list[Reference]]:
        """Those of calls that are over, once so many are or the time is up; and the others."""
        ...

    def result_of(self, reference: Reference, what: str, deadline: Deadline) -> Any:
        """Return an actor's result; an exception of its code is raised here as it was there.

        Raises:
            LostActorError: the actor died or did not answer in time.
        """
        ...

    def put_buckets(self, buckets: Buckets) -> list[Reference]:
        """Lay weights where actors fetch them, and forget those before; references to them."""
        ...

    def await_place(self, place: Place, deadline: Deadline) -> None:
        """Wait until there is room for a new actor."""
        ...


@dataclass
class Boundary:
    """A worker between two rounds, and all that it was asked since then: whoever takes its place is
    asked for the same, and comes to the same.

    state: of its engine. requests: those that the state has, and those that were given since.
    since: the worker's round, and what it was given then; None: its counters were taken.
    """

    state: Json
    requests: dict[str, Request]
    since: list[tuple[int, Requests | None]] = field(default_factory=list)


class RolloutWorker:
    """An actor as the driver sees it: its requests in flight, and the poll that it is working on.

    Its own methods raise LostActorError; `version` and `logprobs`, which the delivery proof asks
    of every worker, replace a lost actor first.
    """

    def __init__(self, group: RolloutWorkers, number: int, place: Place) -> None:
        self.name = f"{group.noun} {number}"
        self._group = group
        self.place = place
        self.in_flight: dict[str, Request] = {}
        # Of its engine, when it answered last.
        self.round = 0
        # None: nobody asked for a state, or its place cannot be taken from there any more.
        self.boundary: Boundary | None = None
        self.start()

    def start(self) -> None:
        """Start a new actor, which begins to load its model."""
        self.actor = self._group.cluster.start(self._group.actor, self.place)
        self.polling: Any = None
        self.polling_since = 0.0
        self._loading = self.actor.build.remote(os.getcwd(), self._group.build)

    def wait_loaded(self) -> int:
        """Wait until a new actor has loaded; return the weight version that it starts with."""
        return self.result(self._loading, "load its model", "load")

    def call(
        self, function: Callable[Concatenate[ParkingEngine, P], R], *inputs: P.args, **_: P.kwargs
    ) -> R:
        """Call a method of the actor's engine, or a function of it, with positional inputs."""
        phase = "sync" if function.__name__ in OF_SYNC else "rollout"
        return self.result(self.actor.call.remote(function, *inputs), function.__name__, phase)

    def result(self, reference: Reference, what: str, phase: Phase) -> Any:
        """Wait for the actor's answer to a call, within the deadline of a phase."""
        deadline = self._group.deadline(phase)
        asked = f"{self.name}, asked to {what},"
        with waiting_for(asked.rstrip(","), deadline):
            return self._group.cluster.result_of(reference, asked, deadline)

    def start_poll(self, seconds: float, until: float) -> None:
        """Have the actor sample, unless it still does."""
        if self.polling is None:
            self.polling = self.actor.poll.remote(seconds, until)
            self.polling_since = monotonic()

    def note(self, given: Requests | None) -> None:
        """Note what the actor was given, or that its counters were taken, since the boundary."""
        if self.polling is not None:
            self.boundary = None  # nobody knows at which round that was
        if self.boundary is not None:
            self.boundary.requests.update((one.id, one) for one in given or ())
            self.boundary.since.append((self.round, given))

    def samples_until(self, round: float) -> bool:
        """Whether the actor has something to sample before a round, or has not said what it did."""
        return bool(self.in_flight) and (self.polling is not None or self.round < round)

    def settle(self) -> None:
        """Wait for what the actor is sampling, and drop it."""
        if self.polling is not None:
            with suppress(LostActorError):  # whoever calls it next is told
                self.result(self.polling, "poll", "rollout")
            self.polling = None

    def forget_older_weights(self) -> None:
        """Forget the boundary if rounds may have passed since: other weights are to come."""
        boundary = self.boundary
        if boundary and (self.polling is not None or boundary.state["round"] != self.round):
            self.boundary = None

    def sample_again(self, start: int, until: int) -> None:
        """Have a new actor sample, between two rounds, what the one before it has answered."""
        before = -1
        answers: list[Answer] = []
        # A poll passes a round at least, unless nothing is left.
        while start < until and (answers or start > before):
            before = start
            polled = self.actor.poll.remote(POLL_S, until)
            answers, start = self.result(polled, "poll", "rollout")
        self.call(set_round, until)

    @property
    def version(self) -> int:
        return self._group.call(self, weight_version)

    def logprobs(
        self,
        rows: TokenRows,
        temperature: float = 1.0,
        shown: ShownImages = (),
    ) -> RowLogprobs:
        return self._group.score(self, (rows, temperature, shown))

    def held(self) -> Fingerprints:
        return self._group.held_by(self)


class RolloutWorkers:
    """ParkingEngine over several processes: rollout workers behind one interface.

    An actor that dies or hangs is replaced: the new one gets the current weights, has to prove that
    it holds them, and samples again what the old one had in flight. Where the caller asks for the
    state before it delivers weights, what was sampled by then is kept, and the new actor goes on
    from there through the same rounds, to the same responses. A request that loses a second actor
    ends the run.

    Args:
        cluster: what starts actors.
        places: where they live.
        build: makes the engine of an actor, there; picklable.
        waits: longest waits for an actor's answer; one that is silent for half of that of rollouts
            while it samples is replaced.
        nbytes: of the model that each reads and is sent, as far as that is known.
        before_wake: where a training rank needs their memory, actors sleep while nothing is being
            sampled; this is called before they take it again, for the ranks to give up what they
            only keep. None: actors do not sleep.
        images: those of the prompts, which go to the actors with the requests; None: there are
            none.
    """

    # What a worker is called in messages, where their number is set, and what one serves.
    noun = "sampling process"
    setting = "inference_engine.processes"
    actor = EngineActor

    def __init__(
        self,
        cluster: Processes,
        places: Sequence[Place],
        build: BuildEngine,
        waits: Deadlines,
        *,
        nbytes: int = 0,
        before_wake: Callable[[], None] | None = None,
        images: ImageStore | None = None,
    ) -> None:
        self.cluster = cluster
        self.images = images
        self.build = build
        self._waits = waits
        self._nbytes = nbytes
        self._before_wake = before_wake
        self.workers = [RolloutWorker(self, number, place) for number, place in enumerate(places)]
        # Requests that have lost an actor already.
        self._retried: set[str] = set()
        self._asleep = False
        self._replaced = 0
        # Requests that were given to a new actor, and the number of its worker.
        self._retries: list[tuple[str, int]] = []
        # Where replacements find the last weights.
        self._weights: Weights = list
        self._fingerprints: Fingerprints = {}
        self._held: Fingerprints = {}
        # Rows that were scored with the current weights, and their logprobs (nats).
        self._probe: tuple[Scored, RowLogprobs] | None = None
        self._version = max(worker.wait_loaded() for worker in self.workers)

    @property
    def version(self) -> int:
        return self._version

    @property
    def round(self) -> int:
        """See ParkingEngine: the least of the workers that have something to sample."""
        busy = [worker.round for worker in self.workers if worker.in_flight]
        return min(busy, default=max(worker.round for worker in self.workers))

    @round.setter
    def round(self, value: int) -> None:
        for worker in self.workers:
            if worker.round != value:
                self.call(worker, set_round, value)
                worker.round = value

    def submit(self, requests: Requests) -> None:
        """See RolloutEngine. Samples of one prompt go to one actor, which reads the prompt once."""
        in_flight = {id for worker in self.workers for id in worker.in_flight}
        for request in requests:
            if request.id in in_flight:
                raise EngineError(f"request id {request.id!r} is already being sampled")
        self._set_asleep(False)
        for _, group in groupby(requests, key=lambda request: request.prompt.token_ids):
            samples = list(group)
            worker = min(self.workers, key=_tokens_in_flight)
            self._submit_to(worker, samples, self.call)
            worker.note(samples)
            worker.in_flight.update((request.id, request) for request in samples)

    def _submit_to(self, worker: RolloutWorker, requests: Requests, call: Calling) -> None:
        """Give requests to a worker, and with them the images that they show."""
        if self.images is None:
            call(worker, RolloutEngine.submit, requests)
            return
        contents = self.images.contents(_shown_by(requests))
        known = list(worker.in_flight.values())
        if worker.boundary is not None:  # what was answered since may be sampled again
            known += worker.boundary.requests.values()
        call(worker, submit_with_images, requests, contents, _shown_by([*known, *requests]))

    def state(self) -> Json:
        """See ParkingEngine: the state of each worker's engine, and what has lost an actor so far.

        Until weights are delivered after further rounds, or something is aborted, a lost actor's
        place is taken from here.
        """
        for worker in self.workers:
            if worker.polling is not None:
                raise EngineError(
                    f"{worker.name} is still sampling: poll until its round is reached before the "
                    "state is asked for"
                )
        states = [self.call(worker, ParkingEngine.state) for worker in self.workers]
        for worker, state in zip(self.workers, states, strict=True):
            worker.boundary = Boundary(state, dict(worker.in_flight))
        return {"workers": states, "retried": sorted(self._retried)}

    def restore(self, state: Json, requests: Mapping[str, Request]) -> None:
        """See ParkingEngine.

        Raises:
            EngineError: also where the state is that of another number of workers. Workers before
                one that refuses its part are restored already.
        """
        states: list[Json] = state.get("workers", [])
        if len(states) != len(self.workers):
            raise EngineError(
                f"the state is that of {len(states)} {self.noun}s, and there are "
                f"{len(self.workers)}: set {self.setting} to {len(states)}"
            )
        parts = [requests_in(own, requests) for own in states]
        self._set_asleep(False)
        for worker, own, held in zip(self.workers, states, parts, strict=True):
            worker.settle()
            self._restore_to(worker, own, held, self.call)
            worker.in_flight = held
            worker.round = own["round"]
            worker.boundary = Boundary(own, dict(held))
        self._retried = set(state["retried"])

    def _restore_to(
        self, worker: RolloutWorker, state: Json, requests: dict[str, Request], call: Calling
    ) -> None:
        """Restore a worker's engine, which is given the images that the requests show."""
        if self.images is None:
            call(worker, ParkingEngine.restore, state, requests)
            return
        names = _shown_by(requests.values())
        call(worker, restore_with_images, state, requests, self.images.contents(names))

    def poll(self, deadline_s: float, until: float = inf) -> Responses:
        """See ParkingEngine. What an earlier call began is waited for, whatever `until` is."""
        end = monotonic() + deadline_s
        finished: Responses = []
        while not finished:
            busy = [worker for worker in self.workers if worker.samples_until(until)]
            if not busy:
                break
            for worker in busy:
                worker.start_poll(min(POLL_S, deadline_s), until)
            ready = self._wait([worker.polling for worker in busy])
            for worker in busy:
                silent_s = monotonic() - worker.polling_since
                if worker.polling in ready:
                    finished += self._collect(worker)
                elif silent_s > self.deadline("rollout").seconds / 2:
                    half = f"half of {self.deadline('rollout')}"
                    silence = f"{worker.name} has not answered for {silent_s:.1f} s, {half}"
                    self._replace(worker, LostActorError(silence))
                    end = monotonic() + deadline_s
            # Somebody who is silent is waited for: either it answers or it is replaced.
            answering = all(worker.polling is None for worker in busy)
            if not finished and answering and monotonic() > end:
                in_flight = [len(worker.in_flight) for worker in self.workers]
                raise DeadlineError(
                    f"waited {deadline_s:g} s for a sampled response: {self.noun}s answer, and "
                    f"have {in_flight} requests in flight. "
                    "Raise run.deadlines.rollout or lower rollout.max_tokens"
                )
        self._sleep_if_idle()
        return finished

    def _wait(self, polls: Sequence[Any]) -> Sequence[Any]:
        """Wait for a poll, POLL_S seconds at most; return all polls that are done."""
        self.cluster.wait(polls, timeout=POLL_S)
        ready, _ = self.cluster.wait(polls, timeout=0, count=len(polls))
        return ready

    def _collect(self, worker: RolloutWorker) -> Responses:
        """Return the answers of a finished poll; empty if the actor died and was replaced."""
        polled = worker.polling
        worker.polling = None
        try:
            answers, worker.round = worker.result(polled, "poll", "rollout")
        except LostActorError as lost:
            self._replace(worker, lost)
            return []
        return self._taken(worker, answers)

    def _taken(self, worker: RolloutWorker, answers: Iterable[Answer]) -> Responses:
        """Take back the requests that a worker has answered."""
        found: Responses = []
        for id, completion in answers:
            request = worker.in_flight.pop(id, None)
            if request is None:
                raise EngineError(f"{worker.name} returned {id!r}, which it was not given")
            self._retried.discard(id)
            found.append(Finished(request, completion))
        return found

    def abort(self, ids: Sequence[str]) -> Responses:
        aborted: Responses = []
        for worker in self.workers:
            wanted = [id for id in ids if id in worker.in_flight]
            if wanted:
                aborted += self._taken(worker, self.call(worker, abort_answers, wanted))
                worker.boundary = None
        self._sleep_if_idle()
        return aborted

    def update_weights(self, buckets: Buckets, version: int) -> Fingerprints:
        """See RolloutEngine. Each bucket is laid out once, for all actors.

        Raises:
            WeightSyncError: actors do not hold the same tensors, or not this version.
        """
        self.begin_update(version)
        references = self.cluster.put_buckets(buckets)
        return self.load(lambda: references)

    def begin_update(self, version: int) -> None:
        """Forget what is known of the weights so far, which other ones are to replace."""
        self._set_asleep(False)
        # The old ones go first: nowhere are there two copies.
        self._weights = list
        self._fingerprints = {}
        self._held = {}
        self._probe = None
        self._version = version
        for worker in self.workers:
            worker.forget_older_weights()

    def load(self, weights: Weights) -> Fingerprints:
        """Have every actor load weights that were laid out, after `begin_update`."""
        self._weights = weights
        references = weights()
        updates = [w.actor.update_weights.remote(references, self._version) for w in self.workers]
        for worker, update in zip(self.workers, updates, strict=True):
            try:
                self._prove(worker, worker.result(update, "update_weights", "sync"))
            except LostActorError as lost:
                self._replace(worker, lost)
        return self._fingerprints

    def deadline(self, phase: Phase) -> Deadline:
        """Return the longest wait for an actor."""
        return self._waits.of(phase, self._nbytes)

    def _prove(self, worker: RolloutWorker, fingerprints: Fingerprints) -> None:
        """Check that a worker has the others' version and tensors, and scores as they do."""
        found = worker.call(weight_version)
        if found != self._version:
            raise WeightSyncError(f"{worker.name} serves version {found}, not {self._version}")
        expected = self._fingerprints or fingerprints
        self._fingerprints = expected
        names = expected.keys() | fingerprints.keys()
        wrong = sorted(name for name in names if fingerprints.get(name) != expected.get(name))
        if wrong:
            raise WeightSyncError(
                f"{worker.name} holds other weights of version {found} than the others: "
                f"{len(wrong)} tensors differ, such as {wrong[:1]}"
            )
        if self._held and worker.call(RolloutEngine.held) != self._held:
            raise WeightSyncError(f"{worker.name} computes with other weights than were proved")
        if self._probe is not None:
            self._check_probe(worker, *self._probe)

    def _check_probe(self, worker: RolloutWorker, asked: Scored, expected: RowLogprobs) -> None:
        ours = chain(*self._scores(worker, asked, RolloutWorker.call))
        theirs = chain(*expected)
        worst = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        if not worst <= AGREEMENT:
            raise WeightSyncError(f"{worker.name} scores the last probe up to {worst:.3g} nats off")

    def logprobs(
        self,
        rows: TokenRows,
        temperature: float = 1.0,
        shown: ShownImages = (),
    ) -> RowLogprobs:
        """See RolloutEngine. Actor 0 answers; `members` are asked one by one."""
        return self.score(self.workers[0], (rows, temperature, shown))

    def held(self) -> Fingerprints:
        """See RolloutEngine. Actor 0 answers; `members` are asked one by one."""
        return self.held_by(self.workers[0])

    def held_by(self, worker: RolloutWorker) -> Fingerprints:
        """Fingerprint the weights that one actor computes with; kept to check replacements."""
        self._set_asleep(False)
        found = self.call(worker, RolloutEngine.held)
        self._held = self._held or found
        return found

    @property
    def members(self) -> Mapping[str, RolloutWorker]:
        """Every worker by name, for what has to be asked of each."""
        return {worker.name: worker for worker in self.workers}

    def score(self, worker: RolloutWorker, asked: Scored) -> RowLogprobs:
        """Return one actor's scores of rows; kept to check replacements."""
        self._set_asleep(False)
        scores = self._scores(worker, asked, self.call)
        self._probe = (asked, scores)
        return scores

    def _scores(self, worker: RolloutWorker, asked: Scored, call: Calling) -> RowLogprobs:
        """Score rows by one actor, which is given the images that they show."""
        rows, temperature, shown = asked
        if self.images is None or not shown:
            return call(worker, RolloutEngine.logprobs, rows, temperature)
        names = dict.fromkeys(name for images in shown for name in images)
        contents = self.images.contents(names)
        kept = [*_shown_by(worker.in_flight.values()), *names]
        return call(worker, score_with_images, asked, contents, kept)

    def metrics(self) -> Metrics:
        """See RolloutEngine: counts and rates are summed over actors, means averaged."""
        parts = [self.call(worker, RolloutEngine.metrics) for worker in self.workers]
        for worker in self.workers:
            worker.note(None)
        merged: Metrics = {}
        for name in parts[0]:
            merged[name] = sum(part[name] for part in parts)
            if "mean" in name or "frac" in name:
                merged[name] /= len(parts)
        merged["rollout/replaced_actors"] = float(self._replaced)
        self._replaced = 0
        return merged

    def taken_retries(self) -> list[tuple[str, int]]:
        """Requests that were given to a new actor since the last call, each with the number of its
        worker.
        """
        taken = self._retries
        self._retries = []
        return taken

    def sleep(self) -> None:
        self._set_asleep(True)

    def wake(self) -> None:
        self._set_asleep(False)

    def close(self) -> None:
        """End every actor, after a moment for its engine's own processes.

        A cluster is its owner's to close.
        """
        closing = [worker.actor.call.remote(RolloutEngine.close) for worker in self.workers]
        self.cluster.wait(closing, timeout=CLOSE_S, count=len(closing))
        for worker in self.workers:
            self.cluster.end(worker.actor)

    def _sleep_if_idle(self) -> None:
        if self._before_wake and not any(worker.in_flight for worker in self.workers):
            self._set_asleep(True)

    def _set_asleep(self, asleep: bool) -> None:
        if asleep != self._asleep:
            if self._before_wake and not asleep:
                self._before_wake()
            change = RolloutEngine.sleep if asleep else RolloutEngine.wake
            for worker in self.workers:
                self.call(worker, change)
            self._asleep = asleep

    def call(
        self,
        worker: RolloutWorker,
        function: Callable[Concatenate[ParkingEngine, P], R],
        *inputs: P.args,
        **_: P.kwargs,
    ) -> R:
        """As `worker.call`; an actor that is lost over it is replaced, and the new one called."""
        try:
            return worker.call(function, *inputs, **_)
        except LostActorError as lost:
            self._replace(worker, lost)
            return worker.call(function, *inputs, **_)

    def _replace(self, worker: RolloutWorker, lost: LostActorError) -> None:
        """Start a new actor for a lost one, with the current weights and the requests in flight."""
        twice = sorted(self._retried & worker.in_flight.keys())
        if twice:
            raise EngineError(
                f"{lost}; {len(twice)} requests lost their second actor over it, "
                f"such as {twice[0]!r}"
            )
        started = monotonic()
        self.cluster.end(worker.actor)
        with waiting_for(f"room for {worker.name}", self.deadline("load")):
            self.cluster.await_place(worker.place, self.deadline("load"))
        worker.start()
        worker.wait_loaded()
        references = self._weights()
        if references:
            update = worker.actor.update_weights.remote(references, self._version)
            self._prove(worker, worker.result(update, "update_weights", "sync"))
        again = self._take_place(worker)
        self._retried |= worker.in_flight.keys()
        self._retries += [(id, self.workers.index(worker)) for id in worker.in_flight]
        if self._asleep:
            worker.call(RolloutEngine.sleep)
        self._replaced += 1
        log.warning(
            "%s; replaced within %.1f s, with weights of version %d; "
            "%d requests are sampled again%s",
            lost,
            monotonic() - started,
            self._version,
            len(worker.in_flight),
            again,
        )

    def _take_place(self, worker: RolloutWorker) -> str:
        """Give a new actor what the one before it had; from where on that is sampled again."""
        boundary = worker.boundary
        if boundary is None:
            if worker.in_flight:
                self._submit_to(worker, list(worker.in_flight.values()), RolloutWorker.call)
            worker.call(set_round, worker.round)
            return ""
        self._restore_to(worker, boundary.state, boundary.requests, RolloutWorker.call)
        at: int = boundary.state["round"]
        for round, given in boundary.since:
            worker.sample_again(at, round)
            at = round
            if given is None:
                worker.call(RolloutEngine.metrics)
            else:
                self._submit_to(worker, given, RolloutWorker.call)
        worker.sample_again(at, worker.round)
        return f", from round {boundary.state['round']} on"


def _tokens_in_flight(worker: RolloutWorker) -> int:
    return sum(request.sampling.max_tokens for request in worker.in_flight.values())


def _shown_by(requests: Iterable[Request]) -> list[str]:
    """Return the names of the images that requests show, each once."""
    return list(dict.fromkeys(name for request in requests for name in request.prompt.images))


def submit_with_images(
    engine: RolloutEngine,
    requests: Requests,
    contents: Mapping[str, bytes],
    kept: Sequence[str],
) -> None:
    """In an actor: take images over, and the requests that show them."""
    _images_of(engine).hold_only(contents, kept)
    engine.submit(requests)


def restore_with_images(
    engine: ParkingEngine,
    state: Json,
    requests: Mapping[str, Request],
    contents: Mapping[str, bytes],
) -> None:
    """In an actor: take over the images of requests, and the state in which these are."""
    _images_of(engine).hold_only(contents, list(contents))
    engine.restore(state, requests)


def set_round(engine: ParkingEngine, round: int) -> None:
    """In an actor: whoever goes by rounds says which one it is."""
    engine.round = round


def score_with_images(
    engine: RolloutEngine,
    asked: Scored,
    contents: Mapping[str, bytes],
    kept: Sequence[str],
) -> RowLogprobs:
    """In an actor: take images over, and score the rows that show them."""
    _images_of(engine).hold_only(contents, kept)
    return engine.logprobs(*asked)


def _images_of(engine: RolloutEngine) -> ImageStore:
    """Return the images of an engine that samples from a model that reads them."""
    return cast("Any", engine).images


def call_on(engine: object, function: Calling, inputs: Sequence[Any]) -> Any:
    """Call a method as the engine's own class has it, or any other function of an engine."""
    method = getattr(engine, function.__name__, None)
    return function(engine, *inputs) if method is None else method(*inputs)


def abort_answers(engine: RolloutEngine, ids: Sequence[str]) -> list[Answer]:
    """In an actor: stop requests; what was sampled of them."""
    return _answers(engine.abort(ids))


def _answers(finished: Iterable[Finished]) -> list[Answer]:
    """Return what is sent back: ids and completions, because the driver has the requests."""
    return [(item.request.id, item.completion) for item in finished]


def weight_version(engine: RolloutEngine) -> int:
    return engine.version
