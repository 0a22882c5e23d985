"""Bits in which TRL's GRPOTrainer and its own sampler, transformers' `generate`, differ.

    python benchmarks/trl_mismatch.py [--model builtin:small] [--tokens 10000] [--threads 1]
    [--micro-batch-rows 64 8]

Needs the `bench` extra. What the sampler says of a token comes from the logits that it was sampled
from, by the function that the trainer uses; what the trainer says is what it computes for its loss.
Random models have larger weights, as in `same_numbers.py`, where the same is asked of oxRL. Printed
for each micro-batch: tokens that differ in any bit, by how much, and processor seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["ACCELERATE_USE_CPU"] = "true"
warnings.filterwarnings("ignore")

import problem  # noqa: E402
import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from same_numbers import bits, model_of  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import selective_log_softmax  # noqa: E402

from oxrl.models.load import load_tokenizer  # noqa: E402

SAMPLES = 4
LONGEST = 60
Row = tuple[int, ...]


class Sampled:
    """What `generate` says of the tokens that it samples, by the row's tokens."""

    def __init__(self, model: Any, end: int) -> None:
        self._generate = model.generate
        self._end = end
        self.said: dict[Row, Tensor] = {}

    def __call__(self, *args: Any, **given: Any) -> Any:
        found = self._generate(*args, **given, return_dict_in_generate=True, output_logits=True)
        logits = torch.stack(found.logits, dim=1)
        begin = found.sequences.shape[1] - logits.shape[1]
        logprobs = selective_log_softmax(logits, found.sequences[:, begin:])
        for row, real, own in zip(found.sequences, given["attention_mask"], logprobs, strict=True):
            prompt = row[:begin][real.bool()].tolist()
            response = row[begin:].tolist()
            if self._end in response:
                response = response[: response.index(self._end) + 1]
            self.said[(*prompt, *response)] = own[: len(response)]
        return found.sequences


class Watched(GRPOTrainer):
    """Compares what it computes with what was said when a token was sampled."""

    sampled: Sampled
    tokens = 0
    differ = 0
    most = 0.0

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        **given: Any,
    ) -> Any:
        found = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, **given
        )
        real = attention_mask.bool()
        for row, here, own in zip(input_ids, real, found[0].detach(), strict=True):
            said = self.sampled.said[tuple(row[here].tolist())]
            mine = own[here[-logits_to_keep:]]
            self.tokens += len(said)
            self.differ += int((bits(mine) != bits(said)).sum())
            self.most = max(self.most, float((mine - said).abs().max()))
        return found


class Seconds(TrainerCallback):
    """Processor seconds of every step."""

    def __init__(self) -> None:
        self.taken: list[float] = []
        self._begin = 0.0

    def on_step_begin(self, *args: Any, **given: Any) -> None:
        self._begin = time.process_time()

    def on_step_end(self, *args: Any, **given: Any) -> None:
        self.taken.append(time.process_time() - self._begin)


def reward(completions: list[Any], **given: Any) -> list[float]:
    return [problem.score_text(completion[0]["content"]) for completion in completions]


def measured(folder: Path, asked: argparse.Namespace, micro: int) -> dict[str, Any]:
    """Steps of TRL at a learning rate of 0, until there are tokens enough."""
    rows = asked.rows
    config = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rows // micro,
        num_generations=SAMPLES,
        max_completion_length=LONGEST,
        learning_rate=0.0,
        max_steps=-(-asked.tokens // (rows * LONGEST * 2 // 3)),
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        fp16=False,
        use_vllm=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    sampled = Sampled(model, int(tokenizer.eos_token_id))
    model.generate = sampled
    seconds = Seconds()
    questions = [{"role": "user", "content": text} for text in problem.questions()]
    trainer = Watched(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [question]} for question in questions]),
        processing_class=tokenizer,
        callbacks=[seconds],
    )
    trainer.sampled = sampled
    trainer.train()
    return {
        "figure": "TRL, tokens that differ from its sampler",
        "model": asked.model,
        "micro_batch_rows": micro,
        "tokens": trainer.tokens,
        "differ": trainer.differ,
        "most": trainer.most,
        "step_cpu_s": round(median(seconds.taken[1:] or seconds.taken), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="builtin:small")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--micro-batch-rows", type=int, nargs="+", default=[64, 8])
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model_of(asked.model, exact=False).save_pretrained(folder / "model")
        load_tokenizer(asked.model).save_pretrained(folder / "model")
        for micro in asked.micro_batch_rows:
            found = measured(folder, asked, micro)
            share = found["differ"] / found["tokens"]
            print(
                f"{found['differ']} of {found['tokens']} tokens differ ({share:.1%}), by up to "
                f"{found['most']:.2g}; a step of {asked.rows} rows, {micro} at a time, takes "
                f"{found['step_cpu_s']} s"
            )
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
