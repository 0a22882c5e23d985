"""Prompts with images for vLLM: the very pixels and places that the trainer reads.

vLLM would turn images into pixels itself, by a processor of its own choice and version. It is given
what `oxrl.data.image_store` made of them instead, so that both sides see the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from oxrl.engines.sample.vllm_worker import vllm_module
from oxrl.errors import EngineError
from oxrl.types import Tensors

if TYPE_CHECKING:
    from oxrl.data.image_store import Features, ImageStore

IMAGE = "image"
# How the names of inputs with pixels begin: they have a row per patch, tile or square. All others
# have one per image.
PIXELS = "pixel_"


def image_prompt(
    tokens: Sequence[int], names: Sequence[str], images: ImageStore
) -> Mapping[str, object]:
    """Make vLLM's input for a row with images.

    Args:
        tokens: of the whole row; those of images stand where they are shown.
        names: of the images, in their order.
        images: where their pixels are.

    Raises:
        EngineError: there are not as many image tokens as the images take.
    """
    reads = [images.features(name) for name in names]
    places = _places(tokens, images.reader.image_id, reads)
    inputs = vllm_module("inputs")
    kwargs = vllm_module("multimodal.inputs").MultiModalKwargsItems
    counted = images.reader.family.layout == "tiles" or bool(images.reader.family.types)
    return inputs.mm_input(
        list(tokens),
        kwargs({IMAGE: [_item(read, counted=counted) for read in reads]}),
        {IMAGE: list(names)},
        {IMAGE: places},
    )


def _places(tokens: Sequence[int], image_id: int, reads: Sequence[Features]) -> list[object]:
    """Find the place of each image: its first and last token, and which in between are its own."""
    place = vllm_module("multimodal.inputs").PlaceholderRange
    row = torch.tensor(tokens)
    at = (row == image_id).nonzero()[:, 0]
    needed = [read.tokens for read in reads]
    if len(at) != sum(needed):
        raise EngineError(
            f"a prompt has {len(at)} tokens of images, and its {len(reads)} images take "
            f"{sum(needed)}: a part of it is missing"
        )
    found: list[object] = []
    for own in at.split(needed):
        start = int(own[0])
        length = int(own[-1]) + 1 - start
        among = torch.zeros(length, dtype=torch.bool)
        among[own - start] = True
        found.append(place(offset=start, length=length, is_embed=None if among.all() else among))
    return found


def _item(read: Features, *, counted: bool) -> object:
    """Return the inputs that one image is to vLLM's model.

    Args:
        counted: the model is told how many squares or tiles the image has.
    """
    types = vllm_module("multimodal.inputs")
    tensors: Tensors = dict(read.tensors)
    if counted:
        tensors["num_patches"] = torch.tensor([len(tensors["pixel_values"])])
    fields: dict[str, object] = {}
    for name, tensor in tensors.items():
        field = types.MultiModalFieldConfig.batched(IMAGE, keep_on_cpu=True)
        if name.startswith(PIXELS):
            size = torch.tensor([len(tensor)])
            field = types.MultiModalFieldConfig.flat_from_sizes(IMAGE, size)
        fields[name] = field
    made = types.MultiModalKwargsItems.from_hf_inputs(tensors, fields)
    [item] = made[IMAGE]
    return item
