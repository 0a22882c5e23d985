"""A small Ray cluster of this machine, which says nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from oxrl.engines.ray import cluster


@contextmanager
def small_cluster(num_cpus: int = 6) -> Iterator[None]:
    """Connect this process to a cluster of its own, whose actors can import tests and `support`."""
    ray = cluster._import_ray(loopback=True)
    quiet: dict[str, Any] = {
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    with cluster._own_signals(), pytest.MonkeyPatch.context() as patch:
        # Actors have the environment of the cluster's own processes.
        for folder in Path(__file__).parents[1:3]:
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        ray.init(address="local", num_cpus=num_cpus, object_store_memory=200 << 20, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


def process_of(actor: Any) -> int:
    """The number of the process in which an actor lives."""
    import ray  # an extra

    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60)
