"""The evaluation of a policy by how well its implicit reward orders held-out completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from oxrl.data.preferences import Judged
from oxrl.recipes.offline_loop import LookedAt
from oxrl.recipes.preference_objective import WANT, PreferenceObjective
from oxrl.types import Metrics


def evaluate_pairs(
    objective: PreferenceObjective, data: LookedAt[Judged], rows_per_batch: int
) -> Metrics:
    """Measure how often the implicit reward puts the better completion first; a tie counts half.

    `eval/longer_wins` is what preferring the longer one would score.
    """
    batches = data.batches(rows_per_batch)
    rewards, logprobs, lengths = implicit_rewards(objective, batches, rows=2)
    gaps = rewards[0::2] - rewards[1::2]
    return {
        "eval/accuracy": float(wins(gaps)),
        "eval/margin": float(gaps.mean()),
        "eval/chosen": float(logprobs[0::2].mean()),
        "eval/rejected": float(logprobs[1::2].mean()),
        "eval/longer_wins": float(wins(lengths[0::2] - lengths[1::2])),
    }


def evaluate_singles(
    objective: PreferenceObjective, data: LookedAt[Judged], rows_per_batch: int
) -> Metrics:
    """The same of single completions: each desirable one against each undesirable one."""
    seen: list[Judged] = []

    def batches() -> Iterator[list[Judged]]:
        for units in data.batches(rows_per_batch):
            seen.extend(units)
            yield units

    rewards, _, _ = implicit_rewards(objective, batches(), rows=1)
    desirable = torch.tensor([unit.desirable for unit in seen])
    good = rewards[desirable]
    bad = rewards[~desirable].sort().values
    worse = torch.searchsorted(bad, good)
    not_better = torch.searchsorted(bad, good, right=True)
    below = (worse + not_better) / 2
    return {"eval/accuracy": float(below.mean()) / max(len(bad), 1)}


def implicit_rewards(
    objective: PreferenceObjective, batches: Iterable[list[Judged]], *, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Reward, log-probability and length of every row, float64.

    Reward: log-probability minus the reference's, per token where the method is.
    """
    found: list[Tensor] = []
    for units in batches:
        batch = objective.batch(units, rows)
        output = objective.policy.forward(batch.inputs, WANT)
        sums, lengths = objective.sums(output, batch.inputs)
        rewards = sums if batch.ref_logprobs is None else sums - batch.ref_logprobs
        if objective.method.per_token:
            rewards = rewards / lengths.clamp(min=1)
        found.append(torch.stack((rewards, sums, lengths)).double())
    rewards, logprobs, lengths = torch.cat(found, 1)
    return rewards, logprobs, lengths


def wins(gaps: Tensor) -> Tensor:
    """Share of gaps above zero, a zero counting one half."""
    return ((gaps.sign() + 1) / 2).mean()
