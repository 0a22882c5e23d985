"""Faster float32 matrix products on AMD CPUs: oneDNN instead of MKL, same arithmetic.

PyTorch multiplies float32 matrices with MKL, which runs its AVX2 code on AMD processors even where
they have AVX-512. oneDNN, which every PyTorch build for x86 contains, uses AVX-512 on both makers'
processors: about twice as fast. Both round in float32; results differ in the last bits, as they do
between any two shapes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# oneDNN compiles a kernel per shape, which takes about 0.7 ms. Products of fewer multiplications
# than SMALL gain too little. Below LARGE few shapes may occur, so the row count is cut to a coarse
# multiple, and MKL multiplies the rest.
SMALL = 2**22
LARGE = 2**26


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`nn.functional.linear` in oneDNN, where there is enough to multiply.

    Args:
        input: [..., K]. weight: [N, K]. bias: [N].
    """
    outputs = weight.shape[0]
    small = input.numel() * outputs < SMALL
    if small or input.dtype != torch.float32 or input.device.type != "cpu":
        return nn.functional.linear(input, weight, bias)
    output = _Product.apply(input.reshape(-1, weight.shape[1]), weight)
    if bias is not None:
        output = output + bias
    return output.view(*input.shape[:-1], outputs)


class OneDnnLinear(nn.Linear):
    """`nn.Linear` whose products run in oneDNN where it is the faster library."""

    # What an output head computes its logits by, of whatever piece of the hidden states.
    product = staticmethod(onednn_linear)

    def forward(self, input: Tensor) -> Tensor:
        return onednn_linear(input, self.weight, self.bias)


def speed_up_linears(model: nn.Module) -> None:
    """Make every `nn.Linear` of `model` a OneDnnLinear, in place, where that is faster.

    Its parameters stay the same.
    """
    if not onednn_is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


@cache
def onednn_is_faster() -> bool:
    """A fact about the machine, never a measurement: two runs on it must compute the same bits."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text(encoding="utf-8")


class _Product(torch.autograd.Function):
    """x [M, K] times weight [N, K] transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _rows_times(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        gradient = grads[0].contiguous()
        grad_x = _rows_times(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        rows = _onednn_rows(gradient.shape[0], weight.numel())
        grad_weight = _columns_times(gradient[:rows], x[:rows])
        if rows < gradient.shape[0]:
            grad_weight.addmm_(gradient[rows:].t(), x[rows:])
        return grad_x, grad_weight


def _rows_times(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] times weight [N, K] transposed, most rows in oneDNN and the rest in MKL."""
    rows = _onednn_rows(x.shape[0], weight.numel())
    if rows == x.shape[0]:
        return _product(x, weight)
    output = x.new_empty(x.shape[0], weight.shape[0])
    output[:rows] = _product(x[:rows], weight)
    torch.mm(x[rows:], weight.t(), out=output[rows:])
    return output


def _columns_times(gradient: Tensor, x: Tensor) -> Tensor:
    """gradient [M, N] transposed times x [M, K].

    oneDNN is faster with the narrower of the two as its rows.
    """
    if gradient.shape[1] <= x.shape[1]:
        return _product(gradient.t(), x.t())
    return _product(x.t(), gradient.t()).t().contiguous()


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def _onednn_rows(rows: int, multiplications: int) -> int:
    """Return how many of `rows`, each of so many multiplications, oneDNN gets: at least 7 in 8."""
    if rows * multiplications >= LARGE:
        return rows
    granularity = 1 << max(0, rows.bit_length() - 4)
    return rows - rows % granularity
