"""Supervised fine-tuning: rows of the dataset -> one weighted negative log-likelihood -> update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oxrl.config import Config
from oxrl.data.batching import pad_rows, to_token_batch
from oxrl.data.conversations import ConversationDataset, Example
from oxrl.engines.train.base import TrainEngine
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.weights import token_mean
from oxrl.recipes.build import build_tokenizer, build_trainer, load_policy_to_train, row_options
from oxrl.recipes.objective import required
from oxrl.recipes.offline import run_steps
from oxrl.recipes.session import Session
from oxrl.recipes.step import apply_step
from oxrl.types import Metrics, Output, SupervisedBatch

WANT = frozenset({"logprobs"})


def loss_fn(output: Output, batch: SupervisedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(
        required(output.logprobs), batch.inputs.response_mask, batch.loss_weights
    )


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is
    one.
    """
    tokenizer = build_tokenizer(cfg)
    engine = build_trainer(cfg, load_policy_to_train(cfg), tokenizer, ranks=session.ranks)
    pad_id = int(tokenizer.pad_token_id)  # pyright: ignore

    def rows(path: str, held_out: bool) -> ConversationDataset:
        return ConversationDataset.load(path, tokenizer, row_options(cfg, held_out))

    def step_on(
        examples: list[Example], step: int, memory: dict[str, Any]
    ) -> tuple[Metrics, float]:
        batch = to_supervised_batch(examples, pad_id, pack_tokens=cfg.data.pack_tokens)
        mask, real = batch.inputs.response_mask, batch.inputs.attention_mask
        metrics: Metrics = {
            "data/tokens": float(mask.sum()),
            "data/rows": float(len(examples)),
            "data/empty_rows": float((~mask.any(1)).sum()),
            "data/padding_frac": 1.0 - float(real.float().mean()),
            "data/empty_steps": float(not mask.any()),
        }
        if not mask.any():
            return metrics | engine.skip_step(), float(real.sum())
        metrics |= apply_step(engine, session, batch, loss_fn, WANT, step=step)
        return metrics | {"policy/perplexity": perplexity(metrics["update/loss"])}, float(
            real.sum()
        )

    def evaluate(held_out: ConversationDataset) -> Metrics:
        return evaluate_loss(engine, held_out, pad_id, rows_per_batch=cfg.data.rows_per_step)

    run_steps(
        cfg, session, {".": engine}, rows, step_on, evaluate, best="eval/loss", lower_is_better=True
    )


def to_supervised_batch(
    examples: list[Example], pad_id: int, *, pack_tokens: int | None = None
) -> SupervisedBatch:
    """Pad examples, or pack them into rows of at most `pack_tokens`; the loss is the mean over all
    trained tokens.

    Packed examples do not see each other: their positions start again at 0, which is what tells the
    model's attention where one ends and the next begins.
    """
    packs = (
        [[example] for example in examples] if pack_tokens is None else pack(examples, pack_tokens)
    )
    inputs = to_token_batch(
        [[token for example in row for token in example.token_ids] for row in packs],
        # The first token of an example has nothing before it to be predicted from.
        [
            [on and at > 0 for example in row for at, on in enumerate(example.trained)]
            for row in packs
        ],
        pad_id,
    )
    if pack_tokens is not None:
        positions = [
            [at for example in row for at in range(len(example.token_ids))] for row in packs
        ]
        inputs = dataclasses.replace(inputs, position_ids=pad_rows(positions, 0, torch.int64))
    return SupervisedBatch(inputs=inputs, loss_weights=token_mean(inputs.response_mask))


def pack(examples: Sequence[Example], tokens: int) -> list[list[Example]]:
    """Rows of whole examples by best-fit decreasing: the longest first, each into the fullest row
    that still takes it.

    An example longer than `tokens` gets a row of its own. Source: arXiv:2404.10830.
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: -len(example.token_ids)):
        length = len(example.token_ids)
        row = min(
            (r for r in range(len(rows)) if room[r] >= length), key=room.__getitem__, default=None
        )
        if row is None:
            rows.append([example])
            room.append(tokens - length)
        else:
            rows[row].append(example)
            room[row] -= length
    return rows


def evaluate_loss(
    engine: TrainEngine, data: ConversationDataset, pad_id: int, *, rows_per_batch: int
) -> Metrics:
    """Mean negative log-likelihood per trained token over the whole held-out set."""
    total, tokens = 0.0, 0.0
    for examples in data.batches(rows_per_batch):
        inputs = to_supervised_batch(examples, pad_id).inputs
        logprobs = required(engine.forward(inputs, WANT).logprobs)
        total -= float(logprobs[inputs.response_mask].double().sum())
        tokens += float(inputs.response_mask.sum())
    loss = total / max(tokens, 1.0)
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/tokens": tokens}


def perplexity(loss: float) -> float:
    """exp(loss), infinity instead of an overflow."""
    return math.exp(loss) if loss < 700 else math.inf
