"""Critic, reward models, selections, shaping and positions: the branches and ties of each."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oxrl.functional.logprobs import (
    Head,
    bootstrap_positions,
    chunked_head,
    logprobs_from_logits,
    spread,
)
from oxrl.functional.masks import masked_values
from oxrl.functional.reward_model_losses import bradley_terry, process_reward
from oxrl.functional.selections import (
    SELECTIONS,
    above_row_quantile,
    covariance,
    router_shift,
    select_kl_cov,
)
from oxrl.functional.shaping import best_at_k, overlong_penalty, pass_at_k
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.value_losses import value_loss

NAN = float("nan")


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- critic and supervised ---

# (value, old value, return) on every side of a clip of 0.5.
VALUES = [
    (1.0, 1.2, 3.0),  # within the clip
    (2.5, 1.0, 3.0),  # moved too far, towards the return: the clipped error is larger
    (2.5, 1.0, 0.0),  # moved too far, away from it: its own error is larger
    (-1.0, 1.0, -2.0),
    (-1.0, 1.0, 4.0),
    (1.5, 1.0, 2.0),  # exactly at the bound: both errors are the same
    (2.0, 1.0, 1.75),  # both errors are 1/4: no clip
]


@pytest.mark.parametrize("clip", [None, 0.5, 10.0])
def test_the_critics_loss_takes_the_larger_error(clip: float | None) -> None:
    values = f64([[v for v, _, _ in VALUES] + [NAN]]).requires_grad_()
    old = f64([[o for _, o, _ in VALUES] + [NAN]]).requires_grad_()
    returns = f64([[r for _, _, r in VALUES] + [NAN]]).requires_grad_()
    mask = torch.tensor([[True] * len(VALUES) + [False]])
    weights = f64([[0.1 * (i + 1) for i in range(len(VALUES))] + [NAN]])
    loss, metrics = value_loss(values, old, returns, mask, weights, value_clip=clip)
    total, slopes, cut = 0.0, [], 0
    for i, (v, o, r) in enumerate(VALUES):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        clipped = (near - r) ** 2 > (v - r) ** 2
        weight = 0.1 * (i + 1)
        total += weight / 2 * max((v - r) ** 2, (near - r) ** 2)
        slopes.append(0.0 if clipped else weight * (v - r))
        cut += clipped
    assert loss.item() == pytest.approx(total)
    assert metrics["value/clip_frac"].item() == pytest.approx(cut / len(VALUES))
    assert not metrics["value/clip_frac"].requires_grad
    loss.backward()
    assert values.grad is not None and values.grad[0].tolist() == pytest.approx([*slopes, 0.0])
    assert old.grad is None and returns.grad is None


def test_the_metric_of_the_likelihood_carries_no_gradient() -> None:
    logprobs = f64([[-1.0, -3.0, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    loss, metrics = supervised_loss(logprobs, mask, f64([[0.25, 0.5, NAN]]))
    assert loss.item() == 1.75 and metrics["update/nll"] == 2.0
    assert not metrics["update/nll"].requires_grad
    assert not masked_values(logprobs, mask).requires_grad


# --- reward models ---


def test_bradley_terry_with_margins_and_centering() -> None:
    chosen = f64([1.0, 0.5, -1.0, NAN]).requires_grad_()
    rejected = f64([0.0, 0.5, 2.0, NAN])
    margins = f64([0.3, 0.1, 0.2, NAN]).requires_grad_()
    weights = f64([0.5, 0.25, 0.25, 0.0])
    loss, metrics = bradley_terry(chosen, rejected, weights, margins, center_coeff=0.1)
    gaps, sums = [1.0, 0.0, -3.0], [1.0, 1.0, 1.0]
    terms = [
        math.log1p(math.exp(-(g - m))) + 0.1 * s**2
        for g, m, s in zip(gaps, (0.3, 0.1, 0.2), sums, strict=True)
    ]
    assert loss.item() == pytest.approx(0.5 * terms[0] + 0.25 * terms[1] + 0.25 * terms[2])
    loss.backward()
    assert margins.grad is None and chosen.grad is not None and chosen.grad[3] == 0
    assert chosen.grad[0].item() == pytest.approx(0.5 * (-1 / (1 + math.exp(0.7)) + 0.2))
    scores = [1.0, 0.5, -1.0, 0.0, 0.5, 2.0]
    mean = sum(scores) / 6
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {
            "reward_model/accuracy": 0.5,  # right, a tie, wrong
            "reward_model/margin": -2 / 3,
            "reward_model/score_mean": mean,
            "reward_model/score_std": math.sqrt(sum((s - mean) ** 2 for s in scores) / 6),
        }
    )


def test_a_process_reward_is_judged_at_the_ends_of_steps_only() -> None:
    """Scores 2, -2, 0.5, -0.5, 0, 3; labels 1, 1, 0, 0.2, 0.5, 0.9: right, wrong, wrong, and three
    times right: a score of 0 says no, and a label of one half is no.
    """
    given = [2.0, -2.0, 0.5, -0.5, 0.0, 3.0]
    truth = [1.0, 1.0, 0.0, 0.2, 0.5, 0.9]
    scores = f64([[*given, 9.0]]).requires_grad_()
    labels = f64([[*truth, 1.0]]).requires_grad_()
    weights = f64([[0.2] * 6 + [0.0]])
    loss, metrics = process_reward(scores, labels, weights)
    expected = 0.0
    for s, y in zip(given, truth, strict=True):
        p = 1 / (1 + math.exp(-s))
        expected -= 0.2 * (y * math.log(p) + (1 - y) * math.log(1 - p))
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert labels.grad is None and scores.grad is not None
    assert scores.grad[0, 0].item() == pytest.approx(0.2 * (1 / (1 + math.exp(-2.0)) - 1))
    assert {name: float(x) for name, x in metrics.items()} == pytest.approx(
        {
            "reward_model/accuracy": 4 / 6,
            "reward_model/score_mean": 3.0 / 6,
            "reward_model/label_mean": 3.6 / 6,
        }
    )


# --- selections ---


def test_the_covariance_of_logprobs_and_advantages() -> None:
    logprobs = f64([[-1.0, -2.0, NAN], [-6.0, NAN, NAN]]).requires_grad_()
    advantages = f64([[1.0, -1.0, NAN], [3.0, NAN, NAN]]).requires_grad_()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = covariance(logprobs, advantages, mask)
    assert not found.requires_grad and found.dtype == torch.float64
    expected = [(0 * 2.0), (-2 * 1.0), (2 * -3.0)]
    assert found[mask].tolist() == pytest.approx(expected) and not found[~mask].any()
    for first, second in ((logprobs, advantages.detach()), (logprobs.detach(), advantages)):
        assert not covariance(first, second, mask).requires_grad


def test_of_equal_covariances_the_earlier_token_is_chosen() -> None:
    equal = torch.ones(2, 50, dtype=torch.float64)
    chosen = select_kl_cov(equal, torch.ones(2, 50, dtype=torch.bool), fraction=0.3)
    assert chosen.flatten().nonzero().flatten().tolist() == list(range(30))


@pytest.mark.parametrize(
    ("quantile", "expected"),
    [
        (0.0, [True, True, False, False]),
        (0.5, [True, True, False, False]),
        (0.4, [True, True, False, False]),
        (0.9, [False, True, False, False]),
    ],
)
def test_tokens_at_the_quantile_itself_are_not_above_it(
    quantile: float, expected: list[bool]
) -> None:
    """Entropies 2, 3, 1, 1: quantile 0 is 1, one half is 1.5, 0.4 is 1.2."""
    entropy = f64([[2.0, 3.0, 1.0, 1.0, NAN], [5.0, 5.0, NAN, NAN, NAN]]).requires_grad_()
    mask = torch.tensor([[True] * 4 + [False], [True, True, False, False, False]])
    found = above_row_quantile(entropy, mask, quantile=quantile)
    assert found[0].tolist() == [*expected, False]
    assert not found[1].any()  # all are tied


def test_the_shift_of_the_router_is_a_mean_over_layers_and_experts() -> None:
    now = f64([[[[-1.0, -2.0], [-0.5, -0.1], [-1.0, -1.0]]] * 3]).requires_grad_()
    old = f64([[[[-1.2, -1.7], [-0.5, -0.4], [-1.0, -1.1]]] * 3])
    old[0, 1] -= 3.0
    mask = torch.tensor([[True, True, False]])
    found = router_shift(now, old, mask)
    moved = (0.2 + 0.3 + 0.0 + 0.3 + 0.0 + 0.1) / 6
    assert found[0].tolist() == pytest.approx([math.exp(-moved), 0.8, 1.0])
    assert not found.requires_grad
    lower = router_shift(now, old, mask, minimum=0.01)
    far = (3.2 + 2.7 + 3.0 + 3.3 + 3.0 + 3.1) / 6
    assert lower[0, 1].item() == pytest.approx(math.exp(-far))


def test_what_gates_are_told_about_candidates() -> None:
    x = {
        "tokens": torch.tensor([[5, 7, 9]]),
        "mask": torch.tensor([[True, True, False]]),
        "top_ids": torch.tensor([[[5, 1], [3, 7], [2, 4]]]),
        "top_logprobs": f64([[[-0.1, -3.0], [-0.5, -1.0], [-1.0, -2.0]]]),
        "entropy": f64([[1.0, 2.0, 9.0]]),
    }
    found = SELECTIONS["simko"](x, explore_quantile=0.5)
    assert found["sampled_is_top"].tolist() == [[True, False, False]]
    assert found["explore"].tolist() == [[False, True, False]]
    assert torch.equal(found["old_top_logprobs"], x["top_logprobs"])
    for name in ("dppo_topk_tv", "dppo_topk_kl"):
        among = SELECTIONS[name](x)
        assert among["sampled_in_top"].tolist() == [[True, True, False]]
        assert torch.equal(among["old_top_logprobs"], x["top_logprobs"])


# --- shaping ---


def test_the_penalty_grows_over_the_buffer_and_never_rewards() -> None:
    lengths = torch.tensor([0, 5, 6, 7, 8, 10, 12])
    found = overlong_penalty(lengths, max_tokens=10, buffer_tokens=4)
    assert found.tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(k: int) -> None:
    """Prompts with 2, 4 and 3 samples at once, in two dimensions."""
    total = torch.tensor([[2, 4, 4], [4, 3, 4]])
    correct = torch.tensor([[1, 2, 0], [4, 1, 1]])
    found = pass_at_k(total, correct, k=k)
    assert found.shape == total.shape
    for n, c, chance in zip(
        total.flatten().tolist(), correct.flatten().tolist(), found.flatten().tolist(), strict=True
    ):
        draws = list(itertools.combinations([True] * c + [False] * (n - c), min(k, n)))
        assert chance == pytest.approx(sum(map(any, draws)) / len(draws)), (n, c)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_best_of_k_is_its_mean_over_all_draws(k: int) -> None:
    rewards = [[0.3, -1.0, 2.0, 0.5, 0.5], [1.0, 0.0, 0.0, 1.0, 0.0]]
    found = best_at_k(torch.tensor(rewards), k=k)
    assert found.dtype == torch.float64
    for row, value in zip(rewards, found.tolist(), strict=True):
        draws = [max(draw) for draw in itertools.combinations(row, k)]
        assert value == pytest.approx(sum(draws) / len(draws), rel=1e-6)


# --- positions and the head ---


def test_a_row_without_a_token_has_its_state_at_its_first_position() -> None:
    attended = torch.tensor([[False] * 3, [True, False, False], [True, True, False], [True] * 3])
    assert bootstrap_positions(attended).tolist() == [0, 3, 7, 11]


def test_values_of_several_numbers_are_put_at_their_places() -> None:
    like = torch.zeros(2, 3)
    places = torch.tensor([1, 5])
    values = f64([[1.0, 2.0], [3.0, 4.0]]).requires_grad_()
    found = spread(values, places, like)
    assert found.shape == (2, 3, 2)
    assert found[0, 1].tolist() == [1.0, 2.0] and found[1, 2].tolist() == [3.0, 4.0]
    assert found.sum() == 10
    assert torch.autograd.grad(found.sum(), values)[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert spread(f64([1.0, 2.0]), places, like).tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]


def test_logprobs_at_the_temperature_of_one_unless_told() -> None:
    logits = f64([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]])
    tokens = torch.tensor([[0, 1]])
    plain = 1.0 - math.log(1 + math.e + math.e**2)
    assert logprobs_from_logits(logits, tokens).tolist()[0] == pytest.approx([0.0, plain])
    hot = 0.5 - math.log(1 + math.exp(0.5) + math.e)
    found = logprobs_from_logits(logits, tokens, temperature=2.0)
    assert found.tolist()[0] == pytest.approx([0.0, hot])


@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
@pytest.mark.parametrize("scale", [1.0, 2.0, 0.25])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_scale_softcap_and_temperature_of_the_head(
    temperature: float, scale: float, softcap: float | None
) -> None:
    """Values by hand, gradients by finite differences in float64; either side may be frozen."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(3, 2, dtype=torch.float64, generator=generator)
    weight = torch.randn(4, 2, dtype=torch.float64, generator=generator)
    targets = torch.tensor([0, 3, 1])

    def logprob(h: Tensor, w: Tensor) -> float:
        total = 0.0
        for row, target in zip(h.tolist(), targets.tolist(), strict=True):
            z = [
                scale * sum(a * b for a, b in zip(row, column, strict=True))
                for column in w.tolist()
            ]
            if softcap is not None:
                z = [softcap * math.tanh(x / softcap) for x in z]
            z = [x / temperature for x in z]
            total += z[target] - math.log(sum(map(math.exp, z)))
        return total

    head = Head(weight, softcap=softcap, scale=scale)
    found = chunked_head(hidden, head, targets, temperature=temperature, chunk=2)
    assert found.logprobs.sum().item() == pytest.approx(logprob(hidden, weight))
    assert found.entropy is found.sum_p_squared is found.top_ids is found.top_logprobs is None
    step = 1e-6
    for side, frozen in ((hidden, weight), (weight, hidden)):
        leaf = side.clone().requires_grad_()
        pair = (leaf, frozen) if side is hidden else (frozen, leaf)
        head = Head(pair[1], softcap=softcap, scale=scale)
        out = chunked_head(pair[0], head, targets, temperature=temperature, chunk=2)
        (gradient,) = torch.autograd.grad(out.logprobs.sum(), leaf)
        for i in range(side.shape[0]):
            for j in range(side.shape[1]):
                above, below = side.clone(), side.clone()
                above[i, j] += step
                below[i, j] -= step
                ends = [
                    logprob(x, frozen) if side is hidden else logprob(frozen, x)
                    for x in (above, below)
                ]
                assert gradient[i, j].item() == pytest.approx(
                    (ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-8
                )


class Products(TorchDispatchMode):
    """Writes down the rows of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if "mm" in str(func):
            self.rows.append(found.shape[0])
        return found


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [
        (100, [4096, 904]),  # at most 4,096 positions
        (512, [4096, 4096, 1]),
        (1_000, [2097, 2097, 806]),  # 2^21 logits
        (40_000, [64] * 3 + [8]),  # at least 64 positions
    ],
)
def test_about_two_million_logits_exist_at_a_time(vocabulary: int, expected: list[int]) -> None:
    count = sum(expected)
    hidden = torch.zeros(count, 1)
    head = Head(torch.zeros(vocabulary, 1))
    with Products() as products, torch.no_grad():
        chunked_head(hidden, head, torch.zeros(count, dtype=torch.long))
    assert products.rows == expected
