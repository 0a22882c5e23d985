"""The configuration of a dry run: one step that takes every turn of the real one."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.reads import read_values, sections_of
from oxrl.config.schema import Config, FieldValues
from oxrl.errors import ConfigError

MOST_TOKENS = 32
MOST_SAMPLES = 4
MOST_ROWS = 4


def dry_run_config(cfg: Config, directory: Path, model: str) -> Config:
    """The smallest run that takes every turn of `cfg`: one step, of few and short samples.

    Args:
        directory: where that run is written to.
        model: what it trains instead of `model.name`.

    Raises:
        ConfigError: the recipe has no dry run.
    """
    recipe = cfg.recipe
    if cfg.rollout.from_samples is not None:
        raise ConfigError(
            "a dry run samples, shorter and with a smaller model than the samples of "
            f"{cfg.rollout.from_samples} are of: leave --from-samples out of it"
        )
    if recipe == "rejection":
        raise ConfigError(
            f"{cfg.train.alg_name} has no dry run: a random model's responses would not be kept"
        )
    tokens = min(cfg.rollout.max_tokens, MOST_TOKENS)
    samples = min(cfg.rollout.n_samples, MOST_SAMPLES)
    values: FieldValues = {
        "run.dir": str(directory),
        "run.steps": cfg.train.updates if recipe == "rl" else 1,
        "run.mlflow": False,
        "run.trackers": "",
        "run.checkpoint_every": 0,
        "run.eval_every": 0,
        "model.name": model,
        "model.revision": None,
        "model.dtype": "float32",
        "model.max_length": None,
        "data.prompts_per_step": cfg.train.minibatches if recipe == "rl" else 1,
        "data.rows_per_step": min(cfg.data.rows_per_step, MOST_ROWS),
        "data.max_prompt_tokens": None,
        "data.overlong": "drop",
        "data.eval_rows": 2,
        "rollout.n_samples": samples,
        "rollout.max_tokens": tokens,
        "rollout.eval_samples": min(cfg.rollout.eval_samples, MOST_SAMPLES),
        # Numbers of the algorithm that may not be above those.
        "train.overlong_buffer": _at_most(tokens, cfg.train.overlong_buffer),
        "train.pass_k": _at_most(samples, cfg.train.pass_k),
    }
    found = read_values(cfg)
    found |= {path: value for path, value in values.items() if path in found}
    return Config.model_validate(sections_of(found))


def _at_most(most: int, value: int | None) -> int | None:
    return None if value is None else min(value, most)
