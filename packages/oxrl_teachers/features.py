"""Answers of teachers on the sampled tokens, as an advantage and as candidates of a divergence."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oxrl.errors import required
from oxrl.functional.advantages import MAX_TEACHER_GAP
from oxrl.functional.group_advantages import AdvantageInputs
from oxrl.functional.masks import masked_mean
from oxrl.recipes.features.base import FeatureInputs, Prepared
from oxrl.recipes.session import RolloutProgress
from oxrl.tables.numbers import TEACHER_CANDIDATES
from oxrl.types import CANDIDATES, Metrics, PolicyBatch, RolloutBatch, Want
from oxrl_teachers.asking import AsksTeachers

LOGPROBS: Want = frozenset({"logprobs"})
# Rows of a step of which the most likely tokens of both are compared.
COMPARED_ROWS = 8
# Shares of a response whose gaps are told apart.
FIFTHS = 5


class TeacherGap(AsksTeachers):
    """Log-probabilities of the sampled tokens, for advantages that read them.

    Args:
        given: what the run is made of.
    """

    def __init__(self, given: FeatureInputs) -> None:
        super().__init__(given)
        self._steps = given.train.steps
        self._gap = torch.zeros(0, 0)

    def on_advantage_inputs(
        self, inputs: AdvantageInputs, rollouts: RolloutBatch
    ) -> AdvantageInputs:
        """Ask; the student is the policy before the update, as it was asked or as it sampled."""
        own = inputs.policy_logprobs
        if own is None:
            own = rollouts.rollout_logprobs
        said = required(self.ask(rollouts, LOGPROBS).logprobs, "logprobs")
        teacher = torch.where(self._unanswered[:, None], own, said)
        self._gap = torch.where(inputs.response_mask, teacher - own, 0.0)
        # Versions count optimizer steps; stored samples may come from a longer run.
        done = min(1.0, int(rollouts.versions.max()) / self._steps)
        return replace(inputs, old_logprobs=own, teacher_logprobs=teacher, done=done)

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Say how far the two are apart, and what was too far to count."""
        mask = batch.inputs.response_mask
        counted = super().steer(batch, progress)
        if not mask.any():
            return counted
        clamped = self._gap.abs() > MAX_TEACHER_GAP
        return {
            **counted,
            **gap_metrics(self._gap, mask),
            "teacher/clamped_frac": float(masked_mean(clamped, mask)),
        }


class TeacherTop(AsksTeachers):
    """The teacher's most likely tokens, which the policy is asked about in the update.

    Args:
        given: what the run is made of.
    """

    def __init__(self, given: FeatureInputs) -> None:
        super().__init__(given)
        count = given.train.value(TEACHER_CANDIDATES)
        self.want: Want = frozenset({f"top_k={count}"})
        self._gap = torch.zeros(0, 0)
        self._compared = torch.zeros(0, dtype=torch.int64)
        self._own_top = torch.zeros(0, 0, 0)

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Ask, and lay candidates and what the teacher says of them beside the tokens."""
        rollouts = prepared.rollouts
        # The policy first: a teacher elsewhere works meanwhile.
        trained = batch.inputs.response_mask.any(1).nonzero()[:, 0]
        self._compared = trained[:COMPARED_ROWS]
        own = batch.select(self._compared).inputs.said_by(self._policy.forward, self.want)
        self._own_top = required(own.top_ids, "the policy's most likely tokens")
        said = self.ask(rollouts, LOGPROBS | self.want)
        batch = super().on_prepared(batch, prepared)
        inputs = batch.inputs
        ids = required(said.top_ids, "candidates")
        teacher = required(said.logprobs, "logprobs")
        signals = {
            "teacher_top_logprobs": required(said.top_logprobs, "their logprobs"),
            "teacher_logprobs": teacher,
            "sampled_in_top": (ids == inputs.tokens[..., None]).any(-1),
        }
        gap = teacher - rollouts.rollout_logprobs
        self._gap = torch.where(inputs.response_mask, gap, 0.0)
        columns = {**inputs.columns, CANDIDATES: ids.clamp(min=0)}
        return replace(batch, inputs=replace(inputs, columns=columns), signals=signals)

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Say how far the two are apart, and whether they find the same tokens likely."""
        mask = batch.inputs.response_mask
        counted = super().steer(batch, progress)
        if not mask.any():
            return counted
        return counted | gap_metrics(self._gap, mask) | self._overlap(batch)

    def _overlap(self, batch: PolicyBatch) -> Metrics:
        """Share of the teacher's candidates that are the policy's too, over a few rows."""
        some = batch.select(self._compared).inputs
        if not some.response_mask.any():  # no teacher answered on any of them
            return {}
        theirs = some.columns[CANDIDATES]
        found = (theirs[..., :, None] == self._own_top[..., None, :]).any(-1).double().mean(-1)
        return {"teacher/overlap": float(masked_mean(found, some.response_mask))}


def gap_metrics(gap: Tensor, mask: Tensor) -> Metrics:
    """Describe how much likelier the teacher finds what was sampled.

    Args:
        gap: [B, T] nats, teacher less policy.
        mask: [B, T] bool, trained tokens.

    Returns:
        `teacher/gap_mean`, minus an estimate of KL(policy || teacher); `teacher/gap_first` and
        `teacher/gap_last` of the first and the last fifth of responses.
    """
    places = mask.cumsum(1) - 1
    lengths = mask.sum(1, keepdim=True)
    first = mask & (places * FIFTHS < lengths)
    last = mask & ((places + 1) * FIFTHS > lengths * (FIFTHS - 1))
    return {
        "teacher/gap_mean": float(masked_mean(gap, mask)),
        "teacher/gap_first": float(masked_mean(gap, first)),
        "teacher/gap_last": float(masked_mean(gap, last)),
    }
