"""The base of the samplers of one process: requests come in, are waited for, and end once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from time import monotonic
from typing import ClassVar, cast

from transformers import PreTrainedTokenizerBase

from oxrl.engines.sample.base import Finished, Responses
from oxrl.errors import DeadlineError, EngineError
from oxrl.types import Completion, FinishReason, Metrics, Prefix, Request, Requests, Segment


class Sampler(ABC):
    """RolloutEngine: every request comes back once, from `poll` when it ends or from `abort`.

    Args:
        context: most tokens of a prompt and its response.
        version: weight version of the initial weights.
    """

    # What is counted in `_counted` and reported as it is.
    TOTALS: ClassVar[tuple[str, ...]] = (
        "tokens",
        "decode_steps",
        "prefill_tokens",
        "prefill_tokens_saved",
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, context: int, version: int) -> None:
        self.tokenizer = tokenizer
        self._context = context
        self._version = version
        self._here: set[str] = set()
        self._finished: Responses = []
        self._counted: defaultdict[str, float] = defaultdict(float)

    @abstractmethod
    def _accept(self, request: Request) -> None:
        """Take over a request that has at least one token to sample."""

    @abstractmethod
    def _work(self) -> None:
        """Make one step of everything that is here; what it ends goes to `_finished`."""

    @abstractmethod
    def _stop(self, ids: set[str]) -> Responses:
        """Give up those of `ids` that have not finished."""

    @abstractmethod
    def _progress(self) -> str:
        """Say in words what is being waited for."""

    @property
    def version(self) -> int:
        return self._version

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its response."""
        return self._context

    def submit(self, requests: Requests) -> None:
        """See RolloutEngine.

        Raises:
            EngineError: an id that is already here, an empty prompt, or a request longer than the
                context.
        """
        for request in requests:
            prompt = len(request.prompt.token_ids)
            most = request.sampling.max_tokens
            if request.id in self._here:
                raise EngineError(f"request id {request.id!r} is already being sampled")
            if not prompt or most < 1 or prompt + most > self._context:
                raise EngineError(
                    f"request {request.id!r} has {prompt} prompt tokens and max_tokens {most}; "
                    "both must be at least 1 and together at most the model's context of "
                    f"{self._context}: lower rollout.max_tokens or data.max_prompt_tokens"
                )
            self._here.add(request.id)
            if len(request.prefix.token_ids) < most:
                self._accept(request)
            else:
                self._finished.append(self._ended(request, "length", request.prefix))

    def poll(self, deadline_s: float) -> Responses:
        start = monotonic()
        try:
            while not self._finished and self._here:
                self._work()
                if not self._finished and monotonic() - start > deadline_s:
                    raise DeadlineError(
                        f"waited {deadline_s:g} s for a sampled response: {self._progress()}. "
                        "Raise run.deadlines.rollout or lower rollout.max_tokens"
                    )
        finally:
            self._counted["seconds"] += monotonic() - start
        finished = self._finished
        self._finished = []
        self._here.difference_update(item.request.id for item in finished)
        return finished

    def abort(self, ids: Sequence[str]) -> Responses:
        """See RolloutEngine. What had finished already comes back as it ended."""
        wanted = self._here.intersection(ids)
        aborted = [item for item in self._finished if item.request.id in wanted]
        self._finished = [item for item in self._finished if item.request.id not in wanted]
        self._here -= wanted
        return aborted + self._stop(wanted)

    def metrics(self) -> Metrics:
        counted = self._counted.copy()
        self._counted.clear()
        active = counted["active_rows"] / max(1.0, counted["decode_steps"])
        rate = counted["tokens"] / max(counted["seconds"], 1e-9)
        metrics = {f"rollout/{name}": counted[name] for name in self.TOTALS}
        metrics["rollout/mean_active_rows"] = active
        metrics["throughput/rollout_tokens_per_s"] = rate
        return metrics

    def _ended(self, request: Request, reason: FinishReason, sampled: Prefix) -> Finished:
        """Return a request with its response; `sampled` holds the request's own prefix too."""
        segment = Segment(
            token_ids=sampled.token_ids, logprobs=sampled.logprobs, versions=sampled.versions
        )
        text = self.tokenizer.decode(list(sampled.token_ids), skip_special_tokens=True)
        completion = Completion(segments=(segment,), text=cast(str, text), finish_reason=reason)
        return Finished(request, completion)
