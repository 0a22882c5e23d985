"""Sections `deepspeed` and `deepspeed_ref`: how DeepSpeed divides memory."""

from __future__ import annotations

from typing import Literal

from oxrl.config.field import Section, setting


class DeepSpeedConfig(Section):
    """The division of memory by DeepSpeed in training (`train.backend: deepspeed`)."""

    zero_stage: int = setting(
        3,
        "Cut up over ranks: 0 nothing, 1 AdamW's state, 2 and gradients, 3 and weights.",
        ge=0,
        le=3,
    )
    offload_optimizer: bool = setting(
        False, "Keep AdamW's state in CPU memory and step there; needs stage 1 or more."
    )
    offload_param: bool = setting(
        False, "Keep weights in CPU memory until a layer needs them; needs stage 3."
    )


class ReferenceConfig(Section):
    """The division of a reference model's memory by DeepSpeed (`train.backend: deepspeed`)."""

    zero_stage: Literal[0, 3] = setting(
        3, "3: weights are cut up over ranks; 0: every rank holds all of them."
    )
    offload_param: bool = setting(
        False, "Keep weights in CPU memory until a layer needs them; needs stage 3."
    )
