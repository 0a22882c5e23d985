"""The tokens that a model of this process may sample at all: the same for all who ask it.

Whoever reads a model asks here: the sampler, the trainer, a reference and the proof of a delivery.
So log-probabilities are over the same tokens everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oxrl.errors import DataError
from oxrl.models.meta_init import home_of
from oxrl.tables.vision import VISION_FAMILIES
from oxrl.types import TokenIds

ATTRIBUTE = "oxrl_sampled_only"


def sample_only(model: PreTrainedModel, token_ids: Sequence[int]) -> None:
    """Let these tokens share all probability from now on.

    Args:
        model: as loaded; a network that was made of it before knows nothing of this.
        token_ids: the support.

    Raises:
        DataError: the model has no such token.
    """
    rows = model.get_output_embeddings().weight.shape[0]  # pyright: ignore
    if max(token_ids) >= rows:
        raise DataError(f"token {max(token_ids)} stands for an action, and the model has {rows}")
    setattr(model, ATTRIBUTE, tuple(token_ids))


def is_restricted(model: PreTrainedModel) -> bool:
    """True if only some tokens share all probability."""
    return getattr(model, ATTRIBUTE, None) is not None


def excluded(model: PreTrainedModel, vocabulary: int) -> Tensor | None:
    """Tokens without probability: [V] bool, True for those; None where all may be sampled.

    Args:
        model: a language model.
        vocabulary: rows of its output head.
    """
    home = home_of(model)
    support = getattr(model, ATTRIBUTE, None)
    if support is not None:
        outside = torch.ones(vocabulary, dtype=torch.bool, device=home)
        outside[list(support)] = False
        return outside
    banned = [token for token in banned_tokens(model.base_model.config) if 0 <= token < vocabulary]
    if not banned:
        return None
    never = torch.zeros(vocabulary, dtype=torch.bool, device=home)
    never[banned] = True
    return never


def banned_tokens(config: object) -> TokenIds:
    """Ids of tokens that stand in prompts alone; empty for a model of text.

    Args:
        config: of transformers, of the whole model.
    """
    family = VISION_FAMILIES.get(str(getattr(config, "model_type", "")))
    named = () if family is None else [getattr(config, field, None) for field in family.image_ids]
    return tuple(token for token in named if isinstance(token, int))
