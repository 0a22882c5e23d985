"""Draw the training curves of some runs, and keep their numbers beside the picture.

    python experiments/curves.py runs/x/seed0/rl runs/x/seed1/rl --out experiments/x/curves.svg

One line per run: the mean reward of every step, averaged over the steps around it. The numbers, as
they were before the averaging, go to a JSON file of the same name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

AVERAGED = 5  # steps on either side


def rewards_of(run: Path) -> list[float]:
    """Mean reward of every step of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [round(line["reward/mean"], 4) for line in lines if "reward/mean" in line]


def smooth(values: list[float]) -> list[float]:
    """Every value as the mean of those around it."""
    found: list[float] = []
    for place in range(len(values)):
        around = values[max(0, place - AVERAGED) : place + AVERAGED + 1]
        found.append(sum(around) / len(around))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--names", nargs="+", help="of the lines; default: seed 0, seed 1 ...")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    names = chosen.names or [f"seed {place}" for place in range(len(chosen.runs))]
    curves = {name: rewards_of(run) for name, run in zip(names, chosen.runs, strict=True)}
    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "oxrl"
    figure, axes = plt.subplots(figsize=(6, 3))
    for name, values in curves.items():
        axes.plot(range(1, len(values) + 1), smooth(values), label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward of the samples")
    axes.set_ylim(0, 1.02)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(chosen.out, metadata={"Date": None})
    chosen.out.with_suffix(".json").write_text(json.dumps(curves) + "\n")


if __name__ == "__main__":
    main()
