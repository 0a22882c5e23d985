"""How many HumanEval-size programs the `code` reward judges in a second.

    python benchmarks/code_reward.py [--level strict] [--workers 2] [--seconds 10] [--data FOLDER]

Prints one line per number of workers: programs judged per second, of canonical solutions of
HumanEval with their own tests, and what the machine was doing besides.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from oxrl.rewards.workers import RewardPool
from oxrl.types import Completion, Prompt, Segment
from oxrl_datasets.published import humaneval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", default="strict", choices=("strict", "basic", "off"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    default = os.environ.get("OXRL_TEST_DATA", "../shared/data")
    parser.add_argument("--data", type=Path, default=Path(default) / "humaneval")
    options = parser.parse_args()
    lines = (options.data / "HumanEval.jsonl").read_text().splitlines()
    groups: list[tuple[Prompt, list[Completion]]] = []
    for line in lines:
        for row in humaneval(json.loads(line)):
            prompt = Prompt(uid=row["uid"], messages=(), token_ids=(1,), answer=row["answer"])
            segment = Segment(token_ids=(1,), logprobs=(0.0,), versions=(0,))
            text = f"```python\n{row['completion']}\n```"
            groups.append(
                (prompt, [Completion(segments=(segment,), text=text, finish_reason="stop")])
            )
    for workers in sorted({1, options.workers}):
        pool = RewardPool("code", workers=workers, timeout_s=60, options={"sandbox": options.level})
        pool.score(groups[: 2 * workers])
        judged = 0
        wrong = 0
        start = time.perf_counter()
        while time.perf_counter() - start < options.seconds:
            scores = [score for group in pool.score(groups) for score in group]
            judged += len(scores)
            wrong += sum(score.value != 1.0 for score in scores)
        rate = judged / (time.perf_counter() - start)
        load = os.getloadavg()[0]
        pool.close()
        print(
            f"{options.level}, {workers} workers on {os.cpu_count()} cores: {rate:.0f} programs/s "
            f"({judged} judged, {wrong} not right; load average {load:.1f})"
        )


if __name__ == "__main__":
    main()
