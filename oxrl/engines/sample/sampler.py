"""Sampling: `generate` asks an engine and waits; the bases of samplers take requests in, and end
each of them once.

`Sampler` is for any engine in one process. `ModuleSampler` is for those that sample tokens from the
logits of a module of this process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oxrl.data.chat import reply_text
from oxrl.engines.sample import (
    Finished,
    Responses,
    RolloutEngine,
    RowLogprobs,
    ShownImages,
    TokenRows,
)
from oxrl.engines.sample.rows import NOTHING, Recorded, Slots, batch_of, row_batches
from oxrl.engines.train import Buckets, Fingerprints
from oxrl.errors import DeadlineError, EngineError, Stopped, WeightSyncError
from oxrl.models.network import CausalNetwork, check_tokens, read_tokens, vocabulary_of
from oxrl.models.weights import has_adapter
from oxrl.runs.waiting import Patience, StopAsked, no_stop
from oxrl.types import (
    Completion,
    FinishReason,
    Metrics,
    Request,
    Requests,
    Segment,
    TokenBatch,
    TokenRun,
)

if TYPE_CHECKING:
    from oxrl.usercode.messages import Json

# Who is told of a response when it is finished.
OnFinished = Callable[[Finished], object]


def ignore(finished: Finished) -> None:
    """Drop a finished request: nobody waits for single responses.

    Args:
        finished: is dropped.
    """


def generate(
    engine: RolloutEngine,
    requests: Requests,
    *,
    deadline_s: float,
    stop: StopAsked = no_stop,
    on_finished: OnFinished = ignore,
) -> list[Completion]:
    """Submit requests and poll until all are done.

    Args:
        engine: idle; what else is in flight would be taken out of it too.
        requests: with ids that differ.
        deadline_s: seconds to wait for each next finished request.
        stop: whether the run was asked to stop.
        on_finished: is told of every response as soon as it is finished.

    Returns:
        Completions in the order of `requests`.

    Raises:
        DeadlineError: nothing finished within `deadline_s`, or the engine lost a request.
        Stopped: a signal asked to stop; nothing of `requests` is left in flight.
        EngineError: the engine refuses a request.
    """
    engine.submit(requests)
    done: dict[str, Completion] = {}
    while missing := [request.id for request in requests if request.id not in done]:
        try:
            finished = next_finished(engine, missing, stop=stop, deadline_s=deadline_s)
        except Stopped:
            engine.abort(missing)
            raise
        for item in finished:
            done[item.request.id] = item.completion
            on_finished(item)
    return [done[request.id] for request in requests]


def next_finished(
    engine: RolloutEngine, missing: Sequence[str], *, stop: StopAsked, deadline_s: float
) -> Responses:
    """Poll until something finishes, and look for signals in between.

    Args:
        engine: that they are in.
        missing: ids of what is in flight.
        stop: whether the run was asked to stop.
        deadline_s: seconds to wait in all.

    Returns:
        At least one finished request, of whichever.

    Raises:
        DeadlineError: nothing finished within the deadline, or the engine is idle.
        Stopped: a signal asked to stop; everything stays in flight.
    """
    patience = Patience(stop, deadline_s)
    what = "a sampled response"
    while True:
        seconds = patience.look(what)
        try:
            finished = engine.poll(seconds)
        except DeadlineError as error:
            # The engine waited for a short while only; where it is, and what to do, is its to say.
            what = f"a sampled response: {str(error).partition(': ')[2] or error}"
            continue
        if not finished:
            raise DeadlineError(
                f"the rollout engine is idle but {len(missing)} requests never finished: "
                f"{missing[:5]}"
            )
        return finished


class Sampler(ABC):
    """RolloutEngine: every request comes back once, from `poll` when it ends or from `abort`.

    Args:
        context: most tokens of a prompt and its response.
    """

    # What is counted in `_counted` and reported as it is.
    TOTALS: ClassVar[tuple[str, ...]] = (
        "tokens",
        "decode_steps",
        "prefill_tokens",
        "prefill_tokens_saved",
    )

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, context: int) -> None:
        self.tokenizer = tokenizer
        self._context = context
        self._version = 0
        self._here: set[str] = set()
        self._finished: Responses = []
        self._counted: defaultdict[str, float] = defaultdict(float)
        # Pieces of work that were done so far.
        self.round = 0

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

    def poll(self, deadline_s: float, until: float = inf) -> Responses:
        """See ParkingEngine."""
        start = monotonic()
        try:
            while not self._finished and self._here and self.round < until:
                self._work()
                self.round += 1
                late = monotonic() - start > deadline_s
                if late and not self._finished and self.round < until:
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

    def _ended(self, request: Request, reason: FinishReason, sampled: TokenRun) -> Finished:
        """Return a request with its response; `sampled` holds the request's own prefix too."""
        segment = Segment(**vars(sampled))
        text = reply_text(self.tokenizer, sampled.token_ids, request.sampling.stop_token_ids)
        completion = Completion(segments=(segment,), text=text, finish_reason=reason)
        return Finished(request, completion)


