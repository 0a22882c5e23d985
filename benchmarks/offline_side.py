"""One side of `offline_step.py`: whole SFT or DPO steps, one per line read from standard input.

offline_side.py oxrl|trl FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import problem

CONFIG = """
run: {{name: side, dir: {folder}/run, steps: {steps}, device: cpu, threads: {threads},
      checkpoint_every: 0, mlflow: false}}
model: {{name: {folder}/model}}
data: {{train: {folder}/rows.jsonl, rows_per_step: {rows}{packing}}}
train: {{alg_name: {kind}, lr: {lr}, micro_batch_tokens: {budget}}}
"""


def oxrl_side(channel: problem.Channel, folder: Path, given: dict[str, Any]) -> None:
    """The steps of the recipe, as `oxrl train` takes them."""
    from oxrl_side import GatedSession

    from oxrl.assembly.opening import session_options
    from oxrl.commands.loop import begin
    from oxrl.config import load_config

    settings = given.pop("settings")
    pack = settings.get("pack_tokens")
    packing = "" if pack is None else f", pack_tokens: {pack}"
    budget = settings["micro_batch_tokens"]
    text = CONFIG.format(
        folder=folder, lr=problem.LEARNING_RATE, packing=packing, budget=budget, **given
    )
    (folder / "config.yaml").write_text(text)
    GatedSession.channel = channel
    cfg = load_config(folder / "config.yaml")
    with GatedSession(session_options(cfg)) as session:
        begin(cfg, session)


def conversations(folder: Path) -> list[dict[str, Any]]:
    """The rows as TRL wants them."""
    told: list[dict[str, Any]] = []
    for line in (folder / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        roles = {name: "user" if name == "prompt" else "assistant" for name in row}
        told.append({name: [{"role": roles[name], "content": row[name]}] for name in row})
    return told


def trl_side(channel: problem.Channel, folder: Path, given: dict[str, Any]) -> None:
    """The steps of TRL's trainer."""
    import logging
    import warnings

    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # pyright: ignore

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(given["threads"])

    class Gate(TrainerCallback):
        """Waits for the parent before every step and reports its time after it."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            channel.send(ready=True)

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            channel.wait()
            self.start, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds = time.perf_counter() - self.start
            channel.send(seconds=seconds, cpu=time.process_time() - self.cpu)

    settings = given["settings"]
    rows = settings.pop("rows")
    shared: dict[str, Any] = {
        **settings,
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": given["rows"] // rows,
        "max_steps": given["steps"],
        "learning_rate": problem.LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
    }
    if given["kind"] == "sft":
        trainer_class, config = SFTTrainer, SFTConfig(**shared)
    else:
        trainer_class, config = DPOTrainer, DPOConfig(**shared, precompute_ref_log_probs=True)
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(conversations(folder)),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Gate()],
    )
    trainer.train()


def main() -> None:
    channel = problem.Channel()
    side, folder = sys.argv[1], Path(sys.argv[2])
    given = json.loads((folder / "given.json").read_text())
    {"oxrl": oxrl_side, "trl": trl_side}[side](channel, folder, given)


if __name__ == "__main__":
    main()
