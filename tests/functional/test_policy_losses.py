from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.functional.corrections import truncate_weights
from oxrl.functional.gates import (
    gspo,
    policy_gradient,
    ppo_clip,
)
from oxrl.functional.kl import kl_k3_plus
from oxrl.functional.masks import weighted_sum
from oxrl.functional.policy_losses import GATES, cispo
from oxrl.functional.ratios import RATIOS
from oxrl.functional.weights import fixed_length, sequence_mean, token_mean
from oxrl.tables.policy import ROWS

NAN = float("nan")
# Gates that need no further tensor; test_rows.py proves the same of every row of the table.
ALL_GATES = {
    name: GATES[name]
    for name in ("policy_gradient", "ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "vespo")
}
ALL_GATES["gspo"] = gspo


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_token(
    gate: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    ratio: float,
    advantage: float,
    **numbers: Any,
) -> tuple[float, float]:
    """Loss and effective weight -(d loss / d logprob) / A of a single token with loss weight 1."""
    logprobs = f64([[math.log(ratio)]]).requires_grad_()
    ones = torch.ones(1, 1, dtype=torch.float64)
    loss, _ = gate(
        logprobs, 0 * ones, advantage * ones, torch.ones(1, 1, dtype=torch.bool), ones, **numbers
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.item(), -gradient.item() / advantage


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "weight"),
    [
        (1.0, 1, -1.0, 1.0),
        (1.5, 1, -1.28, 0.0),  # clipped
        (0.5, 1, -0.5, 0.5),  # moved the wrong way: not clipped
        (1.5, -1, 1.5, 1.5),  # moved the wrong way: not clipped
        (0.5, -1, 0.8, 0.0),  # clipped
        (4.0, -1, 3.0, 0.0),  # dual clip
    ],
)
def test_ppo_with_dual_clip(ratio: float, advantage: float, loss: float, weight: float) -> None:
    """E2."""
    found = one_token(ppo_clip, ratio, advantage, clip_low=0.2, clip_high=0.28, clip_dual=3.0)
    assert found == pytest.approx((loss, weight), abs=1e-9)


def test_without_dual_clip_a_bad_token_keeps_its_full_ratio() -> None:
    assert one_token(ppo_clip, 4.0, -1, clip_low=0.2, clip_high=0.28) == pytest.approx((4.0, 4.0))
    assert one_token(
        ppo_clip, 10.0, -1, clip_low=0.2, clip_high=0.2, clip_dual=4.0
    ) == pytest.approx((4.0, 0.0))


@pytest.mark.parametrize(
    ("ratio", "positive", "negative"),
    [
        (0.5, 0.5, 0.0),
        (0.9, 0.9, 0.9),
        (1.0, 1, 1),
        (1.1, 1.1, 1.1),
        (1.3, 0, 1.3),
        (1.5, 0.0, 1.5),
    ],
)
def test_the_clip_is_one_sided(ratio: float, positive: float, negative: float) -> None:
    """E2c, the row with the correct sign of clip_low."""
    assert one_token(ppo_clip, ratio, 1)[1] == pytest.approx(positive)
    assert one_token(ppo_clip, ratio, -1)[1] == pytest.approx(negative)


def test_a_ratio_exactly_at_the_bound_is_not_clipped() -> None:
    """min and clamp split or pass the gradient at a tie; the explicit rule does not depend on that.
    1.25 is exact.
    """
    logprobs = f64([[0.0]]).requires_grad_()
    old, ones, mask = (
        f64([[-math.log(1.25)]]),
        torch.ones(1, 1, dtype=torch.float64),
        torch.ones(1, 1).bool(),
    )
    ratio = (logprobs.detach() - old).exp().item()
    loss, metrics = ppo_clip(logprobs, old, ones, mask, ones, clip_high=ratio - 1)
    assert (
        torch.autograd.grad(loss, logprobs)[0].item() == -ratio
        and metrics["update/clip_frac_high"] == 0
    )


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.5, 2.0, 4.0])
def test_cispo_caps_the_weight_and_never_drops_a_token(ratio: float) -> None:
    """E7: bounds [0, 5] leave these ratios alone, [.8, 1.28] cap them."""
    for advantage in (1.0, -1.0):
        assert one_token(cispo, ratio, advantage)[1] == pytest.approx(ratio)
        capped = one_token(cispo, ratio, advantage, weight_min=0.8, weight_max=1.28)[1]
        assert capped == pytest.approx(min(max(ratio, 0.8), 1.28))


