"""The family of a model that reads images, and the tokens that stand for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oxrl.tables.vision import VISION_FAMILIES, VisionFamily
from oxrl.types import TokenIds

# Of `TokenBatch.extras`: for micro-batches, no input of a model.
PATCHES = "patches"


def family_of(decoder: Module) -> VisionFamily | None:
    """The family of a model that reads images, by its config."""
    config = getattr(decoder, "config", None)
    return VISION_FAMILIES.get(str(getattr(config, "model_type", "")))


def never_sampled(decoder: Any, vocabulary: int, device: torch.device) -> Tensor | None:
    """Tokens that stand in prompts alone: [V] bool, True for those; None where all may be sampled.

    Args:
        decoder: the body of a model.
        vocabulary: rows of its output head.
        device: of the result.
    """
    if family_of(decoder) is None:
        return None
    never = torch.zeros(vocabulary, dtype=torch.bool, device=device)
    for token in banned_tokens(decoder.config):
        if 0 <= token < vocabulary:
            never[token] = True
    return never


def banned_tokens(config: object) -> TokenIds:
    """Ids of tokens that stand in prompts alone; empty for a model of text.

    Args:
        config: of transformers, of the whole model.
    """
    family = VISION_FAMILIES.get(str(getattr(config, "model_type", "")))
    named = () if family is None else [getattr(config, field, None) for field in family.never]
    return tuple(token for token in named if isinstance(token, int))
