"""Bytes and seconds of proved weight syncs from training ranks to rollout actors, item by item.

    python benchmarks/weight_sync_ranks.py [--backend fsdp] [--ranks 2] [--engine vllm] [--actors 1]
        [--tensor-parallel 1] [--dtype float32] [--layers 5] [--store]
        needs Ray, and vLLM or DeepSpeed where they are named

The model is a Qwen3 of random weights, 213 MB in float32 with 5 layers. Items are medians of
REPEATS, in seconds of the clock and of all processors: those of this process, the ranks and the
actors, without further workers of vLLM's. `over_bare` are multiples of what a bare gloo broadcast
of the same bytes from rank 0 to the same processes takes, in turns with the items. What the driver
puts into Ray or gets from it is counted as it is serialised.
"""

from __future__ import annotations

import argparse
import itertools
import json
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

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.delivery.proof import Distance
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.ray.cluster import Cluster, layout
from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.engines.ray.trainer import RankGroup, RayTrainer
from oxrl.engines.ray.transport import RayTransport
from oxrl.engines.sample import RolloutEngine, RowLogprobs
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.trainer import Trainer
from oxrl.engines.transport.base import Copy
from oxrl.engines.transport.line import SENDER, Line, Meeting, Seat
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.tables.engines import TRAINING_ENGINES
from oxrl.tables.watch import Deadlines

REPEATS = 7
VOCABULARY = 8192
DEADLINE_S = 300.0
CPU = torch.device("cpu")


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
    with joined_ranks(CPU, Deadlines.alike(DEADLINE_S)) as own:
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


# Item -> what to do once.
Works = Mapping[str, Callable[[], object]]


def measured(works: Works, processors: Callable[[], float]) -> Mapping[str, list[Spent]]:
    """What each item takes, REPEATS times, in turns."""
    found: dict[str, list[Spent]] = {item: [] for item in works}
    for _ in range(REPEATS):
        for item, work in works.items():
            before = processors()
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
            found[item].append(Spent(seconds, processors() - before))
    return found


def own_seconds(_: Any = None) -> float:
    return time.process_time()


def processor_seconds(group: RankGroup, rollouts: RayRollouts) -> float:
    """Of this process, the ranks and the actors, since they began."""
    ranks = group._ranks  # pyright: ignore[reportPrivateUsage]
    actors = [*ranks, *(worker.actor for worker in rollouts.workers)]
    asked = [actor.__ray_call__.remote(own_seconds) for actor in actors]
    return time.process_time() + sum(rollouts.cluster.ray.get(asked, timeout=DEADLINE_S))


def gather(trainer: Trainer, dtype: torch.dtype) -> None:
    for _ in trainer.weights_in_turn("all", dtype):
        pass


def bare_meet(meeting: Meeting, place: int, sizes: list[int], process: Any) -> None:
    """In a rank or an actor: take a place on a bare line."""
    line = Line(meeting, Seat(0, place), address="127.0.0.1", device=CPU)
    process.bare = line, [torch.ones(size, dtype=torch.uint8) for size in sizes]


def bare_once(process: Any) -> None:
    """Broadcast as many bytes as a delivery has."""
    line, payloads = process.bare
    for payload in payloads:
        line._tensors.broadcast(payload, SENDER).wait()
    line._tensors.barrier().wait()


