from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oxrl.functional.logprobs import (
    NO_CHANCE,
    Head,
    bootstrap_positions,
    chunked_head,
    head_of_batch,
    logprobs_from_logits,
    logsumexp_of_rows,
    predicted_positions,
    spread,
)

HIDDEN, VOCABULARY, POSITIONS = 5, 11, 23


def _problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(POSITIONS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, VOCABULARY, (POSITIONS,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def _reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    temperature: float,
    softcap: float | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Full logits, plain autograd."""
    z = (hidden @ weight.t() + bias) * scale
    z = (torch.tanh(z / softcap) * softcap if softcap else z) / temperature
    log_p = torch.log_softmax(z, -1)
    p = log_p.exp()
    picked = log_p.gather(1, targets[:, None]).squeeze(1)
    top_logprobs, top_ids = log_p.topk(3)
    return picked, -(p * log_p).sum(-1), (p * p).sum(-1), top_ids, top_logprobs


def test_uniform_logits_give_log_of_the_vocabulary_and_the_first_position_is_zero() -> None:
    logprobs = logprobs_from_logits(torch.zeros(1, 3, 4), torch.tensor([[0, 1, 2]]))
    assert logprobs.tolist() == [[0.0, pytest.approx(-math.log(4)), pytest.approx(-math.log(4))]]


def test_the_logit_at_a_position_scores_the_next_token() -> None:
    logits = torch.full((1, 3, 4), -30.0)
    logits[0, 0, 3] = logits[0, 1, 2] = 30.0
    logprobs = logprobs_from_logits(logits, torch.tensor([[1, 3, 2]]))
    assert torch.allclose(logprobs, torch.zeros(1, 3), atol=1e-6)


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]])
    got = logprobs_from_logits(logits, torch.tensor([[0, 0]]), temperature=2.0)[0, 1].item()
    assert got == pytest.approx(-math.log(1 + math.exp(-1.0)), abs=1e-6)


def test_low_precision_logits_are_scored_in_float32_and_float64_stays() -> None:
    tokens = torch.tensor([[0, 1]])
    assert (
        logprobs_from_logits(torch.zeros(1, 2, 4, dtype=torch.bfloat16), tokens).dtype
        == torch.float32
    )
    assert (
        logprobs_from_logits(torch.zeros(1, 2, 4, dtype=torch.float64), tokens).dtype
        == torch.float64
    )


def test_spread_puts_the_values_of_predicted_tokens_back() -> None:
    mask = torch.tensor([[False, True, True], [True, False, True]])
    tokens_at, hidden_at = predicted_positions(mask)
    assert tokens_at.tolist() == [1, 2, 5]
    assert hidden_at.tolist() == [0, 1, 4]
    assert spread(torch.tensor([7.0, 8.0, 9.0]), tokens_at, mask).tolist() == [
        [0.0, 7.0, 8.0],
        [0.0, 0.0, 9.0],
    ]


def test_the_bootstrap_state_is_the_one_of_the_last_real_token() -> None:
    assert bootstrap_positions(
        torch.tensor([[True, True, False], [True, True, True]])
    ).tolist() == [1, 5]


@pytest.mark.parametrize("chunk", [1, 7, POSITIONS])
@pytest.mark.parametrize(
    ("temperature", "softcap", "scale"), [(1.0, None, 1.0), (0.7, None, 1.0), (1.5, 3.0, 0.5)]
)
def test_the_chunked_head_equals_full_logits_in_value_and_gradient(
    chunk: int, temperature: float, softcap: float | None, scale: float
) -> None:
    hidden, weight, bias, targets = _problem()
    want = _reference(hidden, weight, bias, targets, temperature, softcap, scale)
    pull = torch.linspace(-1, 2, POSITIONS, dtype=torch.float64)

    def scalar(logprobs: Tensor, entropy: Tensor, top_logprobs: Tensor) -> Tensor:
        return (
            (logprobs * pull).sum()
            + (entropy * pull.flip(0)).sum()
            + (top_logprobs * pull[:, None]).sum()
        )

    expected = torch.autograd.grad(scalar(want[0], want[1], want[4]), (hidden, weight, bias))
    got = chunked_head(
        hidden,
        Head(weight, bias, softcap, scale),
        targets,
        temperature=temperature,
        entropy=True,
        sum_p_squared=True,
        top_k=3,
        chunk=chunk,
    )
    assert torch.equal(got.top_ids, want[3])
    for ours, reference in zip(
        (got.logprobs, got.entropy, got.sum_p_squared, got.top_logprobs),
        (want[0], want[1], want[2], want[4]),
        strict=True,
    ):
        assert torch.allclose(ours, reference, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(
        scalar(got.logprobs, got.entropy, got.top_logprobs), (hidden, weight, bias)
    )
    for ours, reference in zip(gradients, expected, strict=True):
        assert torch.allclose(ours, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [2, POSITIONS])
def test_given_candidates_get_their_logprobs_and_gradients_instead_of_the_most_likely(
    chunk: int,
) -> None:
    hidden, weight, bias, targets = _problem()
    ids = torch.arange(POSITIONS)[:, None] % 3 + torch.arange(2)
    out = chunked_head(hidden, Head(weight, bias), targets, top_k=2, candidates=ids, chunk=chunk)
    expected = torch.nn.functional.linear(hidden, weight, bias).log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(out.top_logprobs, expected)
    pull = torch.linspace(-1, 2, 2 * POSITIONS, dtype=torch.float64).view(-1, 2)
    found, right = (
        torch.autograd.grad((x * pull).sum(), (hidden, weight, bias))
        for x in (out.top_logprobs, expected)
    )
    torch.testing.assert_close(found, right)


def test_the_chunk_size_does_not_change_values_or_gradients_in_float32() -> None:
    results = []
    for chunk in (1, 7, POSITIONS):
        hidden, weight, bias, targets = _problem(torch.float32)
        out = chunked_head(hidden, Head(weight, bias), targets, entropy=True, chunk=chunk)
        gradients = torch.autograd.grad(
            (out.logprobs - 0.1 * out.entropy).sum(), (hidden, weight, bias)
        )
        results.append((out.logprobs.detach(), out.entropy.detach(), gradients))
    for logprobs, entropy, gradients in results[1:]:
        assert torch.allclose(logprobs, results[0][0], rtol=0, atol=1e-6)
        # A difference of two numbers as large as the logits, 10 here, each rounded some times.
        assert torch.allclose(entropy, results[0][1], rtol=0, atol=2e-5)
        for ours, reference in zip(gradients, results[0][2], strict=True):
            assert torch.allclose(ours, reference, rtol=0, atol=1e-5)


def test_entropy_of_uniform_logits_has_no_gradient() -> None:
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.zeros(6, 3, dtype=torch.float64, requires_grad=True)
    out = chunked_head(hidden, Head(weight), torch.zeros(4, dtype=torch.long), entropy=True)
    assert torch.allclose(out.entropy, torch.full((4,), math.log(6), dtype=torch.float64))
    out.entropy.sum().backward()
    assert torch.allclose(weight.grad, torch.zeros_like(weight), atol=1e-15)


def test_no_positions_at_all_give_empty_results_and_zero_gradients() -> None:
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    weight = torch.ones(VOCABULARY, HIDDEN, requires_grad=True)
    out = chunked_head(
        hidden, Head(weight), torch.zeros(0, dtype=torch.long), entropy=True, top_k=2
    )
    assert out.logprobs.shape == (0,)
    assert out.top_ids.shape == (0, 2)
    out.logprobs.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_bf16_hidden_states_are_scored_in_float32() -> None:
    hidden, weight, bias, targets = _problem(torch.bfloat16)
    out = chunked_head(hidden, Head(weight, bias), targets, entropy=True, chunk=7)
    assert out.logprobs.dtype == out.entropy.dtype == torch.float32
    out.logprobs.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


def test_the_gradient_of_a_bf16_head_is_summed_in_float32() -> None:
    """512 positions of probability a half each add 0.5: a bf16 sum of them stands still at 128."""
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    targets = torch.zeros(512, dtype=torch.long)
    chunked_head(hidden, Head(weight, bias), targets, chunk=1).logprobs.sum().backward()
    assert weight.grad is not None and bias.grad is not None
    assert weight.grad.flatten().tolist() == bias.grad.tolist() == [256.0, -256.0]


def test_tokens_that_are_never_sampled_have_no_share_of_the_probability() -> None:
    hidden, weight, bias, _ = _problem()
    never = torch.tensor([index in (0, 4, 10) for index in range(VOCABULARY)])
    kept = [index for index in range(VOCABULARY) if not never[index]]
    targets = torch.tensor([kept[position % len(kept)] for position in range(POSITIONS)])
    found = chunked_head(hidden, Head(weight, bias, never=never), targets, entropy=True)
    z = (hidden @ weight.t() + bias)[:, kept]
    places = torch.tensor([kept.index(int(target)) for target in targets])
    wanted = torch.log_softmax(z, -1)
    picked = wanted.gather(1, places[:, None]).squeeze(1)
    torch.testing.assert_close(found.logprobs, picked, rtol=1e-12, atol=1e-12)
    assert found.entropy is not None
    torch.testing.assert_close(found.entropy, -(wanted.exp() * wanted).sum(-1))
    ours = torch.autograd.grad(found.logprobs.sum(), weight, retain_graph=True)[0]
    theirs = torch.autograd.grad(picked.sum(), weight)[0]
    torch.testing.assert_close(ours, theirs)
    assert ours[never].abs().max() == 0


def test_a_head_says_what_it_is_asked_for_and_no_more() -> None:
    torch.manual_seed(3)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[False, True, True, False], [False, False, True, True]])
    hidden = torch.randn(8, HIDDEN)
    head = Head(torch.randn(VOCABULARY, HIDDEN))
    found = head_of_batch(hidden, head, tokens, mask, temperature=1.0)
    assert set(found) == {"logprobs"}
    asked = head_of_batch(hidden, head, tokens, mask, temperature=1.0, entropy=True, top_k=2)
    assert set(asked) == {"logprobs", "entropy", "top_logprobs", "top_ids"}
    assert torch.equal(asked["logprobs"], found["logprobs"])


def test_candidates_of_a_token_are_looked_for_where_it_is_predicted() -> None:
    torch.manual_seed(4)
    tokens = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    mask = torch.tensor([[False, True, True, False], [False, False, True, True]])
    hidden = torch.randn(2, 4, HIDDEN)
    head = Head(torch.randn(VOCABULARY, HIDDEN))
    candidates = torch.randint(0, VOCABULARY, (2, 4, 3))
    asked = {"temperature": 0.7, "candidates": candidates, "top_k": 3}
    found = head_of_batch(hidden.flatten(0, 1), head, tokens, mask, **asked)
    every = (hidden @ head.weight.T / 0.7).log_softmax(-1)
    for row, place in mask.nonzero().tolist():
        expected = every[row, place - 1, candidates[row, place]]
        torch.testing.assert_close(found["top_logprobs"][row, place], expected)
    assert not found["top_logprobs"][~mask].any()


# --- Tokens without a chance.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("nothing", [-math.inf, NO_CHANCE])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_quick_sum_over_cut_rows_has_the_bits_of_the_slow_one(
    dtype: torch.dtype, nothing: float, scale: float
) -> None:
    generator = torch.Generator().manual_seed(5)
    z = scale * torch.randn(50, 3000, generator=generator, dtype=dtype)
    kept = torch.rand(50, 3000, generator=generator) < torch.linspace(0.0003, 1, 50)[:, None]
    kept[:, 7] = True
    z = z.masked_fill(~kept, nothing)
    assert torch.equal(logsumexp_of_rows(z, some_have_none=True), z.logsumexp(1))


def test_where_nothing_has_a_chance_the_quick_sum_says_so() -> None:
    z = torch.full((2, 9), NO_CHANCE)
    assert (logsumexp_of_rows(z, some_have_none=True) < NO_CHANCE / 2).all()
    z = torch.full((2, 9), -math.inf)
    assert (logsumexp_of_rows(z, some_have_none=True) == -math.inf).all()


def test_a_token_without_a_chance_gets_no_gradient_at_all() -> None:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(6, 8, generator=generator)
    weight = torch.randn(40, 8, generator=generator, requires_grad=True)
    never = torch.arange(40) % 3 == 1
    found = chunked_head(hidden, Head(weight, never=never), torch.arange(6) * 3, entropy=True)
    assert found.entropy is not None
    (found.logprobs + found.entropy).sum().backward()
    assert weight.grad is not None
    assert (weight.grad[never] == 0).all() and (weight.grad[~never] != 0).any()
