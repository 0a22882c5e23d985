"""The kinds of code that users write: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oxrl.errors import (
    ConfigError,
    EnvironmentDefinitionError,
    OxrlError,
    RewardDefinitionError,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """One kind of code that users write.

    noun: what it is called, and the argument of `oxrl.train` that gives it. field: of the
    configuration that names it. forms: what may stand there, for errors; {} are the names that are
    known. error: raised about it. table: name -> where oxRL has it, as an entry point says it.
    """

    noun: str
    field: str
    forms: str
    error: type[OxrlError] = ConfigError
    table: Mapping[str, str]

    @property
    def group(self) -> str:
        """The entry points by which installed packages offer it."""
        return f"oxrl.{self.noun}s"

    def problem(self, name: str, text: str) -> OxrlError:
        """Return an error that says what is wrong with the one of a name."""
        return self.error(f"{self.field}={name}: {text}")


REWARD = Kind(
    noun="reward",
    field="reward.name",
    forms="{}, path.py:function (such as my_reward.py:score) or a reward model's folder",
    error=RewardDefinitionError,
    table={
        "math": "oxrl_graders.math:MATH",
        "exact": "oxrl.rewards.exact:EXACT",
        "code": "oxrl_sandbox.code_reward:CODE",
        "ifeval": "oxrl_graders.instructions:IFEVAL",
        "toolcall": "oxrl_graders.tool_calls:TOOL_CALL",
        "choice": "oxrl_graders.choices:CHOICE",
        "format": "oxrl_graders.formats:FORMAT",
        "repetition": "oxrl_graders.formats:REPETITION",
        "cosine": "oxrl_graders.formats:COSINE",
        "judge": "oxrl_graders.judge.reward:JUDGE",
        "reasoning-gym": "oxrl_graders.reasoning_gym_rewards:REASONING_GYM",
    },
)
ENVIRONMENT = Kind(
    noun="environment",
    field="environment.name",
    forms="{} or path.py:Class (such as my_game.py:Guess)",
    error=EnvironmentDefinitionError,
    table={
        "agent": "oxrl_envs.agent:AgentEnvironment",
        "gymnasium": "oxrl_envs.gymnasium_adapter:GymnasiumEnvironment",
        "openenv": "oxrl_envs.openenv_adapter:OpenEnvEnvironment",
        "raster-world": "oxrl_robots.raster_world:RasterEnvironment",
        "reasoning-gym": "oxrl_envs.reasoning_gym_adapter:ReasoningGymEnvironment",
        "simulator": "oxrl_robots.simulator:SimulatorEnvironment",
        "textarena": "oxrl_envs.textarena_adapter:TextArenaEnvironment",
        "tools": "oxrl.environments.tool_environment:ToolEnvironment",
    },
)
# Losses of the table are found by `oxrl.recipes.policy_loss`, before anybody asks here.
GATE = Kind(
    noun="gate",
    field="train.loss",
    forms="a name of `oxrl algorithms`, or path.py:function such as my_gate.py:my_gate",
    table={},
)
FEATURE = Kind(
    noun="feature",
    field="train.features",
    forms="path.py:Class such as my_feature.py:MyFeature",
    table={},
)
