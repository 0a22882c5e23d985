"""Who looks whether the head of a cluster is there, and who says that a run was ended from outside.

Nothing here needs Ray.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from oxrl.engines.ray import head
from oxrl.engines.ray.cluster import Place, by_node, layout
from oxrl.engines.ray.head import HeadWatch, LostClusterError
from oxrl.engines.ray.trainer import RankActor

ROOT = Path(__file__).resolve().parents[2]
ENDS = """
import os, sys
from oxrl.engines.ray.head import LastWords

words = LastWords()
if sys.argv[1] == "properly":
    words.close()
os._exit(1)  # as Ray does
"""


def test_a_head_that_is_gone_for_too_long_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOOK_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        watch = HeadWatch(address, gone_s=0.5)
        time.sleep(1.0)
        watch.check()
        assert watch.answers()
    time.sleep(1.0)
    assert not watch.answers()
    with pytest.raises(LostClusterError, match=rf"{address} .*has not answered for 1 s.*--resume"):
        watch.check()
    watch.close()


def test_a_head_may_be_gone_as_long_as_ray_was_told_and_ray_waits_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(head.GONE_SETTING, "300")
    monkeypatch.setattr(head, "patience_with_head", head.patience_with_head.__wrapped__)
    assert head.patience_with_head() == 300
    assert float(os.environ[head.GONE_SETTING]) > 300
    monkeypatch.delenv(head.GONE_SETTING)
    assert head.patience_with_head() == head.GONE_S


@pytest.mark.parametrize("way", ["properly", "at once"])
def test_a_run_that_is_ended_from_outside_is_told_of(way: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, way],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 1
    told = "was ended from outside" in ended.stderr and "--resume" in ended.stderr
    assert told == (way == "at once")


def test_ranks_are_numbered_node_by_node_and_samplers_stay_with_them() -> None:
    planned = layout(4, 4, trainer_gpus=1, sampler_gpus=1, colocated=True)
    placed = by_node(planned, {0: "one", 1: "two", 2: "one", 3: "two"})
    assert [place.bundle for place in placed.trainers] == [0, 2, 1, 3]
    assert [place.bundle for place in placed.samplers] == [0, 2, 1, 3]
    planned = layout(2, 2, trainer_gpus=1, sampler_gpus=2, colocated=False)
    placed = by_node(planned, {0: "one", 1: "two", 2: "two", 3: "one"})
    assert placed.trainers == [Place(0, 1), Place(1, 1)]
    assert placed.samplers == [Place(3, 2), Place(2, 2)]


@pytest.mark.parametrize(("device", "times"), [("cuda", 1), ("cpu", 0)])
def test_a_rank_gives_up_what_it_only_keeps(
    device: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    rank = RankActor()
    rank._device = torch.device(device)  # pyright: ignore[reportPrivateUsage]
    rank.free_cache()
    assert len(emptied) == times
