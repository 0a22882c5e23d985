"""Rows per second of every built-in reward.

    python benchmarks/rewards.py [--workers 2] [--seconds 5] [--only math,exact]

Prints a table: each reward on a response of a usual kind, as runs call it: through its processes,
with groups of eight. `code` runs at the level `--sandbox`.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oxrl.rewards.pool_choice import reward_pool
from oxrl.tables.user_code import REWARD
from oxrl.types import Completion, Prompt, Segment

GROUP = 8
GROUPS = 16
WORDS = "First we add the two numbers, then we carry the one, and so the sum is what was asked. "
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@dataclass(frozen=True)
class Case:
    """What a reward is tried on, and the score that it is to give."""

    response: str
    answer: Any = None
    score: float | None = 1.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


def cases(sandbox: str) -> dict[str, Case]:
    """A case for each reward that this machine can run."""
    program = "```python\ndef add(a, b):\n    return a + b\n```"
    tests = {"tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"], "setup": ""}
    kinds = {"instructions": ["punctuation:no_comma"], "kwargs": [{}]}
    found = {
        "exact": Case("42", "42"),
        "math": Case(8 * WORDS + "The answer is \\boxed{\\frac{3}{4}}.", "0.75"),
        "code": Case(program, tests, options={"sandbox": sandbox}),
        "ifeval": Case(WORDS.replace(",", ""), kinds),
        "toolcall": Case(CALL, [{"name": "weather", "arguments": {"city": "Paris"}}]),
        "choice": Case(8 * WORDS + "The answer is (B).", "B"),
        "format": Case(f"<think>{8 * WORDS}</think><answer>42</answer>"),
        "repetition": Case(8 * WORDS, score=None),
        "cosine": Case(8 * WORDS + "The answer is \\boxed{42}.", "42", score=None),
    }
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError:
        return found
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    answered = f"<answer>{entry['answer']}</answer>"
    found["reasoning-gym"] = Case(answered, metadata={"entry": entry})
    return found


def rate(name: str, case: Case, options: argparse.Namespace) -> tuple[float, float]:
    """Responses per second, and the share that got the score that was expected."""
    segment = Segment(token_ids=(1,) * 64, logprobs=(0.0,) * 64, versions=(0,) * 64)
    completion = Completion(segments=(segment,), text=case.response, finish_reason="stop")
    groups: list[tuple[Prompt, list[Completion]]] = []
    for index in range(GROUPS):
        prompt = Prompt(
            uid=str(index),
            messages=({"role": "user", "content": "?"},),
            token_ids=(1,),
            answer=case.answer,
            metadata=case.metadata,
        )
        groups.append((prompt, [completion] * GROUP))
    pool = reward_pool(name, workers=options.workers, timeout_s=60, options=case.options)
    pool.score(groups[: options.workers])
    count = 0
    right = 0
    start = time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        scores = [score for group in pool.score(groups) for score in group]
        count += len(scores)
        for score in scores:
            right += score.value == case.score if case.score is not None else score.status == "ok"
    seconds = time.perf_counter() - start
    pool.close()
    return count / seconds, right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--sandbox", default="strict", choices=("strict", "basic", "off"))
    parser.add_argument("--only", default="", help="names, with commas between them")
    options = parser.parse_args()
    wanted = [name for name in options.only.split(",") if name] or list(REWARD.table)
    known = cases(options.sandbox)
    print(f"{options.workers} workers, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| reward | rows/s | as expected |\n|---|---|---|")
    for name in wanted:
        if name not in known:
            print(f"| `{name}` | - | not installed, or no case here |")
            continue
        per_second, share = rate(name, known[name], options)
        print(f"| `{name}` | {per_second:,.0f} | {100 * share:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
