"""Metrics of responses that repeat themselves, or one another."""

from __future__ import annotations

import zlib
from collections import Counter

from oxrl.types import Metrics, Rollouts

# Bytes below which a text is too short to be called a loop.
SHORTEST_LOOP = 200
# Size that compression leaves of a loop; of prose and proofs it leaves a third or more.
# The same idea as the compression ratio of Whisper's decoding, arXiv:2212.04356, section 4.5.
LOOP_LEFT = 0.15


def repetition_metrics(rollouts: Rollouts) -> Metrics:
    """Measure how often responses of a rollout step repeat themselves, and those of their group.

    Args:
        rollouts: of a step, in any order.

    Returns:
        `data/looping_frac`, the share of responses that say one thing again and again, and
        `data/duplicate_frac`, over all pairs of a group the share with equal texts, where there are
        pairs. Empty for no rollouts.
    """
    if not rollouts:
        return {}
    texts = [rollout.completion.text for rollout in rollouts]
    looping = sum(map(is_loop, texts))
    metrics = {"data/looping_frac": looping / len(texts)}
    sizes = Counter(rollout.group_id for rollout in rollouts)
    same = Counter((rollout.group_id, rollout.completion.text) for rollout in rollouts)
    pairs = _pairs(sizes)
    if pairs:
        metrics["data/duplicate_frac"] = _pairs(same) / pairs
    return metrics


def is_loop(text: str) -> bool:
    """True if a text is mostly one passage, repeated.

    Args:
        text: of a response; one below SHORTEST_LOOP bytes is none.
    """
    data = text.encode("utf-8", "surrogatepass")
    if len(data) < SHORTEST_LOOP:
        return False
    return len(zlib.compress(data, 1)) < LOOP_LEFT * len(data)


def _pairs(counts: Counter[int] | Counter[tuple[int, str]]) -> int:
    """Unordered pairs of things that are counted together."""
    return sum(count * (count - 1) // 2 for count in counts.values())
