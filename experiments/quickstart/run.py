"""The quickstart: a tiny model learns to add, first by example, then by reinforcement; on a laptop,
in minutes.

    python experiments/quickstart/run.py              one run (`make quickstart`)
    python experiments/quickstart/run.py --seeds 5
        five seeds, one row each (`make quickstart-seeds`)
    python experiments/quickstart/run.py --control
        rewards permuted across the batch: nothing should be learned

Every run gets a fresh directory under `runs/`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.types import Metrics
from oxrl_datasets.prepare import PREPARERS
from oxrl_stats.compare import compared
from oxrl_stats.evaluated import read_answers
from oxrl_stats.intervals import Interval

HERE = Path(__file__).parent
# The part of the task that decides how hard it is. Half of the demonstrations forget the carry, so
# that the warm start leaves a habit behind which only the reward can break.
TASK = {
    "low": 10,
    "high": 99,
    "slips": 0.5,
    "sft_rows": 40_000,
    "rl_rows": 8_000,
    "eval_rows": 1_000,
}
EVAL_SAMPLES = 4


@dataclass(frozen=True)
class Result:
    """Accuracies on the held-out sums, each with its 95 % interval: (greedy, sampled at temperature
    1), before and after reinforcement.

    gain: of the sampled accuracy, sum by sum.
    """

    before: tuple[Interval, Interval]
    after: tuple[Interval, Interval]
    gain: Interval
    seconds: float


def say(text: str = "") -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def percent(found: Interval) -> str:
    """As in `94.7 % [93.9, 95.4]`."""
    value, low, high = (100 * number for number in found)
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def accuracies(model: Path, folder: Path, seed: int, name: str) -> tuple[Interval, Interval]:
    """(greedy, sampled) accuracy of `model` on every held-out sum; the sampled answers are kept."""
    shared = [
        f"model.name={model}",
        f"data.eval={folder / 'data/eval.jsonl'}",
        f"data.train={folder / 'data/rl.jsonl'}",
    ]
    shared.append(f"run.seed={seed}")
    greedy = run_eval(HERE / "rl.yaml", shared, samples=1, temperature=0.0)
    sampled = run_eval(
        HERE / "rl.yaml",
        shared,
        samples=EVAL_SAMPLES,
        temperature=1.0,
        out=folder / f"{name}_samples.jsonl",
    )
    return told(greedy), told(sampled)


def told(metrics: Metrics) -> Interval:
    """The accuracy of an evaluation."""
    names = ("eval/reward", "eval/reward_low", "eval/reward_high")
    return Interval(*(metrics[name] for name in names))


def quickstart(folder: Path, seed: int, *, control: bool) -> Result:
    """Prepare, warm start, evaluate, reinforce, evaluate. Everything lands in `folder`."""
    start = time.monotonic()
    numbers = f"two numbers from {TASK['low']} to {TASK['high']}"
    say(f"Preparing sums of {numbers} in {folder / 'data'} ...")
    report = PREPARERS["arithmetic"](None, folder / "data", seed=seed, **TASK)
    held_out = report["held_out_tuples"]
    say(f"  {report['written']}; {held_out} pairs of numbers are held out in either order")

    say("\nWarm start: supervised, on answers that forget the carry half of the time")
    shared = [f"run.seed={seed}"]
    sft = [f"run.dir={folder / 'sft'}", f"data.train={folder / 'data/sft.jsonl'}"]
    run(load_config(HERE / "sft.yaml", shared + sft))
    warm = max((folder / "sft/checkpoints").glob("step_*"))
    before = accuracies(warm, folder, seed, "before")
    say(f"  held-out accuracy: greedy {percent(before[0])}, sampled {percent(before[1])}")

    say(
        "\nReinforcement: SGRPO, reward 1 for the exact sum"
        + (", rewards permuted (control)" if control else "")
    )
    rl = [
        f"run.dir={folder / 'rl'}",
        f"data.train={folder / 'data/rl.jsonl'}",
        f"model.name={warm}",
    ]
    if control:
        rl.append("train.features={permuted-rewards: {}}")
    run(load_config(HERE / "rl.yaml", shared + rl))
    after = accuracies(max((folder / "rl/checkpoints").glob("step_*")), folder, seed, "after")
    asked = [read_answers(folder / f"{name}_samples.jsonl") for name in ("after", "before")]
    return Result(
        before=before,
        after=after,
        gain=compared("sums", *asked).gap,
        seconds=time.monotonic() - start,
    )


def show(folder: Path, result: Result) -> None:
    """The table before/after, a few answers, and where everything is."""
    say("\nHeld-out accuracy      before RL               after RL")
    for name, index in (("greedy", 0), ("sampled at T = 1", 1)):
        before, after = result.before[index], result.after[index]
        say(f"  {name:<20} {percent(before):<23} {percent(after)}")
    say(f"  the sampled accuracy gained {percent(result.gain)}")
    for name in ("before", "after"):
        lines = (
            (folder / f"{name}_samples.jsonl")
            .read_text(encoding="utf-8")
            .split("\n")[: 6 * EVAL_SAMPLES]
        )
        samples = [json.loads(line) for line in lines[::EVAL_SAMPLES]]
        answers = ", ".join(
            f"{s['prompt']}{s['response']}{'' if s['reward'] else ' (wrong)'}" for s in samples
        )
        say(f"\nSampled {name}: {answers}")
    say(f"\nDone in {result.seconds:.0f} s. Everything is in {folder}:")
    say(
        "  rl/metrics.jsonl   one line per step          "
        "rl/samples.jsonl   every answer with its reward"
    )
    say(
        "  rl/checkpoints     load with transformers     "
        "rl/config.yaml     the resolved configuration"
    )


def fresh_folder(root: Path) -> Path:
    """runs/quickstart-1, -2, ...: the first that does not exist."""
    number = 1
    while True:
        folder = root / f"quickstart-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a tiny model by example and then by reinforcement."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seeds", type=int, default=1, help="run so many seeds and print a line for each"
    )
    parser.add_argument("--control", action="store_true", help="permute rewards across the batch")
    parser.add_argument(
        "--out", type=Path, default=Path("runs"), help="where run directories are made"
    )
    arguments = parser.parse_args()
    results: dict[int, Result] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        folder = fresh_folder(arguments.out)
        results[seed] = quickstart(folder, seed, control=arguments.control)
        show(folder, results[seed])
    if len(results) > 1:
        say("\n| seed | greedy | sampled | gain of the sampled, in points | seconds |")
        say("|---|---|---|---|---|")
        for seed, result in results.items():
            pairs = zip(result.before, result.after, strict=True)
            cells = [f"{percent(before)} to {percent(after)}" for before, after in pairs]
            gain = percent(result.gain).replace(" %", "")
            say(f"| {seed} | {' | '.join(cells)} | {gain} | {result.seconds:.0f} |")


if __name__ == "__main__":
    main()
