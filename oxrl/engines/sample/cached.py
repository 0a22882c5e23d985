"""CachedSampler: RolloutEngine for any causal model, over whatever cache the model itself keeps.

LocalSampler is faster, but it has a cache of its own making, which is right only where every layer
attends to everything. Windows, states of recurrent layers and compressed keys are the model's own
affair; what every model can do is to read equally many tokens of several rows. So rows are decoded
in lanes: the rows of a lane have equally many tokens at all times, nothing is ever padded, and each
lane has a cache that the model made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from oxrl.engines.sample.base import Responses
from oxrl.engines.sample.module_sampler import ModuleSampler
from oxrl.engines.sample.prefill import PREFILL_TOKENS, prompt_of
from oxrl.engines.sample.slots import Slots
from oxrl.errors import EngineError
from oxrl.functional.logprobs import head_logits
from oxrl.types import FinishReason, Request, Requests, TokenIds

UNLIMITED = 2**31
# What a model's forward pass and its output call the cache.
CACHE_NAMES = ("past_key_values", "cache_params")


@dataclass
class Lane:
    """Rows of equally many tokens.

    cache: of all their tokens but the last one each; None: to be computed again.
    """

    slots: Slots
    cache: Cache | None = None


class CachedSampler(ModuleSampler):
    """Samples in lanes of rows that have equally many tokens.

    Args:
        model, tokenizer, max_rows, version: as of ModuleSampler.

    Raises:
        EngineError: the model keeps no cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 128,
        version: int = 0,
    ) -> None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        super().__init__(
            model, tokenizer, context=context or UNLIMITED, max_rows=max_rows, version=version
        )
        self._cache_name = _cache_name(model)
        self._lanes: list[Lane] = []

    @property
    def _active(self) -> int:
        return sum(len(lane.slots.requests) for lane in self._lanes)

    @torch.inference_mode()
    def _work(self) -> None:
        while self._waiting and self._active < self.max_rows:
            self._open_lane(self._next_lane(self.max_rows - self._active))
        if not self._finished:
            for lane in self._lanes:
                self._decode_step(lane)
        self._lanes = [lane for lane in self._lanes if lane.slots.requests]

    def _prompt(self, request: Request) -> Hashable:
        """Return what a request reads before its first new token; equal ones are read once."""
        return prompt_of(request)

    def _next_lane(self, most: int) -> list[Request]:
        """Take up to `most` waiting requests out of the queue, all as long as its first one."""
        length = len(prompt_of(self._waiting[0]))
        most_prompts = max(1, PREFILL_TOKENS // length)
        taken: list[Request] = []
        prompts: set[Hashable] = set()
        for request in self._waiting:
            prompt = self._prompt(request)
            fits = prompt in prompts or len(prompts) < most_prompts
            if len(prompt_of(request)) == length and len(taken) < most and fits:
                taken.append(request)
                prompts.add(prompt)
        ids = {request.id for request in taken}
        self._waiting = deque(request for request in self._waiting if request.id not in ids)
        return taken

    def _open_lane(self, requests: Requests) -> None:
        """Read the prompts, each once, and sample the first tokens."""
        prompts = [self._prompt(request) for request in requests]
        # Of each different prompt the last request: any of them will do.
        different = dict(zip(prompts, requests, strict=True))
        lane = Lane(Slots(len(requests), self.model.device))
        lane.slots.occupy(requests)
        contexts = [prompt_of(request) for request in different.values()]
        tokens = torch.tensor(contexts, device=self.model.device)
        logits = self._read(lane, tokens, list(different.values()))
        read = tokens.numel()
        self._counted["prefill_tokens"] += read
        self._counted["prefill_tokens_saved"] += len(requests) * tokens.shape[1] - read
        place = {prompt: index for index, prompt in enumerate(different)}
        order = torch.tensor([place[prompt] for prompt in prompts], device=logits.device)
        _select(lane, order)
        self._lanes.append(lane)
        self._finished += self._release(lane, self._sample(lane.slots, 0, logits[order]))

    def _decode_step(self, lane: Lane) -> None:
        """Read what the lane's cache lacks, the last token of every row, and sample the next."""
        slots = lane.slots
        active = len(slots.requests)
        if not active:
            return
        tokens = slots.last[:active, None]
        if lane.cache is None:
            contexts: list[TokenIds] = []
            responses = slots.responses(range(active))
            for request, response in zip(slots.requests, responses, strict=True):
                contexts.append(request.prompt.token_ids + response.token_ids)
            tokens = torch.tensor(contexts, device=self.model.device)
            self._counted["prefill_tokens"] += tokens.numel()
        logits = self._read(lane, tokens, slots.requests)
        self._counted["decode_steps"] += 1
        self._counted["active_rows"] += active
        self._finished += self._release(lane, self._sample(slots, 0, logits))

    def _read(self, lane: Lane, tokens: Tensor, requests: Requests) -> Tensor:
        """Compute logits [n, V] after `tokens` [n, t], which the lane's cache then holds too.

        Args:
            requests: whose tokens these are.
        """
        known = {} if lane.cache is None else {self._cache_name: lane.cache}
        output: Any = self.network.decoder(input_ids=tokens, use_cache=True, **known)
        lane.cache = getattr(output, self._cache_name)
        return head_logits(output.last_hidden_state[:, -1], self.network.head)

    def _release(
        self, lane: Lane, ended: Sequence[int], reason: FinishReason | None = None
    ) -> Responses:
        """Turn slots into completions and free them. `reason` None means stop or length."""
        if not ended:
            return []
        finished = self._completed(lane.slots, ended, reason)
        moves = lane.slots.release(ended)
        left = torch.arange(len(lane.slots.requests), device=self.model.device)
        if moves is not None:
            left[moves.targets] = moves.sources
        if len(left):
            _select(lane, left)
        return finished

    @torch.inference_mode()
    def _stop(self, ids: set[str]) -> Responses:
        stopped = self._stop_waiting(ids)
        for lane in self._lanes:
            active = enumerate(lane.slots.requests)
            slots = [slot for slot, request in active if request.id in ids]
            stopped += self._release(lane, slots, "abort")
        self._lanes = [lane for lane in self._lanes if lane.slots.requests]
        return stopped

    def _forget_computed(self) -> None:
        for lane in self._lanes:
            lane.cache = None

    def _progress(self) -> str:
        return (
            f"{self._active} rows are being decoded in {len(self._lanes)} lanes of equal length, "
            f"and {len(self._waiting)} requests wait"
        )


def _select(lane: Lane, rows: Tensor) -> None:
    """Let row i of the lane's cache be what row rows[i] was."""
    if lane.cache is not None:
        lane.cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]


def _cache_name(model: PreTrainedModel) -> str:
    parameters = signature(model.base_model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise EngineError(
        f"{type(model).__name__} keeps no cache of what it has read, so it cannot be sampled from"
    )
