"""Checks across sections, all run before anything heavy is imported.

Each check yields every problem that it finds; a file holds those of one topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oxrl.config.checks.action import check_action
from oxrl.config.checks.adapter import check_adapter, check_adapter_model, check_four_bit
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
from oxrl.config.checks.environment import check_environment
from oxrl.config.checks.features import check_features
from oxrl.config.checks.model import MODEL, check_context
from oxrl.config.checks.notices import notices
from oxrl.config.checks.numbers import check_numbers
from oxrl.config.checks.own_features import check_own_features
from oxrl.config.checks.own_gate import check_own_gate
from oxrl.config.checks.preference import check_preference
from oxrl.config.checks.reward import check_generated, check_reward
from oxrl.config.checks.sampling import check_rejection, check_sampling, check_staleness
from oxrl.config.checks.share_prefix import check_share_prefix
from oxrl.config.checks.stored_samples import check_stored_samples
from oxrl.config.checks.vision import check_images
from oxrl.config.schema import Config

__all__ = ["evaluation_problems", "notices", "training_problems"]

OF_ALL: tuple[Check, ...] = (
    check_ranks,
    check_deepspeed,
    check_optimizer,
    check_samplers,
    check_sampling_process,
    check_adapter,
    check_adapter_model,
    check_four_bit,
    *MODEL,
    check_images,
    check_training_files,
    check_evaluation_file,
    check_columns,
)
OF_RECIPE: Mapping[str, tuple[Check, ...]] = {
    "rl": (
        check_reward,
        check_environment,
        check_action,
        check_batch,
        check_share_prefix,
        check_sampling,
        check_staleness,
        check_stored_samples,
        check_features,
        check_correction,
        check_cells,
        check_own_gate,
        check_own_features,
        check_numbers,
        check_context,
    ),
    "rejection": (check_reward, check_rejection, check_context),
    "preference": (check_preference, check_share_prefix, check_numbers),
    "supervised": (check_generated, check_action),
}


def training_problems(cfg: Config) -> Problems:
    """Every cross-section problem of a training run."""
    for check in OF_ALL:
        yield from check(cfg)
    for check in OF_RECIPE.get(cfg.train.row.recipe, ()):
        for problem in check(cfg):
            # While the algorithm is in doubt, so is what it asks for.
            yield replace(problem, also=(*problem.also, "train.alg_name"))


def evaluation_problems(cfg: Config) -> Problems:
    """Problems that matter when a configuration is only evaluated."""
    whole = (check_ranks, check_deepspeed, check_samplers, *MODEL, check_environment, check_action)
    for check in whole:
        yield from check(cfg)
    # Without a reward, a supervised run is judged by the likelihood of given answers.
    if cfg.reward.exists or cfg.train.row.recipe != "supervised":
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
