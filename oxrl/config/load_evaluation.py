"""The configuration of a run, to evaluate with: what its training reads does not matter then."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oxrl.config.checks.engines import (
    check_attention,
    check_deepspeed,
    check_device,
    check_offload,
    check_ranks,
    check_samplers,
    check_template,
)
from oxrl.config.checks.sampling import check_action, check_environment
from oxrl.config.checks.usual import (
    check_evaluation_file,
    check_model,
    check_reward,
    check_training_files,
)
from oxrl.config.given import apply_overrides
from oxrl.config.load import checked, read_with_overrides
from oxrl.config.schema import Config, FieldValues
from oxrl.config.source import Problems, Source, at

# Sections that may be set whatever the training algorithm reads.
EVALUATED = (
    "run",
    "model",
    "data",
    "reward",
    "environment",
    "action",
    "rollout",
    "inference_engine",
)
OF_EVERY_EVALUATION = (
    check_ranks,
    check_device,
    check_deepspeed,
    check_samplers,
    check_model,
    check_template,
    check_attention,
    check_offload,
    check_environment,
    check_action,
)
# What an override begins with that says what scores.
SCORING = ("reward.name=", "reward.parts=", "reward.parts.", "environment.name=")


def load_evaluation_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """As `load_config`, to evaluate with: reward and rollout are read even for `sft`.

    Rules about training data and training samples do not apply, so `rollout.top_p` and `top_k` may
    be set.
    """
    return checked(read_with_overrides(path, overrides), _problems, EVALUATED)


def model_evaluation_config(model: str, overrides: Sequence[str]) -> Config:
    """Configure the evaluation of a model that belongs to no run: overrides say everything else.

    With a reward or an environment its responses to prompts are scored; without one it is judged by
    the likelihood of the answers in data.eval.
    """
    rewarded = any(override.startswith(SCORING) for override in overrides)
    values: FieldValues = {
        "run.name": "evaluation",
        "run.steps": 1,
        "model.name": model,
        "train.alg_name": "sgrpo" if rewarded else "sft",
    }
    source = Source(f"the evaluation of {model}", values)
    apply_overrides(source, overrides)
    if "data.eval" in source.values:
        source.values.setdefault("data.train", source.values["data.eval"])
    return checked(source, _problems, EVALUATED)


def _problems(cfg: Config) -> Problems:
    """Problems that matter where a configuration is only evaluated."""
    for check in OF_EVERY_EVALUATION:
        yield from check(cfg)
    # Without a reward, a supervised run is judged by the likelihood of given answers.
    if cfg.reward.exists or cfg.recipe != "supervised":
        yield from check_reward(cfg)
    if cfg.data.eval is not None:
        yield from check_evaluation_file(cfg)
        return
    if len(cfg.data.train_files) > 1:
        yield at(
            "data.eval",
            "is needed: data.train is several files; name the one to evaluate on",
            "data.train",
        )
    yield from check_training_files(cfg)
