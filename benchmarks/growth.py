"""How the time and the memory of a step grow, beside how the model's own work grows.

    OMP_NUM_THREADS=1 python benchmarks/growth.py [--rounds 2]

Prompts, samples of a prompt, tokens of a response and width of the model are doubled twice, one at
a time; rollout (`LocalSampler`) and update (`LocalTrainer`, prompts read once, one micro-batch,
AdamW) of every size in turns, in processor seconds of one thread. Memory is the most that an update
needs above what was resident before. A slope is that of the logarithms, by least squares: 1 is
linear. The model's are those of the least time of a rollout on this machine (operations, weights
and cache read for every token), of an update's operations, and of activations and gradients. What
is below costs less than it might: passes that were too small to fill the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.data.batching import to_token_batch
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.recipes.compute_accounting import FORWARD_AND_BACKWARD, ModelWork
from oxrl.runs.clock import machine_speed
from oxrl.types import Output, Prompt, Request, Sampling, TokenBatch

LAYERS, HEADS, KV_HEADS = 4, 4, 2
VOCABULARY = 261
PROMPT = 32
DEADLINE_S = 600.0
TIMES = (1, 2, 4)


@dataclass(frozen=True)
class Size:
    """Of a step: prompts, samples of each, tokens of a response, width of the model."""

    prompts: int = 8
    samples: int = 4
    response: int = 32
    width: int = 128

    @property
    def tokens(self) -> int:
        """That the update reads."""
        return self.prompts * (PROMPT + self.samples * self.response)


def model_config(size: Size) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=size.width // HEADS,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def loss(output: Output, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A sum over tokens, each with a weight of its own."""
    weights = (batch.tokens % 7 - 3) * batch.response_mask
    assert output.logprobs is not None
    return (output.logprobs * weights).sum(), {}


def memory_kb(name: str) -> int:
    """A line of what Linux says of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise RuntimeError(f"no {name} in /proc/self/status: this benchmark needs Linux")


class EndlessSampler(LocalSampler):
    """Stops at the limit alone."""

    def _sample_next(self, first: int, logits: Tensor) -> None:
        logits[:, int(self.tokenizer.eos_token_id)] = -torch.inf  # pyright: ignore
        super()._sample_next(first, logits)


class Step:
    """Rollout and update of one size."""

    def __init__(self, size: Size) -> None:
        self.size = size
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(model_config(size)).eval()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        rows = size.prompts * size.samples
        self._sampler = EndlessSampler(model, builtin_tokenizer(), max_rows=rows)
        options = TrainerOptions(lr=0.0, micro_batch_tokens=10**6, share_prefix=True)
        self._trainer = LocalTrainer(model, options)
        draw = torch.Generator().manual_seed(1)
        self._prompts = torch.randint(5, 250, (size.prompts, PROMPT), generator=draw).tolist()
        responses = torch.randint(5, 250, (rows, size.response), generator=draw).tolist()
        tokens = [self._prompts[at // size.samples] + own for at, own in enumerate(responses)]
        trained = [[False] * PROMPT + [True] * size.response for _ in tokens]
        self._batch = to_token_batch(tokens, trained, 0)
        self.rollout_s: list[float] = []
        self.update_s: list[float] = []
        self.memory_mb: list[float] = []

    def run(self, *, count: bool) -> None:
        """One step; whether it counts, or warms up."""
        begun = time.process_time()
        generate(self._sampler, self._requests(), deadline_s=DEADLINE_S)
        sampled = time.process_time() - begun
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_kb("VmRSS")
        begun = time.process_time()
        self._trainer.forward_backward(self._batch, loss, frozenset({"logprobs"}))
        self._trainer.optim_step()
        updated = time.process_time() - begun
        if count:
            self.rollout_s.append(sampled)
            self.update_s.append(updated)
            self.memory_mb.append((memory_kb("VmHWM") - before) / 1024)

    def _requests(self) -> list[Request]:
        sampling = Sampling(max_tokens=self.size.response)
        asked: list[Request] = []
        for at in range(self.size.prompts * self.size.samples):
            group = at // self.size.samples
            ids = tuple(self._prompts[group])
            prompt = Prompt(uid=str(group), messages=(), token_ids=ids)
            request = Request(
                id=str(at), prompt=prompt, sampling=sampling, seed=at, draw=group, sample=at
            )
            asked.append(request)
        return asked

    def work(self) -> tuple[float, float, float]:
        """Least seconds of the rollout; operations of the update; bytes that it needs."""
        size = self.size
        head = VOCABULARY * size.width
        work = ModelWork(
            body=2.0 * (self.parameters - head),
            head=2.0 * head,
            attention=4.0 * LAYERS * size.width,
            weight_bytes=4.0 * self.parameters,
            kv_bytes=8.0 * LAYERS * KV_HEADS * size.width / HEADS,
        )
        rows = size.prompts * size.samples
        prompts = float(work.forward(torch.tensor([PROMPT] * size.prompts)).sum())
        whole = work.forward(
            torch.tensor([PROMPT + size.response] * rows), torch.tensor([size.response] * rows)
        )
        again = work.forward(torch.tensor([PROMPT] * rows))
        forward = prompts + float((whole - again).sum())
        layer = 12 * size.width + 4 * 3 * size.width + 4 * KV_HEADS * size.width // HEADS
        kept = 4.0 * (LAYERS * layer * size.tokens + self.parameters)
        speed = machine_speed(torch.device("cpu"), torch.float32)
        floor = prompts / speed.flops + work.decode_floor(
            torch.tensor([PROMPT] * rows), torch.tensor([size.response] * rows), speed
        )
        return floor, FORWARD_AND_BACKWARD * forward, kept


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Of the logarithms, by least squares."""
    line = statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    )
    return round(line.slope, 2)


def figure(axis: str, values: Sequence[int], steps: Sequence[Step]) -> dict[str, object]:
    """What one axis shows."""
    found: dict[str, object] = {"case": axis, "values": [*values]}
    works = [step.work() for step in steps]
    measured = {
        "rollout": [statistics.median(step.rollout_s) for step in steps],
        "update": [statistics.median(step.update_s) for step in steps],
        "memory": [statistics.median(step.memory_mb) for step in steps],
    }
    for at, (name, costs) in enumerate(measured.items()):
        found[f"{name}_{'mb' if name == 'memory' else 's'}"] = [round(cost, 3) for cost in costs]
        found[f"{name}_slope"] = slope(values, costs)
        found[f"{name}_model"] = slope(values, [work[at] for work in works])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(1)
    usual = Size()
    axes: dict[str, list[Size]] = {
        "prompts": [replace(usual, prompts=usual.prompts * times) for times in TIMES],
        "samples": [replace(usual, samples=usual.samples * times) for times in TIMES],
        "response": [replace(usual, response=usual.response * times) for times in TIMES],
        "width": [replace(usual, width=usual.width * times) for times in TIMES],
    }
    steps = {size: Step(size) for sizes in axes.values() for size in sizes}
    for turn in range(given.rounds + 1):
        for step in steps.values():
            step.run(count=turn > 0)
    for axis, sizes in axes.items():
        values = [int(getattr(size, axis)) for size in sizes]
        print(json.dumps(figure(axis, values, [steps[size] for size in sizes])), flush=True)


if __name__ == "__main__":
    main()
