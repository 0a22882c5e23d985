"""Checks across sections, all run before anything heavy is imported.

Each check yields every problem that it finds; a file holds those of one topic. Here are those of
all runs, and those of the runs of a recipe, in the order in which they are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oxrl.config.checks.algorithm import (
    check_batch,
    check_cells,
    check_centering,
    check_correction,
    check_features,
    check_moving_ratio,
    check_numbers,
    check_own_features,
    check_own_gate,
    check_share_prefix,
)
from oxrl.config.checks.engines import (
    check_adapter,
    check_attention,
    check_deepspeed,
    check_device,
    check_exact,
    check_images,
    check_offload,
    check_optimizer,
    check_ranks,
    check_samplers,
    check_sampling_process,
    check_template,
)
from oxrl.config.checks.offline import (
    check_columns,
    check_generated,
    check_preference,
    check_rejection,
)
from oxrl.config.checks.sampling import (
    check_action,
    check_environment,
    check_staleness,
    check_stored_samples,
)
from oxrl.config.checks.usual import (
    check_context,
    check_evaluation_file,
    check_model,
    check_reward,
    check_sampling,
    check_training_files,
)
from oxrl.config.schema import Config
from oxrl.config.source import Check, Problems

OF_EVERY_RUN: tuple[Check, ...] = (
    check_ranks,
    check_device,
    check_deepspeed,
    check_optimizer,
    check_samplers,
    check_sampling_process,
    check_adapter,
    check_model,
    check_template,
    check_attention,
    check_offload,
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
        check_exact,
        check_features,
        check_correction,
        check_cells,
        check_centering,
        check_moving_ratio,
        check_own_gate,
        check_own_features,
        check_numbers,
        check_context,
    ),
    "supervised": (check_generated, check_action),
    "rejection": (check_reward, check_rejection, check_context),
    "preference": (check_preference, check_share_prefix, check_numbers),
    "reward_model": (),
}


def training_problems(cfg: Config) -> Problems:
    """Every cross-section problem of a training run."""
    for check in OF_EVERY_RUN:
        yield from check(cfg)
    for check in OF_RECIPE[cfg.recipe]:
        for problem in check(cfg):
            # While the algorithm is in doubt, so is what it asks for.
            yield replace(problem, also=(*problem.also, "train.alg_name"))