def bare_broadcast(group: RankGroup, rollouts: RayRollouts, size: int) -> Callable[[], object]:
    """What has bare gloo bring so many bytes from rank 0 to every actor."""
    host, port = group.store
    actors = [worker.actor for worker in rollouts.workers]
    meeting = Meeting(host, port, "bare", [len(actors)], 1, "gloo", DEADLINE_S)
    chunk = 64 * 2**20
    sizes = [chunk] * (size // chunk) + [size % chunk]
    first = group._ranks[0]  # pyright: ignore[reportPrivateUsage]
    ends = [first, *actors]
    ray = rollouts.cluster.ray
    meets = [partial(bare_meet, meeting, place, sizes) for place in range(len(ends))]
    begun = [end.__ray_call__.remote(meet) for end, meet in zip(ends, meets, strict=True)]
    ray.get(begun, timeout=DEADLINE_S)
    return lambda: ray.get([end.__ray_call__.remote(bare_once) for end in ends], timeout=DEADLINE_S)


class WithoutProbe(WeightSync):
    """A delivery in which everything is proved but what the sampler says of the probe: all that
    grows with bytes alone.
    """

    def _policy_logprobs(self) -> RowLogprobs:
        return []

    def _distances(self, version: int, expected: RowLogprobs) -> dict[str, Distance]:
        return {name: Distance(0.0, 0.0, 0.0, 0.0) for name in self._members()}

    def _calibrate(self) -> Distance:
        return Distance(1.0, 1.0, 1.0, 1.0)

    def _prove_perturbed(self, expected: RowLogprobs) -> None:
        """Nobody is asked."""


def items_of(
    sync: WeightSync, transport: RayTransport, group: RankGroup
) -> dict[str, Callable[[], object]]:
    """The parts of a delivery."""
    dtype = sync.options.dtype
    policy = sync.policy
    members = sync.sampler.members  # pyright: ignore[reportAttributeAccessIssue]
    of_driver = sync._policy_logprobs  # pyright: ignore[reportPrivateUsage]

    def held_twice() -> None:
        for member in (*members.values(), *members.values()):
            member.held()

    def probe() -> None:
        for member in members.values():
            member.logprobs(sync.rows)

    version = sync.sampler.version
    return {
        "moved": lambda: transport.deliver(version, Copy(dtype)),
        "gathered": lambda: group.call(group.waits.of("step"), "policy", gather, dtype),
        "masters": lambda: policy.fingerprints(dtype),
        "read": held_twice,
        "probe ranks": of_driver,
        "probe samplers": probe,
    }


def figures(case: str, spent: list[Spent], bare: list[Spent]) -> dict[str, Any]:
    """Medians, and of each turn's multiple of the bare broadcast beside it."""
    pairs = list(zip(spent, bare, strict=True))
    return {
        "case": case,
        "clock_s": round(statistics.median(own.clock for own in spent), 3),
        "over_bare": round(statistics.median(own.clock / other.clock for own, other in pairs), 2),
        "processors_s": round(statistics.median(own.processors for own in spent), 3),
        "processors_over_bare": round(
            statistics.median(own.processors / other.processors for own, other in pairs), 2
        ),
    }


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
    works = {"bare": bare_broadcast(group, rollouts, size), **items_of(sync, transport, group)}
    versions = itertools.count(1)
    works["whole"] = lambda: sync.deliver(next(versions))
    # No copy of the model is scored, so none is made.
    unprobed = WithoutProbe(sync.policy, rollouts, sync.options, torch.nn.Module, None, transport)
    unprobed.deliver(next(versions))
    works["bytes"] = lambda: unprobed.deliver(next(versions))
    found = dict(measured(works, lambda: processor_seconds(group, rollouts)))
    measuring.bytes = 0
    sync.deliver(next(versions))
    later = measuring.bytes
    sent = [part.bytes for part in transport._sent]  # pyright: ignore[reportPrivateUsage]
    say(f"{arguments.backend} x {arguments.ranks} -> {arguments.engine} x {arguments.actors}")
    bandwidth = size / statistics.median(spent.clock for spent in found["bare"]) / 1e9
    say(f"model: {size / 1e6:.1f} MB in {arguments.dtype}; bare gloo: {bandwidth:.2f} GB/s")
    say(f"everything the driver put or got: first sync {begun:.0f}, later {later:.0f} bytes")
    say(
        f"bytes sent by each rank: {sent}; buckets in flight: "
        f"{ledger['sync/buckets_in_flight']:.0f}"
    )
    say(f"first sync, with a perturbed copy: {first:.3f} s")
    for case, spent in found.items():
        line = figures(case, spent, found["bare"])
        if case == "whole":
            line["driver_bytes"] = int(ledger["sync/driver_bytes"])
        say(json.dumps(line))


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
        group = RankGroup(cluster, trainers, build_rank, Deadlines.alike(DEADLINE_S))
        build = partial(sampler, arguments.engine, folder, dtype, arguments.tensor_parallel)
        rollouts = RayRollouts(cluster, samplers, build, Deadlines.alike(DEADLINE_S))
        new_model = partial(load_policy, folder, LoadOptions(dtype=dtype))
        transport = RayTransport(group, rollouts, new_model)
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
