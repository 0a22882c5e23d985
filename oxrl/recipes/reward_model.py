"""Reward models: pairs (Bradley-Terry) or judged steps -> a score at the end or after each step ->
update.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from oxrl.config import Config
from oxrl.data.preferences import PreferenceDataset, to_preference_batch
from oxrl.data.steps import StepDataset, to_step_batch
from oxrl.functional.reward_model_losses import bradley_terry, process_reward
from oxrl.recipes.build import build_tokenizer, build_trainer, load_critic_to_train, row_options
from oxrl.recipes.objective import required
from oxrl.recipes.offline import run_steps
from oxrl.recipes.session import Session
from oxrl.recipes.step import apply_step
from oxrl.types import Metrics, Output, PreferenceBatch, StepBatch

WANT = frozenset({"values"})


def pair_loss(
    output: Output, batch: PreferenceBatch, *, center_coeff: float
) -> tuple[Tensor, dict[str, Tensor]]:
    scores, margins = required(output.bootstrap), batch.extras["margins"]
    return bradley_terry(
        scores[0::2], scores[1::2], batch.loss_weights, margins, center_coeff=center_coeff
    )


def step_loss(output: Output, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
    values = required(output.values)
    return process_reward(values, batch.labels.to(values.dtype), batch.loss_weights)


def verdicts(output: Output, batch: PreferenceBatch | StepBatch) -> Tensor:
    """[1, pairs]: by how much the better one scores higher; or [2, steps]: whether each is judged
    right, and is.
    """
    if isinstance(batch, StepBatch):
        mask = batch.inputs.response_mask
        return torch.stack((required(output.values)[mask] > 0, batch.labels[mask] > 0.5))
    scores = required(output.bootstrap)
    return (scores[0::2] - scores[1::2])[None]


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is
    one.
    """
    tokenizer, model = build_tokenizer(cfg), load_critic_to_train(cfg)
    if cfg.train.alg_name == "process_reward_model":
        model.kind, dataset, to_batch, loss_fn = "process", StepDataset, to_step_batch, step_loss
    else:
        model.kind, dataset, to_batch = "outcome", PreferenceDataset, to_preference_batch
        loss_fn = partial(pair_loss, center_coeff=cfg.train.center_coeff)
    engine = build_trainer(cfg, model, tokenizer, ranks=session.ranks)
    pad_id = int(tokenizer.pad_token_id)  # pyright: ignore

    def rows(path: str, held_out: bool) -> Any:
        return dataset.load(path, tokenizer, row_options(cfg, held_out))

    def step_on(units: list[Any], step: int, memory: dict[str, Any]) -> tuple[Metrics, float]:
        batch = to_batch(units, pad_id)
        metrics = apply_step(engine, session, batch, loss_fn, WANT, step=step)
        return metrics | {"data/rows": float(len(units))}, float(batch.inputs.attention_mask.sum())

    def evaluate(held_out: Any) -> Metrics:
        found: list[Tensor] = []
        for units in held_out.batches(cfg.data.rows_per_step):
            batch = to_batch(units, pad_id)
            found.append(verdicts(engine.forward(batch.inputs, WANT), batch))
        first, *labels = torch.cat(found, 1)
        if not labels:
            return {
                "eval/accuracy": float(((first.sign() + 1) / 2).mean()),
                "eval/margin": float(first.mean()),
            }
        share, right = float(labels[0].double().mean()), (first == labels[0]).double()
        return {"eval/accuracy": float(right.mean()), "eval/majority": max(share, 1 - share)}

    run_steps(
        cfg,
        session,
        {".": engine},
        rows,
        step_on,
        evaluate,
        best="eval/accuracy",
        lower_is_better=False,
    )
