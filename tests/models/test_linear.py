from __future__ import annotations

import pytest
import torch
from torch import nn

from oxrl.models.linear import OneDnnLinear, onednn_is_faster, speed_up_linears
from oxrl.models.load import load_policy


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
