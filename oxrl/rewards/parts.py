"""A reward of several parts: each is a reward of its own, and their weighted sum is the score.

    R_i = sum over the parts k of weight_k * R_ik

Every part has its own workers, deadline and status, and all are asked at the same time. A response
on which a part failed has no score, unless that part is optional: then the others are its score,
and, where that part says so, the score of every response of its group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from oxrl.rewards.pools import SinglePool
from oxrl.runs.threads import in_threads
from oxrl.runs.waiting import Patience
from oxrl.types import Group, Metrics, Score, Scores, ScoreStatus


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a reward.

    pool: scores it. weight: times which its score is added. optional: whether a response has a
    score where this part failed; "group": and no response of its group has this part in its score.
    """

    pool: SinglePool
    weight: float
    optional: bool | Literal["group"]


class PartsPool:
    """Scores groups of completions with every part, and adds the scores up.

    Args:
        parts: by the names that the config gives them, at least one.
    """

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = dict(parts)

    @property
    def pools(self) -> Sequence[SinglePool]:
        """Those of the parts, in their order."""
        return [part.pool for part in self._parts.values()]

    def counters(self) -> Metrics:
        """The sums of what the parts took."""
        found: Metrics = {}
        for pool in self.pools:
            for name, number in pool.counters().items():
                found[name] = found.get(name, 0.0) + number
        return found

    def start(self, patience: Patience | None = None) -> None:
        """Start every part, one after the other: see `SinglePool.start`."""
        for pool in self.pools:
            pool.start(patience)

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """See GroupScorer. The parts are scored at the same time."""
        patience = patience or Patience()

        def score(pool: SinglePool) -> Scores:
            return pool.score(groups, patience)

        of_parts = in_threads(score, self.pools, patience, most=len(self.pools))
        found: Scores = []
        for of_group in zip(*of_parts, strict=True):
            left_out = {
                name: score.status
                for (name, part), scores in zip(self._parts.items(), of_group, strict=True)
                for score in scores
                if score.value is None and part.optional == "group"
            }
            responses = [
                dict(zip(self._parts, own, strict=True)) for own in zip(*of_group, strict=True)
            ]
            found.append([combined(self._parts, own, left_out) for own in responses])
        return found

    def close(self) -> None:
        """Kill the workers of every part."""
        for pool in self.pools:
            pool.close()


def combined(
    parts: Mapping[str, Part], scores: Mapping[str, Score], left_out: Mapping[str, ScoreStatus]
) -> Score:
    """The score of a response from those of its parts.

    Args:
        parts: by name.
        scores: of the same names.
        left_out: parts that failed on another response of the group, and do not count here either,
            and how they failed.

    Returns:
        The weighted sum of the parts that have a score and count; a failure where a part failed
        that is not optional, or none is left. `parts` holds what each part gave, and under
        "name.inner" what that is made of.
    """
    values: Metrics = {}
    statuses: dict[str, ScoreStatus] = {}
    reasons: list[str] = []
    terms: list[float] = []
    steps: list[tuple[int, float]] = []
    failed: list[ScoreStatus] = []
    for name, score in scores.items():
        statuses[name] = score.status
        if score.reason:
            reasons.append(f"{name}: {score.reason}")
        if score.value is not None:
            values[name] = score.value
            weight = parts[name].weight
            if name in left_out:
                statuses[name] = "left_out"
                reasons.append(f"{name}: left out, it failed on another response to this prompt")
            else:
                terms.append(weight * score.value)
                steps += [(end, weight * share) for end, share in score.steps]
        elif not parts[name].optional:
            failed.append(score.status)
        values |= {f"{name}.{inner}": value for inner, value in score.parts.items()}
    reason = "; ".join(reasons)
    if not terms and not failed:
        failed = [left_out.get(name, status) for name, status in statuses.items()]
    total: float | None = None
    if not failed:
        # Exactly rounded, so that the order of the parts in the config changes nothing.
        total = _sum(terms)
        if total is None:
            failed = ["invalid"]
            reason = f"the weighted sum of {terms} is no finite number"
    status = failed[0] if failed else "ok"
    answers = (score.answer for score in scores.values())
    return Score(
        value=total,
        status=status,
        parts=values,
        reason=reason,
        statuses=statuses,
        steps=tuple(steps),
        # That of the first part that reads one.
        answer=next((answer for answer in answers if answer is not None), None),
    )


def _sum(terms: Sequence[float]) -> float | None:
    """The sum of finite numbers; None where it, or one of them, is too large for a float."""
    try:
        total = math.fsum(terms)
    except (OverflowError, ValueError):  # the latter of infinities of both signs
        return None
    return total if math.isfinite(total) else None
