"""Does a tiny model learn to call a calculator, and does it use what the calculator says?

    python experiments/calculator/run.py [--seeds 3] [--first 0] [--out runs/calculator]

The task: a product of a three-digit and a two-digit number, of five digits, which 0.15M parameters
cannot work out. A short supervised warm start shows the form of call and answer, until some sampled
answers are right; then reinforcement learning, whose reward is the exact product. Held-out
products, before and after, greedy and sampled; the same policy with a broken tool; and a run whose
rewards are permuted across the batch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import resource
import statistics
import sys
from pathlib import Path
from typing import Any

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.config.load_evaluation import load_evaluation_config
from oxrl_envs.calculator import calculator

HERE = Path(__file__).parent
TURNS = f"{HERE / 'calculator.py'}"
# The warm start lasts until as many of its sampled answers are right: reinforcement
# learns from what it samples, and from nothing where that is never right.
WARM_STEPS = 60
MORE_STEPS = 10
MOST_STEPS = 200
WANTED = 0.1
ASKED = 128


def cpu_seconds() -> float:
    """Processor time of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_data(folder: Path, seed: int) -> None:
    """Disjoint products to imitate, to train on and to be judged by."""
    folder.mkdir(parents=True, exist_ok=True)
    # Of five digits, as most are: a model of this size copies what has the length it knows.
    factors = itertools.product(range(100, 1000), range(10, 100))
    pairs = [(a, b) for a, b in factors if a * b >= 10_000]
    random.Random(seed).shuffle(pairs)
    parts = {"sft": pairs[:30_000], "rl": pairs[30_000:-256], "eval": pairs[-256:]}
    for name, part in parts.items():
        rows: list[dict[str, Any]] = []
        for a, b in part:
            question, result = f"{a}*{b}=", calculator(f"{a}*{b}")
            if name != "sft":
                rows.append({"prompt": question, "answer": result})
                continue
            texts = [question, f"<{a}*{b}>", result, result]
            roles = ["user", "assistant"] * 2
            said = [
                {"role": role, "content": text} for role, text in zip(roles, texts, strict=True)
            ]
            rows.append({"messages": said})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)


def newest(folder: Path) -> str:
    return str(max((folder / "checkpoints").glob("step_*")))


def warm_start(folder: Path, seed: int, model: str = "builtin:tiny") -> str:
    """Imitate; the first checkpoint whose answers to training products are right often enough."""
    trial = folder / "trial.jsonl"
    rows = (folder / "rl.jsonl").read_text().splitlines(keepends=True)
    trial.write_text("".join(rows[:ASKED]))
    given = [
        f"run.seed={seed}",
        f"run.dir={folder / 'sft'}",
        f"run.steps={MOST_STEPS}",
        f"run.checkpoint_every={MORE_STEPS}",
        f"run.keep_checkpoints={MOST_STEPS}",
        f"data.train={folder / 'sft.jsonl'}",
        f"model.name={model}",
    ]
    run(load_config(HERE / "sft.yaml", given))
    for steps in range(WARM_STEPS, MOST_STEPS + 1, MORE_STEPS):
        begun = str(folder / "sft" / "checkpoints" / f"step_{steps:08d}")
        found = right(folder, begun, "Calculator", 1, trial)
        say(f"seed {seed} warm start of {steps} steps: {found:.3f} right when sampled")
        if found >= WANTED:
            return begun
    raise SystemExit(f"seed {seed}: after {MOST_STEPS} steps of warm start too little is right")


def reinforce(folder: Path, seed: int, model: str, *, permuted: bool = False) -> str:
    name = "permuted" if permuted else "rl"
    given = [
        f"run.seed={seed}",
        f"run.dir={folder / name}",
        f"data.train={folder / 'rl.jsonl'}",
        f"model.name={model}",
        f"environment.name={TURNS}:Calculator",
    ]
    if permuted:
        given.append("train.features={permuted-rewards: {}}")
    run(load_config(HERE / "rl.yaml", given))
    return newest(folder / name)


def right(
    folder: Path, model: str, environment: str, temperature: float, rows: Path | None = None
) -> float:
    """Share of the products in `rows`, by default the held-out ones, that a policy gets right."""
    given = [
        f"model.name={model}",
        f"data.train={folder / 'rl.jsonl'}",
        f"data.eval={rows or folder / 'eval.jsonl'}",
        f"environment.name={TURNS}:{environment}",
        f"rollout.eval_temperature={temperature}",
    ]
    config = folder / "eval.yaml"
    config.write_text((HERE / "rl.yaml").read_text())
    load_evaluation_config(config, given)
    return run_eval(config, given)["eval/reward"]


def trained(folder: Path, seed: int) -> tuple[str, str]:
    """The policies before and after reinforcement."""
    write_data(folder, seed)
    began = cpu_seconds()
    warm = warm_start(folder, seed)
    learned = reinforce(folder, seed, warm)
    took = cpu_seconds() - began
    say(f"seed {seed} warm start and reinforcement: {took:.0f} s of processor time")
    return warm, learned


def gained(folder: Path, seed: int, policies: tuple[str, str]) -> float:
    """Print what the policies do with held-out products; what the greedy answers gained."""
    asked = {
        "greedy": ("Calculator", 0.0),
        "sampled": ("Calculator", 1.0),
        "broken tool": ("Broken", 0.0),
    }
    gain = 0.0
    for name, (environment, temperature) in asked.items():
        before, after = (right(folder, model, environment, temperature) for model in policies)
        say(f"seed {seed} {name:<15} {before:.3f} -> {after:.3f}")
        if name == "greedy":
            gain = after - before
    return gain


def control(folder: Path, seed: int, warm: str) -> None:
    """The same training with rewards that say nothing."""
    permuted = reinforce(folder, seed, warm, permuted=True)
    before, after = (right(folder, model, "Calculator", 0) for model in (warm, permuted))
    say(f"seed {seed} {'permuted':<15} {before:.3f} -> {after:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A tiny model learns to call a calculator.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/calculator"))
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    policies = {seed: trained(arguments.out / f"seed_{seed}", seed) for seed in seeds}
    gains = [gained(arguments.out / f"seed_{seed}", seed, policies[seed]) for seed in seeds]
    say(f"gain, greedy: mean {statistics.mean(gains):.3f}, least {min(gains):.3f}")
    for seed in seeds:
        control(arguments.out / f"seed_{seed}", seed, policies[seed][0])


if __name__ == "__main__":
    main()
