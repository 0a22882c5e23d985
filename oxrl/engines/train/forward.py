"""A model's forward pass as training engines need it: hooked by libraries, computed again, and with
activations that wait in CPU memory until the backward pass reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Dropout, Module, Parameter
from transformers import PreTrainedConfig

from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import EngineError
from oxrl.models.network import TokenModel, read_tokens
from oxrl.models.shared_prefix import attention_by
from oxrl.runs.device import is_apart
from oxrl.types import Tensors, TokenBatch, Want

# Runs a model and raises where something is wrong with it.
Check = Callable[[], None]
# Activations that are smaller are not worth a copy.
FEWEST_BYTES = 1 << 16


class Reader(Module):
    """The whole forward pass as one module: what sharding libraries hook to gather weights."""

    def __init__(self, model: Module, network: TokenModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        # In a tuple, so that nothing of it is registered here a second time.
        self._network = (network,)
        self._temperature = temperature

    def forward(self, inputs: TokenBatch | Check, want: Want) -> Tensors:
        """Return the fields of Output that were asked for, as a dict: hooks look into those.

        A check is called instead, where the weights that it reads are gathered.
        """
        [network] = self._network
        if not isinstance(inputs, TokenBatch):
            inputs()
            return {}
        output = read_tokens(network, inputs, want, temperature=self._temperature)
        # Cloned, because hooks that gather weights for backward do not survive on views.
        return {name: value.clone() for name, value in vars(output).items() if value is not None}


def prepare_activations(
    model: Module, options: TrainerOptions
) -> Callable[[], AbstractContextManager[object]]:
    """Prepare a model for activations that are computed again, or wait on the CPU, as is asked for.

    Args:
        model: changed in place.
        options: say which of the two.

    Returns:
        What makes the context of a forward pass.

    Raises:
        EngineError: the model cannot compute them again.
    """
    if options.gradient_checkpointing:
        checkpoint_activations(model)
    return offloaded if options.offload_activations else nullcontext


def checkpoint_activations(model: Module) -> None:
    """Let each layer of `model` be computed again in backward, instead of storing what it computed.

    Raises:
        EngineError: the model does not know how.
    """
    host: Any = getattr(model, "decoder", model)
    enable = getattr(host, "gradient_checkpointing_enable", None)
    if enable is None:
        raise EngineError(
            f"{type(model).__name__} does not support gradient checkpointing; set it to false"
        )
    given = {"use_reentrant": False, "context_fn": partial(_attention_kept, host.config)}
    enable(gradient_checkpointing_kwargs=given)
    # Checkpointed layers recompute only in train mode, which must not switch dropout on, whatever a
    # model calls it.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, Dropout)):
                setattr(module, name, 0.0)


def _attention_kept(
    config: PreTrainedConfig,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make the contexts of a layer that is computed now, and of the same layer computed again: the
    second has what computes attention now, which the end of a forward pass may have changed.
    """
    return nullcontext(), attention_by(config, config._attn_implementation)  # pyright: ignore[reportPrivateUsage]


class Kept(NamedTuple):
    """A tensor that autograd keeps: itself, or a copy on the CPU and where it came from."""

    tensor: Tensor
    came_from: torch.device | None


def offloaded() -> saved_tensors_hooks:
    """Make a context: activations that autograd saves inside go to the CPU, and back when read.

    Beside gradient checkpointing these are the inputs of the layers; what a layer computes again
    stays where it is. Weights stay too: they are on the device anyway.
    """

    def pack(tensor: Tensor) -> Kept:
        if tensor.nbytes < FEWEST_BYTES or is_weight(tensor):
            return Kept(tensor, None)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_apart(tensor.device))
        # Waited for: memory of the device that is still being read must not be given away.
        copy.copy_(tensor)
        return Kept(copy, tensor.device)

    def unpack(kept: Kept) -> Tensor:
        if kept.came_from is None:
            return kept.tensor
        return kept.tensor.to(kept.came_from)

    return saved_tensors_hooks(pack, unpack)


def is_weight(tensor: Tensor) -> bool:
    """True if it is a parameter, or a view of one, as a transposed matrix is."""
    whole = tensor if tensor._base is None else tensor._base  # pyright: ignore
    return isinstance(whole, Parameter)