def test_gspo_of_the_worked_example() -> None:
    """E6: geometric ratio 1.181360 on a row of three, so each token has s / 3; clipped as a whole
    at 4e-4.
    """
    logprobs = f64([[-0.9, -0.7, -1.4]]).requires_grad_()
    old, ones, mask = (
        f64([[-1, -0.5, -2]]),
        torch.ones(1, 3, dtype=torch.float64),
        torch.ones(1, 3).bool(),
    )
    loss, _ = gspo(logprobs, old, ones, mask, sequence_mean(mask).double(), clip_low=9, clip_high=9)
    assert (-torch.autograd.grad(loss, logprobs)[0]).tolist()[0] == pytest.approx(
        [0.393787] * 3, abs=1e-6
    )
    loss, metrics = gspo(logprobs, old, ones, mask, sequence_mean(mask).double())
    assert (
        torch.autograd.grad(loss, logprobs)[0].abs().max() == 0
        and metrics["update/clip_frac_high"] == 1
    )
    mixed, _ = gspo(
        logprobs,
        old,
        f64([[1, -1, 2]]),
        mask,
        sequence_mean(mask).double(),
        clip_low=9,
        clip_high=9,
    )
    gradient = (-torch.autograd.grad(mixed, logprobs)[0]).tolist()[0]
    assert gradient == pytest.approx([0.393787, -0.393787, 0.787574], abs=1e-6)


# --- E13: one whole GRPO step ---

