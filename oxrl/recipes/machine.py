"""Everything that a training loop works with, as plain objects: no configuration is read there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from oxrl.checkpoint import Saved
from oxrl.engines.train import Scorer, TrainEngine
from oxrl.recipes.compute_accounting import ComputeAccounting
from oxrl.recipes.objective import Objective
from oxrl.rollouts.batch import RowRules
from oxrl.rollouts.sync import RolloutSource
from oxrl.tables.roles import POLICY

if TYPE_CHECKING:
    from oxrl.recipes.features.base import Feature
    from oxrl.recipes.scored_answers import Evaluation


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A run of reinforcement learning, put together; `oxrl.assembly.assemble` does that.

    seed: of the run. steps: optimizer steps. epochs: passes over a rollout batch, in `minibatches`
    steps each. kl_coeff: of the KL in the reward, at the start. models: by role, see
    `oxrl.tables.roles`. features: what the row adds to the loop, in order. source: of rollouts.
    row_rules: which rows can be learned from. evaluation: None without held-out prompts.
    saved: what a checkpoint holds, subdirectory -> what is stored there. ratio_tolerance: of the
    first ratio, in nats. keeps_tokens: rollout batches are recorded with the numbers of every
    token.
    """

    seed: int
    steps: int
    epochs: int
    minibatches: int
    kl_coeff: float
    models: Mapping[str, Scorer]
    objective: Objective
    features: Sequence[Feature]
    source: RolloutSource
    row_rules: RowRules
    evaluation: Evaluation | None
    ledger: ComputeAccounting
    saved: Mapping[str, Saved]
    ratio_tolerance: float
    keeps_tokens: bool

    @property
    def updates(self) -> int:
        """Optimizer steps on each rollout batch."""
        return self.epochs * self.minibatches

    @property
    def policy(self) -> TrainEngine:
        """The model that learns."""
        return cast("TrainEngine", self.models[POLICY])
