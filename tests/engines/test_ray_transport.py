"""Weights from training ranks to rollout actors: proved, without passing through the driver.

Over Ray, with ranks of FSDP2, and the same with threads for actors, which needs neither.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.ray.cluster import Cluster, Place, layout
from oxrl.engines.ray.rollouts import RayRollouts, RolloutActor
from oxrl.engines.ray.trainer import RankGroup, RayTrainer
from oxrl.engines.ray.transport import RayTransport
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.sample.workers import RolloutWorker
from oxrl.engines.train import Bucket, Part, fsdp
from oxrl.engines.train.fsdp import FsdpTrainer
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import WeightSyncError
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.weights import Whole, buckets
from oxrl.tables.watch import Deadlines
from oxrl.types import Prompt, Request, Sampling
from support.small_cluster import process_of, small_cluster
from support.thread_cluster import HOST, Ray, ThreadCluster
from support.weight_attacks import ATTACKS

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: `make test-scale` runs this"
)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
Attack = Callable[[Bucket], Bucket]
SMALL = 100_000
NAME = "model.layers.1.mlp.up_proj.weight"


LOADING = threading.Lock()  # random numbers are those of the whole process


def model(seed: int) -> Any:
    torch.set_num_threads(1)
    with LOADING:
        return load_policy("builtin:tiny", LoadOptions(seed=seed))


class Lying(LocalTrainer):
    """Sends small buckets; lies in them where it is told to."""

    lie: Attack | None = None

    def weights(self, part: Part = "all") -> Iterator[Bucket]:
        whole = [named for bucket in super().weights(part) for named in bucket]
        if self.lie is not None:
            whole = self.lie(whole)
        return buckets(whole, limit=SMALL)


class Policy(Lying, FsdpTrainer):
    """Cut up over ranks, which gather as they do wherever they do not lie."""

    def weights_in_turn(
        self, part: Part = "all", dtype: torch.dtype | None = None
    ) -> Iterator[Bucket | Whole | None]:
        honest = FsdpTrainer.weights_in_turn if self.lie is None else Trainer.weights_in_turn
        return honest(self, part, dtype)


@contextmanager
def ranks() -> Iterator[dict[str, Policy]]:
    fsdp.sent_bytes = lambda device: SMALL
    with joined_ranks(torch.device("cpu"), Deadlines.alike(30)) as own:
        yield {"policy": Policy(model(0), TrainerOptions(lr=1e-3), ranks=own)}


MEETING = threading.Lock()
STORES: dict[int, Any] = {}


@contextmanager
def copies() -> Iterator[dict[str, Lying]]:
    """What a thread builds for a rank: the whole policy; the first opens the store of all."""
    port = int(os.environ["MASTER_PORT"])
    with MEETING:
        if port not in STORES:
            STORES[port] = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False)
    yield {"policy": Lying(model(0), TrainerOptions(lr=1e-3))}


class Faulty(LocalSampler):
    """Something happens to what arrives, or to what was loaded."""

    attack: Attack | None = None
    later: Attack | None = None

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        if self.attack is not None:
            buckets = [self.attack([named for bucket in buckets for named in bucket])]
        return super().update_weights(buckets, version)


def sampler() -> LocalSampler:
    return Faulty(model(5), load_tokenizer("builtin:tiny"), max_rows=8)


class Wired(NamedTuple):
    """Ranks, actors, and what delivers from one to the other."""

    group: RankGroup
    rollouts: RayRollouts
    sync: WeightSync
    passed: list[int]
    # Whether actors are processes of their own, so that what they move is not counted here.
    separate: bool

    def deliver(self, version: int) -> dict[str, float]:
        """What a delivery says of itself; and the driver put and got next to nothing over it."""
        self.sync._transport.metrics()  # what tests themselves have read since is not counted
        self.passed.clear()
        self.sync.deliver(version)
        metrics = self.sync.metrics()
        assert metrics["sync/driver_bytes"] == 0 or not self.separate
        assert sum(self.passed) < metrics["sync/sent_bytes"] / 5
        return metrics

    def everywhere(self, function: Callable[..., Any], *inputs: Any) -> None:
        for worker in self.rollouts.workers:
            worker.call(function, *inputs)


@contextmanager
def threads() -> Iterator[Any]:
    """A cluster of threads."""
    with pytest.MonkeyPatch.context() as patch:
        played = Ray()
        patch.setitem(sys.modules, "ray", played)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
        yield ThreadCluster(played)


@contextmanager
def over_ray() -> Iterator[Any]:
    with small_cluster(num_cpus=4):
        cluster = Cluster(4)
        yield cluster
        cluster.close()


@pytest.fixture(scope="module", params=["threads", pytest.param("ray", marks=needs_ray)])
def wired(request: pytest.FixtureRequest) -> Iterator[Wired]:
    by_threads = request.param == "threads"
    with threads() if by_threads else over_ray() as cluster:
        trainers = samplers = [Place(0, 0), Place(1, 0)]
        if not by_threads:
            _, trainers, samplers = layout(2, 2, trainer_gpus=0, sampler_gpus=0, colocated=False)
            cluster.reserve([{"CPU": 1}] * 4)
        passed: list[int] = []
        _measure(cluster, passed)
        group = RankGroup(cluster, trainers, copies if by_threads else ranks, Deadlines.alike(30))
        rollouts = RayRollouts(cluster, samplers, sampler, Deadlines.alike(20))

        def new_model() -> Any:
            return model(9)

        transport = RayTransport(group, rollouts, new_model)
        options = SyncOptions(
            dtype=torch.float32, vocabulary=261, temperature=1.0, probe_every=3, probe_tokens=64
        )
        policy = RayTrainer(group, "policy")
        sync = WeightSync(policy, rollouts, options, new_model, transport=transport)
        yield Wired(group, rollouts, sync, passed, not by_threads)


def _measure(cluster: Any, passed: list[int]) -> None:
    """Note the size of everything that the driver puts into Ray or gets from it."""
    inner = cluster.ray
    dumps = getattr(inner, "cloudpickle", pickle).dumps

    class Measuring:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def put(self, thing: Any) -> Any:
            passed.append(len(dumps(thing)))
            return inner.put(thing)

        def get(self, reference: Any, **options: Any) -> Any:
            found = inner.get(reference, **options)
            passed.append(len(dumps(found)))
            return found

    cluster.ray = Measuring()


def set_lie(trainer: Any, lie: Attack | None) -> None:
    trainer.lie = lie


def set_attack(engine: Any, attack: Attack | None) -> None:
    engine.attack = attack


def change_a_value(engine: Any) -> None:
    with torch.no_grad():
        engine.model.get_parameter(NAME).view(-1)[7] += 1e-6


def move(trainer: Any, by: float) -> None:
    """As after a step: every rank's piece of every weight."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(by)


