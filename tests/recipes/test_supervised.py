"""Supervised batches: packing changes neither loss nor gradient; schedules; a mixture of files runs
and resumes.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from oxrl.commands.train import run
from oxrl.data.conversations import ConversationDataset, Example
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import NothingTrainedError
from oxrl.models.load import LoadOptions, load_policy
from oxrl.recipes import supervised
from oxrl.recipes.supervised import evaluate_loss, loss_fn, pack, to_supervised_batch
from oxrl.types import Output, TokenBatch
from support.small_runs import metric_lines, sft_config

WANT = frozenset({"logprobs"})


def examples(count: int = 12) -> list[Example]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(count):
        length = int(torch.randint(4, 30, (), generator=generator))
        tokens = torch.randint(5, 261, (length,), generator=generator).tolist()
        made.append(
            Example(
                uid=str(index),
                token_ids=tuple(tokens),
                trained=tuple(at >= 2 for at in range(length)),
            )
        )
    # The first token of an example has nothing before it: it must count neither alone nor behind
    # another example.
    return [*made, dataclasses.replace(made[0], trained=(True,) * len(made[0].token_ids))]


def gradients(
    pack_tokens: int | None, budget: int, dtype: torch.dtype
) -> tuple[float, dict[str, Tensor], int]:
    trainer = LocalTrainer(
        load_policy("builtin:tiny", LoadOptions(seed=0, dtype=dtype)),
        TrainerOptions(lr=1e-3, micro_batch_tokens=budget),
    )
    batch = to_supervised_batch(examples(), 0, pack_tokens=pack_tokens)
    trainer.forward_backward(batch, loss_fn, WANT)
    return trainer.last_loss, dict(trainer.gradients()), len(batch)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("budget", [10_000, 64])
def test_packed_padded_and_single_rows_give_the_same_loss_and_gradient(
    dtype: torch.dtype, tolerance: float, budget: int
) -> None:
    loss, padded, rows = gradients(None, budget, dtype)
    packed_loss, packed, packed_rows = gradients(64, budget, dtype)
    one_by_one_loss, one_by_one, _ = gradients(None, 1, dtype)
    assert packed_rows < rows / 2
    assert packed_loss == pytest.approx(loss, abs=tolerance) and one_by_one_loss == pytest.approx(
        loss, abs=tolerance
    )
    for name, gradient in padded.items():
        torch.testing.assert_close(packed[name], gradient, rtol=0, atol=tolerance)
        torch.testing.assert_close(one_by_one[name], gradient, rtol=0, atol=tolerance)


class Said:
    """An engine that says minus the token's id of every token, whatever comes before."""

    def forward(self, inputs: TokenBatch, want: frozenset[str]) -> Output:
        return Output(logprobs=-inputs.tokens.float())


def test_a_held_out_loss_is_the_mean_over_trained_tokens_alone() -> None:
    long = Example(uid="a", token_ids=(9, 9, 9, 1, 2), trained=(False,) * 3 + (True,) * 2)
    short = Example(uid="b", token_ids=(9, 6), trained=(False, True))
    # Its first token has nothing before it.
    last = Example(uid="c", token_ids=(9, 9, 3), trained=(True, False, True))
    found = evaluate_loss(cast(Any, Said()), [[long, short], [last]], 0)
    assert found["eval/tokens"] == 4.0
    assert found["eval/loss"] == pytest.approx((1 + 2 + 6 + 3) / 4)
    assert found["eval/perplexity"] == pytest.approx(math.exp(3.0))


def test_best_fit_decreasing_fills_rows_and_keeps_examples_whole() -> None:
    sized = [
        Example(uid=str(n), token_ids=(9,) * n, trained=(True,) * n) for n in (5, 6, 2, 3, 4, 12)
    ]
    rows = [[len(example.token_ids) for example in row] for row in pack(sized, 10)]
    assert rows == [[12], [6, 4], [5, 3, 2]]  # 12 is longer than a row and gets its own


