"""A value model trained beside the policy."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from oxrl.errors import required
from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.functional.masks import LossAndMetrics
from oxrl.functional.metrics import value_metrics
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import token_mean
from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared
from oxrl.recipes.step import gradients
from oxrl.tables.numbers import CRITIC_WARMUP_STEPS, VALUE_CLIP
from oxrl.tables.roles import CRITIC
from oxrl.types import Metrics, Output, PolicyBatch, RolloutBatch, ValueBatch

WANT = frozenset({"values"})


class Critic(Feature):
    """See the module; reads train.value_clip and train.critic_warmup_steps."""

    def __init__(self, given: FeatureInputs) -> None:
        self.engine = given.models[CRITIC]
        self.value_clip = given.train.value(VALUE_CLIP)
        self.warmup_steps = given.train.value(CRITIC_WARMUP_STEPS)
        self._values = None
        self._batch = None

    def on_advantage_inputs(
        self, inputs: AdvantageInputs, rollouts: RolloutBatch
    ) -> AdvantageInputs:
        """Add the critic's values."""
        judged = rollouts.inputs.said_by(self.engine.forward, WANT)
        self._values = required(judged.values, "values")
        return replace(inputs, values=self._values, bootstrap=judged.bootstrap)

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Keep what the critic will learn from."""
        self._batch = ValueBatch(
            inputs=batch.inputs,
            old_values=required(self._values, "values"),
            returns=required(prepared.returns, "returns"),
            loss_weights=token_mean(batch.inputs.response_mask),
        )
        return batch

    def value_loss(self, output: Output, batch: ValueBatch) -> LossAndMetrics:
        """The critic's loss, a LossFn."""
        return value_loss(
            required(output.values, "values"),
            batch.old_values,
            batch.returns,
            batch.inputs.response_mask,
            batch.loss_weights,
            value_clip=self.value_clip,
        )

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics | None:
        """Add the critic's gradient on the same rows as the policy's."""
        mask = batch.inputs.response_mask
        part = required(self._batch, "a value batch").select(rows)
        part = part.inputs.as_read(part)
        part = replace(part, loss_weights=token_mean(mask))
        found = gradients(self.engine, part, self.value_loss, WANT)
        if not found.finite:
            return None
        about = value_metrics(part.old_values, part.returns, mask)
        return as_critics(found.metrics) | about

    def holds_policy(self, step: int) -> bool:
        """The first steps train the critic alone."""
        return step <= self.warmup_steps

    def optim_step(self, *, skip: bool) -> Metrics:
        """See Feature."""
        stepped = self.engine.skip_step() if skip else self.engine.optim_step()
        return as_critics(stepped)


def as_critics(metrics: Metrics) -> Metrics:
    """The same metrics as the critic's."""
    return {name.replace("update/", "value/"): value for name, value in metrics.items()}
