"""Checks across sections, all run before anything heavy is imported.

Each check yields every problem that it finds; a file holds those of one topic. What most runs leave
as it is has nothing to be checked, and its files are not imported then.
"""

from __future__ import annotations

from dataclasses import replace

from oxrl.config.checks.usual import (
    check_context,
    check_evaluation_file,
    check_groups,
    check_model,
    check_model_files,
    check_reward,
    check_sampling,
    check_training_files,
)
from oxrl.config.schema import Config
from oxrl.config.sections.train import CELLS
from oxrl.config.source import Problems
from oxrl.modelfiles.folder import vision_family
from oxrl.tables.cells import GROUPS
from oxrl.tables.policy import ROWS

# Of a plain run, in the order of `by_recipe.py`.
OF_EVERY_RUN = (check_model, check_model_files, check_training_files, check_evaluation_file)
OF_PLAIN_RUNS = (check_reward, check_sampling, check_groups, check_context)


def training_problems(cfg: Config) -> Problems:
    """Every cross-section problem of a training run."""
    if is_plain(cfg):
        of_every_run = OF_EVERY_RUN
        of_recipe = OF_PLAIN_RUNS
    else:
        from oxrl.config.checks import by_recipe  # four files, of which a plain run needs none

        of_every_run = by_recipe.OF_EVERY_RUN
        of_recipe = by_recipe.OF_RECIPE[cfg.recipe]
    for check in of_every_run:
        yield from check(cfg)
    for check in of_recipe:
        for problem in check(cfg):
            # While the algorithm is in doubt, so is what it asks for.
            yield replace(problem, also=(*problem.also, "train.alg_name"))


def is_plain(cfg: Config) -> bool:
    """True if the usual checks are all: of reinforcement learning with groups or no needs, by an
    algorithm as its row has it, in one process, on a model of text as its files have it.
    """
    model = cfg.model
    train = cfg.train
    row = ROWS[train.alg_name]
    unusual = (
        cfg.recipe != "rl",
        not {GROUPS.name}.issuperset(train.row.needs),
        any(getattr(train, cell) is not None for cell in CELLS),
        any(getattr(train, name) != value for name, value in row.defaults.items()),
        train.features,
        train.old_logprobs != "auto",
        train.updates > 1,
        train.share_prefix is True,
        train.master_weights != "float32",
        train.backend != "local",
        cfg.run.training_gpus > 1,
        cfg.samplers,
        cfg.inference_engine.placement != "separate",
        cfg.lora.rank,
        cfg.environment.name,
        cfg.action.exists,
        cfg.action.choices,
        cfg.rollout.max_staleness,
        cfg.rollout.from_samples is not None,
        cfg.data.columns,
        model.chat_template,
        model.attention != "auto",
        model.offload_activations,
        vision_family(model.name),
    )
    return not any(unusual)
