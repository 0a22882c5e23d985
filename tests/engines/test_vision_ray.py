"""Reinforcement learning on images with training ranks and rollout actors over Ray, and with vLLM."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.commands.train import run
from oxrl.engines.ray import rollouts as ray_rollouts
from support.rank_runs import samples
from support.small_runs import metric_lines
from support.vision_families import write_family
from support.vision_runs import rl, write_rows

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
)

from oxrl.engines.ray import cluster as ray_cluster  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", autouse=True)
def connected() -> Iterator[None]:
    """One small Ray cluster for the whole module."""
    ray_cluster._import_ray(loopback=True)
    with ray_cluster._own_signals():
        options: dict[str, Any] = {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        ray.init(address="local", num_cpus=6, object_store_memory=200 << 20, **options)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    write_rows(found)
    return found


RUN = {"steps": 3, "threads": 1, "deadline_s": 120}


def test_ranks_and_an_actor_train_on_images_like_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = rl(folder, "one", run=RUN)
    run(one)
    scaled: dict[str, Any] = {
        "run": RUN | {"training_gpus": 2, "max_restarts": 0},
        "inference_engine": {"actors": 1, "probe_tokens": 64},
        "train": {"backend": "fsdp", "micro_batch_tokens": 60},
    }
    other = rl(folder, "other", **scaled)
    # An actor that dies with images in flight is given them again.
    submit = ray_rollouts.RayRollouts.submit
    killed: list[int] = []

    def submitting(group: Any, requests: Any) -> None:
        submit(group, requests)
        if not killed and group.version == 1:
            worker = group.workers[0]
            pid = ray.get(worker.actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    monkeypatch.setattr(ray_rollouts.RayRollouts, "submit", submitting)
    run(other)
    assert killed
    lines = metric_lines(other.run.directory)
    assert max(line["rollout/replaced_actors"] for line in lines) == 1
    for step in range(3):
        assert samples(one.run.directory, step) == samples(other.run.directory, step)
    for ours, theirs in zip(metric_lines(one.run.directory), lines, strict=True):
        for key in ("reward/mean", "update/loss", "update/grad_norm", "update/param_norm"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-6), key
    names = [
        sorted(p.name for p in (cfg.run.directory / "images").iterdir()) for cfg in (one, other)
    ]
    assert names[0] == names[1]


def test_vllm_in_an_actor_samples_images_for_the_local_trainer(folder: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: make env-scale")
    model = str(write_family("idefics3", folder / "idefics3", heads=2))
    sections: dict[str, Any] = {"run": RUN, "model": {"name": model, "max_length": 512}}
    one = rl(folder, "vllm_none", **copy.deepcopy(sections))
    run(one)
    sections["inference_engine"] = {"actors": 1, "name": "vllm", "probe_tokens": 64}
    other = rl(folder, "vllm", **sections)
    run(other)
    assert samples(one.run.directory, 0) == samples(other.run.directory, 0)
    for line in metric_lines(other.run.directory):
        assert line["sync/probe_max"] < 1e-4
        assert line["sync/unread"] == 0
        assert line["mismatch/abs_logdiff_max"] < 1e-4
