"""The features that row, user and configuration add to the loop. Most runs have none."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

from oxrl.assembly.assembly import Assembly, Engines
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.recipes.features.episodes import Episodes
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.features.own_feature import OwnFeature
from oxrl.recipes.features.reward_scale import RewardScale
from oxrl.recipes.features.token_record import TokenRecord
from oxrl.runs.directory import ROLLOUTS


def features_of(assembly: Assembly, engines: Engines) -> Iterator[Feature]:
    """Every feature of a run, in the order in which their hooks are called."""
    cfg = assembly.cfg
    train = cfg.train
    given = FeatureInputs(
        row=train.row,
        train=assembly.algorithm,
        max_tokens=cfg.longest_response,
        models=engines.trainers,
        part_weights=assembly.part_weights,
        compared_parts=assembly.compared_parts,
    )
    if cfg.reward.bound is not None:
        yield RewardScale(cfg.reward.normalize, cfg.reward.bound)
    yield from build_features(given)
    for name, numbers in train.features.items():
        own = OwnFeature(name, given, numbers)
        if train.backend != "local":
            pickle.dumps(own)  # it is sent to other processes, so that has to be possible
        yield own
    if cfg.run.record == "tokens":
        yield TokenRecord(cfg.run.directory / ROLLOUTS)
    if cfg.environment.name:
        # Last: what it hands on is cut into rows.
        yield Episodes()
