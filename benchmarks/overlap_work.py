"""What both sides of `overlap.py` are given: lengths of responses, and how long rounds take."""

from __future__ import annotations

import math
import random

# Rows that a sampler decodes at once; responses of a batch for each sampler; of a prompt.
SLOTS = 32
BATCH = 2 * SLOTS
GROUP = 8
# Of lengths, in tokens, whose logarithms have a standard deviation of 1.
MEDIAN = 24
CAP = 10 * MEDIAN
# Seconds of a round, and of each row in it.
ROUND_S = 0.04
ROW_S = 0.0004


def length_of(draw: int, sample: int) -> int:
    """Tokens of a response."""
    drawn = MEDIAN * math.exp(random.Random(f"{draw}/{sample}").gauss(0.0, 1.0))
    return max(1, min(CAP, round(drawn)))


def round_seconds(rows: int) -> float:
    """How long a round with so many rows takes."""
    return ROUND_S + ROW_S * rows
