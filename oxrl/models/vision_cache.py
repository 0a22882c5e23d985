"""A cache of what a vision tower that is not trained made of images: no image is read twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from inspect import signature
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oxrl.models.vision_network import as_input, part_of
from oxrl.tables.vision import VISION_FAMILIES
from oxrl.types import TensorMap, Tensors

# The input of a model with what its tower would make of the images.
OUTPUTS = "mm_encoder_outputs"
MOST_BYTES = 2**29


class KeptFeatures(NamedTuple):
    """One image after tower and projector.

    pooled: what takes the place of its tokens. deep: what is added in the first layers, of models
    that do so.
    """

    pooled: Tensor
    deep: tuple[Tensor, ...]


def tower_is_still(model: PreTrainedModel) -> bool:
    """True if nothing of the vision tower and the projector is trained, and the rest is."""
    parts = part_of(model)
    trained = {parts[name] for name, weight in model.named_parameters() if weight.requires_grad}
    return trained == {"language"}


class SeenImages:
    """Images after a tower and a projector that stay as they are, by name.

    Args:
        model: of one of the families, whose tower is still (`tower_is_still`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder: Any = model.base_model
        self._family = VISION_FAMILIES[self._decoder.config.model_type]
        self._held: OrderedDict[str, KeptFeatures] = OrderedDict()
        self._bytes = 0
        # Some families give one tensor of all images, others a tensor of each.
        self._in_one = False

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        """True if the model takes what its tower made, in place of pixels."""
        return OUTPUTS in signature(model.base_model.forward).parameters

    def forget(self) -> None:
        """The weights of the tower are others now."""
        self._held.clear()
        self._bytes = 0

    def outputs(self, pixels: Mapping[str, TensorMap], names: Sequence[str]) -> Any:
        """Return the tower's outputs for images, as the model takes them.

        Args:
            pixels: name -> inputs of the model, of every image.
            names: of the images, in the order in which rows show them.
        """
        missing = [name for name in dict.fromkeys(names) if name not in self._held]
        if missing:
            self._read({name: pixels[name] for name in missing})
        seen = [self._held[name] for name in names]
        for name in names:
            self._held.move_to_end(name)
        # What was used longest ago goes.
        while self._bytes > MOST_BYTES and len(self._held) > len(set(names)):
            _, gone = self._held.popitem(last=False)
            self._bytes -= _size(gone)
        pooled: Any = [one.pooled for one in seen]
        if self._in_one:
            pooled = torch.cat(pooled)
        deep = [list(layer) for layer in zip(*(one.deep for one in seen), strict=True)]
        return SimpleNamespace(pooler_output=pooled, deepstack_features=deep)

    def _read(self, pixels: Mapping[str, TensorMap]) -> None:
        """Have the tower read images that it has not read yet."""
        decoder = self._decoder
        inputs: Tensors = {}
        for field in next(iter(pixels.values())):
            values = torch.cat([tensors[field] for tensors in pixels.values()])
            inputs[field] = as_input(decoder, self._family, values.to(decoder.device))
        said = decoder.get_image_features(**inputs, return_dict=True)
        counts = [len(tensors["pixel_values"]) for tensors in pixels.values()]
        pooled = said.pooler_output
        self._in_one = isinstance(pooled, Tensor)
        pieces = pooled.split(counts) if isinstance(pooled, Tensor) else pooled
        layers = getattr(said, "deepstack_features", None) or []
        for at, name in enumerate(pixels):
            seen = KeptFeatures(pieces[at].clone(), tuple(layer[at].clone() for layer in layers))
            self._held[name] = seen
            self._bytes += _size(seen)


def _size(seen: KeptFeatures) -> int:
    return sum(tensor.nbytes for tensor in chain([seen.pooled], seen.deep))
