"""The progress of a run: what a checkpoint keeps beside weights, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from oxrl.types import Metrics


@dataclass(kw_only=True)
class Progress:
    """The progress of every run.

    step: optimizer steps done. draw: next position in the data order. line: the metrics of `step`
    until they are recorded; a signal during its evaluation leaves them here. tokens: of `line`.
    good_enough: whether an evaluation was as good as `run.stop_at` asks for.
    """

    step: int = 0
    draw: int = 0
    line: Metrics = field(default_factory=Metrics)
    tokens: float = 0.0
    good_enough: bool = False


@dataclass(kw_only=True)
class RolloutProgress(Progress):
    """The progress of reinforcement learning.

    rollout_step: rollout steps done. samples: what became of every sample so far.
    kl_coeff: of the KL in the reward, which a feature may steer.
    """

    rollout_step: int = 0
    samples: dict[str, int] = field(default_factory=dict[str, int])
    kl_coeff: float = 0.0


P = TypeVar("P", bound=Progress)


def crossed(every: int, before: int, after: int) -> bool:
    """True if a multiple of `every` lies in (before, after]; 0 means never."""
    return every > 0 and after // every > max(before, 0) // every
