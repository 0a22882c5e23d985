"""Reward models: pairs (Bradley-Terry) or judged steps -> a score at the end or after each step ->
update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from oxrl.data.preferences import Judged, to_preference_batch
from oxrl.data.steps import Steps, to_step_batch
from oxrl.errors import required
from oxrl.functional.masks import LossAndMetrics
from oxrl.functional.reward_model_losses import bradley_terry, process_reward
from oxrl.recipes.offline_loop import Learner, Memory, Stepped
from oxrl.recipes.preference_evaluation import wins
from oxrl.types import Metrics, Output, PreferenceBatch, StepBatch

WANT = frozenset({"values"})


@dataclass(kw_only=True)
class OutcomeLearner(Learner[Judged]):
    """One score per completion, learned from pairs.

    center_coeff: of the penalty that keeps scores near 0.
    """

    center_coeff: float

    def update(self, units: list[Judged], step: int, memory: Memory) -> Stepped:
        batch = to_preference_batch(units, self.pad_id, images=self.images)
        return self.learn(batch, self.loss, WANT, units, step=step)

    def loss(self, output: Output, batch: PreferenceBatch) -> LossAndMetrics:
        """Bradley-Terry on the scores after the last token."""
        scores = required(output.bootstrap, "model output")
        return bradley_terry(
            scores[0::2],
            scores[1::2],
            batch.loss_weights,
            batch.extras["margins"],
            center_coeff=self.center_coeff,
        )

    def evaluate(self, batches: Iterable[list[Judged]]) -> Metrics:
        """Measure how often, and by how much, the better completion scores higher (a tie: half)."""
        found: list[Tensor] = []
        for units in batches:
            inputs = to_preference_batch(units, self.pad_id, images=self.images).inputs
            scores = required(self.engine.forward(inputs, WANT).bootstrap, "model output")
            found.append(scores[0::2] - scores[1::2])
        gaps = torch.cat(found)
        return {"eval/accuracy": float(wins(gaps)), "eval/margin": float(gaps.mean())}


class ProcessLearner(Learner[Steps]):
    """One score per step, learned from judged steps."""

    def update(self, units: list[Steps], step: int, memory: Memory) -> Stepped:
        batch = to_step_batch(units, self.pad_id, images=self.images)
        return self.learn(batch, step_loss, WANT, units, step=step)

    def evaluate(self, batches: Iterable[list[Steps]]) -> Metrics:
        """Measure how often a step is judged right, and how often the commoner verdict would be."""
        verdicts: list[Tensor] = []
        labels: list[Tensor] = []
        for units in batches:
            batch = to_step_batch(units, self.pad_id, images=self.images)
            ends = batch.inputs.response_mask
            values = required(self.engine.forward(batch.inputs, WANT).values, "model output")
            verdicts.append(values[ends] > 0)
            labels.append(batch.labels[ends] > 0.5)
        truth = torch.cat(labels)
        right = (torch.cat(verdicts) == truth).double()
        share = float(truth.double().mean())
        return {"eval/accuracy": float(right.mean()), "eval/majority": max(share, 1 - share)}


def step_loss(output: Output, batch: StepBatch) -> LossAndMetrics:
    """Cross-entropy of the labels after each step."""
    values = required(output.values, "model output")
    return process_reward(values, batch.labels.to(values.dtype), batch.loss_weights)
