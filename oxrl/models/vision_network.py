"""The body of a model that reads images: its parts, and pixels and positions beside the tokens.

Positions are always given: some models remember those of the last batch, and would use them for the
next one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import PreTrainedModel

from oxrl.errors import EngineError, InvariantError
from oxrl.modelfiles.folder import family_of
from oxrl.tables.vision import PATCHES, VISION_FAMILIES, VisionFamily
from oxrl.types import Tensors, TokenBatch

log = logging.getLogger(__name__)


def read_with_images(
    decoder: Any, batch: TokenBatch, seen: object | None = None, **more: Any
) -> Any:
    """Run the body of a model on a batch, its images included.

    Args:
        decoder: the body of a model of one of the families.
        batch: [B, T] tokens, right-padded; `extras` with the pixels of its rows.
        seen: what the tower makes of these, where that is known (`oxrl.models.vision_cache`).
        more: further arguments of the body, such as a cache.

    Raises:
        InvariantError: there are not as many image tokens as the images take.
    """
    family = VISION_FAMILIES[decoder.config.model_type]
    pixels = _pixel_inputs(decoder, family, batch)
    is_image = batch.tokens == getattr(decoder.config, family.image)
    if not pixels and bool((is_image & batch.attention_mask).any()):
        raise InvariantError("a row has tokens of an image, and there is no image")
    inputs: dict[str, Any] = dict(pixels)
    if family.types and pixels:
        inputs[family.types] = is_image.long()
    positions = batch.position_ids
    if family.rotary:
        positions = rotary_positions(decoder, batch)
    if positions is not None:
        inputs["position_ids"] = positions
    if seen is not None:
        inputs = {name: value for name, value in inputs.items() if name not in pixels}
        inputs["mm_encoder_outputs"] = {"image": seen}
    return decoder(input_ids=batch.tokens, attention_mask=None, **inputs, **more)


def rotary_positions(decoder: Any, batch: TokenBatch) -> Tensor:
    """Positions of time, height and width, [3, B, T], of a batch of whole rows.

    Args:
        decoder: the body of a model of a rotary family.
        batch: as of `read_with_images`.

    Returns:
        [4, B, T] of packed rows: the count in each example, by which the model keeps them apart,
        comes first.
    """
    if batch.position_ids is not None:
        return _packed_positions(decoder, batch, batch.position_ids)
    rows, length = batch.tokens.shape
    grids = batch.extras.get("image_grid_thw")
    if grids is None or not len(grids.values):
        counted = torch.arange(length, device=batch.tokens.device)
        return counted.expand(3, rows, length)
    is_image = batch.tokens == decoder.config.image_token_id
    positions, _ = decoder.get_rope_index(
        batch.tokens,
        is_image.int(),
        image_grid_thw=grids.values,
        attention_mask=batch.attention_mask.long(),
    )
    return positions


def _packed_positions(decoder: Any, batch: TokenBatch, counted: Tensor) -> Tensor:
    """See `rotary_positions`: every example's are those that it has in a row of its own.

    Args:
        counted: [B, T], which starts again where an example begins.
    """
    begins = (counted == 0) & batch.attention_mask
    # Of every token its example, from 1 on over all rows; examples become rows of their own.
    example = begins.flatten().cumsum(0).reshape(begins.shape)
    real = batch.attention_mask
    count = int(begins.sum())
    length = int(counted[real].max()) + 1
    place = (example[real] - 1, counted[real])
    tokens = batch.tokens.new_zeros(count, length)
    tokens[place] = batch.tokens[real]
    there = torch.zeros_like(tokens, dtype=torch.bool)
    there[place] = True
    alone = TokenBatch(
        tokens=tokens, attention_mask=there, response_mask=there, extras=batch.extras
    )
    found = counted.new_zeros(3, *counted.shape)
    found[:, real] = rotary_positions(decoder, alone)[:, *place]
    return torch.cat([counted[None], found])


def _pixel_inputs(decoder: Any, family: VisionFamily, batch: TokenBatch) -> Tensors:
    """Pixels as the model's forward takes them; nothing of a batch without images."""
    found: Tensors = {}
    for name, ragged in batch.extras.items():
        if name == PATCHES or not len(ragged.values):
            continue
        found[name] = as_input(decoder, family, ragged.values)
    return found


def as_input(decoder: Any, family: VisionFamily, values: Tensor) -> Tensor:
    """Return an input of the images of any number of rows, as the model's forward takes it."""
    if values.is_floating_point():
        values = values.to(decoder.dtype)
    # All tiles of all rows as the tiles of one row: the model puts them into one line anyway, and
    # padding rows to equally many would show it black images.
    return values[None] if family.layout == "tiles" else values


def part_of(model: PreTrainedModel) -> dict[str, str]:
    """Name the part that every parameter belongs to: vision, projector or language.

    Args:
        model: of one of the families of `oxrl.tables.vision`.

    Raises:
        EngineError: it is of no such family.
    """
    family = family_of(model)
    if family is None:
        raise EngineError(f"{type(model).__name__} has no vision tower that is known here")
    body = f"{model.base_model_prefix}."
    found: dict[str, str] = {}
    for name, _ in model.named_parameters():
        inside = name.removeprefix(body)
        if inside.startswith(family.projector):
            found[name] = "projector"
        elif inside.startswith(family.tower):
            found[name] = "vision"
        else:
            found[name] = "language"
    return found


def freeze(model: PreTrainedModel, parts: str) -> None:
    """Let parts of a model stay as they are, and say in the log which weights these are.

    Args:
        model: changed in place.
        parts: "vision", "projector" or "vision+projector".
    """
    chosen = parts.split("+")
    parameters = dict(model.named_parameters())
    frozen = [name for name, part in part_of(model).items() if part in chosen]
    for name in frozen:
        parameters[name].requires_grad_(False)
    count = sum(parameters[name].numel() for name in frozen)
    total = sum(parameter.numel() for parameter in parameters.values())
    log.info(
        "model.freeze: %s: %d of %d parameters are frozen: %s",
        parts,
        count,
        total,
        ", ".join(frozen),
    )


def language_linears(model: PreTrainedModel) -> Iterator[tuple[str, Linear]]:
    """The linear layers of the language part but the output head: where adapters go."""
    family = family_of(model)
    inside = "" if family is None else f"{model.base_model_prefix}.{family.language}"
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module is not head and name.startswith(inside):
            yield name, module
