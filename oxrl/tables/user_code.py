"""The kinds of code that users write: one row each."""

from __future__ import annotations

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
    known. error: raised about it.
    """

    noun: str
    field: str
    forms: str
    error: type[OxrlError] = ConfigError

    @property
    def group(self) -> str:
        """The entry points by which packages offer it, those beside the core too."""
        return f"oxrl.{self.noun}s"

    def problem(self, name: str, text: str) -> OxrlError:
        """Return an error that says what is wrong with the one of a name."""
        return self.error(f"{self.field}={name}: {text}")


REWARD = Kind(
    noun="reward",
    field="reward.name",
    forms="{}, path.py:function (such as my_reward.py:score) or a reward model's folder",
    error=RewardDefinitionError,
)
ENVIRONMENT = Kind(
    noun="environment",
    field="environment.name",
    forms="{} or path.py:Class (such as my_game.py:Guess)",
    error=EnvironmentDefinitionError,
)
# Only of rows that say `has_own_loss`; losses of the table are found without, see
# oxrl/recipes/objective.py.
GATE = Kind(
    noun="gate",
    field="train.loss",
    forms="a name of `oxrl algorithms`, or path.py:function such as my_gate.py:my_gate",
)
FEATURE = Kind(
    noun="feature",
    field="train.features",
    forms="{} or path.py:Class such as my_feature.py:MyFeature",
)
TOOL = Kind(
    noun="tool",
    field="environment.options.tools",
    forms="{} or path.py:function",
    error=EnvironmentDefinitionError,
)