MASK = torch.tensor([[True, True], [True, False]])
OLD = f64([[-1, -0.5], [-0.7, NAN]])
NOW = OLD + f64([[1.1, 1.5], [0.9, 1]]).log()
REF = f64([[-1.1, -0.4], [-0.8, NAN]])
ROLLOUT = f64([[-1.05, -1.4], [-0.7, NAN]])
A = f64([[0.707106, 0.707106], [-0.707106, NAN]])
CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def check_e13(loss: Tensor, logprobs: Tensor, value: float, gradient: list[float]) -> None:
    (found,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(value, abs=1e-6)
    assert found[MASK].tolist() == pytest.approx(gradient, abs=1e-6)
    assert found[~MASK].tolist() == [0]


def test_a_grpo_step_with_token_mean() -> None:
    x = NOW.clone().requires_grad_()
    loss, _ = ppo_clip(x, OLD, A, MASK, token_mean(MASK), **CLIP)
    check_e13(loss, x, -0.348839, [-0.259272, 0, 0.212132])


def test_a_grpo_step_with_sequence_mean() -> None:
    x = NOW.clone().requires_grad_()
    loss, _ = ppo_clip(x, OLD, A, MASK, sequence_mean(MASK), **CLIP)
    check_e13(loss, x, -0.102530, [-0.194454, 0, 0.318198])


def test_a_dr_grpo_step() -> None:
    x = NOW.clone().requires_grad_()
    loss, _ = ppo_clip(x, OLD, A.sign() / 2, MASK, fixed_length(MASK, weights_length=4), **CLIP)
    check_e13(loss, x, -0.0925, [-0.06875, 0, 0.05625])


def test_a_grpo_step_with_truncated_importance_sampling() -> None:
    x = NOW.clone().requires_grad_()
    correction = truncate_weights(OLD, ROLLOUT, MASK, correction_max=2.0)
    loss, _ = ppo_clip(x, OLD, A, MASK, token_mean(MASK), correction=correction, **CLIP)
    check_e13(loss, x, -0.663830, [-0.272565, 0, 0.212132])


def test_a_clipped_token_still_gets_the_gradient_of_the_kl_term() -> None:
    x, weights = NOW.clone().requires_grad_(), token_mean(MASK)
    loss, _ = ppo_clip(x, OLD, A, MASK, weights, **CLIP)
    loss = loss + 0.1 * weighted_sum(kl_k3_plus(x, REF, MASK), MASK, weights)
    check_e13(loss, x, -0.346834, [-0.252762, 0.010182, 0.211953])


# --- properties of every gate ---


def random_batch(
    seed: int = 0, spread: float = 0.3
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A ragged batch of 7 rows whose masked positions are NaN in every float tensor; row 6 is
    empty.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([1, 9, 4, 7, 2, 5, 0])
    mask = torch.arange(9)[None] < lengths[:, None]
    old = -torch.rand(7, 9, generator=generator, dtype=torch.float64)
    now = old + spread * torch.randn(7, 9, generator=generator, dtype=torch.float64)
    advantages = torch.randn(7, 1, generator=generator, dtype=torch.float64).expand(7, 9).clone()
    weights = token_mean(mask).double()
    hole = torch.where(mask, 0.0, NAN)
    return now + hole, old + hole, advantages + hole, mask, weights + hole


def gradient_of(
    gate: Callable[..., tuple[Tensor, dict[str, Tensor]]], *batch: Tensor, **numbers: Any
) -> tuple[float, Tensor]:
    x = batch[0].clone().requires_grad_()
    loss, metrics = gate(x, *batch[1:], **numbers)
    assert all(
        metric.ndim == 0 and not metric.requires_grad and metric.isfinite()
        for metric in metrics.values()
    )
    return loss.item(), torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize("name", ALL_GATES)
def test_on_policy_the_gradient_is_reinforce(name: str) -> None:
    _, old, advantages, mask, weights = random_batch()
    _, gradient = gradient_of(ALL_GATES[name], old, old, advantages, mask, weights)
    torch.testing.assert_close(
        gradient, torch.where(mask, -advantages * weights, 0.0), atol=1e-15, rtol=1e-12
    )


@pytest.mark.parametrize("name", ALL_GATES)
def test_zero_advantages_give_exactly_zero_gradient(name: str) -> None:
    now, old, advantages, mask, weights = random_batch()
    assert gradient_of(ALL_GATES[name], now, old, 0 * advantages, mask, weights)[1].abs().max() == 0


@pytest.mark.parametrize("name", ALL_GATES)
def test_splitting_into_micro_batches_changes_no_gradient(name: str) -> None:
    batch = random_batch()
    loss, gradient = gradient_of(ALL_GATES[name], *batch)
    for size in (1, 2, 3):
        parts = [
            gradient_of(ALL_GATES[name], *(x[i : i + size] for x in batch))
            for i in range(0, 7, size)
        ]
        assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(
            torch.cat([part[1] for part in parts]), gradient, rtol=1e-12, atol=1e-16
        )


@pytest.mark.parametrize("name", ALL_GATES)
def test_more_padding_changes_no_gradient(name: str) -> None:
    batch = random_batch()
    wide = tuple(
        torch.cat([x, torch.full((7, 3), NAN if x.is_floating_point() else False).to(x.dtype)], 1)
        for x in batch
    )
    loss, gradient = gradient_of(ALL_GATES[name], *batch)
    wide_loss, wide_gradient = gradient_of(ALL_GATES[name], *wide)
    assert loss == pytest.approx(wide_loss, rel=1e-14)
    torch.testing.assert_close(wide_gradient[:, :9], gradient, rtol=1e-14, atol=0)
    assert (wide_gradient[~wide[3]] == 0).all()


@pytest.mark.parametrize("name", ALL_GATES)
def test_the_correction_multiplies_the_policy_term(name: str) -> None:
    batch = random_batch()
    correction = torch.where(batch[3], torch.rand(7, 9, dtype=torch.float64), NAN)
    _, plain = gradient_of(ALL_GATES[name], *batch)
    _, corrected = gradient_of(ALL_GATES[name], *batch, correction=correction)
    torch.testing.assert_close(corrected, torch.where(batch[3], plain * correction, 0.0))


@pytest.mark.parametrize("name", ALL_GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_ratios_stay_finite(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -100.0]], dtype=dtype)
    old, ones, mask = (
        torch.tensor([[-100.0, 0.0]], dtype=dtype),
        torch.ones(1, 2),
        torch.ones(1, 2).bool(),
    )
    for sign in (1, -1):
        loss, gradient = gradient_of(ALL_GATES[name], x, old, sign * ones, mask, ones)
        assert math.isfinite(loss) and gradient.isfinite().all()


@pytest.mark.parametrize("name", ALL_GATES)
def test_a_batch_without_trained_tokens_has_a_zero_loss_with_a_graph(name: str) -> None:
    now, old, advantages, mask, weights = random_batch()
    loss, gradient = gradient_of(
        ALL_GATES[name], now, old, advantages, torch.zeros_like(mask), weights
    )
    assert loss == 0 and gradient.abs().max() == 0


@pytest.mark.parametrize("name", ALL_GATES)
def test_no_gradient_flows_into_anything_but_the_current_logprobs(name: str) -> None:
    now, old, advantages, mask, weights = random_batch()
    others = [t.clone().requires_grad_() for t in (old, advantages, torch.ones_like(old))]
    loss, _ = ALL_GATES[name](
        now.requires_grad_(), *others[:2], mask, weights, correction=others[2]
    )
    loss.backward()
    assert all(t.grad is None for t in others)


def test_the_surrogate_matches_the_formula_of_the_paper_and_its_autograd() -> None:
    """PPO, Eq. 7, written literally; random ratios are never exactly at a bound."""
    now, old, advantages, mask, weights = (torch.nan_to_num(t) for t in random_batch(1, spread=0.5))
    x = now.clone().requires_grad_()
    ratio = (x - old).exp()
    literal = -(
        torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages) * weights
    ).sum()
    loss, gradient = gradient_of(ppo_clip, now, old, advantages, mask.bool(), weights, **CLIP)
    assert loss == pytest.approx(literal.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(literal, x)[0])


