"""Supervised fine-tuning: rows of the dataset -> one weighted negative log-likelihood -> update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oxrl.data.batching import pad_rows, to_inputs
from oxrl.engines.train import TrainEngine
from oxrl.errors import required
from oxrl.functional.masks import LossAndMetrics
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.weights import token_mean
from oxrl.recipes.offline_loop import Learner, Memory, Stepped
from oxrl.recipes.step import apply_step
from oxrl.types import Example, Images, LossFn, Metrics, Output, SupervisedBatch

# Of logprobs, targets and loss weights.
TokenLoss = Callable[[Tensor, Tensor, Tensor], LossAndMetrics]
WANT = frozenset({"logprobs"})


@dataclass(kw_only=True)
class SupervisedLearner(Learner[Example]):
    """A model that imitates given answers.

    pack_tokens: most tokens of a packed row; None: one example per row. generated: evaluates its
    own answers; None: only given ones are looked at. loss: what an update minimises.
    nll: the metric that is the mean negative log-likelihood.
    """

    pack_tokens: int | None
    generated: Callable[[], Metrics] | None
    loss: LossFn
    nll: str

    def update(self, units: list[Example], step: int, memory: Memory) -> Stepped:
        batch = to_supervised_batch(
            units, self.pad_id, pack_tokens=self.pack_tokens, images=self.images
        )
        targets = batch.inputs.response_mask
        tokens = float(batch.inputs.attention_mask.sum())
        metrics = {
            "data/tokens": float(targets.sum()),
            "data/rows": float(len(units)),
            "data/empty_rows": float((~targets.any(1)).sum()),
            "data/padding_frac": 1.0 - float(batch.inputs.attention_mask.float().mean()),
            "data/empty_steps": float(not targets.any()),
        }
        if not targets.any():
            return metrics | self.engine.skip_step(), tokens
        metrics |= apply_step(self.engine, self.session, batch, self.loss, WANT, step=step)
        metrics["policy/perplexity"] = perplexity(metrics.get(self.nll, math.nan))
        return metrics, tokens

    def evaluate(self, batches: Iterable[list[Example]]) -> Metrics:
        found = evaluate_loss(self.engine, batches, self.pad_id, images=self.images)
        if self.generated is not None:
            found |= self.generated()
        return found


def loss_fn(
    output: Output, batch: SupervisedBatch, *, of_tokens: TokenLoss = supervised_loss
) -> LossAndMetrics:
    """The negative log-likelihood of a batch, or another loss of its tokens."""
    logprobs = required(output.logprobs, "model output")
    return of_tokens(logprobs, batch.inputs.response_mask, batch.loss_weights)


def to_supervised_batch(
    examples: list[Example],
    pad_id: int,
    *,
    pack_tokens: int | None = None,
    images: Images = None,
) -> SupervisedBatch:
    """Pad examples, or pack them into rows; the loss is the mean over all trained tokens.

    Packed examples do not see each other: their positions start again at 0, which is what tells the
    model's attention where one ends and the next begins.

    Args:
        pack_tokens: most tokens of a packed row; None: one example per row.
        images: those of the examples; None: they have none.
    """
    packs = [[example] for example in examples]
    if pack_tokens is not None:
        packs = pack(examples, pack_tokens)
    positions = [[at for one in row for at in range(len(one.token_ids))] for row in packs]
    inputs = to_inputs([_joined(row) for row in packs], pad_id, images)
    if pack_tokens is not None:
        inputs = replace(inputs, position_ids=pad_rows(positions, 0, torch.int64))
    return SupervisedBatch(inputs=inputs, loss_weights=token_mean(inputs.response_mask))


def _joined(row: Sequence[Example]) -> Example:
    """Return examples as one, in which the first token of each is not trained: there is nothing
    before it to be predicted from.
    """
    return Example(
        uid=" + ".join(example.uid for example in row),
        token_ids=tuple(token for example in row for token in example.token_ids),
        trained=tuple(on and at > 0 for example in row for at, on in enumerate(example.trained)),
        images=tuple(name for example in row for name in example.images),
    )


def pack(examples: Sequence[Example], tokens: int) -> list[list[Example]]:
    """Rows of whole examples by best-fit decreasing.

    The longest example comes first, each goes into the fullest row that still takes it. An example
    longer than `tokens` gets a row of its own.

    Source: arXiv:2404.10830.
    """
    rows: list[list[Example]] = []
    room: list[int] = []
    for example in sorted(examples, key=lambda example: -len(example.token_ids)):
        length = len(example.token_ids)
        fitting = [row for row in range(len(rows)) if room[row] >= length]
        if fitting:
            fullest = min(fitting, key=room.__getitem__)
            rows[fullest].append(example)
            room[fullest] -= length
        else:
            rows.append([example])
            room.append(tokens - length)
    return rows


def evaluate_loss(
    engine: TrainEngine, batches: Iterable[list[Example]], pad_id: int, *, images: Images = None
) -> Metrics:
    """Mean negative log-likelihood per trained token over the whole held-out set.

    Args:
        batches: of its rows, each read at once.
        images: those of the rows; None: they have none.
    """
    total = 0.0
    tokens = 0.0
    for examples in batches:
        inputs = to_supervised_batch(examples, pad_id, images=images).inputs
        logprobs = required(engine.forward(inputs, WANT).logprobs, "model output")
        total -= float(logprobs[inputs.response_mask].double().sum())
        tokens += float(inputs.response_mask.sum())
    loss = total / max(tokens, 1.0)
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/tokens": tokens}


def perplexity(loss: float) -> float:
    """exp(loss), infinity instead of an overflow."""
    return math.exp(loss) if loss < 700 else math.inf
