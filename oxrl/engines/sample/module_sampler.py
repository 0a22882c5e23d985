"""The base of the two samplers of this process: they sample tokens from a module's own logits."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oxrl.engines.sample.base import Responses, RowLogprobs, ShownImages, TokenRows
from oxrl.engines.sample.gumbel import noise_keys, restrict, sample_tokens
from oxrl.engines.sample.prefill import pad_rows, row_batches
from oxrl.engines.sample.sampler import Sampler
from oxrl.engines.sample.slots import Slots
from oxrl.engines.train.base import Buckets, Fingerprints
from oxrl.errors import EngineError, WeightSyncError
from oxrl.models.adapters import has_adapter
from oxrl.models.network import CausalNetwork, check_tokens, read_tokens, vocabulary_of
from oxrl.types import FinishReason, Prefix, Request, TokenBatch


class ModuleSampler(Sampler):
    """A sampler on a module of this process.

    Args:
        model: a Hugging Face causal LM. The trainer's own module is fine: its weights are then
            always current, and `update_weights` only drops what was computed from the old ones.
        context: most tokens of a prompt and its response.
        max_rows: rows decoded at the same time.
        version: weight version that the model holds now.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        context: int,
        max_rows: int,
        version: int,
    ) -> None:
        super().__init__(tokenizer, context=context, version=version)
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

    @abstractmethod
    def _forget_computed(self) -> None:
        """Drop everything that was computed from weights; rows go on and compute it again."""

    def _sample(self, slots: Slots, first: int, logits: Tensor) -> list[int]:
        """Sample a token for each of the slots from `first` on.

        Args:
            logits: [m, V], of the m slots' next tokens, before any temperature.

        Returns:
            The slots whose response it ends.
        """
        rows = slice(first, first + len(logits))
        temperature = slots.temperature[rows]
        if slots.restricted:
            logits = restrict(
                logits, temperature=temperature, top_k=slots.top_k[rows], top_p=slots.top_p[rows]
            )
        keys = noise_keys(slots.seed[rows], slots.count[rows])
        stochastic = slots.stochastic[rows] if slots.greedy else None
        tokens, logprobs = sample_tokens(
            logits, keys, temperature=temperature, stochastic=stochastic
        )
        self._counted["tokens"] += len(logits)
        return slots.append(first, tokens, logprobs, self._version)

    def _completed(
        self, slots: Slots, ended: Sequence[int], reason: FinishReason | None
    ) -> Responses:
        """Return the completions of slots; `reason` None means stop or length."""
        finished: Responses = []
        for slot, response in zip(ended, slots.responses(ended), strict=True):
            request = slots.requests[slot]
            why = reason or _why_ended(request, response)
            finished.append(self._ended(request, why, response))
        return finished

    def _stop_waiting(self, ids: set[str]) -> Responses:
        """Give up those of `ids` for which nothing has been sampled here."""
        stopped = [request for request in self._waiting if request.id in ids]
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        return [self._ended(request, "abort", request.prefix) for request in stopped]

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
            tokens, lengths = pad_rows(batch, self.model.device)
            real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            inputs = TokenBatch(tokens=tokens, attention_mask=real, response_mask=real)
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


def _why_ended(request: Request, response: Prefix) -> FinishReason:
    return "stop" if response.token_ids[-1] in request.sampling.stop_token_ids else "length"
