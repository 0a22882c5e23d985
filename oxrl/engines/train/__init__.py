"""The engines that train: their interface. Policy, critic and teacher are instances of TrainEngine,
a reference is a Scorer.

Letters of shapes as in `oxrl.types`: B rows, T tokens per row, K of the most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, Protocol, TypeVar

import torch

from oxrl.checkpoint import Saved
from oxrl.errors import InvariantError
from oxrl.models.stored import NamedTensor
from oxrl.models.weights import Whole
from oxrl.types import LossFn, Metrics, Output, TokenBatch, TrainBatch, Want

# Of a policy with an adapter: all of its weights, the adapter's alone, or those of a model without
# adapter that computes the same.
Part = Literal["all", "adapter", "merged"]
Bucket = list[NamedTensor]
BucketStream = Iterator[Bucket]
Buckets = Iterable[Bucket]
# Whole on one rank only; None: it is another rank's.
OneRanksBucket = Bucket | Whole | None
# Of weights, by name.
Fingerprints = Mapping[str, str]
# Makes of a weight the one that a sampler computes with.
Rounding = Callable[[torch.Tensor], torch.Tensor]


class Scorer(Protocol):
    """All that is asked of a reference."""

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """Read a batch without gradient.

        Args:
            inputs: B rows of any length; cut into micro-batches inside.
            want: which fields of `Output` to compute.

        Returns:
            The fields asked for, [B, T] or [B, T, K] or [B], on the CPU, rows in the order given;
            log-probabilities and entropies in nats. 0.0 wherever `response_mask` is False.

        Raises:
            EngineError: values were asked of a model without a value head.
        """
        ...


Asked = TypeVar("Asked", bound=Scorer)


class Models(dict[str, Asked]):
    """The models of a run by their roles, see `oxrl.tables.roles`."""

    def __missing__(self, role: str) -> Asked:
        """Say which roles there are.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(f"this run has no {role}; its models are {', '.join(self)}")


class TrainEngine(Scorer, Saved, Protocol):
    """A model, its gradient and its optimizer."""

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        """Add the gradient of the plain sum of a loss over all rows of all ranks.

        Gradients of several calls add until `optim_step` or `skip_step`.

        Args:
            batch: N units (rows, or pairs of rows); cut into micro-batches of whole units inside.
            loss_fn: of one micro-batch: (what the model said, that part of the batch) -> (sum to
                minimise, metrics, which are ignored here).
            want: what `loss_fn` reads of `Output`.

        Returns:
            What the model said, detached and on the CPU, rows in the order of `batch.inputs`: the
            caller computes metrics once over the whole batch, whatever the micro-batches were.
        """
        ...

    def optim_step(self) -> Metrics:
        """Clip by the global norm, step unless something is not finite anywhere, zero gradients.

        Returns:
            `update/grad_norm` (before the clip), `update/lr`, `update/skipped` (0 or 1),
            `update/param_norm`, `update/update_norm_ratio` (norm of the change over
            `update/param_norm`).
        """
        ...

    def skip_step(self) -> Metrics:
        """Refuse this step: drop the accumulated gradient; the step index is consumed.

        Returns:
            The keys of `optim_step`, `update/skipped` 1.
        """
        ...

    def set_weights(self, named: Iterable[NamedTensor]) -> None:
        """Overwrite whole weights; their optimizer state starts anew, masters from these weights.

        Args:
            named: (HF name, whole tensor), the same on every rank; collective.
        """
        ...

    def weights(self, part: Part = "all") -> BucketStream:
        """Yield the weights as the model computes with them; collective across ranks.

        Args:
            part: which of them.

        Returns:
            Buckets of at most 64 MB (24 MB from a CPU) or of one weight: (HF name, whole tensor).
        """
        ...

    def fingerprints(
        self, dtype: torch.dtype | None, part: Part = "all", rounded: Rounding | None = None
    ) -> Fingerprints:
        """Fingerprint what `weights()` has to yield, without calling it; collective across ranks.

        Args:
            dtype: what the weights are cast to after they were rounded as they are stored; None:
                they are not.
            part: which of them.
            rounded: rounds a whole weight after that; None: nothing does. Of one rank alone: others
                hold pieces of weights.

        Returns:
            HF name -> fingerprint of the weight as the optimizer holds it: its float32 master,
            where it has one.
        """
        ...
