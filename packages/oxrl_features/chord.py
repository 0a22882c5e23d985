"""Given answers learned from beside one's own: off-policy experts, weighed less and less.

    (1 - m) L_RL + m mean(phi CE),  phi = sg(p (1 - p)),  p = pi(token of the given answer)

phi takes the weight from what the policy knows already and from what it would never say. m rises
from 0 to its peak, and falls along a cosine to its valley.

Source: arXiv:2508.11408, CHORD-phi, and the authors' schedule in
trinity/algorithm/policy_loss_fn/chord_policy_loss.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from oxrl.errors import required
from oxrl.functional.masks import LossAndMetrics
from oxrl.recipes.features.base import FeatureInputs, Prepared
from oxrl.types import Metrics, Output, PolicyBatch, SupervisedBatch
from oxrl_features.numbers import Checked, between, count, opened

NAME = "chord"
ROWS = "of conversations, with prompt and completion"
WANT = frozenset({"logprobs"})


class Schedule(NamedTuple):
    """The way in which m changes.

    peak, valley: the most, and what stays at the end. warmup_steps, decay_steps: optimizer steps up
    to the peak, and from there to the valley.
    """

    peak: float
    valley: float
    warmup_steps: int
    decay_steps: int

    def at(self, step: int) -> float:
        """Return m of an optimizer step.

        Args:
            step: counted from 0.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps * self.peak
        behind = step - self.warmup_steps
        if behind >= self.decay_steps:
            return self.valley
        cosine = 0.5 * (1 + math.cos(math.pi * behind / self.decay_steps))
        return (self.peak - self.valley) * cosine + self.valley


class Chord(Checked):
    """See the module.

    Args:
        given: what the run is made of.
        rows: file of conversations, as those of supervised training.
        rows_per_step: of them, with each optimizer step.
        peak, valley, warmup_steps, decay_steps: as of Schedule.
    """

    stays = ("given", "rows")

    def __init__(
        self,
        given: FeatureInputs,
        rows: str = "",
        rows_per_step: int = 8,
        peak: float = 0.9,
        valley: float = 0.05,
        warmup_steps: int = 0,
        decay_steps: int = 200,
    ) -> None:
        self.schedule = Schedule(
            between(NAME, "peak", peak, 0.0, 1.0),
            between(NAME, "valley", valley, 0.0, 1.0),
            count(NAME, "warmup_steps", warmup_steps, 0),
            count(NAME, "decay_steps", decay_steps, 0),
        )
        self.rows_per_step = count(NAME, "rows_per_step", rows_per_step, 1)
        self.rows = opened(NAME, "rows", rows, ROWS, required(given.rows, "rows of files"))
        self.given = given
        # Optimizer steps begun; m of the newest one.
        self._begun = 0
        self._share = 0.0

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Note which optimizer step comes next."""
        self._begun = prepared.version
        return batch

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """Begin an optimizer step: its own rows weigh 1 - m."""
        self._share = self.schedule.at(self._begun)
        self._begun += 1
        if not self._share:
            return batch
        of_likelihood = batch.likelihood_weights
        if of_likelihood is not None:
            of_likelihood = of_likelihood * (1 - self._share)
        weights = batch.loss_weights * (1 - self._share)
        return replace(batch, loss_weights=weights, likelihood_weights=of_likelihood)

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics | None:
        """Add the gradient of the given answers."""
        if not self._share:
            return {"chord/share": 0.0}
        end = self._begun * self.rows_per_step
        given = self.rows(range(end - self.rows_per_step, end))
        given = replace(given, loss_weights=given.loss_weights * self._share)
        output = self.given.policy.forward_backward(given, imitation_loss, WANT)
        said = required(output.logprobs, "logprobs")[given.inputs.response_mask]
        if not said.isfinite().all():
            return None
        return {"chord/share": self._share, "chord/nll": -float(said.double().mean())}


def imitation_loss(output: Output, batch: SupervisedBatch) -> LossAndMetrics:
    """The weighted sum of phi CE over the given tokens; a LossFn.

    Args:
        output: what the policy said.
        batch: given answers, and the loss weights of their tokens.
    """
    logprobs = required(output.logprobs, "logprobs")
    mask = batch.inputs.response_mask
    known = logprobs.detach().exp()
    phi = known * (1 - known)
    return torch.where(mask, -phi * logprobs * batch.loss_weights, 0.0).sum(), {}
