"""Rewards that are more than functions: programs that are run, judges, and trained models."""

from __future__ import annotations

from operator import attrgetter

from oxrl.config.checks.base import Problems
from oxrl.config.reward_options import (
    CODE,
    JUDGE,
    AskedReward,
    runs_beside_policy,
    runs_in_actors,
)
from oxrl.config.schema import Config
from oxrl.config.source import Problem


def check_kind(cfg: Config, asked: AskedReward) -> Problems:
    """What one reward of these kinds needs."""
    if asked.name == CODE:
        yield from _check_times(asked)
    elif runs_beside_policy(cfg, asked) or runs_in_actors(cfg, asked):
        yield from _check_copies(asked)
    elif asked.name == JUDGE and asked.options.get("compare") == "group":
        yield from _check_groups(cfg, asked)


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
