"""The features that row, user and configuration add to the loop. Most runs have none."""

from __future__ import annotations

from oxrl.assembly.assembly import Assembly, Engines
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.recipes.features.episodes import Episodes
from oxrl.recipes.features.of_rows import build_features
from oxrl.recipes.features.own_feature import own_features
from oxrl.recipes.features.reward_scale import RewardScale
from oxrl.recipes.features.token_record import TokenRecord
from oxrl.runs.directory import ROLLOUTS


def features_of(assembly: Assembly, engines: Engines) -> list[Feature]:
    """Every feature of a run, in the order in which their hooks are called."""
    cfg = assembly.cfg
    train = cfg.train
    given = FeatureInputs(
        row=train.row,
        train=assembly.algorithm,
        max_tokens=cfg.longest_response,
        policy=engines.trainers["policy"],
        critic=engines.trainers.get("critic"),
        reference=engines.trainers.get("reference"),
        part_weights=assembly.part_weights,
        compared_parts=assembly.compared_parts,
    )
    features: list[Feature] = []
    if cfg.reward.bound is not None:
        features.append(RewardScale(cfg.reward.normalize, cfg.reward.bound))
    features += build_features(given)
    features += own_features(given, train.features, sent=train.backend != "local")
    if cfg.run.record == "tokens":
        features.append(TokenRecord(cfg.run.directory / ROLLOUTS))
    if cfg.environment.name:
        # Last: what it hands on is cut into rows.
        features.append(Episodes())
    return features
