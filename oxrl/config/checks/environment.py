"""The environment, as far as it can be judged without running it."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.schema import Config
from oxrl.tables.user_code import ENVIRONMENT


def check_environment(cfg: Config) -> Problems:
    """It is built in, or a class that its file defines, and its limits leave room for a turn."""
    name = cfg.environment.name
    if not name:
        return
    # Only where there is one.
    from oxrl.usercode.locate import place_of

    try:
        place_of(ENVIRONMENT, name)
    except ValueError as error:
        yield at(ENVIRONMENT.field, str(error))
    if name == "agent" and not cfg.environment.options.get("command"):
        rule = "environment.name=agent needs the program: {command: python my_agent.py}"
        yield at("environment.options", rule, "environment.name")
    most = cfg.rollout.max_episode_tokens
    if most is not None and most < cfg.rollout.max_tokens:
        yield at(
            "rollout.max_episode_tokens",
            f"is less than rollout.max_tokens={cfg.rollout.max_tokens}, which bounds one turn: "
            "lower that, or raise this",
            "rollout.max_tokens",
        )
