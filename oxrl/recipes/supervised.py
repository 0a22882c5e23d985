"""Supervised fine-tuning: rows of the dataset -> one weighted negative log-likelihood -> update."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from oxrl.config import Config
from oxrl.data.batching import to_token_batch
from oxrl.data.conversations import ConversationDataset, Example
from oxrl.engines.base import TrainEngine
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.weights import token_mean
from oxrl.recipes.build import build_tokenizer, build_trainer, choose_device, load_model
from oxrl.recipes.session import Session, all_finite
from oxrl.types import Metrics, Output, SupervisedBatch

WANT = frozenset({"logprobs"})


def loss_fn(output: Output, batch: SupervisedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    if output.logprobs is None:
        raise ValueError("the engine did not return logprobs")
    return supervised_loss(output.logprobs, batch.inputs.response_mask, batch.loss_weights)


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is one."""
    device = choose_device(cfg)
    tokenizer = build_tokenizer(cfg)
    engine = build_trainer(cfg, load_model(cfg, device), tokenizer, lr=cfg.train.lr, temperature=1.0)

    def rows(path: str, limit: int | None = None) -> ConversationDataset:
        return ConversationDataset.load(
            Path(path), tokenizer, max_tokens=cfg.model.max_length, overlong=cfg.data.overlong, limit=limit
        )

    data = rows(cfg.data.train)
    held_out = rows(cfg.data.eval, cfg.data.eval_rows) if cfg.data.eval else None
    pad_id = int(tokenizer.pad_token_id)  # pyright: ignore
    progress = session.restore({".": engine}, {"step": 0, "draw": 0})
    while progress["step"] < cfg.run.steps:
        # The rows of this step are a function of the step and the seed alone.
        start = progress["step"]
        draws = range(progress["draw"], progress["draw"] + cfg.data.rows_per_step)
        batch = to_supervised_batch([data.at(draw, seed=cfg.run.seed) for draw in draws], pad_id)
        with session.phase("time/update_s"):
            metrics = update(engine, session, batch, step=start + 1)
        progress = {"step": start + 1, "draw": progress["draw"] + cfg.data.rows_per_step}
        if held_out is not None and session.eval_due(start, progress["step"]):
            with session.phase("time/eval_s"):
                metrics |= evaluate_loss(engine, held_out, pad_id, rows_per_batch=cfg.data.rows_per_step)
        session.record(progress["step"], metrics, tokens=float(batch.inputs.attention_mask.sum()))
        session.boundary({".": engine}, progress)
    session.finish(progress["step"])


def to_supervised_batch(examples: list[Example], pad_id: int) -> SupervisedBatch:
    """Pad examples; the loss is the mean over all trained tokens of the batch."""
    inputs = to_token_batch(
        [example.token_ids for example in examples], [example.trained for example in examples], pad_id
    )
    return SupervisedBatch(inputs=inputs, loss_weights=token_mean(inputs.response_mask))


def update(engine: TrainEngine, session: Session, batch: SupervisedBatch, *, step: int) -> Metrics:
    """One optimizer step, refused and dumped when something is not finite."""
    mask = batch.inputs.response_mask
    metrics: Metrics = {
        "data/tokens": float(mask.sum()),
        "data/rows": float(mask.any(1).sum()),
        "data/empty_rows": float((~mask.any(1)).sum()),
        "data/padding_frac": 1.0 - float(batch.inputs.attention_mask.float().mean()),
    }
    if not mask.any():
        return metrics | engine.skip_step() | {"data/empty_steps": 1.0}
    output = engine.forward_backward(batch, loss_fn, WANT)
    with torch.no_grad():
        loss, more = loss_fn(output, batch)
    metrics |= {"update/loss": float(loss), "policy/perplexity": perplexity(float(loss)), "data/empty_steps": 0.0}
    metrics |= {name: float(value) for name, value in more.items()}
    finite = bool(loss.isfinite()) and all_finite(output.logprobs, mask=mask)
    metrics |= engine.optim_step() if finite else engine.skip_step()
    if metrics["update/skipped"]:
        session.dump(step, {"tokens": batch.inputs.tokens, "response_mask": mask, "loss_weights": batch.loss_weights})
    return metrics


def evaluate_loss(engine: TrainEngine, data: ConversationDataset, pad_id: int, *, rows_per_batch: int) -> Metrics:
    """Mean negative log-likelihood per trained token over the whole held-out set."""
    total, tokens = 0.0, 0.0
    examples = data.in_order()
    for start in range(0, len(examples), rows_per_batch):
        batch = to_supervised_batch(examples[start : start + rows_per_batch], pad_id)
        logprobs = engine.forward(batch.inputs, WANT).logprobs
        if logprobs is not None:
            total -= float(logprobs[batch.inputs.response_mask].double().sum())
            tokens += float(batch.inputs.response_mask.sum())
    loss = total / max(tokens, 1.0)
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/tokens": tokens}


def perplexity(loss: float) -> float:
    """exp(loss), infinity instead of an overflow."""
    return math.exp(loss) if loss < 700 else math.inf
