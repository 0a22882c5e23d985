"""A row of the table as functions: what `train.*` says, bound once, and the losses that the engines differentiate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from oxrl.algorithms import PARAMETERS
from oxrl.config import Config
from oxrl.config.schema import TrainConfig
from oxrl.engines.base import Want
from oxrl.errors import InvariantError
from oxrl.functional.advantages import ADVANTAGES, AdvantageInputs
from oxrl.functional.corrections import CORRECTIONS, Level, importance_ratio
from oxrl.functional.kl import KLS, kl_k3_ratio
from oxrl.functional.masks import weighted_sum
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS, interpolated_anchor
from oxrl.functional.selections import SELECTIONS, Looked
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import WEIGHTS
from oxrl.recipes.collect import penalize_overlong
from oxrl.types import LossFn, Output, PolicyBatch, RolloutBatch, ValueBatch

# (old_logprobs, rollout_logprobs, mask) -> weights, with the advantages by keyword where a correction reads them.
Correction = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A row of the table as functions, its numbers bound."""

    advantage: Callable[[AdvantageInputs], tuple[Tensor, Tensor | None]]
    ratio: Callable[[Tensor, Tensor, Tensor], Tensor]
    to_rollout: bool  # the ratio's denominator is the sampler, not the old policy
    gate: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    kl: Callable[..., Tensor] | None  # in the loss
    coefficients: TrainConfig  # of KL, entropy and likelihood
    value_loss: LossFn
    weights: Callable[[Tensor, Tensor], Tensor]
    old_logprobs: str  # recompute | current | bypass | interpolated
    correction: Callable[[Tensor, PolicyBatch], Tensor] | None  # inside the loss
    step_correction: Correction | None  # over the whole rollout batch, before the update
    correction_level: Level | None  # of the ratios that the correction's weights are; None where they are 0 or 1
    shape: Callable[[RolloutBatch], RolloutBatch] | None  # of rewards, before advantages
    looks: Want  # what the policy is asked before the update, beside old_logprobs; empty where nothing is
    select: Callable[[Looked], dict[str, Tensor]] | None  # what the gate reads beside logprobs, from that look
    want: Want  # what the policy is asked in the update
    likelihood: bool  # right responses have a likelihood term

    def policy_loss(self, output: Output, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """loss = gate(ratio, advantages) * correction + kl_coeff * KL - entropy_coeff * H, weighted by loss_weights.

        Right responses add nll_coeff times the mean negative log-likelihood of their tokens, where the row says so.
        """
        logprobs, mask, numbers = required(output.logprobs), batch.inputs.response_mask, self.coefficients
        old = old_logprobs(logprobs, batch)
        anchor = self.ratio(logprobs, batch.rollout_logprobs if self.to_rollout else old, mask)
        weights = batch.correction if self.correction is None else self.correction(old, batch)
        signals = dict(batch.signals) | ({} if output.top_logprobs is None else {"top_logprobs": output.top_logprobs})
        given = (batch.advantages, mask, batch.loss_weights)
        loss, metrics = self.gate(logprobs, anchor, *given, correction=weights, **signals)
        if self.kl is not None and batch.ref_logprobs is not None:
            sampler = (batch.rollout_logprobs,) if self.kl is kl_k3_ratio else ()
            kl = self.kl(logprobs, batch.ref_logprobs, mask, *sampler)
            loss = loss + numbers.kl_coeff * weighted_sum(kl, mask, batch.loss_weights)
        if numbers.entropy_coeff:
            loss = loss - numbers.entropy_coeff * weighted_sum(required(output.entropy), mask, batch.loss_weights)
        if batch.likelihood_weights is not None:
            likelihood = weighted_sum(logprobs, mask, batch.likelihood_weights)
            loss, metrics = loss - numbers.nll_coeff * likelihood, metrics | {"update/nll": -likelihood.detach()}
        return loss, metrics


def resolve(cfg: Config) -> Algorithm:
    """Look up the row's cells, once."""
    row, needs = cfg.train.row, set(cfg.train.row.needs)

    def bound(function: Callable[..., Any], kind: str, name: str, **numbers: Any) -> Callable[..., Any]:
        read = {field: getattr(cfg.train, field) for field in PARAMETERS[(kind, name)]}
        return partial(function, **(read | numbers))

    length = cfg.train.weights_length or cfg.rollout.max_tokens
    fixed_length = {"weights_length": length} if row.weights == "fixed_length" else {}
    mode = cfg.train.old_logprobs
    if "interpolated_anchor" in needs:
        mode = "interpolated"
    elif mode == "auto":
        mode = "current" if cfg.train.updates == 1 else "recompute"
    # The proximal policy's weight against the sampler belongs to the interpolation.
    correction: Correction | None = importance_ratio if mode == "interpolated" else None
    if row.correction != "none":
        correction = bound(CORRECTIONS[row.correction], "correction", row.correction)
    per_batch = None
    if correction is not None and "full_batch_correction" not in needs:
        per_batch = partial(corrected, correction=correction, graded="advantages_in_correction" in needs)
    level = cfg.train.correction_level
    levels: dict[str, Level] = {"none": "token", "truncate": level, "mask": level}
    limit, buffer = cfg.rollout.max_tokens, cfg.train.overlong_buffer
    shape = partial(penalize_overlong, max_tokens=limit, buffer_tokens=buffer or max(1, limit // 5))
    top = frozenset({f"top_k={cfg.train.top_candidates}"} if "top_logprobs" in needs else ())
    looked = not needs.isdisjoint({"token_selection", "full_batch_correction"})
    return Algorithm(
        advantage=bound(ADVANTAGES[row.advantage], "advantage", row.advantage),
        ratio=RATIOS[row.ratio],
        to_rollout=row.denominator == "rollout",
        gate=bound(GATES[row.gate], "gate", row.gate),
        kl=KLS[row.kl] if row.kl.startswith("loss_") else None,
        coefficients=cfg.train,
        value_loss=partial(critic_loss, value_clip=cfg.train.value_clip),
        weights=bound(WEIGHTS[row.weights], "weights", row.weights, **fixed_length),
        old_logprobs=mode,
        correction=per_batch,
        step_correction=correction if per_batch is None else None,
        correction_level=levels.get(row.correction),
        shape=shape if "overlong_penalty" in needs else None,
        looks=top | {"entropy"} if top else frozenset({"logprobs"} if looked else ()),
        select=bound(SELECTIONS[row.gate], "selection", row.gate) if row.gate in SELECTIONS else None,
        want=frozenset({"logprobs", "entropy"}) | top,
        likelihood="positive_nll" in needs,
    )


def old_logprobs(logprobs: Tensor, batch: PolicyBatch) -> Tensor:
    """The policy that the update starts from, detached: recorded, interpolated by age, or the current one itself."""
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    if batch.lags is not None:
        return interpolated_anchor(logprobs, batch.rollout_logprobs, batch.lags, batch.inputs.response_mask)
    return logprobs.detach()


def corrected(old: Tensor, batch: PolicyBatch, *, correction: Correction, graded: bool) -> Tensor:
    """The correction's weights on `batch`; a graded one sees the advantages."""
    seen = {"advantages": batch.advantages} if graded else {}
    return correction(old, batch.rollout_logprobs, batch.inputs.response_mask, **seen)


def critic_loss(output: Output, batch: ValueBatch, *, value_clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    mask = batch.inputs.response_mask
    values = required(output.values)
    return value_loss(values, batch.old_values, batch.returns, mask, batch.loss_weights, value_clip=value_clip)


def required(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise InvariantError("the engine did not return what the loss asked for")
    return tensor
