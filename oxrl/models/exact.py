"""A model that computes a token alike to the last bit, whatever else is in its batch.

Sampler and trainer give a model the same tokens in other shapes: one token of many rows over a
cache, whole rows with padding, prompts that are read once. Libraries choose by shape in which order
they add up, so the last bits differ. Here every sum that depends on shapes elsewhere has one order:

    linear layers   in oneDNN, rows padded to a multiple of ROWS: a row alone has another kernel
    attention       ROWS queries at a time; keys padded to a multiple of KEYS; values in pieces of
                    at most VALUES keys, added one after the other; key j is the row's token j
    activations     of operations that treat the last elements of a tensor like all others

Norms, softmax, embeddings and rotations are PyTorch's own: their rows do not depend on each other.
Gradients come from the usual kernels; their bits do depend on shapes.
"""

from __future__ import annotations

from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from oxrl.errors import ConfigError
from oxrl.functional.masks import OptionalTensor
from oxrl.models.shared_prefix import EXACT, UNKNOWN, register_attention

# What one product has at a time. Other numbers are other bits: checkpoints note them.
ROWS = 16
KEYS = 32
VALUES = 256
# Activations by the names of their classes: those that have a form here, and those whose every
# element is computed alike as it is.
SILU = frozenset({"SiLU", "SiLUActivation"})
TANH_GELU = frozenset({"GELUTanh", "NewGELUActivation"})
KEPT = frozenset({"GELUActivation", "ReLU", "ReLUSquaredActivation", "LinearActivation"})
ACTIVATIONS_IN = ("transformers.activations", "torch.nn.modules.activation")
OFF = "set run.exact: false"


def make_exact(model: PreTrainedModel) -> None:
    """Make a model compute every token in one order, in place; its parameters stay the same.

    Args:
        model: of text, in float32, on the CPU. What was made exact before stays so.

    Raises:
        ConfigError: this PyTorch has no oneDNN, or a part of the model has no exact form.
    """
    check_onednn()
    for name, module in model.named_modules():
        _make_exact(name, module)
    if model.config._attn_implementation != EXACT:  # pyright: ignore[reportPrivateUsage]
        model.set_attn_implementation(EXACT)
    # Models whose code does not ask transformers for an attention stay as they are.
    if model.config._attn_implementation != EXACT:  # pyright: ignore[reportPrivateUsage]
        name = type(model).__name__
        raise ConfigError(f"run.exact: {name} computes its attention in code of its own; {OFF}")


def check_onednn() -> None:
    """Make sure that PyTorch has the library that multiplies here.

    Raises:
        ConfigError: it has not.
    """
    there = torch.backends.mkldnn.is_available()
    if not there or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        raise ConfigError(
            f"run.exact: linear layers are computed by oneDNN, and PyTorch {torch.__version__} of "
            f"this machine was built without it; {OFF}, or install PyTorch's build for x86"
        )


def _make_exact(name: str, module: nn.Module) -> None:
    """Give a module its exact form, or leave it where it has one.

    Raises:
        ConfigError: no exact form of it is known.
    """
    kind = type(module).__name__
    if isinstance(module, ExactLinear | ExactSilu | ExactTanhGelu):
        return
    if type(module) is nn.Linear:
        module.__class__ = ExactLinear
    elif kind in SILU:
        module.__class__ = ExactSilu
    elif kind in TANH_GELU:
        module.__class__ = ExactTanhGelu
    elif type(module).__module__ in ACTIVATIONS_IN:
        if kind not in KEPT:
            raise _no_form(name, kind)
    elif next(module.parameters(recurse=False), None) is not None:
        # What multiplies in a way of its own: experts, convolutions, recurrent states.
        if not isinstance(module, nn.Embedding) and not kind.endswith("Norm"):
            raise _no_form(name, kind)


def _no_form(name: str, kind: str) -> ConfigError:
    return ConfigError(f"run.exact: no exact form of {kind} ({name}) exists; {OFF}")


def exact_linear(input: Tensor, weight: Tensor, bias: OptionalTensor = None) -> Tensor:
    """`nn.functional.linear` of which a row depends on that row alone.

    Args:
        input: [..., K]; float64 is multiplied by the usual kernels. weight: [N, K]. bias: [N].

    Returns:
        [..., N].
    """
    if input.dtype != torch.float32:  # in float64, where a delivery of weights is proved
        return nn.functional.linear(input, weight, bias)
    rows = input.reshape(-1, weight.shape[1])
    learns = torch.is_grad_enabled()
    output = _Product.apply(rows, weight) if learns else _product(rows, weight)
    if bias is not None:
        output = output + bias
    return output.view(*input.shape[:-1], weight.shape[0])


