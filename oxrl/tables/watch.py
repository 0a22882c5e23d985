"""The watch over a run: the longest time that each phase may keep others waiting, health checks by
their names, and trackers that can show it.

A run waits for five kinds of work. Each has seconds of its own; what moves bytes has more of them,
for each GB, so that a slow disk or network is slow and not dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

Phase = Literal["load", "sync", "checkpoint", "rollout", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Those whose work grows with the bytes that they move.
OF_BYTES: frozenset[Phase] = frozenset({"load", "sync", "checkpoint"})
# Starting processes and importing libraries may take this long, whatever else has to be quick.
LEAST_LOAD_S = 600.0


HealthCheck = Literal[
    "zero-reward",
    "constant-reward",
    "failing-rewards",
    "zero-gradient",
    "uniform-entropy",
    "flat-reward",
    "same-groups",
    "entropy-collapse",
    "growing-length",
    "repeated-responses",
    "truncated-responses",
    "clipped-tokens",
    "jumping-policy",
    "sampler-mismatch",
    "far-from-reference",
    "displaced-likelihood",
    "dropped-rows",
    "stale-samples",
    "skipped-steps",
    "gradient-spike",
    "large-updates",
    "nothing-trained",
    "hacked-reward",
    "unlike-teacher",
    "unseen-by-teacher",
    "lost-prefix",
    "clamped-teacher",
]
HEALTH_CHECKS: tuple[HealthCheck, ...] = get_args(HealthCheck)


@dataclass(frozen=True)
class Deadline:
    """The longest wait for one piece of work.

    base_s: seconds whatever its size is. nbytes: that it moves. seconds_per_gb: that each 10^9 of
    them may add.
    """

    phase: Phase
    base_s: float
    nbytes: int = 0
    seconds_per_gb: float = 0.0

    @property
    def seconds(self) -> float:
        """All in all."""
        return self.base_s + self.seconds_per_gb * self.nbytes / 1e9

    @property
    def field(self) -> str:
        """The field of the config that a user raises."""
        return f"run.deadlines.{self.phase}"

    def __str__(self) -> str:
        """As an error names it: where it comes from, and how it is made up."""
        if not self.nbytes:
            return f"{self.field}={self.base_s:g} s"
        return (
            f"{self.seconds:.4g} s ({self.field}={self.base_s:g} s, and "
            f"run.seconds_per_gb={self.seconds_per_gb:g} for {self.nbytes / 1e9:.3g} GB)"
        )


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of all phases.

    seconds: of each, before bytes are counted. seconds_per_gb: added where bytes are moved.
    """

    seconds: Mapping[Phase, float]
    seconds_per_gb: float = 50.0

    @classmethod
    def alike(cls, seconds: float, seconds_per_gb: float = 50.0) -> Deadlines:
        """Make the same deadline for every phase, but that loading may always take LEAST_LOAD_S."""
        alike: dict[Phase, float] = dict.fromkeys(PHASES, seconds)
        alike["load"] = max(seconds, LEAST_LOAD_S)
        return cls(alike, seconds_per_gb)

    def of(self, phase: Phase, nbytes: int = 0) -> Deadline:
        """Return the deadline of one piece of work.

        Args:
            nbytes: that it moves, as far as that is known.
        """
        moved = nbytes if phase in OF_BYTES else 0
        return Deadline(phase, self.seconds[phase], moved, self.seconds_per_gb)


@dataclass(frozen=True)
class TrackerRow:
    """A tracker.

    title: in messages. install: what installs its package, which has its name, in the folder of
    oxRL's own repository.
    """

    title: str
    install: str


TRACKERS: Mapping[str, TrackerRow] = MappingProxyType(
    {
        "mlflow": TrackerRow("MLflow", "pip install -c constraints.txt -e ."),
        "tensorboard": TrackerRow(
            "TensorBoard", 'pip install -c constraints.txt -e ".[tensorboard]"'
        ),
        "wandb": TrackerRow("W&B", 'pip install -c constraints.txt -e ".[wandb]"'),
        # Without the pins: it wants an older Pillow than they name.
        "trackio": TrackerRow("trackio", 'pip install -e ".[trackio]"'),
    }
)
