"""The engines that sample: their interface, which is RolloutEngine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from oxrl.engines.train import Buckets, Fingerprints
from oxrl.types import Completion, Metrics, Request, Requests

# Rows of token ids, of any lengths.
TokenRows = Sequence[Sequence[int]]
# Of each row the names of the images that it shows; empty: no row shows any.
ShownImages = Sequence[Sequence[str]]
# Of each row the log-probability of every token, in nats.
RowLogprobs = list[list[float]]


@dataclass(frozen=True)
class Finished:
    """A request and its completion, as `poll` and `abort` return them."""

    request: Request
    completion: Completion


class RolloutEngine(Protocol):
    """An engine that samples responses: a queue of requests, worked off while `poll` is called."""

    @property
    def version(self) -> int:
        """Weight version that the next token is sampled with."""
        ...

    def submit(self, requests: Requests) -> None:
        """Take requests in; nothing is sampled before `poll`.

        Args:
            requests: with ids that no request in flight has.

        Raises:
            EngineError: an id that is in flight, an empty prompt, or a request (prompt and
                `max_tokens`) longer than the engine's context.
        """
        ...

    def poll(self, deadline_s: float) -> Responses:
        """Sample until at least one request finishes, or nothing is left.

        Args:
            deadline_s: seconds to wait for a finished request.

        Returns:
            All that have finished since the last call, in any order; empty: nothing is left.

        Raises:
            DeadlineError: no request finished within `deadline_s`; everything stays in flight.
        """
        ...

    def abort(self, ids: Sequence[str]) -> Responses:
        """Stop requests; what was sampled so far comes back with finish_reason "abort".

        Args:
            ids: of requests; those that are not in flight are ignored.

        Returns:
            One completion for each of `ids` in flight, with no tokens if none were sampled.
        """
        ...

    def update_weights(self, buckets: Buckets, version: int) -> Fingerprints:
        """Load weights between polls, drop every cached key and value; requests go on with them.

        Args:
            buckets: (Hugging Face name, tensor) of every weight, some at a time.
            version: weight version of what is sampled from now on.

        Returns:
            The fingerprint of each tensor that was copied, where it arrived, by name.

        Raises:
            WeightSyncError: a weight is unknown, missing, or of another shape.
        """
        ...

    def held(self) -> Fingerprints:
        """Read every weight again, as the engine computes with it now.

        Returns:
            The fingerprint of each weight: of the whole one under its Hugging Face name, and under
            a name of the engine's own where it does not know which part of which weight it holds.
        """
        ...

    def logprobs(
        self,
        rows: TokenRows,
        temperature: float = 1.0,
        shown: ShownImages = (),
    ) -> RowLogprobs:
        """Score rows of token ids: what the delivery probe compares.

        Args:
            rows: token ids, any lengths.
            temperature: logits are divided by it.
            shown: names of the images of each row; empty: there are none.

        Returns:
            Log-probability in nats of each token given those before it, as long as its row; the
            first entry is 0.0.
        """
        ...

    def metrics(self) -> Metrics:
        """Return the counters since the last call, keys `rollout/...` and `throughput/...`."""
        ...

    def sleep(self) -> None:
        """Give memory back while nothing is sampled; requests stay in flight."""
        ...

    def wake(self) -> None:
        """Take the memory again, before anything is sampled."""
        ...

    def close(self) -> None:
        """Drop every request and end what the engine has started."""
        ...


Responses = list[Finished]
