"""The evaluation of a policy by how well its implicit reward orders held-out completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from oxrl.data.preferences import Judged
from oxrl.recipes.preference_objective import WANT, PreferenceObjective
from oxrl.types import Metrics


def evaluate_pairs(objective: PreferenceObjective, batches: Iterable[list[Judged]]) -> Metrics:
    """Measure how often the implicit reward puts the better completion first; a tie counts half.

    `eval/longer_wins` is what preferring the longer one would score.
    """
    read = [implicit_rewards(objective, units, rows=2) for units in batches]
    rewards, logprobs, lengths = torch.cat(read, 1)
    gaps = rewards[0::2] - rewards[1::2]
    return {
        "eval/accuracy": float(wins(gaps)),
        "eval/margin": float(gaps.mean()),
        "eval/chosen": float(logprobs[0::2].mean()),
        "eval/rejected": float(logprobs[1::2].mean()),
        "eval/longer_wins": float(wins(lengths[0::2] - lengths[1::2])),
    }


def evaluate_singles(objective: PreferenceObjective, batches: Iterable[list[Judged]]) -> Metrics:
    """The same of single completions: each desirable one against each undesirable one."""
    found: list[Tensor] = []
    verdicts: list[bool] = []
    for units in batches:
        found.append(implicit_rewards(objective, units, rows=1)[0])
        verdicts += [unit.desirable for unit in units]
    rewards = torch.cat(found)
    desirable = torch.tensor(verdicts)
    good = rewards[desirable]
    bad = rewards[~desirable].sort().values
    worse = torch.searchsorted(bad, good)
    not_better = torch.searchsorted(bad, good, right=True)
    below = (worse + not_better) / 2
    return {"eval/accuracy": float(below.mean()) / max(len(bad), 1)}


def implicit_rewards(objective: PreferenceObjective, units: Sequence[Judged], rows: int) -> Tensor:
    """Reward, log-probability and length of every row, [3, rows of all units] float64.

    Reward: log-probability minus the reference's, per token where the method is.

    Args:
        units: read at once.
        rows: of each.
    """
    batch = objective.batch(units, rows)
    output = objective.policy.forward(batch.inputs, WANT)
    sums, lengths = objective.sums(output, batch.inputs)
    rewards = sums if batch.ref_logprobs is None else sums - batch.ref_logprobs
    if objective.method.per_token:
        rewards = rewards / lengths.clamp(min=1)
    return torch.stack((rewards, sums, lengths)).double()


def wins(gaps: Tensor) -> Tensor:
    """Share of gaps above zero, a zero counting one half."""
    return ((gaps.sign() + 1) / 2).mean()
