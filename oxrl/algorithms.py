"""The table: an algorithm is a row of named cells. Pure data; imports neither torch nor config.

    rewards -> advantage -> ratio (level, denominator) -> gate -> correction -> KL -> loss weights

A cell names a function in `oxrl/functional` (ADVANTAGES, GATES, CORRECTIONS, KLS, WEIGHTS there); a recipe resolves the
names once, when it is built. `PARAMETERS` says which `train.*` fields each cell reads: the config refuses any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Value = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One algorithm. `defaults` are values of `train.*` fields that differ from the schema's."""

    name: str
    summary: str
    source: str
    recipe: Literal["rl", "supervised"] = "rl"
    advantage: str = "group_normalize"
    ratio: Literal["none", "token", "sequence", "geometric"] = "token"
    denominator: Literal["old", "rollout"] = "old"
    gate: str = "ppo_clip"
    correction: str = "none"
    kl: str = "none"
    weights: str = "token_mean"
    extras: tuple[str, ...] = ()
    defaults: Mapping[str, Value] = field(default_factory=dict[str, Value])


# (cell kind, cell name) -> the train fields it reads.
PARAMETERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("advantage", "group_normalize"): (),
    ("advantage", "group_center"): (),
    ("advantage", "leave_one_out"): (),
    ("advantage", "gae"): ("gamma", "gae_lambda", "whiten", "bootstrap_on_truncation"),
    ("gate", "policy_gradient"): (),
    ("gate", "ppo_clip"): ("clip_low", "clip_high", "clip_dual"),
    ("gate", "cispo"): ("weight_min", "weight_max"),
    ("correction", "none"): (),
    ("correction", "truncate"): ("correction_level", "correction_max"),
    ("kl", "none"): (),
    ("kl", "loss_k2"): ("kl_coeff",),
    ("kl", "loss_k3"): ("kl_coeff",),
    ("kl", "loss_k3_plus"): ("kl_coeff",),
    ("kl", "reward_k1"): ("kl_coeff",),
    ("weights", "token_mean"): (),
    ("weights", "sequence_mean"): (),
    ("weights", "sequence_sum"): (),
    ("weights", "fixed_length"): ("weights_length",),
    ("weights", "prompt_mean"): (),
    ("extra", "critic"): ("critic_lr", "value_clip", "critic_warmup_steps"),
}

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(name="sgrpo", summary="oxRL's stable GRPO", source="architecture notes", kl="loss_k3_plus"),
        Row(
            name="grpo",
            summary="group-relative policy optimisation",
            source="arXiv:2402.03300",
            kl="loss_k3",
            weights="sequence_mean",
        ),
        Row(
            name="ppo",
            summary="clipped surrogate with a critic and GAE",
            source="arXiv:1707.06347",
            advantage="gae",
            extras=("critic",),
        ),
        Row(
            name="cispo",
            summary="clipped importance weights, no token dropped",
            source="arXiv:2506.13585",
            gate="cispo",
        ),
        Row(name="sft", summary="supervised fine-tuning", source="", recipe="supervised"),
    )
}
