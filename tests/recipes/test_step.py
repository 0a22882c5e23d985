"""One optimizer step: what is not finite is refused, wherever it stands, and kept."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.recipes.step import all_finite, apply_step, gradients, named_tensors, per_token
from oxrl.types import Output, SupervisedBatch, TokenBatch

NAN = float("nan")
MASK = torch.tensor([[False, True, True]])
WANT = frozenset({"logprobs"})


def batch(weights: list[float] | None = None) -> SupervisedBatch:
    inputs = TokenBatch(
        tokens=torch.tensor([[1, 2, 3]]), attention_mask=MASK | True, response_mask=MASK
    )
    return SupervisedBatch(inputs=inputs, loss_weights=torch.tensor([weights or [NAN, 0.5, 0.5]]))


class Engine:
    """Answers with one output, and writes down what is done to it."""

    def __init__(self, refuses: bool = False, **answer: Tensor) -> None:
        self.answer = Output(**answer)
        self.refuses = refuses
        self.done: list[str] = []

    def forward_backward(self, batch: Any, loss_fn: Any, want: Any) -> Output:
        self.done.append("backward")
        return self.answer

    def optim_step(self) -> dict[str, float]:
        self.done.append("step")
        return {"update/skipped": float(self.refuses)}

    def skip_step(self) -> dict[str, float]:
        self.done.append("skip")
        return {"update/skipped": 1.0}


def mean(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    assert not torch.is_grad_enabled()
    assert output.logprobs is not None
    return -output.logprobs[MASK].mean(), {"update/nll": torch.tensor(3.0)}


def row(*values: float) -> Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize(
    ("answer", "finite"),
    [
        ({"logprobs": row(NAN, -1.0, -2.0)}, True),  # what is masked does not matter
        ({"logprobs": row(0.0, -1.0, -2.0), "entropy": row(NAN, 1.0, 1.0)}, True),
        ({"logprobs": row(0.0, -1.0, NAN)}, False),
        ({"logprobs": row(0.0, -1.0, -math.inf)}, False),
        ({"logprobs": row(0.0, -1.0, -2.0), "entropy": row(0.0, NAN, 1.0)}, False),
        ({"logprobs": row(0.0, -1.0, -2.0), "values": row(0.0, math.inf, 1.0)}, False),
    ],
)
def test_what_the_model_says_has_to_be_finite(answer: dict[str, Tensor], finite: bool) -> None:
    found = gradients(Engine(**answer), batch(), mean, WANT)  # type: ignore[arg-type]
    assert found.finite is finite
    assert found.metrics["update/nll"] == 3.0
    if finite:
        assert found.metrics["update/loss"] == 1.5


def test_a_loss_that_is_not_finite_is_refused_though_the_output_is() -> None:
    def broken(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.tensor(NAN), {}

    engine = Engine(logprobs=row(0.0, -1.0, -2.0))
    assert not gradients(engine, batch(), broken, WANT).finite  # type: ignore[arg-type]


def test_a_batch_that_is_not_finite_is_not_even_read() -> None:
    engine = Engine(logprobs=row(0.0, -1.0, -2.0))
    found = gradients(engine, batch([0.5, NAN, 0.5]), mean, WANT)  # type: ignore[arg-type]
    assert not found.finite and engine.done == []
    assert math.isnan(found.metrics["update/loss"]) and found.output.logprobs is None


@pytest.mark.parametrize(
    ("weights", "refuses", "done", "dumped"),
    [
        (None, False, ["backward", "step"], []),
        (None, True, ["backward", "step"], [7]),  # the engine found something itself
        ([0.5, NAN, 0.5], False, ["skip"], [7]),
    ],
)
def test_a_refused_step_is_skipped_and_its_batch_kept(
    weights: list[float] | None, refuses: bool, done: list[str], dumped: list[int]
) -> None:
    engine = Engine(refuses, logprobs=row(0.0, -1.0, -2.0))
    kept: list[int] = []
    session = SimpleNamespace(dump=lambda step, tensors: kept.append(step))
    metrics = apply_step(engine, session, batch(weights), mean, WANT, step=7)  # type: ignore[arg-type]
    assert engine.done == done and kept == dumped
    assert metrics["update/skipped"] == float(bool(dumped)) and "update/loss" in metrics


def test_the_numbers_per_token_of_a_batch() -> None:
    found = per_token(batch())
    assert len(found) == 1 and found[0].shape == (1, 3)
    names = named_tensors(batch())
    assert set(names) == {"loss_weights", "tokens", "attention_mask", "response_mask"}
    assert torch.equal(names["response_mask"], MASK)
    assert names["attention_mask"].all() and names["tokens"].tolist() == [[1, 2, 3]]


def test_numbers_of_rows_and_whole_numbers_are_not_per_token() -> None:
    float_of_rows, whole = torch.ones(1), torch.ones(1, 3, dtype=torch.long)
    mixed = SimpleNamespace(
        inputs=batch().inputs, a=float_of_rows, b=whole, c=row(1.0, 2.0, 3.0), d=None
    )
    (found,) = per_token(mixed)  # type: ignore[arg-type]
    assert found.tolist() == [[1.0, 2.0, 3.0]]


def test_finite_means_every_tensor_that_is_there() -> None:
    good, bad = row(NAN, 1.0, 2.0), row(0.0, 1.0, NAN)
    assert all_finite(good, None, good, mask=MASK) and all_finite(None, mask=MASK)
    assert not all_finite(good, bad, mask=MASK) and not all_finite(bad, None, mask=MASK)