def test_clip_fractions_count_the_favoured_direction_only() -> None:
    ratio, advantages = f64([[1.5, 1.5, 0.5, 0.5]]), f64([[1, -1, 1, -1]])
    mask, weights = torch.ones(1, 4).bool(), torch.ones(1, 4)
    _, metrics = ppo_clip(ratio.log(), 0 * ratio, advantages, mask, weights)
    assert metrics["update/clip_frac_high"] == 0.25 and metrics["update/clip_frac_low"] == 0.25
    assert metrics["update/weight_zero_frac"] == 0.5 and metrics[
        "update/weight_mean"
    ] == pytest.approx(0.5)
    assert metrics["update/weight_ess"] == pytest.approx(
        4 / (4 * 2.5)
    )  # (1.5 + .5)^2 / (4 * (1.5^2 + .5^2))


def test_the_plain_policy_gradient_ignores_the_old_policy() -> None:
    now, old, advantages, mask, weights = random_batch()
    assert gradient_of(policy_gradient, now, old, advantages, mask, weights)[0] == pytest.approx(
        float(-(now * advantages * weights)[mask].sum())
    )


def test_tensors_of_different_shapes_are_refused_by_name() -> None:
    now, old, advantages, mask, weights = random_batch()
    with pytest.raises(ValueError, match="advantages has shape"):
        ppo_clip(now, old, advantages[:, :3], mask, weights)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_kl_cov_has_no_clip_and_pulls_only_chosen_tokens(sign: float) -> None:
    """-A * ratio on every token, as its authors run it, and |log r| on the chosen ones."""
    ratios = f64([[0.3, 0.9, 1.0, 1.4, 3.0]])
    logprobs = ratios.log().requires_grad_()
    ones, mask = torch.ones_like(ratios), torch.ones_like(ratios, dtype=torch.bool)
    chosen = torch.tensor([[False, False, True, True, False]])
    loss, _ = GATES["kl_cov"](
        logprobs, 0 * ratios, sign * ones, mask, ones, selected=chosen, kl_cov_coeff=0.5
    )
    assert loss.item() == pytest.approx(-sign * 6.6 + 0.5 * math.log(1.4))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    pull = f64([[0, 0, 0, 0.5, 0]])  # |log r| is flat at ratio 1
    torch.testing.assert_close(gradient, -sign * ratios + pull)