class ExactLinear(nn.Linear):
    """`nn.Linear` of which a row depends on that row alone."""

    product = staticmethod(exact_linear)

    def forward(self, input: Tensor) -> Tensor:
        return exact_linear(input, self.weight, self.bias)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed, in oneDNN."""
    rows = len(x)
    whole = _padded(x, ROWS)
    output = torch.ops.mkldnn._linear_pointwise(whole, weight, None, "none", [], "")
    return output[:rows]


class _Product(torch.autograd.Function):
    """x [M, K] times weight [N, K] transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[OptionalTensor, OptionalTensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        gradient = grads[0]
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = gradient.t() @ x if ctx.needs_input_grad[1] else None
        return of_x, of_weight


class ExactSilu(nn.Module):
    """x / (1 + exp(-x)). PyTorch's own computes the last elements of a tensor another way."""

    def forward(self, input: Tensor) -> Tensor:
        return _Silu.apply(input) if torch.is_grad_enabled() else _silu(input)


def _silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1)


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _silu(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.silu_backward(grads[0], ctx.saved_tensors[0])


class ExactTanhGelu(nn.Module):
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which has last elements of its own too."""

    def forward(self, input: Tensor) -> Tensor:
        return _TanhGelu.apply(input)


class _TanhGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        inner = (x * x * x).mul_(0.044715).add_(x).mul_(sqrt(2 / pi))
        return inner.tanh_().add_(1).mul_(x).mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return torch.ops.aten.gelu_backward(grads[0], ctx.saved_tensors[0], approximate="tanh")


def exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: OptionalTensor,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of prefill, decode steps and training, as transformers' AttentionInterface has it.

    Args:
        query: [B, heads, M, d]. key, value: [B, key heads, S, d], key j of a row is its token j.
        attention_mask: what is added to scores, [B, 1, 1 or M, S]; None: a query sees the keys up
            to its own, and the last query all of them.
        kwargs: the factor of scores.

    Returns:
        [B, M, heads, d].

    Raises:
        ConfigError: the model asks for attention of another kind.
    """
    unknown = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if unknown:
        what = ", ".join(unknown)
        raise ConfigError(f"run.exact: no exact form of attention with {what} exists; {OFF}")
    scale = kwargs.get("scaling")
    rows, heads, count, width = query.shape
    shared = heads // key.shape[1]
    if count == 1 and shared > 1:
        # In a decode step heads that share keys are the queries: nothing is repeated.
        folded = query.reshape(rows, key.shape[1], shared, width)
        sees = attention_mask
        if sees is None:
            sees = query.new_zeros(1, 1, 1, key.shape[2])
        found = attend_exactly(folded, key, value, sees, scale=scale)
        return found.reshape(rows, 1, heads, width), None
    if shared > 1:
        key = key.repeat_interleave(shared, dim=1)
        value = value.repeat_interleave(shared, dim=1)
    found = attend_exactly(query, key, value, attention_mask, is_causal=True, scale=scale)
    return found.transpose(1, 2), None


def attend_exactly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: OptionalTensor = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` of which a query depends on itself and on what it sees alone.

    Args:
        query: [B, H, M, d]. key, value: [B, H, S, d].
        attn_mask: what is added to scores, or where a query may look, [B or 1, 1, M or 1, S]; it
            stands in for `is_causal`, which is true where it is None.
        is_causal: a query sees the keys up to its own, and the last query all of them.
        scale: factor of scores; None: d ** -0.5.

    Returns:
        [B, H, M, d].
    """
    factor = query.shape[3] ** -0.5 if scale is None else scale
    if not torch.is_grad_enabled():
        return _attend(query, key, value, attn_mask, factor)
    return _Attention.apply(query, key, value, attn_mask, factor)


class _Attention(torch.autograd.Function):
    """Forward in one order; backward by the usual kernels, which compute it anew."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: OptionalTensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask = mask
        ctx.scale = scale
        return _attend(query, key, value, mask, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[OptionalTensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            found = scaled_dot_product_attention(
                *inputs, attn_mask=ctx.mask, is_causal=ctx.mask is None, scale=ctx.scale
            )
        return *torch.autograd.grad(found, inputs, grads[0]), None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: OptionalTensor, scale: float
) -> Tensor:
    """Attention, ROWS queries at a time; see `attend_exactly`."""
    count = query.shape[2]
    added = _added(mask, query, key.shape[2])
    keys = _padded(key, KEYS).transpose(2, 3)
    values = _padded(value, KEYS)
    queries = _padded(query * scale, ROWS)
    # Behind the last key that a block of queries sees, nothing has a weight: it is left out where
    # that is known without a look.
    stepwise = mask is None and count == key.shape[2]
    found: list[Tensor] = []
    for first in range(0, count, ROWS):
        last = first + ROWS
        end = values.shape[2]
        if stepwise:
            end = min(end, last + -last % KEYS)
        seen = added[:, :, first:last] if added.shape[2] > 1 else added
        scores = queries[:, :, first:last] @ keys[..., :end]
        # Queries that fill a block up have no weights: most of one, in a decode step.
        asked = scores[:, :, : min(ROWS, count - first)]
        weights = asked.add_(seen[..., :end]).softmax(-1)
        found.append(_weighted(_padded(weights, ROWS), values))
    joined = found[0] if len(found) == 1 else torch.cat(found, dim=2)
    return joined[:, :, :count]


def _added(mask: OptionalTensor, query: Tensor, span: int) -> Tensor:
    """The mask as numbers to add to scores, padded like keys: [B or 1, 1, M or 1, S]."""
    count = query.shape[2]
    if mask is None:
        at = torch.arange(count, device=query.device)
        keys = torch.arange(span, device=query.device)
        mask = (keys <= at[:, None] + (span - count))[None, None]
    if mask.dtype == torch.bool:
        nothing = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = nothing.masked_fill_(~mask, -torch.inf)
    return pad(mask, (0, -span % KEYS), value=-torch.inf) if span % KEYS else mask


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Sum of values [B, H, S, d] with weights [B, H, ROWS, up to S], in pieces of VALUES."""
    end = weights.shape[3]
    total = weights[..., :VALUES] @ values[:, :, : min(VALUES, end)]
    for start in range(VALUES, end, VALUES):
        stop = min(start + VALUES, end)
        total += weights[..., start:stop] @ values[:, :, start:stop]
    return total


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """[..., M, d] with zeros behind, so that M is a multiple of a number."""
    more = -tensor.shape[-2] % multiple
    return pad(tensor, (0, 0, 0, more)) if more else tensor


AttentionInterface.register(EXACT, exact_attention)
register_attention(EXACT, attend_exactly)
