"""Policies that act, with training ranks and rollout actors over Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import metric_lines
from test_action_runs import make_data, reinforcement
from test_ray_recipe import samples

from oxrl.data.action_heads import read_head
from oxrl.recipes import run

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
)

from oxrl.engines.ray import cluster as ray_cluster  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]
RUN = {"steps": 2, "threads": 1, "deadline_s": 120}
# Groups that differ in their outcomes: some of these layouts are solved by a random policy.
SLOW = {"alg_name": "sgrpo", "lr": 1e-3, "adam_eps": 1e-3}


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
        ray.init(num_cpus=6, object_store_memory=200 << 20, **options)
    yield
    ray.shutdown()


def test_ranks_and_an_actor_act_like_one_process(tmp_path: Path) -> None:
    make_data(tmp_path)
    one = reinforcement(tmp_path, "one", run=RUN, train=SLOW)
    run(one)
    other = reinforcement(
        tmp_path,
        "other",
        run=RUN | {"training_gpus": 2},
        inference_engine={"actors": 1, "probe_tokens": 64},
        train=SLOW | {"backend": "fsdp", "micro_batch_tokens": 60},
    )
    run(other)
    for step in range(2):
        assert samples(one.run.directory, step) == samples(other.run.directory, step)
    lines = metric_lines(other.run.directory)
    for ours, theirs in zip(metric_lines(one.run.directory), lines, strict=True):
        for key in ("reward/mean", "episode/success", "update/loss", "update/grad_norm"):
            assert theirs[key] == pytest.approx(ours[key], rel=1e-4, abs=1e-6), key
        assert theirs["mismatch/abs_logdiff_max"] < 1e-5
        assert theirs["sync/probe_max"] < 1e-4 and theirs["sync/retries"] == 0
    assert read_head(one.run.directory) == read_head(other.run.directory)
