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
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from oxrl.engines.sample import ShownImages
from oxrl.engines.sample.rows import NOTHING, PREFILL_TOKENS, Recorded, Slots, prompt_of
from oxrl.engines.sample.sampler import ModuleSampler
from oxrl.engines.train import Buckets, Fingerprints
from oxrl.errors import EngineError
from oxrl.functional.logprobs import head_logits
from oxrl.modelfiles.folder import family_of
from oxrl.models.network import unpadded
from oxrl.models.vision_cache import SeenImages, tower_is_still
from oxrl.models.vision_network import read_with_images, rotary_positions
from oxrl.types import Request, Requests, TokenBatch

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore

UNLIMITED = 2**31
# What a model's forward pass and its output call the cache.
CACHE_NAMES = ("past_key_values", "cache_params")


class Lane(Slots):
    """Rows of equally many tokens.

    `cache` is of all their tokens but the last one each; None: to be computed again.
    """

    cache: Cache | None = None

    def release(self, ended: Sequence[int]) -> None:
        """See Slots."""
        places = {request.id: slot for slot, request in enumerate(self.requests)}
        super().release(ended)
        if self.requests:
            self.select(self.last.new_tensor([places[request.id] for request in self.requests]))
        else:
            self.cache = None

    def select(self, rows: Tensor) -> None:
        """Let row i of the cache be what row rows[i] was."""
        if self.cache is not None:
            self.cache.reorder_cache(rows)  # pyright: ignore[reportArgumentType]


class CachedSampler(ModuleSampler):
    """Samples in lanes of rows that have equally many tokens.

    Args:
        model, tokenizer, max_rows, recorded: as of ModuleSampler.

    Raises:
        EngineError: the model keeps no cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int,
        recorded: Recorded = NOTHING,
    ) -> None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        context = context or UNLIMITED
        super().__init__(model, tokenizer, context=context, max_rows=max_rows, recorded=recorded)
        self._cache_name = _cache_name(model)
        self._lanes: list[Lane] = []

    @property
    def _active(self) -> int:
        return sum(len(lane.requests) for lane in self._lanes)

    def _rows(self) -> Sequence[Slots]:
        return self._lanes

    def _slots_for(self, count: int) -> Lane:
        lane = Lane(count, self.model.device, self.recorded)
        self._lanes.append(lane)
        return lane

    @torch.inference_mode()
    def _work(self) -> None:
        while self._waiting and self._active < self.max_rows:
            self._open_lane(self._next_lane(self.max_rows - self._active))
        if not self._finished:
            for lane in self._lanes:
                self._decode_step(lane)
        self._lanes = [lane for lane in self._lanes if lane.requests]

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
        lane = self._slots_for(len(requests))
        lane.occupy(requests)
        contexts = [prompt_of(request) for request in different.values()]
        tokens = torch.tensor(contexts, device=self.model.device)
        logits = self._read(lane, tokens, list(different.values()))
        read = tokens.numel()
        self._counted["prefill_tokens"] += read
        self._counted["prefill_tokens_saved"] += len(requests) * tokens.shape[1] - read
        place = {prompt: index for index, prompt in enumerate(different)}
        order = torch.tensor([place[prompt] for prompt in prompts], device=logits.device)
        lane.select(order)
        self._sample_next(lane, logits[order])

    def _decode_step(self, lane: Lane) -> None:
        """Read what the lane's cache lacks, the last token of every row, and sample the next."""
        active = len(lane.requests)
        if not active:
            return
        tokens = lane.last[:active, None]
        if lane.cache is None:
            tokens = torch.tensor(lane.contexts(), device=self.model.device)
            self._counted["prefill_tokens"] += tokens.numel()
        logits = self._read(lane, tokens, lane.requests)
        self._counted["decode_steps"] += 1
        self._counted["active_rows"] += active
        self._sample_next(lane, logits)

    def _sample_next(self, lane: Lane, logits: Tensor) -> None:
        """Sample a token for each row of a lane, and release the rows it ends."""
        self._counted["tokens"] += len(logits)
        ended = lane.sample(0, logits, self._version)
        if ended:
            self._finished += self._release(lane, ended)

    def _read(self, lane: Lane, tokens: Tensor, requests: Requests) -> Tensor:
        """Compute logits [n, V] after `tokens` [n, t], which the lane's cache then holds too.

        Args:
            requests: whose tokens these are.
        """
        output = self._run(lane, tokens, requests)
        lane.cache = getattr(output, self._cache_name)
        return head_logits(output.last_hidden_state[:, -1], self.network.head)

    def _run(self, lane: Lane, tokens: Tensor, requests: Requests, **positions: Tensor) -> Any:
        """Run the model on tokens, over the lane's cache."""
        known = {} if lane.cache is None else {self._cache_name: lane.cache}
        return self.network.decoder(input_ids=tokens, use_cache=True, **known, **positions)

    def _forget_computed(self) -> None:
        for lane in self._lanes:
            lane.cache = None

    def _progress(self) -> str:
        return (
            f"{self._active} rows are being decoded in {len(self._lanes)} lanes of equal length, "
            f"and {len(self._waiting)} requests wait"
        )


