"""The statistics of the whole batch that a preference loss needs, from one forward before the step.

`STATISTICS` names a function per extra tensor of a loss; each returns the batch with that tensor in
it. Sums are per row, [2 * N] or [B]; whatever is per pair is [N]; all in nats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import oxrl.functional.preference_statistics as preference_statistics
from oxrl.data.preferences import Judged, to_preference_batch
from oxrl.errors import required
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

    def with_extra(self, name: str, value: Tensor) -> PreferenceBatch:
        """The batch with one more tensor for the loss."""
        return dataclasses.replace(self.batch, extras={**self.batch.extras, name: value})


def with_statistics(before: BeforeStep) -> PreferenceBatch:
    """The batch with every statistic that its loss takes."""
    for name in before.objective.method.extras:
        statistic = STATISTICS.get(name)
        if statistic is not None:
            before.batch = statistic(before)
    return before.batch


def kl_baseline(before: BeforeStep) -> PreferenceBatch:
    """KTO: how far completions to other prompts have moved."""
    mismatched: list[Judged] = []
    for unit in before.units:
        ref_logprobs = (unit.ref_logprobs or ())[1:]
        shown = dataclasses.replace(unit, rows=unit.rows[1:], ref_logprobs=ref_logprobs)
        mismatched.append(shown)
    objective = before.objective
    other = to_preference_batch(mismatched, objective.pad_id, rows=1, images=objective.images)
    sums = objective.completion_logprobs(objective.policy, other.inputs)
    ref_sums = required(other.ref_logprobs, "reference log-probabilities")
    return before.with_extra("kl_baseline", preference_statistics.kto_baseline(sums, ref_sums))


def reward_shift(before: BeforeStep) -> PreferenceBatch:
    """BCO: the mean of all rewards so far."""
    memory = before.memory
    shift, count = preference_statistics.bco_reward_shift(
        before.objective.numbers["beta"] * before.log_ratios,
        mean=memory.get("mean", 0.0),
        count=int(memory.get("count", 0)),
    )
    memory["count"] = count
    memory["mean"] = float(shift)
    return before.with_extra("reward_shift", shift)


def matched_ref_margins(before: BeforeStep) -> PreferenceBatch:
    """AOT: for each gap of the policy the reference's of equal rank."""
    gaps = before.sums[0::2] - before.sums[1::2]
    ref_gaps = before.ref_sums[0::2] - before.ref_sums[1::2]
    matched = preference_statistics.rank_match(gaps, ref_gaps)
    return before.with_extra("matched_ref_margins", matched)


def matched_rejected(before: BeforeStep) -> PreferenceBatch:
    """Unpaired AOT: for each chosen log ratio the rejected one of equal rank."""
    matched = preference_statistics.rank_match(before.chosen_log_ratios, before.rejected_log_ratios)
    return before.with_extra("matched_rejected", matched)


def matched_chosen(before: BeforeStep) -> PreferenceBatch:
    """Unpaired AOT: for each rejected log ratio the chosen one of equal rank."""
    matched = preference_statistics.rank_match(before.rejected_log_ratios, before.chosen_log_ratios)
    return before.with_extra("matched_chosen", matched)


def log_mean(before: BeforeStep) -> PreferenceBatch:
    """Dr. DPO: what normalizes its weights."""
    numbers = before.objective.numbers
    normalizer = preference_statistics.dr_dpo_log_mean(
        -logsigmoid(numbers["beta"] * before.margins),
        before.batch.loss_weights,
        robustness=numbers["robustness"],
    )
    return before.with_extra("log_mean", normalizer)


def pair_weights(before: BeforeStep) -> PreferenceBatch:
    """WPO: how likely the policy is to have sampled both completions."""
    weights = preference_statistics.wpo_weights(
        required(before.output.logprobs, "logprobs"),
        required(before.output.sum_p_squared, "sum_p_squared"),
        before.batch.inputs.response_mask,
    )
    return before.with_extra("pair_weights", weights[0::2] * weights[1::2])


def standardized_gaps(before: BeforeStep) -> PreferenceBatch:
    """Alpha-DPO: the margins per token, against those of the steps so far."""
    lengths = before.objective.sums(before.output, before.batch.inputs)[1].clamp(min=1)
    per_token = before.log_ratios / lengths
    gaps = per_token[0::2] - per_token[1::2]
    mean, std = update_moments(before.memory, gaps)
    z = preference_statistics.standardize(gaps, mean=mean, std=std)
    return before.with_extra("standardized_gaps", z)


def batch_beta(before: BeforeStep) -> PreferenceBatch:
    """Beta-DPO: the pairs that count, and the beta they ask for."""
    numbers = before.objective.numbers
    margins = before.margins
    mean, std = update_moments(before.memory, margins)
    generator = torch.Generator().manual_seed(before.seed)
    noise = torch.rand(len(margins), generator=generator).clamp(1e-6, 1 - 1e-6)
    kept = preference_statistics.beta_dpo_selection(
        margins, noise, mean=mean, std=std, drop=numbers["drop_frac"]
    )
    beta = preference_statistics.beta_dpo_beta(
        margins[kept], mean=mean, beta=numbers["beta"], scale=numbers["beta_scale"]
    )
    changed = before.with_extra("batch_beta", beta)
    return dataclasses.replace(changed, loss_weights=kept / kept.sum())


def update_moments(memory: Memory, values: Tensor) -> tuple[float, float]:
    """Running mean and deviation with this batch in it; the first batch is taken as it is."""
    now = {"mean": float(values.mean()), "std": float(values.std(correction=0))}
    for name, value in now.items():
        if name in memory:
            value = DECAY * memory[name] + (1 - DECAY) * value
        memory[name] = value
    return memory["mean"], memory["std"]


STATISTICS: dict[str, Callable[[BeforeStep], PreferenceBatch]] = {
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
