"""A row of the table as functions: what `train.*` says, bound once, and the losses that the engines
differentiate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from oxrl.config import Config
from oxrl.engines.train.base import Want
from oxrl.errors import InvariantError
from oxrl.functional.advantages import ADVANTAGES
from oxrl.functional.corrections import CORRECTIONS, Level, importance_ratio
from oxrl.functional.kl import KLS, kl_k3_ratio
from oxrl.functional.masks import weighted_sum
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS, interpolated_anchor
from oxrl.functional.selections import SELECTIONS
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import WEIGHTS
from oxrl.recipes.collect import penalize_overlong
from oxrl.tables.policy import PARAMETERS
from oxrl.types import Output, PolicyBatch, ValueBatch

# (old_logprobs, rollout_logprobs, mask) -> weights, with the advantages by keyword where a
# correction reads them.
Correction = Callable[..., Tensor]


class Algorithm:
    """A row of the table as functions, looked up once, its numbers bound."""

    def __init__(self, cfg: Config) -> None:
        row, needs, train = cfg.train.row, set(cfg.train.row.needs), cfg.train

        def bound(
            function: Callable[..., Any], kind: str, name: str, **numbers: Any
        ) -> Callable[..., Any]:
            read = {field: getattr(train, field) for field in PARAMETERS[(kind, name)]}
            return partial(function, **(read | numbers))

        limit, buffer = cfg.rollout.max_tokens, train.overlong_buffer
        fixed_length = (
            {"weights_length": train.weights_length or limit}
            if row.weights == "fixed_length"
            else {}
        )
        self.weights = bound(WEIGHTS[row.weights], "weights", row.weights, **fixed_length)
        self.advantage = bound(ADVANTAGES[row.advantage], "advantage", row.advantage)
        # Of rewards, before advantages.
        shape = partial(
            penalize_overlong, max_tokens=limit, buffer_tokens=buffer or max(1, limit // 5)
        )
        self.shape = shape if "overlong_penalty" in needs else None
        # recompute | current | bypass | interpolated
        self.old_logprobs: str = train.old_logprobs
        if "interpolated_anchor" in needs:
            self.old_logprobs = "interpolated"
        elif train.old_logprobs == "auto":
            self.old_logprobs = "current" if train.updates == 1 else "recompute"
        # The proximal policy's weight against the sampler belongs to the interpolation.
        correction: Correction | None = (
            importance_ratio if self.old_logprobs == "interpolated" else None
        )
        if row.correction != "none":
            correction = bound(CORRECTIONS[row.correction], "correction", row.correction)
        # Inside the loss, or over the whole rollout batch before the update.
        self.correction = self.step_correction = None
        if correction is not None and "full_batch_correction" in needs:
            self.step_correction = correction
        elif correction is not None:
            self.correction = partial(
                corrected, correction=correction, graded="advantages_in_correction" in needs
            )
        # Of the ratios that the correction's weights are; None where they are 0 or 1.
        levels: dict[str, Level] = {
            "none": "token",
            "truncate": train.correction_level,
            "mask": train.correction_level,
        }
        self.correction_level: Level | None = levels.get(row.correction)
        # What the policy is asked before the update beside old_logprobs, what the gate reads from
        # that, and what the policy is asked in the update.
        top: Want = frozenset({f"top_k={train.top_candidates}"} if "top_logprobs" in needs else ())
        looked = not needs.isdisjoint({"token_selection", "full_batch_correction"})
        self.looks: Want = top | {"entropy"} if top else frozenset({"logprobs"} if looked else ())
        self.select = (
            bound(SELECTIONS[row.gate], "selection", row.gate) if row.gate in SELECTIONS else None
        )
        self.want: Want = frozenset({"logprobs", "entropy"}) | top
        self.likelihood = "positive_nll" in needs  # of right responses, in the loss
        self.ratio, self.to_rollout = RATIOS[row.ratio], row.denominator == "rollout"
        self.gate = bound(GATES[row.gate], "gate", row.gate)
        self.kl: Callable[..., Tensor] | None = KLS[row.kl] if row.kl.startswith("loss_") else None
        self.coefficients = train  # of KL, entropy and likelihood, and the clip of values

    def policy_loss(self, output: Output, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """loss = gate(ratio, advantages) * correction + kl_coeff * KL - entropy_coeff * H, weighted
        by loss_weights.

        Right responses add nll_coeff times the mean negative log-likelihood of their tokens, where
        the row says so.
        """
        logprobs, mask, numbers = (
            required(output.logprobs),
            batch.inputs.response_mask,
            self.coefficients,
        )
        old = old_logprobs(logprobs, batch)
        anchor = self.ratio(logprobs, batch.rollout_logprobs if self.to_rollout else old, mask)
        weights = batch.correction if self.correction is None else self.correction(old, batch)
        signals = dict(batch.signals) | (
            {} if output.top_logprobs is None else {"top_logprobs": output.top_logprobs}
        )
        given = (batch.advantages, mask, batch.loss_weights)
        loss, metrics = self.gate(logprobs, anchor, *given, correction=weights, **signals)
        if self.kl is not None and batch.ref_logprobs is not None:
            sampler = (batch.rollout_logprobs,) if self.kl is kl_k3_ratio else ()
            kl = self.kl(logprobs, batch.ref_logprobs, mask, *sampler)
            loss = loss + numbers.kl_coeff * weighted_sum(kl, mask, batch.loss_weights)
        if numbers.entropy_coeff:
            loss = loss - numbers.entropy_coeff * weighted_sum(
                required(output.entropy), mask, batch.loss_weights
            )
        if batch.likelihood_weights is not None:
            likelihood = weighted_sum(logprobs, mask, batch.likelihood_weights)
            loss, metrics = (
                loss - numbers.nll_coeff * likelihood,
                metrics | {"update/nll": -likelihood.detach()},
            )
        return loss, metrics

    def value_loss(self, output: Output, batch: ValueBatch) -> tuple[Tensor, dict[str, Tensor]]:
        given = (batch.old_values, batch.returns, batch.inputs.response_mask, batch.loss_weights)
        return value_loss(required(output.values), *given, value_clip=self.coefficients.value_clip)


def old_logprobs(logprobs: Tensor, batch: PolicyBatch) -> Tensor:
    """The policy that the update starts from, detached: recorded, interpolated by age, or the
    current one itself.
    """
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    if batch.lags is not None:
        return interpolated_anchor(
            logprobs, batch.rollout_logprobs, batch.lags, batch.inputs.response_mask
        )
    return logprobs.detach()


def corrected(old: Tensor, batch: PolicyBatch, *, correction: Correction, graded: bool) -> Tensor:
    """The correction's weights on `batch`; a graded one sees the advantages."""
    seen = {"advantages": batch.advantages} if graded else {}
    return correction(old, batch.rollout_logprobs, batch.inputs.response_mask, **seen)


def required(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise InvariantError("the engine did not return what the loss asked for")
    return tensor
