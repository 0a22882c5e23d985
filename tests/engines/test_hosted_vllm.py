"""vLLM in a process of this machine, against vLLM in a Ray actor. In `make test-scale`; skipped where
vLLM or Ray is not installed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.checkpoint.model_files import save_model
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.hosted import ThisMachine
from oxrl.engines.sample.sampler import generate
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.tables.watch import Deadlines
from oxrl.types import Completion
from support.samplers import TOKENIZER, lively, make_requests

pytestmark = [
    pytest.mark.skipif(
        find_spec("vllm") is None or find_spec("ray") is None,
        reason="needs vLLM and Ray: `make env-scale`",
    ),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]
WAITS = Deadlines.alike(300)


def engine(folder: Path, dtype: str, devices: int = 1) -> Any:
    """What the processes build."""
    from oxrl.engines.sample.vllm import VllmEngine, VllmOptions

    torch.set_num_threads(1)
    log_file = str(folder / f"vllm_{os.getpid()}.log")
    options = VllmOptions(
        max_model_len=256,
        log_file=log_file,
        dtype=dtype,
        tensor_parallel=devices,
        gpu_memory_fraction=0.2,
    )
    return VllmEngine(str(folder), options)


def model_folder(folder: Path, dtype: torch.dtype) -> Path:
    save_model(lively(dtype=dtype), folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@contextmanager
def hosted(folder: Path, dtype: str, devices: int = 1) -> Iterator[RolloutWorkers]:
    machine = ThisMachine(threads=1)
    try:
        yield RolloutWorkers(machine, [None], partial(engine, folder, dtype, devices), WAITS)
    finally:
        machine.close()


@contextmanager
def in_ray(folder: Path, dtype: str) -> Iterator[RolloutWorkers]:
    from oxrl.engines.ray.cluster import Cluster, layout
    from oxrl.engines.ray.rollouts import RayRollouts

    # Where an actor finds this file and what it imports.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    cluster = Cluster(1)
    bundles, _, places = layout(0, 1, trainer_gpus=0, sampler_gpus=0, colocated=False)
    cluster.reserve(bundles)
    try:
        yield RayRollouts(cluster, places, partial(engine, folder, dtype), WAITS)
    finally:
        cluster.close()
        del os.environ["PYTHONPATH"]


def delivered(rollouts: RolloutWorkers, dtype: torch.dtype) -> float:
    """Deliver other weights than the folder's, proved; the share of the probe's limit."""
    policy = LocalTrainer(lively(seed=5, dtype=dtype), TrainerOptions(lr=1e-3))
    options = SyncOptions(dtype=dtype, vocabulary=261, temperature=1.0, probe_tokens=128)
    sync = WeightSync(policy, rollouts, options, lambda: lively(seed=9, dtype=dtype))
    sync.deliver(3)
    said = sync.metrics()
    assert said["sync/retries"] == 0
    return said["sync/probe_limit_share"]


def sampled(rollouts: RolloutWorkers) -> list[Completion]:
    requests = [
        *make_requests(32, 4, temperature=0.9),
        *make_requests(32, 3, temperature=1.0, top_p=0.9, prefix="p"),
        *make_requests(32, 1, temperature=0.0, prefix="g"),
    ]
    assert len(requests) == 256
    return generate(rollouts, requests, deadline_s=300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_256_requests_are_answered_as_by_a_ray_actor_before_and_after_a_delivery(
    tmp_path: Path, dtype: str
) -> None:
    kind = getattr(torch, dtype)
    folder = model_folder(tmp_path / "model", kind)
    answers: list[list[Completion]] = []
    for start in (hosted, in_ray):
        with start(folder, dtype) as rollouts:
            answers.append(sampled(rollouts))
            share = delivered(rollouts, kind)
            answers.append(sampled(rollouts))
            print(f"{start.__name__}, {dtype}: {share:.3f} of the probe's limit")  # noqa: T201
            assert share < 1
    first, second, first_in_ray, second_in_ray = answers
    tokens = sum(completion.sampled for completion in first + second)
    print(f"{dtype}: {tokens} tokens of 2 x 256 requests")  # noqa: T201
    assert first == first_in_ray
    assert second == second_in_ray
    assert [c.token_ids for c in first] != [c.token_ids for c in second]


def group_of(rollouts: RolloutWorkers) -> list[int]:
    """The sampling process and all that it has started."""
    [worker] = rollouts.members.values()
    leader = worker.call(own_id)
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def own_id(_: Any) -> int:
    return os.getpid()


@pytest.mark.full
def test_kill_9_with_two_workers_leaves_none_of_them_and_another_one_goes_on(
    tmp_path: Path,
) -> None:
    """vLLM's own workers, of which each has a part of the model."""
    folder = model_folder(tmp_path / "model", torch.float32)
    with hosted(folder, "float32", devices=2) as rollouts:
        expected = sampled(rollouts)
        before = group_of(rollouts)
        assert len(before) >= 3
        [worker] = rollouts.members.values()
        os.kill(worker.call(own_id), signal.SIGKILL)
        assert sampled(rollouts) == expected
        assert rollouts.metrics()["rollout/replaced_actors"] == 1
        after = group_of(rollouts)
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in after) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in after)
