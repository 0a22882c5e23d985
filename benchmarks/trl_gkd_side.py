"""The other side of `teacher_step.py`: whole on-policy steps of TRL's GKDTrainer, one per line read
from standard input.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
warnings.filterwarnings("ignore")

import problem  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl.experimental.gkd import GKDConfig, GKDTrainer  # noqa: E402


class Gate(TrainerCallback):
    """Waits for the parent before every step, and reports the step's time after it."""

    def __init__(self, channel: problem.Channel) -> None:
        self.channel = channel

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.channel.send(ready=True)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.channel.wait()
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        seconds, cpu = time.perf_counter() - self.start, time.process_time() - self.cpu
        self.channel.send(seconds=seconds, cpu=cpu)


def main() -> None:
    channel = problem.Channel()
    folder, given = Path(sys.argv[1]), problem.read_settings(Path(sys.argv[1]) / "trl.json")
    torch.set_num_threads(given["trl"]["threads"])
    logging.disable(logging.WARNING)
    rows, micro = given["trl"]["rows"], given["trl"]["micro_batch_rows"]
    tokens = given["trl"]["tokens"]
    config = GKDConfig(
        output_dir=str(folder / "trl_out"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        learning_rate=problem.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=100000,
        lmbda=1.0,
        beta=1.0,
        temperature=1.0,
        max_new_tokens=tokens,
        max_length=256,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1000000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    name = given["trl"]["model"]
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(given["trl"]["teacher"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    # Every response has as many tokens: none ends early.
    model.generation_config.eos_token_id = None
    rows_of_data = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "0"},
            ]
        }
        for text in problem.questions()
    ]
    trainer = GKDTrainer(
        model=model,
        teacher_model=teacher,
        args=config,
        train_dataset=Dataset.from_list(rows_of_data),
        processing_class=tokenizer,
        callbacks=[Gate(channel)],
    )
    trainer.generation_config.eos_token_id = None
    trainer.train()


if __name__ == "__main__":
    main()
