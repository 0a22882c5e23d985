"""Preference learning: judged completions -> sums of log-probabilities -> a loss of the table of
preference methods -> update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from oxrl.data.preferences import Judged
from oxrl.engines.train import TrainEngine
from oxrl.recipes.offline_loop import Learner, Memory, Stepped
from oxrl.recipes.preference_batch import BeforeStep, with_statistics
from oxrl.recipes.preference_evaluation import evaluate_pairs, evaluate_singles
from oxrl.recipes.preference_objective import WANT, PreferenceObjective
from oxrl.recipes.preference_reference import follow
from oxrl.seeds import stable_seed
from oxrl.types import Metrics


@dataclass(kw_only=True)
class PreferenceLearner(Learner[Judged]):
    """A policy that learns from judged completions, and the reference that it is compared with.

    objective: the method and its policy. seed: of the run. held_out_singles: evaluations look at
    single completions, not at pairs.
    """

    objective: PreferenceObjective
    seed: int
    held_out_singles: bool

    @property
    def engines(self) -> dict[str, TrainEngine]:
        """See Learner; a reference that moves is kept as well."""
        moving = self.objective.moving_reference
        return super().engines | ({} if moving is None else {"reference": moving})

    def update(self, units: list[Judged], step: int, memory: Memory) -> Stepped:
        self._move_reference(step)
        before = BeforeStep(
            objective=self.objective,
            batch=self.objective.batch(units, rows=1 if self.objective.method.unpaired else 2),
            units=units,
            memory=memory,
            seed=stable_seed("preference", self.seed, step),
        )
        batch = with_statistics(before)
        return self.learn(batch, self.objective.loss, WANT, units, step=step)

    def evaluate(self, batches: Iterable[list[Judged]]) -> Metrics:
        evaluate = evaluate_singles if self.held_out_singles else evaluate_pairs
        return evaluate(self.objective, batches)

    def _move_reference(self, step: int) -> None:
        moving_reference = self.objective.moving_reference
        if moving_reference is None or step == 1:
            return
        numbers = self.objective.numbers
        if (step - 1) % int(numbers["reference_sync_steps"]) == 0:
            follow(moving_reference, self.engine, numbers["reference_sync_rate"])
