"""Example E5: a vocabulary of three, policy [.7, .2, .1], reference [.5, .3, .2], expectations by
enumeration.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oxrl.functional.kl import KLS, add_kl_to_rewards, kl_k1, kl_k2, kl_k3, kl_k3_plus, kl_k3_ratio

POLICY = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
TO_REFERENCE = [0.175945, -0.098118, -0.077827]  # gradient of KL(policy || reference) by the logits
FROM_REFERENCE = [0.2, -0.1, -0.1]  # of KL(reference || policy)


def expected_loss_gradient(estimator: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Gradient of the estimator as an on-policy loss: the samples' probability is not
    differentiated.
    """
    logits = POLICY.log().requires_grad_()
    loss = (POLICY * estimator(logits.log_softmax(0), REFERENCE.log())).sum()
    return torch.autograd.grad(loss, logits)[0].tolist()


@pytest.mark.parametrize(
    ("estimator", "values", "mean"),
    [
        (kl_k1, [0.336472, -0.405465, -0.693147], 0.085123),
        (kl_k2, [0.056607, 0.082201, 0.240227], 0.080088),
        (kl_k3, [0.050758, 0.094535, 0.306853], 0.085123),
        (kl_k3_plus, [0.050758, 0.094535, 0.306853], 0.085123),
    ],
)
def test_values_and_expectations(
    estimator: Callable[[Tensor, Tensor], Tensor], values: list[float], mean: float
) -> None:
    found = estimator(POLICY.log(), REFERENCE.log())
    assert found.tolist() == pytest.approx(values, abs=1e-6)
    assert float((POLICY * found).sum()) == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        (kl_k1, [0, 0, 0]),
        (kl_k2, TO_REFERENCE),
        (kl_k3, FROM_REFERENCE),
        (kl_k3_plus, TO_REFERENCE),
    ],
)
def test_expected_gradients_as_a_loss(
    estimator: Callable[[Tensor, Tensor], Tensor], gradient: list[float]
) -> None:
    assert expected_loss_gradient(estimator) == pytest.approx(gradient, abs=1e-6)


def test_the_ratio_form_is_exact_on_samples_of_an_older_policy() -> None:
    """Sampled from [.6, .25, .15]: value and gradient are those of KL(policy || reference)."""
    sampler, logits = (
        torch.tensor([0.6, 0.25, 0.15], dtype=torch.float64),
        POLICY.log().requires_grad_(),
    )
    kl = kl_k3_ratio(logits.log_softmax(0), REFERENCE.log(), None, sampler.log())
    loss = (sampler * kl).sum()
    assert float(loss.detach()) == pytest.approx(0.085123, abs=1e-6)
    assert torch.autograd.grad(loss, logits)[0].tolist() == pytest.approx(TO_REFERENCE, abs=1e-6)
    assert expected_loss_gradient(kl_k3_ratio) == pytest.approx(TO_REFERENCE, abs=1e-6)


def test_the_ratio_form_is_exact_where_a_token_is_far_below_the_reference() -> None:
    """The third token has d = log(.02 / .6) = -3.4, so k3 is above 10."""
    policy, reference = (
        torch.tensor([0.9, 0.08, 0.02], dtype=torch.float64),
        torch.tensor([0.3, 0.1, 0.6], dtype=torch.float64),
    )
    logits, wanted = policy.log().requires_grad_(), policy.log().requires_grad_()
    now = wanted.softmax(0)
    (exact,) = torch.autograd.grad((now * (now.log() - reference.log())).sum(), wanted)
    assert exact.tolist() == pytest.approx([0.176, -0.090, -0.086], abs=1e-3)
    kl = kl_k3_ratio(logits.log_softmax(0), reference.log())
    loss = (policy * kl).sum()
    assert float(loss.detach()) == pytest.approx(float((policy * (policy / reference).log()).sum()))
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_ratio", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("difference", [-30.0, -19.0, -12.0, -2.7, 2.7, 12.0, 19.0, 30.0])
def test_the_ratio_form_pulls_towards_the_reference_however_far_it_is(
    difference: float, log_ratio: float, dtype: torch.dtype
) -> None:
    """Its derivative by the logprob is r * d, with d kept within +-20."""
    logprobs = torch.tensor([-40.0], dtype=dtype, requires_grad=True)
    reference = logprobs.detach() - difference
    kl = kl_k3_ratio(logprobs, reference, None, logprobs.detach() - log_ratio)
    (slope,) = torch.autograd.grad(kl.sum(), logprobs)
    bounded = max(min(difference, 20.0), -20.0)
    assert slope.item() == pytest.approx(math.exp(log_ratio) * bounded, rel=1e-5)


def test_k1_in_the_reward_gives_the_exact_gradient() -> None:
    logits = POLICY.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    mask = torch.ones(3, 1, dtype=torch.bool)
    rewards, token_rewards = add_kl_to_rewards(
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(3, 1, dtype=torch.float64),
        logprobs[:, None],
        REFERENCE.log()[:, None],
        mask,
        kl_coeff=1.0,
    )
    assert not rewards.requires_grad and torch.equal(rewards, token_rewards[:, 0])
    loss = -(POLICY * rewards * logprobs).sum()
    assert torch.autograd.grad(loss, logits)[0].tolist() == pytest.approx(TO_REFERENCE, abs=1e-6)


@pytest.mark.parametrize(
    ("logprob", "reference", "k1", "k2", "k3", "slope"),
    [(-0.5, -1.2, 0.7, 0.245, 0.196585, 0.503415), (-1.2, -0.5, -0.7, 0.245, 0.313753, -1.013753)],
)
def test_a_single_token(
    logprob: float, reference: float, k1: float, k2: float, k3: float, slope: float
) -> None:
    x = torch.tensor([logprob], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([reference], dtype=torch.float64)
    assert kl_k1(x, ref).item() == pytest.approx(k1) and kl_k2(x, ref).item() == pytest.approx(k2)
    assert kl_k3(x, ref).item() == pytest.approx(k3, abs=1e-6)
    assert torch.autograd.grad(kl_k3(x, ref).sum(), x)[0].item() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", KLS)
def test_equal_policies_have_no_kl_and_no_gradient(name: str) -> None:
    x = POLICY.log()[None].requires_grad_()
    mask = torch.ones(1, 3, dtype=torch.bool)
    kl = KLS[name](x, POLICY.log()[None], mask)
    assert kl.abs().max() == 0
    if name != "reward_k1":
        assert torch.autograd.grad(kl.sum(), x)[0].abs().max() == 0


@pytest.mark.parametrize("name", KLS)
def test_padding_and_extreme_ratios_stay_finite(name: str) -> None:
    x = torch.tensor([[float("nan"), -500.0, -0.1]], requires_grad=True)
    ref = torch.tensor([[float("inf"), -0.1, -500.0]])
    kl = KLS[name](x, ref, torch.tensor([[False, True, True]]))
    kl.sum().backward()
    assert kl.isfinite().all() and kl[0, 0] == 0
    assert x.grad is not None and x.grad.isfinite().all() and x.grad[0, 0] == 0
