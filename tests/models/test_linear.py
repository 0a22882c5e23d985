from __future__ import annotations

import pytest
import torch
from torch import nn

from oxrl.functional.logprobs import Head, chunked_head
from oxrl.models.linear import (
    OneDnnLinear,
    onednn_is_faster,
    onednn_linear,
    speed_up_linears,
)
from oxrl.models.load import load_policy
from oxrl.models.network import CausalNetwork


@pytest.mark.skipif(
    not onednn_is_faster(), reason="MKL is as fast as oneDNN on this machine, so it is not replaced"
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(3, 7, 5), (201, 256, 128), (131, 128, 320), (700, 320, 320)]
)
def test_onednn_products_and_gradients_are_those_of_float64_to_float32_rounding(
    rows: int, width: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(0)
    exact = nn.Linear(width, outputs, bias=bias, dtype=torch.float64)
    ours = OneDnnLinear(width, outputs, bias=bias)
    ours.load_state_dict(exact.state_dict())
    x, pull = torch.randn(1, rows, width), torch.randn(1, rows, outputs)
    results = []
    for linear, dtype in ((exact, torch.float64), (ours, torch.float32)):
        inputs = x.to(dtype).requires_grad_()
        output = linear(inputs)
        gradients = torch.autograd.grad(output, (inputs, *linear.parameters()), pull.to(dtype))
        results.append((output, *gradients))
    for reference, got in zip(*results, strict=True):
        assert got.shape == reference.shape
        assert (got.double() - reference).norm() <= 1e-6 * reference.norm()


def test_replacing_linears_leaves_parameters_and_other_dtypes_alone() -> None:
    model = load_policy("builtin:tiny")
    names = [name for name, _ in model.named_parameters()]
    speed_up_linears(model)
    assert [name for name, _ in model.named_parameters()] == names
    linear = OneDnnLinear(4, 3, dtype=torch.float64)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


@pytest.mark.skipif(
    not onednn_is_faster(), reason="MKL is as fast as oneDNN on this machine, so it is not replaced"
)
@pytest.mark.parametrize(("positions", "vocabulary"), [(5, 700), (70, 4096), (300, 49152)])
def test_the_head_in_onednn_is_that_of_float64_to_float32_rounding(
    positions: int, vocabulary: int
) -> None:
    """Logprobs, entropy and their gradients, over several chunks; a shared weight, as embeddings."""
    torch.manual_seed(0)
    targets = torch.randint(vocabulary, (positions,))
    weight = torch.randn(vocabulary, 96, dtype=torch.float64)
    hidden = torch.randn(positions, 96, dtype=torch.float64) * 0.1
    results: list[list[torch.Tensor]] = []
    for linear, dtype in (
        (nn.functional.linear, torch.float64),
        (onednn_linear, torch.float32),
    ):
        inputs = hidden.to(dtype).requires_grad_()
        shared = weight.to(dtype).requires_grad_()
        said = chunked_head(inputs, Head(shared, linear=linear), targets, entropy=True, chunk=64)
        assert said.entropy is not None
        total = said.logprobs.sum() + 0.5 * said.entropy.sum()
        gradients = torch.autograd.grad(total, (inputs, shared))
        results.append([said.logprobs, said.entropy, *gradients])
    for reference, got in zip(*results, strict=True):
        assert (got.double() - reference).norm() <= 2e-6 * reference.norm()


@pytest.mark.skipif(
    not onednn_is_faster(), reason="MKL is as fast as oneDNN on this machine, so it is not replaced"
)
def test_the_head_of_a_loaded_model_is_computed_by_the_library_of_its_linears() -> None:
    network = CausalNetwork(load_policy("builtin:tiny"))
    assert network.head.linear is onednn_linear
