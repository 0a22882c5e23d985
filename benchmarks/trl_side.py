"""The other side of `rl_step.py`: whole steps of TRL's GRPOTrainer, one per line read from standard
input.
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
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class ForcedLengths(LogitsProcessor):
    """The stop token is impossible before a response's length and, in `heavy`, certain at it."""

    def __init__(self, lengths: list[int], end: int, *, force_stop: bool) -> None:
        self._lengths = torch.tensor(lengths)
        self._end = end
        self._force_stop = force_stop
        self._drawn = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._drawn += 1
        scores[:, self._end] = -torch.inf
        if self._force_stop:
            last = self._lengths == self._drawn
            scores[last] = -torch.inf
            scores[last, self._end] = 0.0
        return scores


class TimedTrainer(GRPOTrainer):
    phases: dict[str, float]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.phases["generation"] = self.phases.get("generation", 0.0) + time.perf_counter() - start
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        total = time.perf_counter() - start
        self.phases["scoring"] = self.phases.get("scoring", 0.0) + total - self.phases["generation"]
        self.tokens = int(result["completion_mask"].sum())
        return result


class Gate(TrainerCallback):
    """Waits for the parent before every step and reports the step's time and phases after it."""

    def __init__(self, channel: problem.Channel) -> None:
        self.channel = channel
        self.trainer: TimedTrainer | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.channel.send(ready=True)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.channel.wait()
        self.trainer.phases = {}
        self.start, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        seconds, cpu = time.perf_counter() - self.start, time.process_time() - self.cpu
        phases = {**self.trainer.phases, "update": seconds - sum(self.trainer.phases.values())}
        self.channel.send(seconds=seconds, cpu=cpu, phases=phases, tokens=self.trainer.tokens)


def reward(completions: list[Any], **kwargs: Any) -> list[float]:
    return [problem.score_text(completion[0]["content"]) for completion in completions]


def main() -> None:
    channel = problem.Channel()
    folder, given = Path(sys.argv[1]), problem.read_settings(Path(sys.argv[1]) / "trl.json")
    torch.set_num_threads(given["trl"]["threads"])
    logging.disable(logging.WARNING)
    chosen = given["setting"]
    rows, micro = chosen["prompts"] * chosen["samples"], given["trl"]["micro_batch_rows"]
    config = GRPOConfig(
        output_dir=str(folder / "trl_out"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=chosen["samples"],
        max_completion_length=chosen["cap"],
        learning_rate=problem.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_steps=100000,
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        use_vllm=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(given["trl"]["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(given["trl"]["model"], padding_side="left")
    generate = model.generate

    def forced(*args: Any, **kwargs: Any) -> Any:
        processor = ForcedLengths(
            chosen["lengths"], int(tokenizer.eos_token_id), force_stop=chosen["force_stop"]
        )
        return generate(*args, **kwargs, logits_processor=[processor])

    model.generate = forced
    gate = Gate(channel)
    asked = problem.questions(chosen["examples"])
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in asked])
    trainer = TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[gate],
    )
    gate.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    main()
