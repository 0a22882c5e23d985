"""The statistics of the whole batch that a preference loss needs, from one forward before the step.

`STATISTICS` names a function per extra tensor of a loss, which returns it. Sums are per row,
[2 * N] or [B]; whatever is per pair is [N]; all in nats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.data.preferences import Judged
from oxrl.errors import required
from oxrl.functional.preference_statistics import (
    bco_reward_shift,
    beta_dpo_beta,
    beta_dpo_selection,
    dr_dpo_log_mean,
    kto_baseline,
    rank_match,
    standardize,
    wpo_weights,
)
from oxrl.recipes.offline_loop import Memory
from oxrl.recipes.preference_objective import WANT, PreferenceObjective
from oxrl.types import Output, PreferenceBatch

# Decay of running moments, as beta-DPO and alpha-DPO have it.
DECAY = 0.9


@dataclass(kw_only=True)
class BeforeStep:
    """The global batch as the policy sees it before the step.

    Args:
        objective: the method and its policy.
        batch: all rows of the step.
        units: where they come from.
        memory: running means and counts, changed here.
        seed: of what is drawn.
    """

    objective: PreferenceObjective
    batch: PreferenceBatch
    units: Sequence[Judged]
    memory: Memory
    seed: int

    @cached_property
    def output(self) -> Output:
        return self.objective.policy.forward(self.batch.inputs, WANT | {"sum_p_squared"})

    @cached_property
    def sums(self) -> Tensor:
        return self.objective.sums(self.output, self.batch.inputs)[0]

    @property
    def ref_sums(self) -> Tensor:
        return required(self.batch.ref_logprobs, "reference log-probabilities")

    @property
    def log_ratios(self) -> Tensor:
        return self.sums - self.ref_sums

    @property
    def chosen_log_ratios(self) -> Tensor:
        return self.log_ratios[0::2]

    @property
    def rejected_log_ratios(self) -> Tensor:
        return self.log_ratios[1::2]

    @property
    def margins(self) -> Tensor:
        return self.chosen_log_ratios - self.rejected_log_ratios


def with_statistics(before: BeforeStep) -> PreferenceBatch:
    """The batch with every statistic that its loss takes."""
    for name in before.objective.method.extras:
        if name in STATISTICS:
            value = STATISTICS[name](before)
            extras = {**before.batch.extras, name: value}
            before.batch = replace(before.batch, extras=extras)
    return before.batch


def kl_baseline(before: BeforeStep) -> Tensor:
    """KTO: how far completions to other prompts have moved."""
    mismatched = [
        replace(unit, rows=unit.rows[1:], ref_logprobs=(unit.ref_logprobs or ())[1:])
        for unit in before.units
    ]
    objective = before.objective
    other = objective.batch(mismatched, rows=1)
    sums = objective.completion_logprobs(objective.policy, other.inputs)
    ref_sums = required(other.ref_logprobs, "reference log-probabilities")
    return kto_baseline(sums, ref_sums)


def reward_shift(before: BeforeStep) -> Tensor:
    """BCO: the mean of all rewards so far."""
    memory = before.memory
    shift, count = bco_reward_shift(
        before.objective.numbers["beta"] * before.log_ratios,
        mean=memory.get("mean", 0.0),
        count=int(memory.get("count", 0)),
    )
    memory["count"] = count
    memory["mean"] = float(shift)
    return shift


def matched_ref_margins(before: BeforeStep) -> Tensor:
    """AOT: for each gap of the policy the reference's of equal rank."""
    gaps = before.sums[0::2] - before.sums[1::2]
    ref_gaps = before.ref_sums[0::2] - before.ref_sums[1::2]
    return rank_match(gaps, ref_gaps)


def matched_rejected(before: BeforeStep) -> Tensor:
    """Unpaired AOT: for each chosen log ratio the rejected one of equal rank."""
    return rank_match(before.chosen_log_ratios, before.rejected_log_ratios)


def matched_chosen(before: BeforeStep) -> Tensor:
    """Unpaired AOT: for each rejected log ratio the chosen one of equal rank."""
    return rank_match(before.rejected_log_ratios, before.chosen_log_ratios)


def log_mean(before: BeforeStep) -> Tensor:
    """Dr. DPO: what normalizes its weights."""
    numbers = before.objective.numbers
    return dr_dpo_log_mean(
        -logsigmoid(numbers["beta"] * before.margins),
        before.batch.loss_weights,
        robustness=numbers["robustness"],
    )


def pair_weights(before: BeforeStep) -> Tensor:
    """WPO: how likely the policy is to have sampled both completions."""
    weights = wpo_weights(
        required(before.output.logprobs, "logprobs"),
        required(before.output.sum_p_squared, "sum_p_squared"),
        before.batch.inputs.response_mask,
    )
    return weights[0::2] * weights[1::2]


def standardized_gaps(before: BeforeStep) -> Tensor:
    """Alpha-DPO: the margins per token, against those of the steps so far."""
    lengths = before.objective.sums(before.output, before.batch.inputs)[1].clamp(min=1)
    per_token = before.log_ratios / lengths
    gaps = per_token[0::2] - per_token[1::2]
    mean, std = update_moments(before.memory, gaps)
    return standardize(gaps, mean=mean, std=std)


def batch_beta(before: BeforeStep) -> Tensor:
    """Beta-DPO: the pairs that count, and the beta they ask for."""
    numbers = before.objective.numbers
    margins = before.margins
    mean, std = update_moments(before.memory, margins)
    generator = torch.Generator().manual_seed(before.seed)
    noise = torch.rand(len(margins), generator=generator).clamp(1e-6, 1 - 1e-6)
    kept = beta_dpo_selection(margins, noise, mean=mean, std=std, drop=numbers["drop_frac"])
    before.batch = replace(before.batch, loss_weights=kept / kept.sum())
    return beta_dpo_beta(
        margins[kept], mean=mean, beta=numbers["beta"], scale=numbers["beta_scale"]
    )


def update_moments(memory: Memory, values: Tensor) -> tuple[float, float]:
    """Running mean and deviation with this batch in it; the first batch is taken as it is."""
    now = {"mean": float(values.mean()), "std": float(values.std(correction=0))}
    for name, value in now.items():
        if name in memory:
            value = DECAY * memory[name] + (1 - DECAY) * value
        memory[name] = value
    return memory["mean"], memory["std"]


STATISTICS = {
    "kl_baseline": kl_baseline,
    "reward_shift": reward_shift,
    "matched_ref_margins": matched_ref_margins,
    "matched_rejected": matched_rejected,
    "matched_chosen": matched_chosen,
    "log_mean": log_mean,
    "pair_weights": pair_weights,
    "standardized_gaps": standardized_gaps,
    "batch_beta": batch_beta,
}
