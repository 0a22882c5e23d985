"""A row of the table as objects: what is prepared before the update, and what it minimises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from torch import Tensor

from oxrl.engines.train import Scorer
from oxrl.errors import RewardError, required
from oxrl.functional.gates import CLIPPED_GATES, Gate, LossInputs
from oxrl.functional.group_advantages import GROUP_ADVANTAGES, AdvantageInputs, Estimator
from oxrl.functional.masks import LossAndMetrics, weighted_sum
from oxrl.functional.ratios import RATIOS, interpolated_anchor
from oxrl.functional.weights import WEIGHTS
from oxrl.tables.numbers import KL_COEFF, WEIGHTS_LENGTH, Level
from oxrl.tables.policy import Algorithm, Row
from oxrl.tables.roles import POLICY, REFERENCE
from oxrl.types import Output, PolicyBatch, RolloutBatch, TensorMap, TokenBatch, Want

if TYPE_CHECKING:
    from oxrl.recipes.features.base import Feature

LOGPROBS: Want = frozenset({"logprobs"})


class Objective:
    """The cells of a row as functions, looked up once, their numbers bound.

    Args:
        algorithm: the row and its numbers.
        features: of the row.
        max_tokens: longest response, what `fixed_length` divides by unless told otherwise.
    """

    def __init__(
        self, algorithm: Algorithm, features: Sequence[Feature] = (), *, max_tokens: int
    ) -> None:
        row = algorithm.row
        self.features = features
        estimate, gate = find_cells(row)
        self.advantage = partial(estimate, **algorithm.numbers("advantage", row.advantage))
        self.ratio = RATIOS[row.ratio]
        self.ratio_to_sampler = row.denominator == "rollout"
        self.gate = partial(gate, **algorithm.numbers("gate", row.gate))
        weights_numbers = algorithm.numbers("weights", row.weights)
        if row.weights == "fixed_length":
            weights_numbers = {"weights_length": algorithm.value(WEIGHTS_LENGTH) or max_tokens}
        self.weights = partial(WEIGHTS[row.weights], **weights_numbers)
        self.mask_truncated = algorithm.mask_truncated
        self.entropy_coeff = algorithm.entropy_coeff
        kl_coeff = algorithm.value(KL_COEFF)
        self.kl = None
        self.subtract_kl = None
        if row.kl != "none" and kl_coeff > 0:
            from oxrl.recipes.reference_kl import loss_kl, subtract_kl  # of rows with a reference

            if row.kl.startswith("loss_"):
                self.kl = partial(loss_kl, name=row.kl, kl_coeff=kl_coeff)
            else:
                self.subtract_kl = subtract_kl

        # Where the denominator of the ratio comes from: recompute, current, bypass, interpolated.
        self.old_logprobs: str = algorithm.old_logprobs
        if self.old_logprobs == "auto":
            self.old_logprobs = "current" if algorithm.updates == 1 else "recompute"
        for feature in features:
            self.old_logprobs = feature.old_logprobs or self.old_logprobs

        # Weights of tokens against the sampler, in the loss; None where there are none, or where
        # they are decided before the update.
        self.correction = None
        self.correction_level: Level | None = "token"
        if row.correction != "none":
            from oxrl.recipes.sampler_correction import (  # rows that weigh tokens against it
                bind_correction,
                correction_level,
            )

            self.correction = bind_correction(algorithm, features)
            self.correction_level = correction_level(algorithm)

        self.centering = None
        if row.centering != "none":
            from oxrl.recipes.score_centering import ScoreCentering  # few rows subtract anything

            self.centering = ScoreCentering(algorithm)

        self.want: Want = frozenset({"logprobs", "entropy"})
        self.want_before: Want = frozenset()
        for feature in features:
            self.want |= feature.want
            self.want_before |= feature.want_before
            if self.old_logprobs == "recompute":
                self.want_before |= feature.want_old

    def policy_loss(self, output: Output, batch: PolicyBatch) -> LossAndMetrics:
        """The policy's loss, a LossFn.

        gate(ratio, advantages) * correction, centered where the row says so, + kl_coeff * KL -
        entropy_coeff * H, all weighted by loss_weights, plus the terms of features.
        """
        logprobs = output.logprobs
        assert logprobs is not None  # they are in `want`
        mask = batch.inputs.response_mask
        tokens = loss_inputs(logprobs, start_of_update(logprobs, batch), batch)
        if self.centering is not None:
            loss, metrics = self.centering(self.token_loss, tokens, output, batch)
        else:
            signals = dict(batch.signals)
            if output.top_logprobs is not None:
                signals["top_logprobs"] = output.top_logprobs
            loss, metrics = self.token_loss(tokens, batch.correction, signals)
        if self.kl is not None and batch.ref_logprobs is not None:
            loss = loss + self.kl(logprobs, batch.ref_logprobs, batch)
        if self.entropy_coeff:
            entropy = required(output.entropy, "entropy")
            loss = loss - self.entropy_coeff * weighted_sum(entropy, mask, batch.loss_weights)
        for feature in self.features:
            added = feature.loss(output, batch)
            if added is not None:
                loss = loss + added[0]
                metrics = metrics | added[1]
        return loss, metrics

    def token_loss(
        self,
        tokens: LossInputs,
        decided: Tensor | None = None,
        signals: TensorMap = MappingProxyType({}),
    ) -> LossAndMetrics:
        """Ratio, correction and gate of the row, of tokens that were sampled or may have been.

        Args:
            tokens: [B, T].
            decided: their weights against the sampler, where the row decides before the update.
            signals: what else the gate reads.
        """
        denominator = tokens.sampler if self.ratio_to_sampler else tokens.old
        anchor = self.ratio(tokens.logprobs, denominator, tokens.mask)
        correction = decided if self.correction is None else self.correction(tokens)
        return self.gate(
            tokens.logprobs,
            anchor,
            tokens.advantages,
            tokens.mask,
            tokens.loss_weights,
            correction=correction,
            **signals,
        )

    def corrected(self, logprobs: Tensor, old: Tensor, batch: PolicyBatch) -> Tensor | None:
        """[B, T]: the weight of each token against the sampler; None without a correction.

        Args:
            logprobs, old: [B, T] nats of the current policy, and of the one before the update.
            batch: what the update reads.
        """
        if self.correction is None:
            return batch.correction
        return self.correction(loss_inputs(logprobs, old, batch))


def find_cells(row: Row) -> tuple[Estimator, Gate]:
    """Return the functions of a row's advantage and of its policy loss.

    Raises:
        ConfigError: the loss is the user's own, and cannot be run or is none.
    """
    if row.advantage in GROUP_ADVANTAGES and row.gate in CLIPPED_GATES:
        return GROUP_ADVANTAGES[row.advantage], CLIPPED_GATES[row.gate]
    from oxrl.functional.advantages import ADVANTAGES  # of critics, turns, parts

    if row.has_own_loss:
        from oxrl.usercode.gates import OwnGate  # what a user wrote is found and tried

        return ADVANTAGES[row.advantage], cast(Gate, OwnGate(row.gate))
    from oxrl.functional.policy_losses import GATES  # rarer losses

    return ADVANTAGES[row.advantage], GATES[row.gate]


def start_of_update(logprobs: Tensor, batch: PolicyBatch) -> Tensor:
    """Log-probabilities of the policy that the update starts from, [B, T], detached.

    Recorded before the update, interpolated by the age of tokens, or the current ones themselves.
    """
    if batch.old_logprobs is not None:
        return batch.old_logprobs
    if batch.ages is not None:
        return interpolated_anchor(
            logprobs, batch.rollout_logprobs, batch.ages, batch.inputs.response_mask
        )
    return logprobs.detach()


def loss_inputs(logprobs: Tensor, old: Tensor, batch: PolicyBatch) -> LossInputs:
    """The sampled tokens as the policy loss reads them.

    Args:
        logprobs, old: [B, T] nats of the current policy, and of the one before the update.
        batch: what the update reads.
    """
    return LossInputs(
        logprobs=logprobs,
        old=old,
        sampler=batch.rollout_logprobs,
        advantages=batch.advantages,
        mask=batch.inputs.response_mask,
        loss_weights=batch.loss_weights,
    )


def prepare_update(
    objective: Objective,
    models: Mapping[str, Scorer],
    rollouts: RolloutBatch,
    *,
    kl_coeff: float,
    seed: int,
    version: int,
) -> PolicyBatch:
    """Everything that the updates on a rollout batch read, from one forward pass per model.

    Args:
        models: who is asked about the rows, by role; a reference only where a KL is taken.
        kl_coeff: of the KL in the reward, where the row subtracts one.
        seed: of random choices over the whole batch.
        version: of the policy's weights, before the first update.
    """
    # What the policy says before the update, and the reference.
    said = Output()
    ref = None
    if objective.old_logprobs == "recompute" or objective.want_before:
        said = rollouts.inputs.said_by(models[POLICY].forward, LOGPROBS | objective.want_before)
    compared = {"recompute": said.logprobs, "bypass": rollouts.rollout_logprobs}
    old = compared.get(objective.old_logprobs)
    if REFERENCE in models:
        found = rollouts.inputs.said_by(models[REFERENCE].forward, LOGPROBS)
        ref = required(found.logprobs, "logprobs")

    # Rewards relative to a group, a baseline or a critic.
    rewarded = rollouts
    if objective.subtract_kl is not None:
        asked = required(ref, "a reference")
        rewarded = objective.subtract_kl(rollouts, old, asked, kl_coeff=kl_coeff)
    advantages, returns = estimate_advantages(objective, rewarded, old, said)

    inputs = without_cut_rows(rollouts) if objective.mask_truncated else rollouts.inputs
    batch = PolicyBatch(
        inputs=inputs,
        old_logprobs=old,
        rollout_logprobs=rollouts.rollout_logprobs,
        ref_logprobs=ref,
        advantages=advantages,
        loss_weights=objective.weights(inputs.response_mask, rollouts.group_ids),
        versions=rollouts.versions,
        group_ids=rollouts.group_ids,
    )
    if not objective.features:
        return batch
    from oxrl.recipes.features.base import Prepared  # of rows with features

    prepared = Prepared(rollouts=rollouts, before=said, returns=returns, seed=seed, version=version)
    for feature in objective.features:
        batch = feature.on_prepared(batch, prepared)
    return batch


def estimate_advantages(
    objective: Objective, rollouts: RolloutBatch, old: Tensor | None, said: Output
) -> tuple[Tensor, Tensor | None]:
    """The advantage of every token, [B, T], and what a critic is to learn, where there is one.

    Args:
        old: log-probabilities before the update, [B, T]; None where they are not asked for then.
        said: by the policy before the update, as far as it was asked.

    Raises:
        RewardError: the rewards are none that the advantage takes.
    """
    given = AdvantageInputs(
        rewards=rollouts.rewards,
        token_rewards=rollouts.token_rewards,
        response_mask=rollouts.inputs.response_mask,
        group_ids=rollouts.group_ids,
        truncated=rollouts.truncated,
        old_logprobs=old,
        policy_logprobs=said.logprobs,
        sum_p_squared=said.sum_p_squared,
    )
    for feature in objective.features:
        given = feature.on_advantage_inputs(given, rollouts)
    try:
        return objective.advantage(given)
    except ValueError as error:
        raise RewardError(f"train.advantage: {error}") from error


def without_cut_rows(rollouts: RolloutBatch) -> TokenBatch:
    """Overlong filtering, arXiv:2503.14476: cut rows were part of the baseline and are no more."""
    mask = rollouts.inputs.response_mask & ~rollouts.truncated[:, None]
    return replace(rollouts.inputs, response_mask=mask)
