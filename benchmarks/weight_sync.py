"""Time of one proved weight sync from a trainer to a vLLM engine of the same process, item by item.

    python benchmarks/weight_sync.py [MODEL] [DTYPE]
        defaults: builtin:small float32; needs vLLM

Each item is the median of REPEATS runs; `against memory` is bytes of weights / measured bandwidth
of a copy.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.vllm import VllmEngine, VllmOptions
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.fingerprints import fingerprint
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer

REPEATS = 15
COPY_BYTES = 256 * 2**20


def seconds(work: Callable[[], object]) -> float:
    work()
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes copied per second, reading and writing counted once."""
    source, target = (torch.ones(COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    return COPY_BYTES / seconds(lambda: target.copy_(source))


def main(name: str = "builtin:small", dtype_name: str = "float32") -> None:
    dtype = getattr(torch, dtype_name)
    policy = LocalTrainer(
        load_policy(name, LoadOptions(dtype=dtype, seed=1)), TrainerOptions(lr=0.0)
    )
    with tempfile.TemporaryDirectory() as folder:
        log_file = str(Path(folder) / "vllm.log")
        options = VllmOptions(dtype=dtype_name, max_model_len=256, log_file=log_file)
        engine = VllmEngine(name, options)
        settings = SyncOptions(
            dtype=dtype,
            vocabulary=len(load_tokenizer(name)),
            temperature=1.0,
            probe_every=0,
        )
        new_model = partial(load_policy, name, LoadOptions(dtype=dtype))
        sync = WeightSync(policy, engine, settings, new_model)
        start = time.perf_counter()
        sync.deliver(0)
        first = time.perf_counter() - start
        weights = [
            (name, tensor.detach().to(dtype))
            for bucket in policy.weights()
            for name, tensor in bucket
        ]
        size = sum(tensor.nbytes for _, tensor in weights)
        fingerprints = seconds(lambda: [fingerprint(tensor) for _, tensor in weights])
        update = seconds(lambda: engine.update_weights([weights], 1))
        items = {
            "gather and cast": seconds(
                lambda: [t.to(dtype) for bucket in policy.weights() for _, t in bucket]
            ),
            "fingerprints of the masters": seconds(lambda: policy.fingerprints(dtype)),
            "fingerprints, sent": fingerprints,
            "fingerprints, arrived": fingerprints,
            "read back, before and after": 2 * seconds(engine.held),
            "load into vLLM": update - fingerprints,
            "probe, trainer": seconds(sync._policy_logprobs),  # pyright: ignore[reportPrivateUsage]
            "probe, vLLM": seconds(lambda: engine.logprobs(sync.rows)),
        }
        total = seconds(lambda: sync.deliver(2))
        bandwidth = copy_bandwidth()
        ideal = size / bandwidth
        engine.close()
    measured = f"{len(weights)} tensors, {size / 1e6:.1f} MB"
    print(f"{name} {dtype_name}: {measured}; copies at {bandwidth / 1e9:.1f} GB/s")
    for item, spent in [
        *items.items(),
        ("sum of the items", sum(items.values())),
        ("whole sync", total),
    ]:
        print(f"{item:28} {spent * 1e3:8.1f} ms   {spent / ideal:7.1f} x against memory")
    print(f"first sync, with a perturbed copy: {first * 1e3:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
