"""Checks across sections, all run before anything heavy is imported.

Each check yields every problem that it finds; a file holds those of one topic, and is imported
where a configuration has the topic: what most runs leave as it is has nothing to be checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from oxrl.config.checks.base import Check, Problems
from oxrl.config.checks.data import check_evaluation_file, check_training_files
from oxrl.config.checks.features import check_features
from oxrl.config.checks.model import MODEL, check_context
from oxrl.config.checks.reward import check_reward
from oxrl.config.checks.sampling import check_sampling
from oxrl.config.conditions import generates_answers
from oxrl.config.schema import Config
from oxrl.config.sections.train import CELLS, is_own
from oxrl.modelfiles.vision import vision_family
from oxrl.tables.policy import ROWS


def _of_every_run(cfg: Config) -> Iterator[Check]:
    yield from _of_engines(cfg)
    if cfg.lora.rank:
        from oxrl.config.checks.adapter import ADAPTER

        yield from ADAPTER
    yield from _of_model(cfg)
    yield check_training_files
    yield check_evaluation_file
    if cfg.data.columns:
        from oxrl.config.checks.columns import check_columns

        yield check_columns


def _of_engines(cfg: Config) -> Iterator[Check]:
    """Of runs that are more than one process, or have no masters."""
    one_process = cfg.train.backend == "local" and cfg.run.training_gpus == 1 and not cfg.samplers
    placed = cfg.inference_engine.placement == "separate"
    if not (one_process and placed and cfg.train.master_weights == "float32"):
        from oxrl.config.checks.engines import ENGINES

        yield from ENGINES


def _of_model(cfg: Config) -> Iterator[Check]:
    yield from MODEL
    model = cfg.model
    if model.chat_template or model.attention != "auto" or model.offload_activations:
        from oxrl.config.checks.model_options import MODEL_OPTIONS

        yield from MODEL_OPTIONS
    if vision_family(model.name) is not None:
        from oxrl.config.checks.vision import check_images

        yield check_images


def _of_recipe(cfg: Config) -> Iterator[Check]:
    recipe = cfg.recipe
    if recipe == "rl":
        yield from _of_reinforcement_learning(cfg)
    elif recipe == "rejection":
        from oxrl.config.checks.answers import check_rejection

        yield check_reward
        yield check_rejection
        yield check_context
    elif recipe == "preference":
        from oxrl.config.checks.numbers import check_numbers
        from oxrl.config.checks.preference import check_preference
        from oxrl.config.checks.share_prefix import check_share_prefix

        yield check_preference
        yield check_share_prefix
        yield check_numbers
    elif recipe == "supervised":
        if generates_answers(cfg):
            from oxrl.config.checks.answers import check_generated

            yield check_generated
        if cfg.action.exists or cfg.action.choices:
            from oxrl.config.checks.action import check_action

            yield check_action


def _of_reinforcement_learning(cfg: Config) -> Iterator[Check]:
    yield check_reward
    yield from of_episodes(cfg)
    if cfg.train.updates > 1:
        from oxrl.config.checks.batch import check_batch

        yield check_batch
    if cfg.train.share_prefix is True:
        from oxrl.config.checks.share_prefix import check_share_prefix

        yield check_share_prefix
    yield check_sampling
    if cfg.rollout.max_staleness:
        from oxrl.config.checks.staleness import check_staleness

        yield check_staleness
    if cfg.rollout.from_samples is not None:
        from oxrl.config.checks.stored_samples import check_stored_samples

        yield check_stored_samples
    yield check_features
    by_hand = composed_by_hand(cfg)
    if by_hand:
        from oxrl.config.checks.cells import check_cells, check_correction

        yield check_correction
        yield check_cells
    if is_own(cfg.train.row.gate) or cfg.train.features:
        # Code of the user's own.
        from oxrl.config.checks.own_code import check_own_features, check_own_gate

        yield check_own_gate
        yield check_own_features
    if by_hand:
        from oxrl.config.checks.numbers import check_numbers

        yield check_numbers
    yield check_context


def composed_by_hand(cfg: Config) -> bool:
    """Whether a run of reinforcement learning has other cells or numbers than its row of the table,
    or a row that asks for something of the run.
    """
    train = cfg.train
    row = ROWS[train.alg_name]
    asks = row.unsupported or row.advantage == "pass_at_k" or train.old_logprobs != "auto"
    changed = any(getattr(train, name) != value for name, value in row.defaults.items())
    chosen = any(getattr(train, cell) is not None for cell in CELLS)
    return bool(asks) or changed or chosen


def of_episodes(cfg: Config) -> Iterator[Check]:
    """Of runs whose prompts are answered in several turns, or by actions."""
    if cfg.environment.name or cfg.action.exists or cfg.action.choices:
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
