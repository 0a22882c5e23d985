"""Bytes per trained weight that training holds: the weight, its master, its gradient, and what the
optimizer keeps of it between steps.
"""

from __future__ import annotations

from typing import NamedTuple

from oxrl.config.schema import Config
from oxrl.modelfiles.dims import ModelDims

MOMENTS = 8.0  # of AdamW, both float32
MOMENTUM = 4.0  # of Muon
CODES = 2 + 2 * 4 / 256  # of 8-bit AdamW: two codes, and two float32 scales of each 256 values
# Of a weight in four bits: half a byte, a scale of one byte for 64, and a float32 for 256 of these.
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)


class Held(NamedTuple):
    """Bytes per trained weight.

    weights: that the model computes with, or pieces of them. masters: float32 copies. kept: by the
    optimizer between steps. gradients: summed in float32. own_gradients: of one micro-batch, in the
    type of the weights, until they are added up. stored: of weight and master in a checkpoint.
    """

    weights: float
    masters: float
    kept: float
    gradients: float
    own_gradients: float
    stored: float


def held_of(cfg: Config, dims: ModelDims) -> Held:
    """Compute the bytes that each trained weight of a run takes, on average.

    Args:
        dims: of `cfg.model`.
    """
    kept = kept_by_optimizer(cfg, dims)
    low = cfg.model.weight_bytes < 4
    if not low or cfg.lora.dora:  # adapters with magnitudes are float32 beside any model
        # DeepSpeed steps flat copies of any weights, float32 ones too.
        copied = cfg.train.backend == "deepspeed" and cfg.deepspeed.zero_stage > 0
        return Held(4, 4 * copied, kept, 4, 0, 4)
    if cfg.train.master_weights == "none":
        return Held(2, 0, kept, 4, 2, 2)
    if cfg.train.backend == "fsdp" and not cfg.lora.rank:
        # Its pieces are the masters; what a layer computes with is cast when it is gathered.
        return Held(4, 0, kept, 4, 0, 6)
    return Held(2, 4, kept, 4, 2, 6)


def frozen_bytes(cfg: Config, dims: ModelDims) -> float:
    """Count the bytes of the model under an adapter.

    Args:
        dims: of `cfg.model`.

    Returns:
        Linear layers count in four bits where they are held so; experts, head, embeddings and norms
        are in `model.dtype` in any case.
    """
    size = cfg.model.weight_bytes
    whole = dims.parameters * size
    if not cfg.model.load_in_4bit:
        return whole
    of_layer = dims.attention if dims.routed else dims.layer
    return whole - dims.layers * of_layer * (size - FOUR_BITS)


def kept_by_optimizer(cfg: Config, dims: ModelDims) -> float:
    """Count the bytes per trained weight that the optimizer keeps between steps."""
    optimizer = cfg.train.optimizer
    if optimizer == "adamw" or not dims.parameters:
        return MOMENTS
    less = MOMENTUM if optimizer == "muon" else CODES
    if cfg.lora.rank:
        return less
    inside = dims.layers * dims.layer
    if dims.routed:
        inside = dims.parameters - dims.ends
    # Embeddings and head are AdamW's beside Muon; norms and biases are in any case.
    fewer = inside if optimizer == "muon" else inside + dims.ends
    share = min(1.0, fewer / dims.parameters)
    return share * less + (1 - share) * MOMENTS
