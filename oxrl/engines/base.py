"""The two engine interfaces. Policy, critic and teacher are instances of TrainEngine; a reference is a Scorer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from oxrl.errors import DeadlineError
from oxrl.types import Completion, LossFn, Metrics, Output, Request, TokenBatch, TrainBatch

# "logprobs", "entropy", "values", "sum_p_squared", "top_k=<K>".
Want = frozenset[str]
Bucket = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Finished:
    """A request and its completion, as `poll` and `abort` return them."""

    request: Request
    completion: Completion


class Scorer(Protocol):
    """All that is asked of a reference."""

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """Run without gradient; tensors come back on the CPU, rows in the order given."""
        ...


class Saved(Protocol):
    """What a checkpoint holds."""

    def save(self, directory: Path) -> None:
        """Write everything that `load` needs into `directory`; engines write HF-loadable weights too."""
        ...

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, exactly."""
        ...


class TrainEngine(Scorer, Saved, Protocol):
    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        """Add the gradient of the plain sum of `loss_fn` over all rows of all ranks; gradients accumulate.

        Micro-batches by token budget inside. Returns what the model said, detached and on the CPU, so that the
        caller computes metrics once over the whole batch, whatever the micro-batches were.
        """
        ...

    def optim_step(self) -> Metrics:
        """Clip by global norm, check finiteness on all ranks, step unless something is not finite, zero gradients.

        Returns `update/grad_norm` (before the clip), `update/lr`, `update/skipped` (0 or 1),
        `update/param_norm`, `update/update_norm_ratio`.
        """
        ...

    def skip_step(self) -> Metrics:
        """Refuse this step: drop the accumulated gradient; the step index is consumed. Same keys as optim_step."""
        ...

    def set_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite whole weights; their optimizer state starts anew, float32 masters from these weights."""
        ...

    def weights(self) -> Iterator[Bucket]:
        """Buckets of at most 512 MB of (HF name, tensor); collective across ranks."""
        ...


class RolloutEngine(Protocol):
    @property
    def version(self) -> int:
        """Weight version that the next token is sampled with."""
        ...

    def submit(self, requests: Sequence[Request]) -> None: ...

    def poll(self, deadline_s: float) -> list[Finished]:
        """Work until at least one request finishes (all that finished are returned) or nothing is left.

        Raises DeadlineError after `deadline_s` seconds without a finished request.
        """
        ...

    def abort(self, ids: Sequence[str]) -> list[Finished]:
        """Stop these requests; what was sampled so far comes back with finish_reason "abort"."""
        ...

    def update_weights(self, buckets: Iterable[Bucket], version: int) -> Mapping[str, str]:
        """Load weights between polls, drop every cached key and value.

        Returns the fingerprint of each tensor that was copied, where it arrived, by name.
        """
        ...

    def logprobs(self, rows: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Score rows of token ids, token-aligned (first entry 0.0): what the delivery probe compares."""
        ...

    def metrics(self) -> Metrics:
        """Counters since the last call, keys `rollout/...` and `throughput/...`."""
        ...

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def generate(engine: RolloutEngine, requests: Sequence[Request], *, deadline_s: float) -> list[Completion]:
    """Submit, poll until all are done, and return completions in the order of `requests`."""
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while missing := [request.id for request in requests if request.id not in done]:
        finished = engine.poll(deadline_s)
        if not finished:
            raise DeadlineError(f"the rollout engine is idle but {len(missing)} requests never finished: {missing[:5]}")
        done.update((item.request.id, item.completion) for item in finished)
    return [done[request.id] for request in requests]
