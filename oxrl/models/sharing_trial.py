"""A trial, on a small model, of whether models of its kind may read a group's prompt only once."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from oxrl.models.network import CausalNetwork
from oxrl.models.shared_prefix import SharedPrefixNetwork, SharingRefused, trial_rows
from oxrl.models.shrink import shrink

SEED = 17
VOCABULARY = 64
# Largest difference of the gradients in float32, relative, as Euclidean norms: rounding of sums of
# some hundred terms, where a token that sees one too many or too few makes it 0.01 and more.
MOST = 1e-5
# In lower precision plain rows are off as well: prompts read once may be off by so much more.
MOST_TIMES = 2.0


def try_sharing(
    config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> float:
    """Compare the gradient of plain rows with that of prompts that are read once.

    In float32 they have to be the same but for `MOST`; in a lower precision the second may be
    `MOST_TIMES` as far from the gradient in float32 as the first is. On the CPU, always alike.

    Args:
        config: of the model.
        dtype: that it computes in.
        trust_remote_code: run Python code that the model's authors ship with it.

    Returns:
        The difference in float32, relative to the gradient.

    Raises:
        SharingRefused: it is too large, or such a model cannot be read so at all.
    """
    model = _small(config, trust_remote_code=trust_remote_code)
    name = type(model).__name__
    by = model.config._attn_implementation  # pyright: ignore[reportPrivateUsage]
    if by != "sdpa":
        raise SharingRefused(f"attention of {name} is computed by {by}, not by sdpa")
    plain = _gradient(model, share=False)
    shared = _gradient(model, share=True)
    difference = float((shared - plain).norm() / plain.norm())
    if not difference <= MOST:
        raise SharingRefused(
            f"gradients of a small {name} differ by {difference:.2g}, above {MOST:g}"
        )
    if dtype != torch.float32:
        Module.to(model, dtype)
        usual = float((_gradient(model, share=False) - plain).norm())
        found = float((_gradient(model, share=True) - plain).norm())
        if not found <= MOST_TIMES * usual:
            raise SharingRefused(
                f"gradients of a small {name} in {dtype} are {found / usual:.2g} times as far from "
                f"those in float32 as with plain rows, above {MOST_TIMES:g}"
            )
    return difference


def _small(config: PreTrainedConfig, *, trust_remote_code: bool) -> PreTrainedModel:
    """A random model of the same kind, in float32."""
    small = deepcopy(config)
    shrink(small)
    text: Any = small.get_text_config()
    text.vocab_size = VOCABULARY
    text.pad_token_id = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        build: Any = AutoModelForCausalLM.from_config
        model: PreTrainedModel = build(
            small, trust_remote_code=trust_remote_code, dtype=torch.float32
        )
    return model.eval()


def _gradient(model: PreTrainedModel, *, share: bool) -> Tensor:
    """[n], of a sum of hidden states, each with a weight of its own; float32.

    Raises:
        SharingRefused: the model does not hand the layout of a row to its attention.
    """
    network = SharedPrefixNetwork(model) if share else CausalNetwork(model)
    batch = trial_rows()
    try:
        hidden = network.backbone(batch)[batch.attention_mask].float()
    except TypeError as error:
        raise SharingRefused(
            f"{type(model).__name__} does not hand the layout of a row to its attention ({error})"
        ) from error
    weights = torch.linspace(-1.0, 1.0, hidden.numel()).sin().view_as(hidden)
    (hidden * weights).sum().backward()
    found = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(found)
