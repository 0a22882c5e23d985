"""Learning from given answers: columns of rows, losses of pairs, and answers of the model's own
that are evaluated or kept.
"""

from __future__ import annotations

from oxrl.config.checks.usual import check_context, check_reward
from oxrl.config.conditions import generates_answers
from oxrl.config.schema import Config
from oxrl.config.source import Problem, Problems, at
from oxrl.errors import did_you_mean
from oxrl.tables.numbers import ALPHA, LABEL_NOISE
from oxrl.tables.policy import ROWS

# Columns that rows may have, by the recipe; those of prompts may have any.
CHATS = (
    "messages",
    "conversations",
    "tools",
    "system",
    "history",
    "instruction",
    "input",
    "images",
    "image",
)
COLUMNS = {
    "supervised": ("prompt", "completion", "output", *CHATS),
    "preference": (
        "prompt",
        "chosen",
        "rejected",
        "completion",
        "label",
        "offset",
        "margin",
        "uid",
        "output",
        *CHATS,
    ),
    "reward_model": (
        "prompt",
        "chosen",
        "rejected",
        "margin",
        "completions",
        "labels",
        "uid",
        *CHATS,
    ),
}


def check_columns(cfg: Config) -> Problems:
    """Columns are named that rows of this recipe have; those of prompts may have any."""
    columns = COLUMNS.get(cfg.recipe)
    if columns is None:
        return
    for ours, theirs in cfg.data.columns.items():
        if ours not in columns:
            near = did_you_mean(ours, columns)
            told = f"is no column that {cfg.train.alg_name} reads; there are {', '.join(columns)}"
            yield Problem(f"data.columns.{ours}", f"{told}{near}", theirs)


def check_generated(cfg: Config) -> Problems:
    """Answers of evaluations can be generated and scored."""
    if not generates_answers(cfg):
        return
    yield from check_reward(cfg)
    yield from check_context(cfg)
    if cfg.train.engine.several_ranks:
        yield at(
            "reward.name",
            "evaluations generate answers in one process: set train.backend to local",
            "train.backend",
        )


def check_rejection(cfg: Config) -> Problems:
    """Sampling of which something different can be kept."""
    if cfg.rollout.temperature == 0 and cfg.rollout.n_samples > 1:
        yield at(
            "rollout.temperature",
            "all samples of a prompt are identical; set it above 0, or rollout.n_samples to 1",
            "rollout.n_samples",
        )
    if not isinstance(cfg.data.train, str):
        yield at("data.train", "rft asks every prompt of one file; give a path without shares")


def check_preference(cfg: Config) -> Problems:
    """Numbers at which a formula has no value, and sums of losses that read different things."""
    algorithm = cfg.train.alg_name
    methods = ROWS.methods
    addable = [name for name, method in methods.items() if method.addable]
    for name in cfg.train.mix:
        if name in addable:
            if why := _why_not_added(name, algorithm):
                yield at(
                    "train.mix",
                    f"{name} {why}, and cannot be added to {algorithm}",
                    "train.alg_name",
                )
        else:
            why = "is no preference loss"
            if name in methods:
                why = "takes more than a pair, or is a sum itself"
            yield at("train.mix", f"{name} {why}{did_you_mean(name, addable)}")
    if algorithm == "exo" and cfg.train.value(LABEL_NOISE) == 0:
        yield at("train.label_noise", "exo takes its logarithm: set it above 0; 0.001 is usual")
    if algorithm == "f_dpo_alpha" and cfg.train.value(ALPHA) == 1:
        yield at("train.preference_alpha", "at 1 the alpha divergence is the reverse KL: use dpo")


def _why_not_added(name: str, algorithm: str) -> str:
    """Say why the addable loss `name` cannot be added to `algorithm`; empty where it can."""
    method = ROWS.methods[algorithm]
    if method.unpaired:
        return "is a loss of pairs"
    if name == algorithm or name in method.parts:
        return "is in it already"
    if ROWS.methods[name].reference and not method.reference:
        return "needs a reference"
    return ""
