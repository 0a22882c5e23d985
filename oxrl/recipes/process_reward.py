"""Process reward models: judged steps -> a score after each step -> update of backbone and head."""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.config import Config
from oxrl.data.steps import StepDataset, Steps, to_step_batch
from oxrl.functional.reward_model_losses import process_reward
from oxrl.recipes.build import build_tokenizer, build_trainer, choose_device, load_critic_to_train, row_options
from oxrl.recipes.offline import apply_step, run_steps
from oxrl.recipes.session import Progress, Session
from oxrl.types import Metrics, Output, StepBatch

WANT = frozenset({"values"})


def loss_fn(output: Output, batch: StepBatch) -> tuple[Tensor, dict[str, Tensor]]:
    if output.values is None:
        raise ValueError("the engine did not return values")
    return process_reward(output.values, batch.labels.to(output.values.dtype), batch.loss_weights)


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is one."""
    tokenizer, model = build_tokenizer(cfg), load_critic_to_train(cfg, choose_device(cfg))
    model.kind = "process"
    engine = build_trainer(cfg, model, tokenizer, lr=cfg.train.lr, temperature=1.0, ranks=session.ranks)
    pad_id = int(tokenizer.pad_token_id)  # pyright: ignore

    def rows(path: str, held_out: bool) -> StepDataset:
        return StepDataset.load(path, tokenizer, **row_options(cfg, held_out))

    def step_on(units: list[Steps], step: int, memory: Progress) -> tuple[Metrics, float]:
        batch = to_step_batch(units, pad_id)
        metrics = apply_step(engine, session, batch, loss_fn, WANT, step=step)
        return metrics | {"data/rows": float(len(units))}, float(batch.inputs.attention_mask.sum())

    def evaluate(held_out: StepDataset) -> Metrics:
        units, found = held_out.in_order(), list[Tensor]()
        for start in range(0, len(units), cfg.data.rows_per_step):
            batch = to_step_batch(units[start : start + cfg.data.rows_per_step], pad_id)
            values, mask = engine.forward(batch.inputs, WANT).values, batch.inputs.response_mask
            assert values is not None
            found.append(torch.stack((values[mask] > 0, batch.labels[mask] > 0.5)))
        judged, labels = torch.cat(found, 1)
        accuracy, share = float((judged == labels).double().mean()), float(labels.double().mean())
        return {"eval/accuracy": accuracy, "eval/majority": max(share, 1 - share)}

    run_steps(cfg, session, {".": engine}, rows, step_on, evaluate, best="eval/accuracy", lower_is_better=False)
