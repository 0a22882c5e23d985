"""How many responses a reward model scores in a second: next to the policy, and in a worker.

    python benchmarks/reward_model.py [--model FOLDER] [--groups 16] [--size 8] [--letters 400]

Without a model one with random weights is made. Prints responses per second of each, whether the
scores agree, and what the machine was doing besides.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import LoadOptions, load_critic, load_tokenizer
from oxrl.rewards.model_pool import ModelPool
from oxrl.rewards.reward_model import RewardModel
from oxrl.rewards.workers import RewardPool
from oxrl.types import Completion, Prompt


def made(folder: Path) -> Path:
    """A reward model with random weights."""
    model = load_critic("builtin:small", LoadOptions(seed=0))
    torch.nn.init.normal_(model.value_head.weight)
    tokenizer = load_tokenizer("builtin:small")
    LocalTrainer(model, TrainerOptions(lr=0.0, tokenizer=tokenizer)).save(folder / "model")
    return folder / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--size", type=int, default=8)
    parser.add_argument("--letters", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model or made(Path(temporary))
        messages = ({"role": "user", "content": "1+1"},)
        prompt = Prompt(uid="p", messages=messages, token_ids=(1,))
        texts = [
            "7" * (options.letters * (place + 1) // options.size) for place in range(options.size)
        ]
        members = [Completion(segments=(), text=text, finish_reason="stop") for text in texts]
        groups = [(prompt, members)] * options.groups
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        build = partial(RewardModel, folder, device=device)
        pools = {
            f"next to the policy, on {device}": ModelPool(
                str(folder), build, timeout_s=600, field="reward"
            ),
            "in a worker, on cpu": RewardPool(str(folder), timeout_s=600),
        }
        for name, pool in pools.items():
            pool.score(groups[:1])
            start = time.perf_counter()
            scores = pool.score(groups)
            rate = len(groups) * options.size / (time.perf_counter() - start)
            pool.close()
            print(
                f"{name}: {rate:.0f} responses/s, the first {scores[0][0].value:.4f} "
                f"(load average {os.getloadavg()[0]:.1f})"
            )


if __name__ == "__main__":
    main()
