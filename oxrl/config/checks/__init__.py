"""Checks across sections, all run before anything heavy is imported.

Each check yields every problem that it finds; a file holds those of one topic. What most runs leave
as it is has nothing to be checked, and its files are not imported then.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

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
from oxrl.config.schema import Config, defaults_of
from oxrl.config.source import Problems
from oxrl.modelfiles.folder import vision_family
from oxrl.tables.cells import GROUPS
from oxrl.tables.policy import ROWS

# Of a plain run, in the order of `by_recipe.py`.
OF_EVERY_RUN = (check_model, check_model_files, check_training_files, check_evaluation_file)
OF_PLAIN_RUNS = (check_reward, check_sampling, check_groups, check_context)
# What plain runs may set: other checks read it, if at all, beside a field that is none of these.
USUAL = {
    "run.name",
    "run.seed",
    "run.dir",
    "run.steps",
    "run.device",
    "run.threads",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.eval_every",
    "run.mlflow",
    "run.console",
    "model.name",
    "model.dtype",
    "model.max_length",
    "data.train",
    "data.eval",
    "data.prompts_per_step",
    "data.max_prompt_tokens",
    "data.eval_rows",
    "reward.name",
    "reward.options",
    "rollout.temperature",
    "rollout.top_p",
    "rollout.top_k",
    "rollout.max_tokens",
    "rollout.n_samples",
    "rollout.eval_samples",
    "rollout.eval_temperature",
    "train.alg_name",
    "train.lr",
    "train.lr_schedule",
    "train.warmup_steps",
}


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
    """True if the usual checks are all: of reinforcement learning with groups or no needs, on a
    model of text, where all but the usual fields are as the algorithm or their lines have them.
    """
    row = ROWS[cfg.train.alg_name]
    defaults = defaults_of(row.name)
    if any(attrgetter(path)(cfg) != defaults[path] for path in defaults.keys() - USUAL):
        return False
    others = set(row.needs) - {GROUPS.name}
    return row.recipe == "rl" and not others and vision_family(cfg.model.name) is None
