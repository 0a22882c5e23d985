"""The reward, as far as it can be judged without running it."""

from __future__ import annotations

from operator import attrgetter

from oxrl.config.checks.base import Problems, at
from oxrl.config.checks.model import check_context
from oxrl.config.reads import generates_answers
from oxrl.config.reward_options import (
    CODE,
    CODE_OPTIONS,
    JUDGE,
    AskedReward,
    asked_rewards,
    runs_beside_policy,
    runs_in_actors,
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
            yield at(cfg, "reward.options", f"{taken} is a field of its own: reward.{taken}")


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
    elif name == CODE:
        yield from _check_times(asked)
    elif runs_beside_policy(cfg, asked) or runs_in_actors(cfg, asked):
        yield from _check_copies(asked)
    elif name == JUDGE and asked.options.get("compare") == "group":
        yield from _check_groups(cfg, asked)


def check_generated(cfg: Config) -> Problems:
    """Evaluations of a supervised run that generate answers can do so."""
    if not generates_answers(cfg):
        return
    yield from check_reward(cfg)
    yield from check_context(cfg)
    if cfg.train.engine.several_ranks:
        rule = "evaluations generate answers in one process: set train.backend to local"
        yield at(cfg, "reward.name", rule, "train.backend")


def _check_copies(asked: AskedReward) -> Problems:
    """A reward model has no workers: it is there once, or as often as `reward.actors` says."""
    if asked.workers > 1:
        rule = (
            "must be 1: a reward model is loaded once, on the device of the run, and reads "
            "train.micro_batch_tokens tokens at a time; or in each of reward.actors: remove it"
        )
        yield Problem(f"{asked.field}.workers", rule, asked.workers, also=(f"{asked.field}.name",))


def _check_groups(cfg: Config, asked: AskedReward) -> Problems:
    """A judge that compares the responses of a group gets groups of two and more."""
    fields = {"rollout.n_samples": cfg.recipe != "supervised"}
    fields["rollout.eval_samples"] = cfg.data.eval is not None
    for field, is_read in fields.items():
        given = attrgetter(field)(cfg)
        if is_read and given < 2:
            rule = "must be 2 or more: the judge compares responses to one prompt with each other"
            yield Problem(field, rule, given, also=(f"{asked.field}.options",))


def _check_times(asked: AskedReward) -> Problems:
    """A program's own limit ends it before its worker is killed: the first is a score."""
    from oxrl_sandbox.inside.confine import WAIT_S

    needed = float(str(asked.options["program_s"])) + WAIT_S + 1.0
    if asked.timeout_s < needed:
        yield Problem(
            f"{asked.field}.timeout_s",
            f"must be {needed:g} or more: reward.program_s, {WAIT_S:g} s of waiting, 1 s to judge",
            asked.timeout_s,
            also=("reward.program_s",),
        )