class ModuleSampler(Sampler):
    """A sampler on a module of this process.

    Args:
        model: a Hugging Face causal LM. The trainer's own module is fine: its weights are then
            always current, and `update_weights` only drops what was computed from the old ones.
        context: most tokens of a prompt and its response.
        max_rows: rows decoded at the same time.
        recorded: of every token, beside its log-probability and version.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        max_rows: int,
        recorded: Recorded = NOTHING,
    ) -> None:
        super().__init__(tokenizer, context=context)
        self.recorded = recorded
        self.model = model
        self.network = CausalNetwork(model)
        self.max_rows = max_rows
        self._waiting: deque[Request] = deque()
        self._vocabulary = vocabulary_of(model)

    def _accept(self, request: Request) -> None:
        ids = request.prompt.token_ids
        if self._vocabulary is not None and max(ids, default=0) >= self._vocabulary:
            check_tokens(torch.tensor(ids), self._vocabulary)  # raises, and says which
        self._waiting.append(request)
        self._expect(request)

    def _expect(self, request: Request) -> None:
        """Note that one request more waits for its prompt to be read."""

    @abstractmethod
    def _rows(self) -> Sequence[Slots]:
        """Return the rows that are being decoded."""

    @abstractmethod
    def _slots_for(self, count: int) -> Slots:
        """Return slots in which there is room for `count` rows more, which are decoded together."""

    @abstractmethod
    def _forget_computed(self) -> None:
        """Drop everything that was computed from weights; rows go on and compute it again."""

    def state(self) -> Json:
        """See ParkingEngine."""
        from oxrl.engines.sample.parked import state_of  # most runs never park

        return state_of(self._finished, self._rows(), self._waiting, self.round)

    @torch.inference_mode()
    def restore(self, state: Json, requests: Mapping[str, Request]) -> None:
        """See ParkingEngine."""
        from oxrl.engines.sample.parked import parked_of  # most runs never park

        parked = parked_of(state, requests, self.recorded, self.max_rows)
        self.close()
        for rows in parked.rows:
            self._here.update(request.id for request in rows.requests)
            rows.enter(self._slots_for(len(rows.requests)))
        self.submit(parked.waiting)
        self.round = parked.round

    def _release(
        self, slots: Slots, ended: Sequence[int], reason: FinishReason | None = None
    ) -> Responses:
        """Turn slots into completions and free them. `reason` None means stop or length."""
        finished: Responses = []
        for slot, response in zip(ended, slots.responses(ended), strict=True):
            request = slots.requests[slot]
            why = reason or _why_ended(request, response)
            finished.append(self._ended(request, why, response))
        slots.release(ended)
        return finished

    @torch.inference_mode()
    def _stop(self, ids: set[str]) -> Responses:
        waited = [request for request in self._waiting if request.id in ids]
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        stopped = [self._ended(request, "abort", request.prefix) for request in waited]
        for slots in self._rows():
            active = enumerate(slots.requests)
            ended = [slot for slot, request in active if request.id in ids]
            if ended:
                stopped += self._release(slots, ended, "abort")
        return stopped

    @torch.no_grad()
    def update_weights(self, buckets: Buckets, version: int) -> Fingerprints:
        """See RolloutEngine. Tensors that already are this model's memory are not copied, and get
        no fingerprint.

        Raises:
            WeightSyncError: a tensor is unknown, of another shape, or missing.
        """
        missing = dict(self.model.named_parameters())
        fingerprints: dict[str, str] = {}
        for name, tensor in (named for bucket in buckets for named in bucket):
            parameter = missing.pop(name, None)
            if parameter is None or parameter.shape != tensor.shape:
                has = "no such tensor" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise WeightSyncError(
                    f"got {name!r} of shape {tuple(tensor.shape)}; the sampler has {has}"
                )
            if parameter.data_ptr() != tensor.data_ptr():
                parameter.copy_(tensor)
                fingerprints[name] = _fingerprint(parameter)
        if has_adapter(self.model):
            # What is under the adapter stays as it is.
            missing = {name: own for name, own in missing.items() if own.requires_grad}
        if missing:
            raise WeightSyncError(f"{len(missing)} tensors were not sent, such as {min(missing)!r}")
        self._version = version
        self._forget_computed()
        return fingerprints

    def held(self) -> Fingerprints:
        """See RolloutEngine."""
        return {name: _fingerprint(weight) for name, weight in self.model.named_parameters()}

    @torch.inference_mode()
    def logprobs(
        self,
        rows: TokenRows,
        temperature: float = 1.0,
        shown: ShownImages = (),
    ) -> RowLogprobs:
        """See RolloutEngine."""
        results: RowLogprobs = []
        for batch in row_batches([tuple(row) for row in rows]):
            inputs = batch_of(batch, self.model.device)
            if shown:
                inputs = self._showing(inputs, shown[len(results) : len(results) + len(batch)])
            scored = read_tokens(
                self.network, inputs, frozenset({"logprobs"}), temperature=temperature
            )
            aligned = cast(Tensor, scored.logprobs).tolist()
            results += [row[: len(ids)] for row, ids in zip(aligned, batch, strict=True)]
        return results

    def _showing(self, inputs: TokenBatch, shown: ShownImages) -> TokenBatch:
        """Return rows with the pixels of their images.

        Raises:
            EngineError: the model reads none.
        """
        raise EngineError(f"{type(self.model).__name__} is asked about images, and reads none")

    def sleep(self) -> None:
        """Free what was computed from prompts and responses; rows that go on compute it again."""
        self._forget_computed()

    def wake(self) -> None:
        """Nothing to do: memory is taken when it is needed."""

    def close(self) -> None:
        """Drop every request, and what was computed for it."""
        self.abort(tuple(self._here))
        self.sleep()


def _fingerprint(weight: Tensor) -> str:
    from oxrl.models.fingerprints import fingerprint  # only of weights that are copied

    return fingerprint(weight)


def _why_ended(request: Request, response: TokenRun) -> FinishReason:
    return "stop" if response.token_ids[-1] in request.sampling.stop_token_ids else "length"
