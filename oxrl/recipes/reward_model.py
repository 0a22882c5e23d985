"""Bradley-Terry reward models: pairs -> a score per completion, at its last token -> update of backbone and head."""

from __future__ import annotations

import torch
from torch import Tensor

from oxrl.config import Config
from oxrl.data.preferences import Judged, PreferenceDataset, to_preference_batch
from oxrl.functional.reward_model_losses import bradley_terry
from oxrl.recipes.build import build_tokenizer, build_trainer, choose_device, load_critic_to_train, row_options
from oxrl.recipes.offline import apply_step, run_steps
from oxrl.recipes.session import Progress, Session
from oxrl.types import Metrics, Output, PreferenceBatch

WANT = frozenset({"values"})


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is one."""
    device, tokenizer = choose_device(cfg), build_tokenizer(cfg)
    engine = build_trainer(
        cfg, load_critic_to_train(cfg, device), tokenizer, lr=cfg.train.lr, temperature=1.0, ranks=session.ranks
    )
    pad_id = int(tokenizer.pad_token_id)  # pyright: ignore

    def rows(path: str, held_out: bool) -> PreferenceDataset:
        return PreferenceDataset.load(path, tokenizer, **row_options(cfg, held_out))

    def loss_fn(output: Output, batch: PreferenceBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if output.bootstrap is None:
            raise ValueError("the engine did not return values")
        scores = output.bootstrap
        return bradley_terry(
            scores[0::2], scores[1::2], batch.loss_weights, batch.extras["margins"], center_coeff=cfg.train.center_coeff
        )

    def step_on(units: list[Judged], step: int, memory: Progress) -> tuple[Metrics, float]:
        batch = to_preference_batch(units, pad_id)
        metrics = apply_step(engine, session, batch, loss_fn, WANT, step=step)
        return metrics | {"data/rows": float(len(units))}, float(batch.inputs.attention_mask.sum())

    def evaluate(held_out: PreferenceDataset) -> Metrics:
        gaps: list[Tensor] = []
        units = held_out.in_order()
        for start in range(0, len(units), cfg.data.rows_per_step):
            batch = to_preference_batch(units[start : start + cfg.data.rows_per_step], pad_id)
            scores = engine.forward(batch.inputs, WANT).bootstrap
            assert scores is not None
            gaps.append(scores[0::2] - scores[1::2])
        gap = torch.cat(gaps)
        return {"eval/accuracy": float(((gap.sign() + 1) / 2).mean()), "eval/margin": float(gap.mean())}

    run_steps(cfg, session, {".": engine}, rows, step_on, evaluate, best="eval/accuracy", lower_is_better=False)
