"""What trains: the interface. Policy, critic and teacher are instances of TrainEngine; a reference
is a Scorer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from oxrl.types import LossFn, Metrics, Output, TokenBatch, TrainBatch

# "logprobs", "entropy", "values", "sum_p_squared", "top_k=<K>".
Want = frozenset[str]
Bucket = list[tuple[str, Tensor]]


class Scorer(Protocol):
    """All that is asked of a reference."""

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """Run without gradient; tensors come back on the CPU, rows in the order given."""
        ...


class Saved(Protocol):
    """What a checkpoint holds."""

    def save(self, directory: Path) -> None:
        """Write everything that `load` needs into `directory`; engines write HF-loadable weights
        too.
        """
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, exactly."""
        ...


class TrainEngine(Scorer, Saved, Protocol):
    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        """Add the gradient of the plain sum of `loss_fn` over all rows of all ranks; gradients
        accumulate.

        Micro-batches by token budget inside. Returns what the model said, detached and on the CPU,
        so that the caller computes metrics once over the whole batch, whatever the micro-batches
        were.
        """
        ...

    def optim_step(self) -> Metrics:
        """Clip by global norm, check finiteness on all ranks, step unless something is not finite,
        zero gradients.

        Returns `update/grad_norm` (before the clip), `update/lr`, `update/skipped` (0 or 1),
        `update/param_norm`, `update/update_norm_ratio`.
        """
        ...

    def skip_step(self) -> Metrics:
        """Refuse this step: drop the accumulated gradient; the step index is consumed. Same keys as
        optim_step.
        """
        ...

    def set_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite whole weights; their optimizer state starts anew, float32 masters from these
        weights.
        """
        ...

    def weights(self) -> Iterator[Bucket]:
        """Buckets of at most 512 MB of (HF name, tensor); collective across ranks."""
        ...
