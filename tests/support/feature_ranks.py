"""Steps of reinforcement learning with features on a fixed rollout batch, by however many ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oxrl.assembly.assembly import Assembly, Engines
from oxrl.assembly.features import features_of
from oxrl.config import Config
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.recipes import rl
from oxrl.recipes.objective import Objective, prepare_update
from oxrl.runs.ranks import ALONE, Ranks
from oxrl.types import RolloutBatch
from support.tiny import token_batch

# Prompt and response of four groups of four rows.
LENGTHS = [(2 + row % 4, 1 + 3 * row % 7) for row in range(16)]
STEPS = 3
VOCABULARY = 200


def rollout_batch(first_draw: int) -> RolloutBatch:
    """Rows of random tokens and rewards, each of which lies on the last token."""
    chance = torch.Generator().manual_seed(first_draw)
    inputs = token_batch(LENGTHS, extra=0, vocabulary=VOCABULARY)
    mask = inputs.response_mask
    rewards = torch.rand(len(LENGTHS), generator=chance, dtype=torch.float64)
    last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)
    empty = torch.zeros(mask.shape, dtype=torch.float64)
    none = torch.zeros(len(LENGTHS), dtype=torch.bool)
    return RolloutBatch(
        inputs=inputs,
        rollout_logprobs=torch.full(mask.shape, -5.0).masked_fill(~mask, 0.0),
        rewards=rewards,
        token_rewards=empty.scatter_(1, last[:, None], rewards[:, None]),
        group_ids=torch.arange(len(LENGTHS)) // 4 + first_draw,
        versions=torch.zeros(mask.shape, dtype=torch.int64),
        terminated=~none,
        truncated=none,
        valid=~none,
        places=torch.arange(len(LENGTHS)),
    )


def sampled() -> Any:
    """All that is asked of what rows were made of: two sources, in turns."""
    sources = [("sums", "products")[row % 2] for row in range(len(LENGTHS))]
    return [SimpleNamespace(prompt=SimpleNamespace(source=source)) for source in sources]


def trained(cfg: Config, ranks: Ranks) -> dict[str, Tensor]:
    """The weights after three rollout steps, and the advantages of the last one."""
    assembly = Assembly(cfg, ranks)
    never_asked: Any = None
    trainers = assembly.trainers()
    with ExitStack() as stack:
        engines = Engines(trainers, never_asked, never_asked, never_asked)
        features = list(features_of(assembly, engines, stack))
        objective = Objective(assembly.algorithm, features, max_tokens=8)
        machine: Any = SimpleNamespace(
            policy=trainers["policy"],
            objective=objective,
            features=features,
            ledger=SimpleNamespace(count_update=lambda batch: {}),
            ratio_tolerance=1e-3,
            seed=0,
            epochs=1,
            minibatches=cfg.train.minibatches,
        )
        session: Any = None
        batch: Any = None
        step = 0
        for turn in range(STEPS):
            rollouts = rollout_batch(4 * turn)
            for feature in features:
                feature.on_sampled(sampled())
                rollouts = feature.on_rollouts(rollouts)
            batch = prepare_update(
                objective, trainers, rollouts, kl_coeff=0.0, seed=turn, version=step
            )
            for index, rows in enumerate(rl.minibatches(machine, batch, rollout_step=turn)):
                step += 1
                found = rl.update(machine, session, batch, rows, step=step, first=index == 0)
                assert not found["update/skipped"]
    named = dict(item for bucket in trainers["policy"].weights() for item in bucket)
    return {name: weight.clone() for name, weight in named.items()} | {"A": batch.advantages}


def train_alone(cfg: Config) -> dict[str, Tensor]:
    return trained(cfg, ALONE)


def train_on_rank(cfg: Config, out: Path) -> None:
    """Body of a rank; the first one writes what came of it."""
    with joined_ranks(torch.device("cpu"), cfg.run.waits) as ranks:
        found = trained(cfg, ranks)
    if os.environ["RANK"] == "0":
        torch.save(found, out)