def test_tokens_chosen_by_clip_cov_leave_the_loss() -> None:
    ratios = f64([[0.9, 1.0, 1.1]])
    logprobs = ratios.log().requires_grad_()
    ones, mask = torch.ones_like(ratios), torch.ones_like(ratios, dtype=torch.bool)
    chosen = torch.tensor([[False, True, True]])
    loss, _ = GATES["clip_cov"](logprobs, 0 * ratios, ones, mask, ones, selected=chosen)
    assert loss.item() == pytest.approx(-0.9)
    assert torch.autograd.grad(loss, logprobs)[0].tolist()[0] == pytest.approx([-0.9, 0, 0])


@pytest.mark.parametrize("name", ["gspo", "luspo"])
def test_every_token_of_a_float32_row_has_the_rows_ratio_to_the_last_bit(name: str) -> None:
    """Bounds of 3e-4 are near the rounding of a logprob of -20; a row is clipped whole or not."""
    torch.manual_seed(0)
    old = -20 * torch.rand(400, 64)
    logprobs = (old + 2e-3 * torch.randn(400, 64)).requires_grad_()
    mask = torch.rand(400, 64) < 0.8
    row = ROWS[name]
    anchor = RATIOS[row.ratio](logprobs, old, mask)
    ones = torch.ones_like(old)
    signs = torch.where(torch.arange(400) % 2 == 0, 1.0, -1.0)[:, None] * ones
    loss, metrics = GATES[row.gate](
        logprobs, anchor, signs, mask, ones, clip_low=3e-4, clip_high=4e-4
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    high = torch.where(mask, gradient, -torch.inf).amax(1)
    low = torch.where(mask, gradient, torch.inf).amin(1)
    assert torch.equal(high, low)
    clipped = (high == 0).float().mean()
    assert 0.02 < clipped < 0.5
    assert loss.dtype == torch.float32 and metrics["update/weight_mean"].dtype == torch.float32


def test_gspo_is_what_its_row_of_the_table_runs() -> None:
    torch.manual_seed(1)
    old = -5 * torch.rand(6, 9)
    old[0, 3] = -300.0
    mask = torch.rand(6, 9) < 0.7
    advantages = torch.randn(6, 1).expand(6, 9)
    weights = sequence_mean(mask)
    found = []
    for path in ("function", "row"):
        logprobs = (old + 1e-3).requires_grad_()
        logprobs.data[0, 3] = -1.0  # one token's ratio is beyond e^20
        if path == "function":
            loss, _ = gspo(logprobs, old, advantages, mask, weights)
        else:
            anchor = RATIOS["geometric"](logprobs, old, mask)
            bounds = {"clip_low": 3e-4, "clip_high": 4e-4}
            loss, _ = GATES[ROWS["gspo"].gate](
                logprobs, anchor, advantages, mask, weights, **bounds
            )
        found.append((loss.detach(), *torch.autograd.grad(loss, logprobs)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_quadratic_pull_is_on_the_whole_response_and_has_no_bound() -> None:
    """Gradient of -(A sum logprobs - tau / 2 X^2): tau X - A, with X = 30 of two tokens."""
    old = f64([[-40.0, -30.0]])
    logprobs = (old + f64([[5.0, 25.0]])).requires_grad_()
    ones, mask = torch.ones_like(old), torch.ones_like(old, dtype=torch.bool)
    loss, _ = GATES["proximal"](logprobs, old, ones, mask, ones, proximal_coeff=0.1)
    assert loss.item() == pytest.approx(40 + 0.05 * 900)
    assert torch.autograd.grad(loss, logprobs)[0].tolist()[0] == pytest.approx([2.0, 2.0])
