"""Bytes and seconds of proved weight syncs from training ranks to rollout actors, item by item.

    python benchmarks/weight_sync_ranks.py [--backend fsdp] [--ranks 2] [--engine vllm] [--actors 1]
        [--tensor-parallel 1] [--dtype float32] [--layers 5] [--store]
        needs Ray, and vLLM or DeepSpeed where they are named

The model is a Qwen3 of random weights, 213 MB in float32 with 5 layers. Items are medians of
REPEATS, in seconds of the clock and of all processors: those of this process, the ranks and the
actors, without further workers of vLLM's. `x bare` are multiples of what a bare gloo broadcast of
the same bytes from rank 0 to the same processes takes, measured in the same run. What the driver
puts into Ray or gets from it is counted as it is serialised.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.engines.ray.cluster import Cluster, layout
from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.ray.trainer import RankGroup, RayTrainer
from oxrl.engines.ray.transport import RayTransport
from oxrl.engines.sample.base import RolloutEngine
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.ranks import joined_ranks
from oxrl.engines.train.trainer import Trainer
from oxrl.engines.transport.base import Copy
from oxrl.engines.transport.ends import receiver
from oxrl.engines.transport.line import SENDER, Line, Meeting, Seat
from oxrl.engines.weight_sync import SyncOptions, WeightSync
from oxrl.models.builtin import builtin_tokenizer
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.models.weights import save_model
from oxrl.tables.engines import TRAINING_ENGINES

REPEATS = 5
VOCABULARY = 8192
DEADLINE_S = 300.0
CPU = torch.device("cpu")
MOVED = "gather, fingerprint, send, load"
MASTERS = "fingerprints of the masters"
READ = "read back, before and after"


def write_model(folder: Path, layers: int, dtype: torch.dtype) -> int:
    """Write a model; its bytes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    save_model(model, folder)
    builtin_tokenizer().save_pretrained(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


@contextmanager
def ranks(backend: str, folder: str, dtype: torch.dtype) -> Iterator[dict[str, Trainer]]:
    """What each rank builds."""
    engine = TRAINING_ENGINES[backend]
    settings = {"zero_stage": 3} if backend == "deepspeed" else {}
    with joined_ranks(CPU, deadline_s=DEADLINE_S) as own:
        model = load_policy(folder, LoadOptions(dtype=dtype))
        yield {"policy": engine.load()(model, TrainerOptions(lr=0.0), ranks=own, **settings)}


def sampler(engine: str, folder: str, dtype: torch.dtype, tensor_parallel: int) -> RolloutEngine:
    """What each rollout actor builds."""
    if engine == "local":
        from oxrl.engines.sample.local import LocalSampler

        model = load_policy(folder, LoadOptions(dtype=dtype))
        return LocalSampler(model, load_tokenizer(folder), max_rows=8)
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    options = VllmOptions(
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=256,
        max_rows=16,
        tensor_parallel=tensor_parallel,
        gpu_memory_fraction=0.3,
        log_file=f"{folder}/vllm_{os.getpid()}.log",
    )
    return VllmEngine(folder, options)


class Measuring:
    """Ray as the driver sees it; the size of all that it puts and gets."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ray, name)

    def _count(self, thing: Any) -> Any:
        self.bytes += len(self._ray.cloudpickle.dumps(thing))
        return thing

    def put(self, thing: Any) -> Any:
        return self._ray.put(self._count(thing))

    def get(self, reference: Any, **options: Any) -> Any:
        return self._count(self._ray.get(reference, **options))


class Spent(NamedTuple):
    """Seconds of the clock, and of all processors."""

    clock: float
    processors: float


Measure = Callable[[Callable[[], object]], Spent]


def measured(work: Callable[[], object], processors: Callable[[], float]) -> Spent:
    """What one repeat takes."""
    clock: list[float] = []
    used: list[float] = []
    for _ in range(REPEATS):
        before = processors()
        start = time.perf_counter()
        work()
        clock.append(time.perf_counter() - start)
        used.append(processors() - before)
    return Spent(statistics.median(clock), statistics.median(used))


def own_seconds(_: Any = None) -> float:
    return time.process_time()


def processor_seconds(group: RankGroup, rollouts: RayRollouts) -> float:
    """Of this process, the ranks and the actors, since they began."""
    ranks = group._ranks  # pyright: ignore[reportPrivateUsage]
    actors = [*ranks, *(worker.actor for worker in rollouts.workers)]
    asked = [actor.__ray_call__.remote(own_seconds) for actor in actors]
    return time.process_time() + sum(rollouts.cluster.ray.get(asked, timeout=DEADLINE_S))


def gather(trainer: Trainer, dtype: torch.dtype) -> None:
    for bucket in trainer.weights():
        for _, tensor in bucket:
            tensor.to(dtype)


def bare_send(meeting: Meeting, sizes: list[int], _: Any) -> Spent:
    """Broadcast as many bytes as a delivery has."""
    line = Line(meeting, Seat(0, SENDER), address="127.0.0.1", device=CPU)
    return _bare(line, sizes)


def bare_receive(meeting: Meeting, place: int, sizes: list[int], _: Any) -> Spent:
    end = receiver(meeting, [Seat(0, place)], address="127.0.0.1", device=CPU)
    return _bare(end._lines[0], sizes)  # pyright: ignore[reportPrivateUsage]


def _bare(line: Line, sizes: list[int]) -> Spent:
    payloads = [torch.ones(size, dtype=torch.uint8) for size in sizes]
    group = line._tensors  # pyright: ignore[reportPrivateUsage]

    def broadcast() -> None:
        for payload in payloads:
            group.broadcast(payload, SENDER).wait()
        group.barrier().wait()

    broadcast()
    return measured(broadcast, own_seconds)


def bare_broadcast(group: RankGroup, rollouts: RayRollouts, size: int) -> Spent:
    """What it takes bare gloo to bring so many bytes from rank 0 to every actor."""
    host, port = group.store
    actors = [worker.actor for worker in rollouts.workers]
    meeting = Meeting(host, port, "bare", [len(actors)], 1, "gloo", DEADLINE_S)
    chunk = 64 * 2**20
    sizes = [chunk] * (size // chunk) + [size % chunk]
    first = group._ranks[0]  # pyright: ignore[reportPrivateUsage]
    begun = [first.__ray_call__.remote(partial(bare_send, meeting, sizes))]
    for place, actor in enumerate(actors, 1):
        begun.append(actor.__ray_call__.remote(partial(bare_receive, meeting, place, sizes)))
    ends: list[Spent] = rollouts.cluster.ray.get(begun, timeout=DEADLINE_S)
    return Spent(ends[0].clock, sum(end.processors for end in ends))


def items_of(
    sync: WeightSync, transport: RayTransport, group: RankGroup, measure: Measure
) -> Mapping[str, Spent]:
    """What each part of a delivery takes."""
    dtype = sync.options.dtype
    policy = sync.policy
    members = sync.sampler.members  # pyright: ignore[reportAttributeAccessIssue]
    of_driver = sync._policy_logprobs  # pyright: ignore[reportPrivateUsage]

    def held() -> None:
        for member in members.values():
            member.held()

    def held_twice() -> None:
        held()
        held()

    def probe() -> None:
        for member in members.values():
            member.logprobs(sync.rows)

    version = sync.sampler.version
    works: dict[str, Callable[[], object]] = {
        MOVED: lambda: transport.deliver(version, Copy(dtype)),
        "  of it, gather and cast alone": lambda: group.call("policy", gather, dtype),
        MASTERS: lambda: policy.fingerprints(dtype),
        READ: held_twice,
        "probe, ranks": of_driver,
        "probe, samplers": probe,
    }
    return {item: measure(work) for item, work in works.items()}


def bytes_alone(items: Mapping[str, Spent]) -> Spent:
    """Everything that grows with bytes: all but the two forward passes of the probe."""
    parts = [items[MOVED], items[MASTERS], items[READ]]
    return Spent(sum(part.clock for part in parts), sum(part.processors for part in parts))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(
    arguments: argparse.Namespace,
    sync: WeightSync,
    transport: RayTransport,
    group: RankGroup,
    measuring: Measuring,
    size: int,
) -> None:
    """Deliver, measure, and print the tables."""
    measuring.bytes = 0
    start = time.perf_counter()
    sync.deliver(0)
    first = time.perf_counter() - start
    begun = measuring.bytes
    ledger = sync.metrics()
    rollouts: Any = sync.sampler
    bare = bare_broadcast(group, rollouts, size)

    def measure(work: Callable[[], object]) -> Spent:
        return measured(work, lambda: processor_seconds(group, rollouts))

    items = items_of(sync, transport, group, measure)
    versions = iter(range(1, 1000))
    measuring.bytes = 0
    total = measure(lambda: sync.deliver(next(versions)))
    per_sync = measuring.bytes / REPEATS
    sent = [part.bytes for part in transport._sent]  # pyright: ignore[reportPrivateUsage]
    say(f"{arguments.backend} x {arguments.ranks} -> {arguments.engine} x {arguments.actors}")
    bandwidth = size / bare.clock / 1e9
    say(f"model: {size / 1e6:.1f} MB in {arguments.dtype}; bare gloo: {bandwidth:.2f} GB/s")
    say(f"bytes of weights through the driver: {ledger['sync/driver_bytes']:.0f}")
    say(f"everything the driver put or got: first sync {begun:.0f}, later {per_sync:.0f} bytes")
    say(
        f"bytes sent by each rank: {sent}; buckets in flight: "
        f"{ledger['sync/buckets_in_flight']:.0f}"
    )
    say(f"{'':34} {'clock':>9} {'x bare':>7} {'processors':>11} {'x bare':>7}")
    lines = {**items, "all but the probe": bytes_alone(items), "whole proved sync": total}
    for item, spent in {"bare broadcast": bare, **lines}.items():
        clock, used = spent.clock / bare.clock, spent.processors / bare.processors
        say(f"{item:34} {spent.clock:7.3f} s {clock:7.2f} {spent.processors:9.3f} s {used:7.2f}")
    say(f"{'first sync, with a perturbed copy':34} {first:7.3f} s {first / bare.clock:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight syncs of ranks and actors.")
    parser.add_argument("--backend", choices=("fsdp", "deepspeed"), default="fsdp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engine", choices=("local", "vllm"), default="vllm")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--probe-tokens", type=int, default=512)
    parser.add_argument("--store", action="store_true", help="through Ray's object store")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    with tempfile.TemporaryDirectory() as folder:
        size = write_model(Path(folder), arguments.layers, dtype)
        cluster = Cluster(arguments.ranks + arguments.actors)
        measuring = Measuring(cluster.ray)
        cluster.ray = measuring
        bundles, trainers, samplers = layout(
            arguments.ranks, arguments.actors, trainer_gpus=0, sampler_gpus=0, colocated=False
        )
        cluster.reserve(bundles)
        build_rank = partial(ranks, arguments.backend, folder, dtype)
        group = RankGroup(cluster, trainers, build_rank, deadline_s=DEADLINE_S)
        build = partial(sampler, arguments.engine, folder, dtype, arguments.tensor_parallel)
        rollouts = RayRollouts(cluster, samplers, build, deadline_s=DEADLINE_S)
        new_model = partial(load_policy, folder, LoadOptions(dtype=dtype))
        transport = RayTransport(group, "policy", rollouts, new_model)
        transport._no_line = arguments.store  # pyright: ignore[reportPrivateUsage]
        options = SyncOptions(
            dtype=dtype,
            vocabulary=VOCABULARY,
            temperature=1.0,
            probe_every=0,
            probe_tokens=arguments.probe_tokens,
        )
        policy = RayTrainer(group, "policy")
        sync = WeightSync(policy, rollouts, options, new_model, transport=transport)
        report(arguments, sync, transport, group, measuring, size)
        rollouts.close()
        group.close()
        cluster.close()


if __name__ == "__main__":
    main()
