"""Section `environment`: what answers the policy in episodes of several turns."""

from __future__ import annotations

from typing import Any, Literal

from oxrl.config.conditions import has_environment
from oxrl.config.field import Section, aka, setting


class EnvironmentConfig(Section):
    """The environment that answers the policy; without a name there is none, and one turn."""

    name: str = setting(
        "",
        "tools, agent (a program at a chat endpoint), gymnasium, reasoning-gym, textarena, "
        "openenv, or path.py:Class, a class with reset(prompt, seed) and step(text); empty: none.",
        aka=aka("tools", "environment_factory", "multi_turn", note="tools, or path.py:Class"),
    )
    options: dict[str, Any] = setting(
        {}, "Keyword arguments of the environment's class.", when=has_environment
    )
    max_turns: int = setting(
        8,
        "Turns of the policy, after which an episode is cut.",
        ge=1,
        le=100_000,
        why="no context holds more turns",
        when=has_environment,
    )
    max_seconds: float | None = setting(
        None,
        "Seconds after which an episode is cut at its next turn; null: no limit. What is cut then "
        "depends on the machine.",
        ge=0.1,
        le=1_000_000,
        too_low="less is over before a turn",
        why="more than eleven days is no limit",
        when=has_environment,
    )
    timeout_s: float = setting(
        10.0,
        "Seconds that reset, and each step, may take before the episode's process is killed.",
        ge=0.01,
        le=86400,
        too_low="less is over before a process can answer",
        why="more than a day is no limit",
        when=has_environment,
    )
    overlap: bool = setting(
        False,
        "Sample other episodes while environments work. What is sampled together then depends on "
        "how long they take, and with it the last digits; false: the same bytes every time.",
        when=has_environment,
    )
    alive: int = setting(
        256,
        "Episodes that have a process at the same time; the others wait.",
        ge=1,
        le=4096,
        why="each is a process",
        when=has_environment,
    )
    memory_mb: int = setting(
        4096,
        "Address space in MB that an episode's process may take beyond what loading the "
        "environment took; 0: no limit.",
        ge=0,
        le=100_000_000,
        why="no machine has more",
        when=has_environment,
    )
    tool_role: Literal["tool", "user"] = setting(
        "tool",
        "Role under which answers of tools reach the chat template: user where it drops tool.",
        when=has_environment,
    )
