"""Texts that share a row, or a prompt, do not see each other: measured on every kind of model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from oxrl.errors import ConfigError
from oxrl.models.load import load_policy
from oxrl.models.self_checks import APART, LEAK, check_packing, check_sharing, leak
from oxrl.models.shared_prefix import SharingRefused

# What a token takes over from those before it, beside attention.
Carry = Callable[[Tensor], Tensor]


def convolution(hidden: Tensor) -> Tensor:
    """A causal convolution of four tokens."""
    padded = nn.functional.pad(hidden, (0, 0, 3, 0))
    return sum((padded[:, at : at + hidden.shape[1]] for at in range(4)), start=hidden) / 4


def recurrence(hidden: Tensor) -> Tensor:
    """A state that fades from token to token."""
    state = torch.zeros_like(hidden[:, 0])
    states: list[Tensor] = []
    for at in range(hidden.shape[1]):
        state = 0.9 * state + hidden[:, at]
        states.append(state)
    return hidden + torch.stack(states, dim=1) / 10


CARRIES: dict[str, Carry] = {"convolution": convolution, "recurrence": recurrence}


def carrying(carry: Carry, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The smallest model of oxRL, behind whose first layer tokens take over from others."""
    model = load_policy("builtin:tiny").to(dtype)  # pyright: ignore[reportArgumentType]
    layers: Any = model.base_model.layers

    def after(layer: nn.Module, given: object, hidden: Any) -> Any:
        if isinstance(hidden, tuple):
            return (carry(hidden[0]), *hidden[1:])
        return carry(hidden)

    layers[0].register_forward_hook(after)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CARRIES)
def test_what_carries_over_from_token_to_token_is_refused(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"data\.pack_tokens: .* leaks state"):
        check_packing(carrying(CARRIES[kind], dtype))
    with pytest.raises(SharingRefused, match=r"train\.share_prefix: what .* computes"):
        check_sharing(carrying(CARRIES[kind], dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_only_attends_is_taken(dtype: torch.dtype) -> None:
    model = load_policy("builtin:tiny").to(dtype)  # pyright: ignore[reportArgumentType]
    check_packing(model)
    check_sharing(model)


def test_a_look_at_the_smallest_model_takes_under_50_ms() -> None:
    """Of one processor; the quickest of three, since the first builds what others find."""
    model = load_policy("builtin:tiny")
    for check in (check_packing, check_sharing):
        taken: list[float] = []
        for _ in range(3):
            began = time.thread_time()
            check(model)
            taken.append(time.thread_time() - began)
        assert min(taken) < 0.05


def test_a_model_that_ignores_positions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_policy("builtin:tiny")
    forward = model.base_model.forward

    def ignoring(*given: Any, position_ids: Any = None, **others: Any) -> Any:
        return forward(*given, **others)

    monkeypatch.setattr(model.base_model, "forward", ignoring)
    with pytest.raises(ConfigError, match="attention without positions"):
        check_packing(model)

    def knows_no_positions(
        input_ids: Any, attention_mask: Any = None, use_cache: Any = None
    ) -> Any:
        return forward(input_ids, attention_mask=attention_mask, use_cache=use_cache)

    monkeypatch.setattr(model.base_model, "forward", knows_no_positions)
    with pytest.raises(ConfigError, match=r"data\.pack_tokens"):
        check_packing(model)


@pytest.mark.parametrize("reach", [1, APART // 2, APART])
def test_a_leak_is_seen_from_the_last_token_or_from_far_back(reach: int) -> None:
    model = load_policy("builtin:tiny")

    def read(rows: Tensor) -> Tensor:
        """Each token says what stood `reach` tokens before it."""
        tokens = rows.flatten()
        before = torch.roll(tokens, reach)
        before[:reach] = 0
        return torch.stack([tokens, before], dim=1)[-APART:]

    assert leak(read, model) > LEAK
    assert leak(lambda rows: read(rows[1:]), model) == 0
    assert leak(lambda rows: read(rows)[:, :1], model) == 0


def test_hidden_states_that_are_no_numbers_are_a_leak() -> None:
    model = load_policy("builtin:tiny")
    assert not leak(lambda rows: rows[1, :, None] / 0, model) == 0
