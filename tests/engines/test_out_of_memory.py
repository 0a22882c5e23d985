"""Micro-batches that do not fit into memory are made smaller, and the gradient stays what it is."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.modelfiles.builtin import BUILTIN_DIMS
from oxrl.models.load import LoadOptions, load_policy
from oxrl.types import Output, SupervisedBatch
from support.tiny import batches

LENGTHS = [(2, 5), (1, 9), (4, 1), (3, 2), (1, 3), (2, 7), (6, 2)]
LOGPROBS = frozenset({"logprobs"})


def loss(output: Output, batch: SupervisedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(output.logprobs, batch.inputs.response_mask, batch.loss_weights)


class Memory:
    """Of a device, in tokens; more than fit raise what CUDA raises, some of them in backward."""

    def __init__(self, model: nn.Module, tokens: int) -> None:
        self.tokens = tokens
        self.in_backward = False
        self.refused = 0
        model.get_input_embeddings().register_forward_hook(self.look)

    def refuse(self, *_: object) -> None:
        self.refused += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines")

    def look(self, module: nn.Module, given: tuple[Tensor], result: Tensor) -> None:
        if given[0].numel() <= self.tokens:
            return
        if self.in_backward and result.requires_grad:
            result.register_hook(self.refuse)
        else:
            self.refuse()


def trainer_of(budget: int, **options: bool) -> LocalTrainer:
    model = load_policy("builtin:tiny", LoadOptions(seed=0))
    return LocalTrainer(model, TrainerOptions(lr=1e-2, micro_batch_tokens=budget, **options))


@pytest.fixture
def batch() -> SupervisedBatch:
    vocabulary = BUILTIN_DIMS["builtin:tiny"]["vocab_size"]
    return batches(LENGTHS, dtype=torch.float32, vocabulary=vocabulary)["supervised"]


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_micro_batches_that_fit(
    in_backward: bool, checkpointing: bool, batch: SupervisedBatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"gradient_checkpointing": checkpointing}
    small = trainer_of(20, **options)
    said = small.forward_backward(batch, loss, LOGPROBS)
    trainer = trainer_of(80, **options)
    memory = Memory(trainer.model, 20)
    memory.in_backward = in_backward
    with caplog.at_level(logging.WARNING):
        found = trainer.forward_backward(batch, loss, LOGPROBS)
    assert memory.refused == 2
    assert trainer.micro_batch_tokens == 20
    assert torch.equal(found.logprobs, said.logprobs)
    for (name, ours), (_, expected) in zip(trainer.gradients(), small.gradients(), strict=True):
        assert torch.equal(ours, expected), name
    assert trainer.last_loss == small.last_loss
    assert not trainer.model.training
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("micro-batches of 80 tokens do not fit into memory, going on with 40:")
    assert second.endswith("going on with 20: CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert trainer.optim_step() == small.optim_step()


def test_what_a_call_before_has_added_is_not_lost(batch: SupervisedBatch) -> None:
    trainer = trainer_of(80)
    trainer.forward_backward(batch, loss, LOGPROBS)
    before = {name: gradient.clone() for name, gradient in trainer.gradients()}
    Memory(trainer.model, 20)
    said = trainer.forward(batch.inputs, LOGPROBS)
    assert torch.allclose(said.logprobs, trainer_of(20).forward(batch.inputs, LOGPROBS).logprobs)
    for name, gradient in trainer.gradients():
        assert torch.equal(gradient, before[name])
    again = trainer_of(80)
    again.forward_backward(batch, loss, LOGPROBS)
    Memory(again.model, 20)
    with pytest.raises(torch.OutOfMemoryError):
        again.forward_backward(batch, loss, LOGPROBS)


def test_a_row_that_does_not_fit_alone_is_an_error(batch: SupervisedBatch) -> None:
    trainer = trainer_of(80)
    memory = Memory(trainer.model, 9)  # the longest row has ten tokens
    with pytest.raises(torch.OutOfMemoryError):
        trainer.forward_backward(batch, loss, LOGPROBS)
    assert memory.refused == 4 and trainer.micro_batch_tokens == 10


def test_a_checkpoint_keeps_what_fits(batch: SupervisedBatch, tmp_path: Path) -> None:
    trainer = trainer_of(80)
    Memory(trainer.model, 20)
    trainer.forward_backward(batch, loss, LOGPROBS)
    trainer.optim_step()
    trainer.save(tmp_path / "saved")
    assert (
        json.loads((tmp_path / "saved" / "trainer_state.json").read_text())["micro_batch_tokens"]
        == 20
    )
    resumed = trainer_of(80)
    resumed.load(tmp_path / "saved")
    assert resumed.micro_batch_tokens == 20
    # Who asks for less gets less.
    careful = trainer_of(10)
    careful.load(tmp_path / "saved")
    assert careful.micro_batch_tokens == 10
    whole = trainer_of(80)
    whole.save(tmp_path / "whole")
    assert "micro_batch_tokens" not in (tmp_path / "whole" / "trainer_state.json").read_text()
