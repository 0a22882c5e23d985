"""What the samplers of one process share: who is here, the wait for somebody to finish, and what a
response is.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar, cast

from transformers import PreTrainedTokenizerBase

from oxrl.engines.sample.base import Finished
from oxrl.errors import DeadlineError, EngineError
from oxrl.types import Completion, FinishReason, Metrics, Prefix, Request, Segment


class Sampler(ABC):
    """RolloutEngine: requests go in, every one comes back once, from `poll` when it ends or from
    `abort`.

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
        self._context, self._version = context, version
        self._here: set[str] = set()
        self._finished: list[Finished] = []
        self._counted: defaultdict[str, float] = defaultdict(float)

    @abstractmethod
    def _accept(self, request: Request) -> None:
        """Take over a request that has at least one token to sample."""

    @abstractmethod
    def _work(self) -> None:
        """One step of everything that is here; what it ends goes to `_finished`."""

    @abstractmethod
    def _stop(self, ids: set[str]) -> list[Finished]:
        """Give up those of `ids` that have not finished."""

    @abstractmethod
    def _progress(self) -> str:
        """What is being waited for, in words."""

    @property
    def version(self) -> int:
        return self._version

    def submit(self, requests: Sequence[Request]) -> None:
        """See RolloutEngine.

        Raises:
            EngineError: an id that is already here, an empty prompt, or a request longer than the
                context.
        """
        for request in requests:
            prompt, most = len(request.prompt.token_ids), request.sampling.max_tokens
            if request.id in self._here:
                raise EngineError(f"request id {request.id!r} is already being sampled")
            if not prompt or most < 1 or prompt + most > self._context:
                raise EngineError(
                    f"request {request.id!r} has {prompt} prompt tokens and max_tokens {most}; both must be at least 1 "
                    f"and together at most the model's context of {self._context}: lower rollout.max_tokens or "
                    "data.max_prompt_tokens"
                )
            self._here.add(request.id)
            if len(request.prefix.token_ids) < most:
                self._accept(request)
            else:
                self._finished.append(self._ended(request, "length", request.prefix))

    def poll(self, deadline_s: float) -> list[Finished]:
        start = time.monotonic()
        try:
            while not self._finished and self._here:
                self._work()
                if not self._finished and time.monotonic() - start > deadline_s:
                    raise DeadlineError(
                        f"waited {deadline_s:g} s for a sampled response: {self._progress()}. "
                        "Raise run.deadline_s or lower rollout.max_tokens"
                    )
        finally:
            self._counted["seconds"] += time.monotonic() - start
        finished, self._finished = self._finished, []
        self._here.difference_update(item.request.id for item in finished)
        return finished

    def abort(self, ids: Sequence[str]) -> list[Finished]:
        """See RolloutEngine. Ids that are not here are ignored; what had finished already comes
        back as it ended.
        """
        wanted = self._here.intersection(ids)
        aborted = [item for item in self._finished if item.request.id in wanted]
        self._finished = [item for item in self._finished if item.request.id not in wanted]
        self._here -= wanted
        return aborted + self._stop(wanted)

    def metrics(self) -> Metrics:
        counted = self._counted.copy()
        self._counted.clear()
        return {f"rollout/{name}": counted[name] for name in self.TOTALS} | {
            "rollout/mean_active_rows": counted["active_rows"] / max(1.0, counted["decode_steps"]),
            "throughput/rollout_tokens_per_s": counted["tokens"] / max(counted["seconds"], 1e-9),
        }

    def _ended(self, request: Request, reason: FinishReason, sampled: Prefix) -> Finished:
        """`sampled` holds the request's own prefix too."""
        segment = Segment(
            token_ids=sampled.token_ids, logprobs=sampled.logprobs, versions=sampled.versions
        )
        text = self.tokenizer.decode(list(segment.token_ids), skip_special_tokens=True)
        return Finished(
            request, Completion(segments=(segment,), text=cast(str, text), finish_reason=reason)
        )
