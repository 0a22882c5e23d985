"""What intervals cost an evaluation, and what a comparison costs beside two evaluations.

    python benchmarks/evaluation.py [--pairs 5] [--prompts 1000] [--samples 16] [--only time memory]

Whole commands, each in a process of its own, in turns: `oxrl eval` as it is, and the same with the
functions of `oxrl.statistics` taken out of a copy of the tree, whose evaluations have no intervals
and are the same otherwise; `oxrl compare` of two models, and the two `oxrl eval` of them. The most
memory is that of one evaluation of 64 samples per prompt, with and without. The models are random
and of 0.15 million parameters, the worst case for what is done beside the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from oxrl_stats.medians import median, ratio

ROOT = Path(__file__).resolve().parent.parent
STATISTICS = re.compile(r'(?m)^\[project\.entry-points\."oxrl\.statistics"\]\n(?:\w.*\n)+')
MOST_SAMPLES = 64
# Tokens of a response.
TOKENS = 6


class Taken(NamedTuple):
    """What a command took: seconds by the clock and of the processor, and its most memory in MB,
    without that of the processes that it starts.
    """

    seconds: float
    cpu: float
    memory_mb: float


def without_statistics(folder: Path) -> Path:
    """A copy of the tree in which evaluations have no intervals."""
    for name in ("oxrl", "packages"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    text, removed = STATISTICS.subn("", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if removed != 1:
        raise SystemExit("pyproject.toml names no oxrl.statistics")
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def taken(tree: Path, words: Sequence[str], folder: Path, *, intervals: bool = True) -> Taken:
    """Run a command of a tree.

    Raises:
        SystemExit: it failed, or printed intervals where there are none, or none where there are.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'packages'}",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    began = time.perf_counter()
    output = folder / "output"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "oxrl", *words],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    told = output.read_text(encoding="utf-8")
    shown = re.search(r"\[-?\d\.\d+, -?\d\.\d+\]", told) is not None
    if status or shown != intervals:
        raise SystemExit(f"oxrl {' '.join(words)} failed: {told[-2000:]}")
    return Taken(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def prepare(folder: Path, prompts: int) -> None:
    """Prompts, and two models of one size."""
    from oxrl.modelfiles.builtin import builtin_policy, builtin_tokenizer  # torch

    rows = [{"prompt": f"{n}+{n % 7}=", "answer": str(n % 10)} for n in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed, name in enumerate(("one", "two")):
        builtin_policy("builtin:tiny", seed=seed).save_pretrained(folder / name)
        builtin_tokenizer().save_pretrained(folder / name)
    # A number in a response is right now and then, so that rewards differ.
    (folder / "reward.py").write_text(
        "def digit(prompt, completion):\n    return float(prompt.answer in completion)\n"
    )


def words_of(command: str, models: Sequence[str], samples: int) -> list[str]:
    """The words of a command that asks models the prompts."""
    fields = ["reward.name=reward.py:digit", f"rollout.max_tokens={TOKENS}", "run.threads=1"]
    asked = ["--samples", str(samples), "--temperature", "1"]
    if command == "compare":
        return [command, *models, *fields, "--data", "prompts.jsonl", *asked]
    return [command, *models, *fields, "data.eval=prompts.jsonl", *asked]


def of_time(plain: Path, folder: Path, pairs: int, samples: int) -> None:
    """Print the figures of time."""
    found: dict[str, list[Taken]] = {"with": [], "without": [], "other": [], "compare": []}
    evaluate = words_of("eval", ["one"], samples)
    turns = {
        "with": lambda: taken(ROOT, evaluate, folder),
        "without": lambda: taken(plain, evaluate, folder, intervals=False),
        "other": lambda: taken(ROOT, words_of("eval", ["two"], samples), folder),
        "compare": lambda: taken(ROOT, words_of("compare", ["one", "two"], samples), folder),
    }
    for pair in range(pairs + 1):
        order = list(turns) if pair % 2 else list(reversed(turns))
        for name in order:
            one = turns[name]()
            if pair:  # the first of all warms the disk up
                found[name].append(one)
    cpu = {name: [one.cpu for one in several] for name, several in found.items()}
    seconds = {name: [one.seconds for one in several] for name, several in found.items()}
    figure = {
        "case": "intervals",
        "with_cpu_s": median(cpu["with"]),
        "without_cpu_s": median(cpu["without"]),
        "cpu_ratio": ratio(cpu["with"], cpu["without"]),
        "ratio": ratio(seconds["with"], seconds["without"]),
    }
    print(json.dumps(figure), flush=True)
    both = [one + other for one, other in zip(cpu["with"], cpu["other"], strict=True)]
    clock = [one + other for one, other in zip(seconds["with"], seconds["other"], strict=True)]
    figure = {
        "case": "compare",
        "with_cpu_s": median(cpu["compare"]),
        "without_cpu_s": median(both),
        "cpu_ratio": ratio(cpu["compare"], both),
        "ratio": ratio(seconds["compare"], clock),
    }
    print(json.dumps(figure), flush=True)


def of_memory(plain: Path, folder: Path) -> None:
    """Print the figure of memory: the most that the command itself has at a time."""
    words = words_of("eval", ["one"], MOST_SAMPLES)
    most = taken(ROOT, words, folder)
    less = taken(plain, words, folder, intervals=False)
    figure = {
        "case": "memory",
        "with_mb": round(most.memory_mb),
        "without_mb": round(less.memory_mb),
        "ratio": round(most.memory_mb / less.memory_mb, 3),
    }
    print(json.dumps(figure), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--only", nargs="+", default=["time", "memory"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = without_statistics(folder / "plain")
        asked = folder / "asked"
        asked.mkdir()
        prepare(asked, options.prompts)
        if "time" in options.only:
            of_time(plain, asked, options.pairs, options.samples)
        if "memory" in options.only:
            of_memory(plain, asked)


if __name__ == "__main__":
    main()
