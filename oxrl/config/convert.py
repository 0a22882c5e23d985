"""`oxrl config convert`: a configuration of TRL, verl or a relative, written as ours."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from oxrl.config.load import load_source
from oxrl.config.names import meant_by, translated
from oxrl.config.reads import sections_of
from oxrl.config.schema import GivenValues, recipe_of
from oxrl.config.source import Source, read_source
from oxrl.errors import ConfigError

# Which algorithm a file trains by that names none: the first of these names that it has decides.
TRAINED_BY = {
    "adv_estimator": "grpo",
    "num_generations": "sgrpo",
    "n_samples_per_prompt": "sgrpo",
    "reward_funcs": "sgrpo",
    "scale_rewards": "sgrpo",
    "epsilon": "sgrpo",
    "num_iterations": "sgrpo",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "center_rewards_coefficient": "reward_model",
    "beta": "dpo",
    "label_smoothing": "dpo",
    "precompute_ref_log_probs": "dpo",
    "completion_only_loss": "sft",
    "assistant_only_loss": "sft",
    "dataset_text_field": "sft",
    "packing": "sft",
}
GENERATIONS = 8  # of TRL, per prompt, where the file says nothing
# What a batch of TRL is made of.
BATCH = "per_device_train_batch_size times gradient_accumulation_steps"
# Kind of training, as names of other libraries may begin with it, and our field of its batch: from
# data, from rewards.
KINDS = (("sl", "data.rows_per_step"), ("rl", "data.prompts_per_step"))


def converted(path: Path) -> str:
    """A configuration of another library as YAML of ours.

    Args:
        path: YAML with nested sections, as of verl, or with names of arguments, as of TRL.

    Returns:
        Our sections, each field with the name that it had; then, as comments, what has no
        counterpart, and what is missing or wrong before it can be loaded.

    Raises:
        ConfigError: the file cannot be read, or is no YAML.
    """
    theirs = read_source(path)
    given = {name.rpartition(".")[2]: value for name, value in theirs.foreign.items()}
    row = next((row for name, row in TRAINED_BY.items() if name in given), "sft")
    ours = Source(f"what {path.name} becomes", theirs.values)
    if "run.name" not in ours.values:
        _set(ours, "run.name", path.stem, "the name of the file")
    if "train.alg_name" not in ours.values:
        _set(ours, "train.alg_name", row, "a guess by the names in the file")
    kind, batch = KINDS[recipe_of(ours.values["train.alg_name"]) == "rl"]
    _set(ours, batch, _batch(given, kind), BATCH)
    # That a section is none of ours is no loss: what it holds is translated name by name.
    left = [f"{one.path}: {one.rule}" for one in theirs.problems if " section" not in one.rule]
    for name, value in theirs.foreign.items():
        fields, found = translated(f"{kind}.{name}", value)
        for field in fields:
            _set(ours, field, found, name)
        if not fields and name not in ours.where.get(batch, "").split():
            why = meant_by(f"{kind}.{name}") or "; no counterpart"
            left.append(f"{name} = {json.dumps(value, default=str)}{why}")
    return _text(ours, left)


def _set(ours: Source, field: str, value: object, was: str) -> None:
    """Give a field of ours a value, where there is one; `was` is the name that it had."""
    if value is not None:
        ours.values[field] = value
        ours.where[field] = was


def _batch(given: GivenValues, kind: str) -> int | None:
    """Prompts or rows of a step, of a file that counts them by device as TRL does; else None.

    Args:
        given: its values, by the last words of their names.
        kind: rl: rows are responses there, several to a prompt.
    """
    known = {name: value for name, value in given.items() if isinstance(value, int)}
    rows = known.get("per_device_train_batch_size", 0) * known.get("gradient_accumulation_steps", 1)
    if kind == "rl":
        rows //= known.get("num_generations") or GENERATIONS
    return rows or None


def _text(ours: Source, left: list[str]) -> str:
    """The YAML of our sections, and comments about the rest."""
    lines: list[str] = []
    for section, fields in sections_of(ours.values).items():
        lines.append(f"{section}:")
        for name, value in fields.items():
            was = " ".join(ours.where.get(f"{section}.{name}", "").split())
            lines.append(f"  {name}: {json.dumps(value, default=str)}  # {was}".rstrip(" #"))
    comments = ["Not translated, and its defaults neither:", *left]
    try:
        with warnings.catch_warnings(action="ignore"):
            load_source(ours)
    except ConfigError as error:
        comments += ["", "Before it can be loaded:", *str(error).splitlines()]
    return "\n".join([*lines, "", *(f"# {' '.join(line.split())}" for line in comments)])
