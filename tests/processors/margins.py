"""How far learned figures lie from the bounds that tests hold them to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Deviations that a bound has to be away.
LEAST = 3.0


@dataclass
class Spread:
    """The values of one figure of one test.

    seeds: those under the default rounding, one per seed.
    roundings: those of one seed, one per rounding.
    """

    seeds: list[float] = field(default_factory=list)
    roundings: list[float] = field(default_factory=list)
    at_least: float = -math.inf
    at_most: float = math.inf

    @property
    def values(self) -> int:
        """How many there are; that of the default rounding and seed is in both lists."""
        return len(self.seeds) + len(self.roundings) - 1

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seeds)

    @property
    def deviation(self) -> float:
        """Of one run on any processor with any seed: both variances together."""
        return math.hypot(_deviation(self.seeds), _deviation(self.roundings))

    @property
    def margin(self) -> float:
        """Deviations from the mean to the nearer bound; infinite where nothing varies."""
        room = min(self.mean - self.at_least, self.at_most - self.mean)
        if self.deviation == 0:
            return math.inf if room > 0 or self.mean in (self.at_least, self.at_most) else -math.inf
        return room / self.deviation


def spreads(
    default: Sequence[Mapping[str, Any]],
    seeds: Iterable[Sequence[Mapping[str, Any]]],
    roundings: Iterable[Sequence[Mapping[str, Any]]],
) -> dict[tuple[str, str], Spread]:
    """Gather figures by test and name.

    Args:
        default: what the default rounding wrote, a line per figure.
        seeds: the same for each further seed.
        roundings: the same for each further rounding.

    Returns:
        The spread of each figure that the default rounding wrote. A figure that does not hear of
        the seed has the same value under all.
    """
    found: dict[tuple[str, str], Spread] = {}
    for line in default:
        spread = found.setdefault((line["test"], line["figure"]), Spread())
        spread.seeds.append(line["value"])
        spread.roundings.append(line["value"])
        spread.at_least = line.get("at_least", -math.inf)
        spread.at_most = line.get("at_most", math.inf)
    for files, kind in ((seeds, "seeds"), (roundings, "roundings")):
        for line in (line for lines in files for line in lines):
            spread = found.get((line["test"], line["figure"]))
            if spread is not None:
                (spread.seeds if kind == "seeds" else spread.roundings).append(line["value"])
    return found


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
