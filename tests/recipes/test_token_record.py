"""What the policy said of every token when it learned from it, kept for reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oxrl.functional.kl import kl_k3
from oxrl.recipes.features.token_record import TokenRecord
from oxrl.types import Output, PolicyBatch, TokenBatch

MASK = torch.tensor([[False, True, True], [False, True, False], [False, False, True]])


def batch(*, reference: bool, old: bool = True) -> PolicyBatch:
    generator = torch.Generator().manual_seed(2)

    def numbers() -> torch.Tensor:
        return torch.randn(3, 3, generator=generator)

    before = numbers()
    return PolicyBatch(
        inputs=TokenBatch(
            tokens=torch.arange(9).view(3, 3), attention_mask=MASK | True, response_mask=MASK
        ),
        old_logprobs=before if old else None,
        rollout_logprobs=numbers(),
        ref_logprobs=numbers() if reference else None,
        advantages=numbers(),
        loss_weights=numbers(),
        versions=torch.zeros(3, 3, dtype=torch.int64),
        group_ids=torch.zeros(3, dtype=torch.int64),
    )


@pytest.mark.parametrize("reference", [True, False])
def test_every_token_has_its_numbers_where_its_row_is(tmp_path: Path, reference: bool) -> None:
    record = TokenRecord(tmp_path / "rollouts")
    whole = batch(reference=reference)
    nothing: Any = None
    assert record.on_prepared(whole, nothing) is whole
    generator = torch.Generator().manual_seed(4)
    logprobs = torch.randn(3, 3, generator=generator)
    entropy = torch.rand(3, 3, generator=generator)
    for rows in (torch.tensor([2, 0]), torch.tensor([1])):
        part = whole.select(rows)
        record.on_minibatch(part)
        said = Output(logprobs=logprobs[rows], entropy=entropy[rows])
        wrong = Output(logprobs=said.logprobs - 9, entropy=entropy[rows])  # pyright: ignore
        with torch.no_grad():
            assert record.loss(wrong, part) is None  # the last one counts
            assert record.loss(said, part) is None
        assert record.loss(wrong, part) is None  # with gradients it is the update itself
        assert record.add_gradients(rows, part) == {}
    record.after_updates(12, 13)
    found = load_file(tmp_path / "rollouts" / "step_00000012.update.safetensors")
    assert whole.old_logprobs is not None
    expected = {
        "logprobs": logprobs,
        "entropy": entropy,
        "ratio": (logprobs - whole.old_logprobs).exp(),
    }
    if whole.ref_logprobs is not None:
        expected["kl"] = kl_k3(logprobs, whole.ref_logprobs, MASK)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name][~MASK].tolist() == [0.0] * 5
        assert torch.allclose(found[name][MASK], values[MASK], rtol=1e-6, atol=0.0)


def test_without_a_record_of_the_start_the_ratio_is_one(tmp_path: Path) -> None:
    record = TokenRecord(tmp_path)
    whole = batch(reference=False, old=False)
    nothing: Any = None
    record.on_prepared(whole, nothing)
    record.on_minibatch(whole)
    with torch.no_grad():
        record.loss(Output(logprobs=torch.randn(3, 3), entropy=torch.rand(3, 3)), whole)
    record.add_gradients(torch.arange(3), whole)
    record.after_updates(0, 1)
    found = load_file(tmp_path / "step_00000000.update.safetensors")
    assert found["ratio"].tolist() == MASK.float().tolist()
