"""What samples: the interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from oxrl.engines.train.base import Bucket
from oxrl.errors import DeadlineError
from oxrl.types import Completion, Metrics, Request


@dataclass(frozen=True)
class Finished:
    """A request and its completion, as `poll` and `abort` return them."""

    request: Request
    completion: Completion


class RolloutEngine(Protocol):
    @property
    def version(self) -> int:
        """Weight version that the next token is sampled with."""
        ...

    def submit(self, requests: Sequence[Request]) -> None: ...

    def poll(self, deadline_s: float) -> list[Finished]:
        """Work until at least one request finishes (all that finished are returned) or nothing is
        left.

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

    def logprobs(
        self, rows: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Score rows of token ids, token-aligned (first entry 0.0): what the delivery probe
        compares.
        """
        ...

    def metrics(self) -> Metrics:
        """Counters since the last call, keys `rollout/...` and `throughput/...`."""
        ...

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def generate(
    engine: RolloutEngine, requests: Sequence[Request], *, deadline_s: float
) -> list[Completion]:
    """Submit, poll until all are done, and return completions in the order of `requests`."""
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while missing := [request.id for request in requests if request.id not in done]:
        finished = engine.poll(deadline_s)
        if not finished:
            raise DeadlineError(
                f"the rollout engine is idle but {len(missing)} requests never finished: {missing[:5]}"
            )
        done.update((item.request.id, item.completion) for item in finished)
    return [done[request.id] for request in requests]
