"""VisionSampler: CachedSampler for models that read images.

An image is read with its prompt, once for all samples of it. What follows is text, whose positions
go on where those of the prompt end: after an image that is not the number of tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oxrl.engines.sample.base import ShownImages
from oxrl.engines.sample.cached import CachedSampler, Lane
from oxrl.engines.sample.prefill import prompt_of
from oxrl.engines.train.base import Buckets, Fingerprints
from oxrl.errors import EngineError
from oxrl.functional.logprobs import head_logits
from oxrl.models.network import unpadded
from oxrl.models.vision_cache import SeenImages, tower_is_still
from oxrl.models.vision_family import family_of
from oxrl.models.vision_network import read_with_images, rotary_positions
from oxrl.types import Request, Requests, Tensors, TokenBatch

if TYPE_CHECKING:
    from oxrl.data.image_store import ImageStore


class VisionSampler(CachedSampler):
    """Samples from a model that reads images.

    Args:
        model, tokenizer, max_rows, version: as of ModuleSampler.
        images: where those of the prompts are; None: no prompt has any.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 128,
        version: int = 0,
        images: ImageStore | None = None,
    ) -> None:
        super().__init__(model, tokenizer, max_rows=max_rows, version=version)
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

    def _read(self, lane: Lane, tokens: Tensor, requests: Requests) -> Tensor:
        if lane.cache is None:
            output = self._read_whole(tokens, requests)
        else:
            positions: Tensors = {}
            if self._rotary:
                positions["position_ids"] = self._next_positions(lane)
            output = self.network.decoder(
                input_ids=tokens, use_cache=True, **{self._cache_name: lane.cache}, **positions
            )
        lane.cache = getattr(output, self._cache_name)
        return head_logits(output.last_hidden_state[:, -1], self.network.head)

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
        slots = lane.slots
        active = len(slots.requests)
        places = slots.prompt_end[:active] + slots.count[:active]
        offsets = [self._offsets[self._prompt(request)] for request in slots.requests]
        positions = places + places.new_tensor(offsets)
        return positions[None, :, None].expand(3, -1, -1)

    def _forget_computed(self) -> None:
        super()._forget_computed()
        self._offsets.clear()
