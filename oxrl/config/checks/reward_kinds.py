"""Rewards that are more than functions: programs that are run, judges, and trained models."""

from __future__ import annotations

from operator import attrgetter

from oxrl.config.conditions import CODE, JUDGE
from oxrl.config.schema import Config
from oxrl.config.sections.reward import AskedReward
from oxrl.config.source import Problem, Problems, at
from oxrl.errors import required
from oxrl.rewards.builtin import find_builtin


def check_kind(cfg: Config, asked: AskedReward) -> Problems:
    """The needs of one reward of these kinds."""
    if asked.name == CODE:
        yield from _check_times(asked)
    elif asked.name == JUDGE:
        if asked.options.get("compare") == "group":
            yield from _check_groups(cfg, asked)
    elif cfg.reward.actors or not cfg.train.engine.several_ranks:
        yield from _check_copies(asked)


def _check_copies(asked: AskedReward) -> Problems:
    """A reward model has no workers: it is there once, or as often as `reward.actors` says."""
    if asked.workers > 1:
        yield Problem(
            f"{asked.field}.workers",
            (
                "must be 1: a reward model is loaded once, on the device of the run, and reads "
                "train.micro_batch_tokens tokens at a time; or in each of reward.actors: remove it"
            ),
            asked.workers,
            also=(f"{asked.field}.name",),
        )


def _check_groups(cfg: Config, asked: AskedReward) -> Problems:
    """A judge that compares the responses of a group gets groups of two and more."""
    fields = {"rollout.n_samples": cfg.recipe != "supervised"}
    fields["rollout.eval_samples"] = cfg.data.eval is not None
    for field, is_read in fields.items():
        if is_read and attrgetter(field)(cfg) < 2:
            yield at(
                field,
                "must be 2 or more: the judge compares responses to one prompt with each other",
                f"{asked.field}.options",
            )


def _check_times(asked: AskedReward) -> Problems:
    """A program's own limit ends it before its worker is killed: the first is a score."""
    wait_s = required(find_builtin(CODE)).wait_s
    needed = float(str(asked.options["program_s"])) + wait_s + 1.0
    if asked.timeout_s < needed:
        yield Problem(
            f"{asked.field}.timeout_s",
            f"must be {needed:g} or more: reward.program_s, {wait_s:g} s of waiting, 1 s to judge",
            asked.timeout_s,
            also=("reward.program_s",),
        )
