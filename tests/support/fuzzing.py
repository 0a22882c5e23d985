"""What is made of seeds: where each test begins, and what it damages."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from oxrl.modelfiles.builtin import builtin_tokenizer
from support.damage import fails

FIRST = int(os.environ.get("OXRL_FUZZ_SEED", "0")) * 1_000_000
TOKENIZER = builtin_tokenizer()
Values = dict[str, dict[str, Any]]
BASES: tuple[Values, ...] = (
    {
        "run": {"name": "f", "steps": 2},
        "model": {"name": "builtin:tiny"},
        "data": {"train": "train.jsonl", "prompts_per_step": 4},
        "reward": {"name": "exact"},
        "rollout": {"n_samples": 2, "max_tokens": 4},
        "train": {"alg_name": "sgrpo"},
    },
    {
        "run": {"name": "f", "steps": 2},
        "model": {"name": "builtin:tiny"},
        "data": {"train": "train.jsonl", "rows_per_step": 2},
        "train": {"alg_name": "sft"},
    },
    # One update per batch of what is another algorithm then, and a bound that bounds nothing.
    *(
        {
            "run": {"name": "f", "steps": 2},
            "model": {"name": "builtin:tiny"},
            "data": {"train": "train.jsonl", "prompts_per_step": 4},
            "reward": {"name": "exact"},
            "rollout": {"n_samples": 2, "max_tokens": 4},
            "train": train,
        }
        for train in ({"alg_name": "fipo"}, {"alg_name": "drpo", "epochs": 2, "drpo_delta": 12.5})
    ),
)


def check(work: Callable[[random.Random], object], seeds: range, *codes: int) -> None:
    failed = [text for seed in seeds if (text := fails(FIRST + seed, work, *codes))]
    assert failed == [], "\n".join(failed[:20])


def chunks(count: int, size: int) -> list[range]:
    return [range(start, start + size) for start in range(0, count, size)]
