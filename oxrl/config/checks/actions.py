"""Actions of robots and games: they can be told apart, and there is who answers them."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.schema import Config
from oxrl.config.source import Problems, at
from oxrl.data.actions import HEAD_FILE, read_quantiles
from oxrl.data.fast import read_code
from oxrl.errors import DataError


def action_problems(cfg: Config) -> Problems:
    """Every problem of a configuration that has actions."""
    action = cfg.action
    if len(set(action.names)) != len(action.names) or len(action.names) == 1:
        yield at("action.choices", "needs two names or more, each once")
    if not action.names:
        yield from _check_numbers(cfg)
        if action.code == "fast":
            yield from _check_fast(cfg)
    yield from _check_turns(cfg)


def _check_turns(cfg: Config) -> Problems:
    """There is who answers turns, and they are as long as actions are."""
    action = cfg.action
    if cfg.rollout.rewritten_history == "split":
        yield at(
            "rollout.rewritten_history",
            "turns of actions have no text that a template could rewrite: leave it out",
            "action.size",
            "action.choices",
        )
    if cfg.recipe == "rl" and not cfg.environment.name:
        yield at(
            "environment.name",
            "is needed: actions are answered by an environment, not by a reward",
            "action.size",
            "action.choices",
        )
    if cfg.recipe == "supervised" and cfg.reward.exists and not cfg.environment.name:
        yield at(
            "reward.name",
            (
                "actions are judged in episodes: leave it out, and evaluate by oxrl eval RUN "
                "environment.name=NAME"
            ),
            "action.size",
            "action.choices",
        )
    if cfg.environment.name and cfg.rollout.max_tokens != action.tokens:
        most = "most tokens" if action.code == "fast" else "tokens"
        yield at(
            "rollout.max_tokens",
            f"must be {action.tokens}, the {most} of a turn of actions: leave it out",
            "action.size",
            "action.choices",
            "action.chunk",
        )


def _check_numbers(cfg: Config) -> Problems:
    action = cfg.action
    if action.statistics is None:
        if not (Path(cfg.model.name) / HEAD_FILE).is_file():
            yield at(
                "action.statistics",
                (
                    f"is needed: the model has no {HEAD_FILE} that says between which numbers its "
                    "actions lie; name the file that `oxrl prepare demonstrations` wrote"
                ),
                "model.name",
            )
        return
    try:
        found = read_quantiles(Path(action.statistics))
    except DataError as error:
        yield at("action.statistics", str(error))
        return
    if len(found.low) != action.size:
        yield at(
            "action.statistics",
            f"has quantiles of {len(found.low)} numbers, and action.size is {action.size}",
            "action.size",
        )


def _check_fast(cfg: Config) -> Problems:
    action = cfg.action
    if action.fast is None:
        if not (Path(cfg.model.name) / HEAD_FILE).is_file():
            yield at(
                "action.fast",
                (
                    f"is needed for action.code: fast: the model has no {HEAD_FILE} that holds "
                    "pieces; name the file that `oxrl prepare demonstrations fast=1024` wrote"
                ),
                "action.code",
                "model.name",
            )
        return
    try:
        code = read_code(Path(action.fast))
    except DataError as error:
        yield at("action.fast", str(error))
        return
    if (code.chunk, code.size) != (action.chunk, action.size):
        yield at(
            "action.fast",
            f"is of chunks of {code.chunk} actions, {code.size} numbers each",
            "action.chunk",
            "action.size",
        )
