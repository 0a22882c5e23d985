"""Families of models that read images, one row each: pure data.

A family is what `model_type` in config.json says. Names of parts are those below the body of the
model (`model.` in its weights).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

# Of `TokenBatch.extras`: for micro-batches, no input of a model.
PATCHES = "patches"


@dataclass(frozen=True, kw_only=True)
class VisionFamily:
    """A family of models that read images: the facts in which one differs from another.

    Args:
        name: `model_type` in config.json.
        placeholder: field of config.json with the token that a chat template writes for an image.
        image: field with the token whose embedding an image feature takes the place of.
        layout: what one image is as a tensor, and so how many tokens it takes. "patches": as many
            as its size gives; "tiles": a grid of squares and the whole; "square": always one size.
        types: input that marks the tokens of images; empty: the model needs none.
        rotary: positions have three axes, which follow from where images are.
        tower, projector, language: prefixes of the parameters of each part; the projector's may lie
            inside of the tower's.
        image_ids: fields with tokens that stand in prompts alone, and are never sampled.
    """

    name: str
    placeholder: str
    image: str
    layout: Literal["patches", "tiles", "square"]
    types: str = ""
    rotary: bool = False
    tower: tuple[str, ...]
    projector: tuple[str, ...]
    language: str
    image_ids: tuple[str, ...]


QWEN2_5_VL = VisionFamily(
    name="qwen2_5_vl",
    placeholder="image_token_id",
    image="image_token_id",
    layout="patches",
    rotary=True,
    tower=("visual.",),
    projector=("visual.merger.",),
    language="language_model.",
    image_ids=("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
)
IDEFICS3 = VisionFamily(
    name="idefics3",
    placeholder="image_token_id",
    image="image_token_id",
    layout="tiles",
    tower=("vision_model.",),
    projector=("connector.",),
    language="text_model.",
    image_ids=("image_token_id",),
)
ROWS = (
    QWEN2_5_VL,
    replace(
        QWEN2_5_VL,
        name="qwen3_vl",
        projector=("visual.merger.", "visual.deepstack_merger_list."),
    ),
    IDEFICS3,
    replace(IDEFICS3, name="smolvlm"),
    VisionFamily(
        name="gemma3",
        placeholder="boi_token_index",
        image="image_token_index",
        layout="square",
        types="token_type_ids",
        tower=("vision_tower.",),
        projector=("multi_modal_projector.",),
        language="language_model.",
        image_ids=("image_token_index", "boi_token_index", "eoi_token_index"),
    ),
    VisionFamily(
        name="llava",
        placeholder="image_token_index",
        image="image_token_index",
        layout="square",
        tower=("vision_tower.",),
        projector=("multi_modal_projector.",),
        language="language_model.",
        image_ids=("image_token_index",),
    ),
)
VISION_FAMILIES: Mapping[str, VisionFamily] = {row.name: row for row in ROWS}
