"""Settings that are allowed and do less than they seem to."""

from __future__ import annotations

from collections.abc import Iterator

from oxrl.config.reads import row_fields
from oxrl.config.schema import Config
from oxrl.tables.cells import CRITIC
from oxrl.tables.numbers import CRITIC_WARMUP_STEPS, KL_COEFF, REFERENCE_SYNC_STEPS


def notices(cfg: Config) -> Iterator[str]:
    """Settings that are allowed and do less than they seem to."""
    train = cfg.train
    row = train.row
    steps = cfg.run.steps
    if train.kl is not None and row.kl != "none" and train.value(KL_COEFF) == 0:
        yield f"train.kl = {row.kl} has no effect while train.kl_coeff is 0"
    if train.warmup_steps >= steps:
        warmup = f"train.warmup_steps = {train.warmup_steps}"
        yield f"{warmup} is not over when the run ends at run.steps = {steps}"
    if row.has(CRITIC) and train.value(CRITIC_WARMUP_STEPS) >= steps:
        warmup = f"train.critic_warmup_steps = {train.value(CRITIC_WARMUP_STEPS)}"
        yield f"{warmup} leaves none of {steps} steps to the policy"
    if "train.reference_sync_steps" in row_fields(row):
        every = train.value(REFERENCE_SYNC_STEPS)
        if every > steps:
            yield f"train.reference_sync_steps = {every} never happens in run.steps = {steps}"
    if train.lr == 0:
        yield "train.lr = 0 trains nothing: the policy stays what it is"
    if cfg.data.eval in cfg.data.train_files:
        yield f"data.eval is trained on: {cfg.data.eval} is in data.train too"
    if cfg.run.device == "cpu" and cfg.model.dtype == "bfloat16":
        yield "model.dtype = bfloat16 on run.device = cpu is slower and less exact than float32"