def test_a_packed_run_equals_an_unpacked_one(tmp_path: Path) -> None:
    run(sft_config(tmp_path, "padded", ["run.steps=3"]))
    run(sft_config(tmp_path, "packed", ["run.steps=3"], data={"pack_tokens": 40}))
    for padded, packed in zip(
        metric_lines(tmp_path / "padded"), metric_lines(tmp_path / "packed"), strict=True
    ):
        assert packed["update/loss"] == pytest.approx(padded["update/loss"], rel=1e-4)
        assert packed["data/rows"] == padded["data/rows"] == 8


def test_warmup_stable_decay_is_flat_and_then_falls_to_zero() -> None:
    def at(step: int) -> float:
        return TrainerOptions(
            lr=2.0, lr_schedule="wsd", warmup_steps=10, total_steps=110
        ).learning_rate(step)

    assert [at(4), at(10), at(50), at(89)] == pytest.approx([1.0, 2.0, 2.0, 2.0])
    assert at(100) == pytest.approx(1.0)
    assert at(110) == 0.0


def test_a_mixture_of_files_runs_in_its_ratio_and_resumes(tmp_path: Path) -> None:
    config = sft_config(tmp_path, "unused")
    rows = [{"prompt": "hi", "completion": "x" * (i + 1)} for i in range(5)]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {str(config.data.train): 0.75, str(tmp_path / "other.jsonl"): 0.25}
    run(sft_config(tmp_path, "whole", ["run.steps=3"], data={"train": train}))
    run(sft_config(tmp_path, "resumed", ["run.steps=1"], data={"train": train}))
    run(sft_config(tmp_path, "resumed", ["run.steps=3"], data={"train": train}), resume=True)
    assert metric_lines(tmp_path / "whole") == metric_lines(tmp_path / "resumed")
    written = (tmp_path / "whole" / "config.yaml").read_text()
    assert "0.75" in written and "other.jsonl" in written


def test_an_evaluation_that_is_no_number_neither_counts_as_best_nor_hides_what_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([math.nan, 2.0, 3.0])
    monkeypatch.setattr(supervised, "evaluate_loss", lambda *_, **__: {"eval/loss": next(losses)})
    overrides = ["run.keep_best=true", "run.eval_every=2", "run.keep_checkpoints=9"]
    run(sft_config(tmp_path, "run", overrides, data={"eval": str(tmp_path / "chats.jsonl")}))
    name = "model.safetensors"
    kept, fourth = tmp_path / "run/best" / name, tmp_path / "run/checkpoints/step_00000004" / name
    assert kept.read_bytes() == fourth.read_bytes()


def test_the_best_weights_are_there_until_better_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([2.0, 1.0])
    monkeypatch.setattr(supervised, "evaluate_loss", lambda *_, **__: {"eval/loss": next(losses)})
    save, written = LocalTrainer.save, list[Path]()

    def killed(engine: LocalTrainer, directory: Path) -> None:
        if directory.name == ".best.partial" and (written.append(directory) or len(written) == 2):
            raise KeyboardInterrupt
        save(engine, directory)

    monkeypatch.setattr(LocalTrainer, "save", killed)
    overrides = ["run.keep_best=true", "run.eval_every=2"]
    with pytest.raises(KeyboardInterrupt):
        run(sft_config(tmp_path, "run", overrides, data={"eval": str(tmp_path / "chats.jsonl")}))
    assert (tmp_path / "run/best/model.safetensors").is_file()


def test_steps_without_anything_to_train_on_are_not_called_infinite(tmp_path: Path) -> None:
    overrides = ["train.max_skipped_steps=1", "run.steps=20"]
    cfg = sft_config(tmp_path, "run", overrides, data={"rows_per_step": 1})
    # A reply that the first token of a row would be: nothing before it to be predicted from.
    empty = Example(uid="e", token_ids=(3,), trained=(True,))
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(NothingTrainedError, match="10 steps in a row"),
    ):
        patch.setattr(ConversationDataset, "at", lambda *_, **__: empty)
        run(cfg)
