"""Checks across sections, all run before anything heavy is imported.

Each check yields every problem that it finds; a file holds those of one topic, and is imported
where a configuration has the topic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oxrl.config.checks.base import Check, Problems, at
from oxrl.config.checks.batch import check_batch
from oxrl.config.checks.cells import check_cells, check_correction
from oxrl.config.checks.data import check_columns, check_evaluation_file, check_training_files
from oxrl.config.checks.engines import (
    check_deepspeed,
    check_optimizer,
    check_ranks,
    check_samplers,
    check_sampling_process,
)
from oxrl.config.checks.features import check_features
from oxrl.config.checks.model import MODEL, check_context
from oxrl.config.checks.notices import notices
from oxrl.config.checks.numbers import check_numbers
from oxrl.config.checks.reward import check_generated, check_reward
from oxrl.config.checks.sampling import check_rejection, check_sampling, check_staleness
from oxrl.config.checks.share_prefix import check_share_prefix
from oxrl.config.schema import Config
from oxrl.config.sections.train import is_own
from oxrl.modelfiles.vision import vision_family

__all__ = ["evaluation_problems", "notices", "training_problems"]


def _of_every_run(cfg: Config) -> Iterator[Check]:
    yield check_ranks
    yield check_deepspeed
    yield check_optimizer
    yield check_samplers
    yield check_sampling_process
    if cfg.lora.rank:
        from oxrl.config.checks.adapter import ADAPTER  # most runs train all weights

        yield from ADAPTER
    yield from MODEL
    if vision_family(cfg.model.name) is not None:
        from oxrl.config.checks.vision import check_images  # most models read text alone

        yield check_images
    yield check_training_files
    yield check_evaluation_file
    yield check_columns


def _of_recipe(cfg: Config) -> Iterator[Check]:
    recipe = cfg.recipe
    if recipe == "rl":
        yield from _of_reinforcement_learning(cfg)
    elif recipe == "rejection":
        yield check_reward
        yield check_rejection
        yield check_context
    elif recipe == "preference":
        from oxrl.config.checks.preference import check_preference  # of this recipe alone

        yield check_preference
        yield check_share_prefix
        yield check_numbers
    elif recipe == "supervised":
        yield check_generated
        if cfg.action.exists or cfg.action.choices:
            from oxrl.config.checks.action import check_action  # most answers are text

            yield check_action


def _of_reinforcement_learning(cfg: Config) -> Iterator[Check]:
    yield check_reward
    yield from _of_episodes(cfg)
    yield check_batch
    yield check_share_prefix
    yield check_sampling
    yield check_staleness
    if cfg.rollout.from_samples is not None:
        from oxrl.config.checks.stored_samples import check_stored_samples  # most runs sample

        yield check_stored_samples
    yield check_features
    yield check_correction
    yield check_cells
    if is_own(cfg.train.row.gate) or cfg.train.features:
        # Code of the user's own.
        from oxrl.config.checks.own_code import check_own_features, check_own_gate

        yield check_own_gate
        yield check_own_features
    yield check_numbers
    yield check_context


def _of_episodes(cfg: Config) -> Iterator[Check]:
    if cfg.environment.name or cfg.action.exists or cfg.action.choices:
        # Most runs have single turns of text.
        from oxrl.config.checks.action import check_action
        from oxrl.config.checks.environment import check_environment

        yield check_environment
        yield check_action


def training_problems(cfg: Config) -> Problems:
    """Every cross-section problem of a training run."""
    for check in _of_every_run(cfg):
        yield from check(cfg)
    for check in _of_recipe(cfg):
        for problem in check(cfg):
            # While the algorithm is in doubt, so is what it asks for.
            yield replace(problem, also=(*problem.also, "train.alg_name"))


def evaluation_problems(cfg: Config) -> Problems:
    """Problems that matter when a configuration is only evaluated."""
    whole = (check_ranks, check_deepspeed, check_samplers, *MODEL, *_of_episodes(cfg))
    for check in whole:
        yield from check(cfg)
    # Without a reward, a supervised run is judged by the likelihood of given answers.
    if cfg.reward.exists or cfg.recipe != "supervised":
        yield from check_reward(cfg)
    if cfg.data.eval is not None:
        yield from check_evaluation_file(cfg)
        return
    if len(cfg.data.train_files) > 1:
        yield at(
            cfg,
            "data.eval",
            "is needed: data.train is several files; name the one to evaluate on",
            "data.train",
        )
    yield from check_training_files(cfg)