def lose(worker: RolloutWorker) -> None:
    """End an actor as the kernel does."""
    if hasattr(worker.actor, "die"):
        worker.actor.die()
        return
    os.kill(process_of(worker.actor), signal.SIGKILL)


def call(worker: RolloutWorker, function: Callable[[RolloutActor], Any]) -> Any:
    ray = worker._group.cluster.ray
    return ray.get(worker.actor.__ray_call__.remote(function), timeout=20)


def said(completions: Iterable[Any]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def requests(count: int, tokens: int) -> list[Request]:
    return [
        Request(
            id=str(i),
            prompt=Prompt(uid=str(i), messages=(), token_ids=(5, 6, 7 + i)),
            draw=i,
            sample=0,
            sampling=Sampling(max_tokens=tokens, stop_token_ids=()),
            seed=i,
        )
        for i in range(count)
    ]


def weights_of(wired: Wired) -> dict[str, Tensor]:
    policy = RayTrainer(wired.group, "policy")
    return {name: tensor.clone() for bucket in policy.weights() for name, tensor in bucket}


def test_weights_are_sent_by_all_ranks_and_proved_and_none_passes_through_the_driver(
    wired: Wired,
) -> None:
    first = wired.deliver(0)
    size = sum(p.nbytes for p in model(0).parameters())
    assert first["sync/sent_bytes"] == size
    assert size / 2 <= first["sync/sent_bytes_rank_max"] < 0.8 * size
    assert first["sync/buckets_in_flight"] == 2
    assert first["sync/retries"] == 0
    wired.group.call(wired.group.waits.of("step"), "policy", move, 0.01)
    for version in range(1, 4):  # the third with a perturbed copy
        assert wired.deliver(version)["sync/probe_limit_share"] < 1
    local = LocalSampler(model(5), load_tokenizer("builtin:tiny"), max_rows=8)
    local.update_weights([list(weights_of(wired).items())], 3)
    asked = requests(6, 12)
    ours = generate(wired.rollouts, asked, deadline_s=60)
    assert said(ours) == said(generate(local, asked, deadline_s=60))


@pytest.mark.parametrize(
    ("attack", "says"), ATTACKS, ids=["dropped", "corrupted", "mis-cast", "swapped"]
)
def test_a_tampered_payload_and_ranks_that_lie_are_refused_and_named(
    attack: Attack, says: str, wired: Wired
) -> None:
    wired.sync.deliver(10)
    wired.group.call(wired.group.waits.of("step"), "policy", move, 1e-6)
    wired.everywhere(set_attack, attack)
    try:
        with pytest.raises(WeightSyncError, match="after two attempts") as caught:
            wired.sync.deliver(11)
        assert str(caught.value).count(says) == 2
        wired.everywhere(set_attack, None)
        wired.sync._held.clear()
        wired.group.call(wired.group.waits.of("step"), "policy", set_lie, attack)
        with pytest.raises(WeightSyncError, match="after two attempts") as caught:
            wired.sync.deliver(12)
        assert says.partition(" arrived")[0] in str(caught.value)
    finally:
        wired.everywhere(set_attack, None)
        wired.group.call(wired.group.waits.of("step"), "policy", set_lie, None)
    wired.sync._held.clear()
    assert wired.deliver(13)["sync/retries"] == 0


def test_a_weight_that_changes_in_an_actor_is_found_before_the_next_delivery(wired: Wired) -> None:
    wired.deliver(20)
    wired.rollouts.workers[1].call(change_a_value)
    with pytest.raises(WeightSyncError, match=f"rollout actor 1 no longer computes.*{NAME}"):
        wired.sync.deliver(21)
    wired.sync._held.clear()
    wired.deliver(22)


def test_actors_that_are_lost_are_replaced_with_what_was_sent_last(wired: Wired) -> None:
    wired.deliver(30)
    before = weights_of(wired)
    # The ranks train on while the actors sample.
    wired.group.call(wired.group.waits.of("step"), "policy", move, 0.01)
    asked = requests(8, 40)
    wired.rollouts.submit(asked)
    lose(wired.rollouts.workers[1])
    finished = {item.request.id: item.completion for item in poll_all(wired, len(asked))}
    local = LocalSampler(model(5), load_tokenizer("builtin:tiny"), max_rows=8)
    local.update_weights([list(before.items())], 30)
    expected = generate(local, asked, deadline_s=60)
    assert said([finished[request.id] for request in asked]) == said(expected)
    assert wired.rollouts.metrics()["rollout/replaced_actors"] == 1
    # And in a delivery.
    lose(wired.rollouts.workers[0])
    wired.deliver(31)
    assert [member.version for member in wired.rollouts.members.values()] == [31, 31]


def poll_all(wired: Wired, count: int) -> list[Any]:
    finished: list[Any] = []
    while len(finished) < count:
        finished += wired.rollouts.poll(30)
    return finished


def cut_line(actor: RolloutActor) -> None:
    end: Any = actor._end
    end._receiver.cut()


def test_lines_that_break_are_laid_again_and_the_object_store_does_where_none_can_be(
    wired: Wired,
) -> None:
    wired.deliver(40)
    call(wired.rollouts.workers[1], cut_line)
    assert wired.deliver(41)["sync/buckets_in_flight"] == 2
    transport: Any = wired.sync._transport
    transport._no_line = True
    wired.deliver(42)
    assert [member.version for member in wired.rollouts.members.values()] == [42, 42]
    transport._no_line = False
    assert wired.deliver(43)["sync/buckets_in_flight"] == 2
