"""Reward models in Ray actors: the scores of one process, whatever dies (`make test-scale`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed: make env-scale")

import torch  # noqa: E402

from oxrl.commands.train import run  # noqa: E402
from oxrl.engines.ray.cluster import Cluster  # noqa: E402
from oxrl.engines.train.local import LocalTrainer  # noqa: E402
from oxrl.engines.train.options import TrainerOptions  # noqa: E402
from oxrl.errors import RewardDefinitionError, Stopped  # noqa: E402
from oxrl.models.load import LoadOptions, load_critic, load_tokenizer  # noqa: E402
from oxrl.rewards.reward_model import RewardModel  # noqa: E402
from oxrl.rewards.reward_model_actors import ModelActorPool  # noqa: E402
from oxrl.runs.waiting import Patience  # noqa: E402
from oxrl.types import (  # noqa: E402
    Completion,
    Group,
    Prompt,
)
from support.small_runs import metric_lines, rl_config  # noqa: E402

pytestmark = pytest.mark.timeout(400)
MESSAGES = ({"role": "user", "content": "1+1"},)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model with random weights."""
    found = tmp_path_factory.mktemp("model") / "rm"
    model = load_critic("builtin:tiny", LoadOptions(seed=3))
    model.kind = "process"
    torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    tokenizer = load_tokenizer("builtin:tiny")
    LocalTrainer(model, TrainerOptions(lr=0.0, tokenizer=tokenizer)).save(found)
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One cluster for all tests here."""
    found = Cluster(6)
    yield found
    found.close()


def no_gpus(_cluster: Cluster) -> int:
    return 0


def pool_of(folder: Path, cluster: Cluster, *, timeout_s: float = 60.0) -> ModelActorPool:
    def same() -> Cluster:
        return Cluster(1)  # connected already: it is the one that is there

    return ModelActorPool(
        str(folder),
        partial(RewardModel, folder),
        cluster=same,
        actors=2,
        gpus=no_gpus,
        timeout_s=timeout_s,
        field="reward",
    )


def groups() -> list[Group]:
    """Nine of them, which two actors share."""
    found: list[Group] = []
    for number in range(9):
        prompt = Prompt(uid=str(number), messages=MESSAGES, token_ids=(1,))
        texts = [f"{number}\n{place}" for place in range(3)]
        members = [Completion(segments=(), text=text, finish_reason="stop") for text in texts]
        found.append((prompt, members))
    return found


def process_of(actor: Any) -> int:
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def test_actors_score_as_one_process_does_also_when_one_is_killed(
    folder: Path, cluster: Cluster
) -> None:
    alone = RewardModel(folder)
    expected = [alone(*group) for group in groups()]
    assert expected[0][0].steps
    pool = pool_of(folder, cluster)
    try:
        pool.start()
        first = process_of(pool._actors[0])
        assert pool.score(groups()) == expected
        os.kill(first, signal.SIGKILL)
        assert pool.score(groups()) == expected
        assert process_of(pool._actors[0]) != first
    finally:
        pool.close()


def test_a_late_group_is_a_timeout_and_a_signal_ends_the_wait(
    folder: Path, cluster: Cluster
) -> None:
    pool = pool_of(folder, cluster, timeout_s=1e-6)
    try:
        (late,) = pool.score(groups()[:1])
        assert {(score.value, score.status) for score in late} == {(None, "timeout")}
        with pytest.raises(Stopped):
            pool.score(groups(), Patience(lambda: True))
    finally:
        pool.close()


def test_a_model_that_cannot_be_loaded_is_wrong_input(tmp_path: Path, cluster: Cluster) -> None:
    pool = pool_of(tmp_path, cluster)
    try:
        with pytest.raises(RewardDefinitionError, match=r"reward\.name"):
            pool.start()
    finally:
        pool.close()


def test_a_run_whose_reward_model_is_in_an_actor_is_the_run_in_one_process(
    folder: Path, tmp_path: Path, cluster: Cluster
) -> None:
    train = {"alg_name": "reinforce", "advantage": "returns", "lr": 1e-3}
    sections = {"rollout": {"max_tokens": 20, "n_samples": 4}, "train": train}
    runs: list[Path] = []
    for actors in (0, 1):
        reward = {"name": str(folder), "actors": actors, "timeout_s": 60.0}
        cfg = rl_config(tmp_path, f"run{actors}", run={"steps": 2}, reward=reward, **sections)
        run(cfg)
        runs.append(cfg.run.directory)
    assert metric_lines(runs[0]) == metric_lines(runs[1])
    assert (runs[0] / "samples.jsonl").read_bytes() == (runs[1] / "samples.jsonl").read_bytes()
