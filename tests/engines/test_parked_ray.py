"""Parked requests of samplers in Ray actors: the contract of samplers in processes of this machine,
also where an actor dies in the middle. Runs where Ray is installed (`make test-scale`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from oxrl.engines.ray.cluster import Cluster, layout
from oxrl.engines.ray.rollouts import RayRollouts
from oxrl.tables.watch import Deadlines
from support.parked import Kind
from support.parked_workers import (
    MOMENTS,
    check_goes_on,
    check_losses,
    check_second_loss,
    kind_called,
)

pytest.importorskip(
    "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
)

# Ray says of every actor that a test kills that it was killed.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("connected"),
]
Started = Callable[[int], RayRollouts]


@pytest.fixture
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return kind_called(request.param, tmp_path)


@pytest.fixture
def started(kind: Kind) -> Iterator[Started]:
    """`started(count)` starts so many actors, which are ended after the test."""
    with ExitStack() as stack:

        def start(count: int) -> RayRollouts:
            bundles, _, places = layout(0, count, trainer_gpus=0, sampler_gpus=0, colocated=False)
            cluster = Cluster(count)
            stack.callback(cluster.close)
            cluster.reserve(bundles)
            engine = RayRollouts(
                cluster, places, kind.build, Deadlines.alike(60), images=kind.images
            )
            kind.deliver(engine, 0)
            return engine

        yield start


@pytest.mark.parametrize("kind", ["cached", "vision"], indirect=True)
def test_new_actors_go_on_from_a_round_to_the_same_bytes(kind: Kind, started: Started) -> None:
    check_goes_on(kind, started(2), started(2))


@pytest.mark.parametrize(
    "kind",
    ["local columns", *(pytest.param(one, marks=pytest.mark.full) for one in ("cached", "vision"))],
    indirect=True,
)
def test_whatever_an_actor_dies_over_the_rest_is_as_if_nobody_had(
    kind: Kind, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    check_losses(kind, started(2))
    said = [record.getMessage() for record in caplog.records]
    replaced = [text for text in said if "sampled again" in text]
    assert len(replaced) == len(MOMENTS) - 1
    assert all("rollout actor 0, " in text and "from round 3 on" in text for text in replaced)


@pytest.mark.parametrize("kind", ["local"], indirect=True)
def test_requests_that_lose_a_second_actor_in_windows_end_the_run(
    kind: Kind, started: Started
) -> None:
    check_second_loss(kind, started(2))
