"""The configuration of a dry run: one step that takes every turn of the real one."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from oxrl.config.field import Section
from oxrl.config.reads import generates_answers, row_fields
from oxrl.config.schema import Config, FieldValues, GivenValues
from oxrl.errors import ConfigError

MOST_TOKENS = 32
MOST_SAMPLES = 4
MOST_ROWS = 4

S = TypeVar("S", bound=Section)


def dry_run_config(cfg: Config, directory: Path, model: str) -> Config:
    """The smallest run that takes every turn of `cfg`: one step, of few and short samples.

    Args:
        directory: where that run is written to.
        model: what it trains instead of `model.name`.

    Raises:
        ConfigError: the recipe has no dry run.
    """
    recipe = cfg.recipe
    if recipe == "rl" and cfg.rollout.from_samples is not None:
        raise ConfigError(
            "a dry run samples, shorter and with a smaller model than the samples of "
            f"{cfg.rollout.from_samples} are of: leave --from-samples out of it"
        )
    if recipe == "rejection":
        why = "has no dry run: a random model's responses would not be kept"
        raise ConfigError(f"{cfg.train.alg_name} {why}")
    run: FieldValues = {
        "dir": str(directory),
        "steps": cfg.train.updates if recipe == "rl" else 1,
        "mlflow": False,
        "trackers": "",
        "checkpoint_every": 0,
    }
    data: FieldValues = {
        "prompts_per_step": cfg.train.minibatches if recipe == "rl" else 1,
        "rows_per_step": min(cfg.data.rows_per_step, MOST_ROWS),
        "max_prompt_tokens": None,
        "overlong": "drop",
    }
    if cfg.data.eval is not None:
        run["eval_every"] = 0
        data["eval_rows"] = 2
    own = {
        "name": model,
        "revision": None,
        "dtype": "float32",
        "max_length": None,
    }
    tokens = min(cfg.rollout.max_tokens, MOST_TOKENS)
    samples = min(cfg.rollout.n_samples, MOST_SAMPLES)
    rollout = {
        "n_samples": samples,
        "max_tokens": tokens,
        "eval_samples": min(cfg.rollout.eval_samples, MOST_SAMPLES),
    }
    sections = {
        "run": _changed(cfg.run, run),
        "model": _changed(cfg.model, own),
        "data": _changed(cfg.data, data),
        "train": _changed(cfg.train, _numbers(cfg, tokens, samples)),
    }
    answers = recipe != "supervised" or generates_answers(cfg)
    if "rollout" in type(cfg).model_fields and answers:
        sections["rollout"] = _changed(cfg.rollout, rollout)
    return cfg.model_copy(update=sections)


def _numbers(cfg: Config, tokens: int, samples: int) -> FieldValues:
    """Numbers of the algorithm that may not be above the lengths and counts of a dry run."""
    numbers: FieldValues = {}
    read = row_fields(cfg.train.row)
    for name, most in (("overlong_buffer", tokens), ("pass_k", samples)):
        value = getattr(cfg.train, name) if f"train.{name}" in read else None
        if value is not None:
            numbers[name] = min(value, most)
    return numbers


def _changed(section: S, values: GivenValues) -> S:
    """A section with those of the values that its recipe can read."""
    known = {name: values[name] for name in values if name in type(section).model_fields}
    return section.model_copy(update=known)