def _cache_name(model: PreTrainedModel) -> str:
    parameters = signature(model.base_model.forward).parameters
    for name in CACHE_NAMES:
        if name in parameters:
            return name
    raise EngineError(
        f"{type(model).__name__} keeps no cache of what it has read, so it cannot be sampled from"
    )


class VisionSampler(CachedSampler):
    """Samples from a model that reads images.

    Args:
        model, tokenizer, max_rows, recorded: as of ModuleSampler.
        images: where those of the prompts are; None: no prompt has any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int,
        images: ImageStore | None,
        recorded: Recorded = NOTHING,
    ) -> None:
        super().__init__(model, tokenizer, max_rows=max_rows, recorded=recorded)
        self.images = images
        family = family_of(model)
        self._rotary = family is not None and family.rotary
        # Of each prompt that was read: the position after its tokens, less their number.
        self._offsets: dict[Hashable, int] = {}
        # A tower that is not trained reads every image once, not once per prompt and weights.
        self._seen: SeenImages | None = None
        if images is not None and SeenImages.fits(model) and tower_is_still(model):
            self._seen = SeenImages(model)

    def _accept(self, request: Request) -> None:
        if request.prompt.images and self.images is None:
            raise EngineError(f"request {request.id} has images, and this sampler was given none")
        super()._accept(request)

    def _prompt(self, request: Request) -> Hashable:
        # Equal tokens may stand for other images of the same size.
        return prompt_of(request), request.prompt.images

    def _run(self, lane: Lane, tokens: Tensor, requests: Requests, **positions: Tensor) -> Any:
        if lane.cache is None:
            return self._read_whole(tokens, requests)
        if self._rotary:
            positions["position_ids"] = self._next_positions(lane)
        return super()._run(lane, tokens, requests, **positions)

    def _showing(self, inputs: TokenBatch, shown: ShownImages) -> TokenBatch:
        if self.images is None:
            return super()._showing(inputs, shown)
        rows = [(f"row {at}", names) for at, names in enumerate(shown)]
        inputs = self.images.attach(inputs.to("cpu"), rows)
        return inputs.to(self.model.device)

    def _read_whole(self, tokens: Tensor, requests: Requests) -> Any:
        """Read rows from their first token on, with their images."""
        batch = unpadded(tokens)
        if self.images is not None:
            rows = [(request.prompt.uid, request.prompt.images) for request in requests]
            batch = self.images.attach(batch, rows).to(self.model.device)
        if self._rotary:
            ends = rotary_positions(self.network.decoder, batch).amax((0, 2))
            offsets: list[int] = (ends + 1 - tokens.shape[1]).tolist()
            for request, offset in zip(requests, offsets, strict=True):
                self._offsets[self._prompt(request)] = offset
        seen = self._seen_by(requests)
        return read_with_images(self.network.decoder, batch, seen, use_cache=True)

    def _seen_by(self, requests: Requests) -> object | None:
        """Return the vision tower's outputs for the images of rows, if they are kept, else None."""
        names = [name for request in requests for name in request.prompt.images]
        if self._seen is None or self.images is None or not names:
            return None
        pixels = {name: self.images.features(name).tensors for name in names}
        return self._seen.outputs(pixels, names)

    def update_weights(self, buckets: Buckets, version: int) -> Fingerprints:
        """See ModuleSampler. What a still tower made is kept, unless weights were copied."""
        copied = super().update_weights(buckets, version)
        if copied and self._seen is not None:
            self._seen.forget()
        return copied

    def _next_positions(self, lane: Lane) -> Tensor:
        """Return the positions [3, n, 1] of the last token of every row of a lane."""
        active = len(lane.requests)
        places = lane.prompt_end[:active] + lane.count[:active]
        offsets = [self._offsets[self._prompt(request)] for request in lane.requests]
        positions = places + places.new_tensor(offsets)
        return positions[None, :, None].expand(3, -1, -1)

    def _forget_computed(self) -> None:
        super()._forget_computed()
        self._offsets.clear()
