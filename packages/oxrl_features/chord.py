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
from functools import partial

import torch
from torch import Tensor

from oxrl.errors import DataError, required
from oxrl.functional.masks import LossAndMetrics
from oxrl.recipes.features.base import FeatureInputs, Prepared
from oxrl.types import Metrics, Output, PolicyBatch, SupervisedBatch
from oxrl_features.numbers import Driving, between, count, file, problem

NAME = "chord"
WANT = frozenset({"logprobs"})


class Chord(Driving):
    """See the module.

    Args:
        given: what the run is made of.
        rows: file of conversations, as those of supervised training.
        rows_per_step: of them, with each optimizer step.
        peak, valley: of m.
        warmup_steps, decay_steps: optimizer steps up to the peak, and from there to the valley.
    """

    stays = ("policy", "rows")

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
        self.peak = between(NAME, "peak", peak, 0.0, 1.0)
        self.valley = between(NAME, "valley", valley, 0.0, 1.0)
        self.warmup_steps = count(NAME, "warmup_steps", warmup_steps, 0)
        self.decay_steps = count(NAME, "decay_steps", decay_steps, 0)
        self.rows_per_step = count(NAME, "rows_per_step", rows_per_step, 1)
        holds = "of conversations, with prompt and completion"
        path = file(NAME, "rows", rows, holds)
        try:
            self.rows = required(given.rows, "rows of files")(path)
        except DataError as error:
            raise problem(NAME, "rows", f"give a file {holds}: {error}") from error
        self.policy = given.policy
        self._step = 0

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Note which optimizer step comes next."""
        self._step = prepared.version
        return batch

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """Begin an optimizer step: its own rows weigh 1 - m."""
        self._step += 1
        share = self.share()
        if not share:
            return batch
        of_likelihood = batch.likelihood_weights
        if of_likelihood is not None:
            of_likelihood = of_likelihood * (1 - share)
        weights = batch.loss_weights * (1 - share)
        return replace(batch, loss_weights=weights, likelihood_weights=of_likelihood)

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics | None:
        """Add the gradient of the given answers."""
        share = self.share()
        if not share:
            return {"chord/share": 0.0}
        first = (self._step - 1) * self.rows_per_step
        given = self.rows(range(first, first + self.rows_per_step))
        loss = partial(imitation_loss, share=share)
        output = self.policy.forward_backward(given, loss, WANT)
        said = required(output.logprobs, "logprobs")[given.inputs.response_mask]
        if not said.isfinite().all():
            return None
        return {"chord/share": share, "chord/nll": -float(said.double().mean())}

    def share(self) -> float:
        """m of the optimizer step that is under way; the first one is step 0 of the schedule."""
        return share_at(
            self._step - 1,
            peak=self.peak,
            valley=self.valley,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
        )


def share_at(
    step: int, *, peak: float, valley: float, warmup_steps: int, decay_steps: int
) -> float:
    """m of an optimizer step.

    Args:
        step: counted from 0.
        peak, valley: the most, and what stays at the end.
        warmup_steps, decay_steps: up to the peak, and from there to the valley.
    """
    if step < warmup_steps:
        return step / warmup_steps * peak
    behind = step - warmup_steps
    if behind >= decay_steps:
        return valley
    cosine = 0.5 * (1 + math.cos(math.pi * behind / decay_steps))
    return (peak - valley) * cosine + valley


def imitation_loss(output: Output, batch: SupervisedBatch, *, share: float) -> LossAndMetrics:
    """The mean of phi CE over the given tokens; a LossFn, once its share is bound.

    Args:
        output: what the policy said.
        batch: given answers, their loss weights 1 / tokens.
        share: m.
    """
    logprobs = required(output.logprobs, "logprobs")
    mask = batch.inputs.response_mask
    known = logprobs.detach().exp()
    phi = known * (1 - known)
    token_loss = torch.where(mask, -phi * logprobs * batch.loss_weights, 0.0)
    return share * token_loss.sum(), {}
