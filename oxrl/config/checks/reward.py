"""The reward, as far as it can be judged without running it."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.reward_options import (
    CODE,
    CODE_OPTIONS,
    JUDGE,
    AskedReward,
    asked_rewards,
    is_folder,
)
from oxrl.config.schema import Config
from oxrl.config.source import Problem


def check_reward(cfg: Config) -> Problems:
    """Every reward is built in, or a function that its file defines; no code of users is imported.

    An environment may be all that rewards.
    """
    reward = cfg.reward
    if reward.name and reward.parts:
        rule = "say what scores, and so does reward.name: keep one of the two, and remove it here"
        parts = {name: part.model_dump(exclude_unset=True) for name, part in reward.parts.items()}
        yield Problem("reward.parts", rule, parts, also=("reward.name",))
        return
    if not reward.exists and not cfg.environment.name:
        yield Problem(
            "reward.name",
            "is required: what scores a response; one of math, exact or path.py:function",
            also=("reward.parts",),
        )
        return
    for asked in asked_rewards(reward):
        yield from _check_one(cfg, asked)
    for taken in CODE_OPTIONS:
        if reward.name == CODE and taken in reward.options:
            yield at("reward.options", f"{taken} is a field of its own: reward.{taken}")


def _check_one(cfg: Config, asked: AskedReward) -> Problems:
    """One reward can be found and called with its options, in the time that it has."""
    # Only where a reward is read: it is a quarter of the time to start.
    from oxrl.rewards.builtin import option_problem, place_of_reward

    name = asked.name
    field = f"{asked.field}.name"
    if not name:
        yield Problem(field, "is empty: write a built-in reward or path.py:function", name)
        return
    try:
        place_of_reward(name)
    except ValueError as error:
        yield Problem(field, str(error), name)
        return
    problem = option_problem(name, asked.options)
    if problem:
        options = f"{asked.field}.options"
        given = cfg.reward.parts[asked.part].options if asked.part else cfg.reward.options
        # Of a judge names alone: a value may be a key in the wrong place.
        shown = list(given) if name == JUDGE else given
        yield Problem(options, problem, shown, also=(field,))
    elif name in (CODE, JUDGE) or is_folder(asked):
        from oxrl.config.checks.reward_kinds import check_kind  # most rewards are functions

        yield from check_kind(cfg, asked)
