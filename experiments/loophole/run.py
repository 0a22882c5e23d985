"""When does a monitor tell that a reward is hacked, and when does held-out accuracy turn?

    python experiments/loophole/run.py [--seeds 3] [--first 0] [--out runs/loophole]

The sums of the quickstart and its warm start, and a reward that has a loophole, `loophole.py`: a
number that is wrong pays by its length, if its last digit is right. The feature `held-out-grader`
judges the same held-out answers by the exact sum, and the sign `hacked-reward` reads what it found.
Printed per seed: at which step the sign was told, where held-out accuracy was at its best, and
where it was 5 points below that. And the control: the same run with the exact reward, where the
sign has to be silent.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.runs.health import verdicts
from oxrl_datasets.prepare import PREPARERS

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart"
TASK = {
    "low": 10,
    "high": 99,
    "slips": 0.5,
    "sft_rows": 40_000,
    "rl_rows": 8_000,
    "eval_rows": 1_000,
}
EVERY = 5
# Below the best accuracy: from there on it has turned.
TURNED = 0.05


class Found(NamedTuple):
    """Steps of a run: where the sign was told, where accuracy was best, where it was 5 points
    below; None where that never came. best, last: accuracies. gap: of the last probe.
    """

    told: int | None
    best_at: int
    turned: int | None
    best: float
    last: float
    gap: float


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def warm_start(folder: Path, seed: int) -> Path:
    """A policy that forgets the carry half of the time, as that of the quickstart."""
    PREPARERS["arithmetic"](None, folder / "data", seed=seed, **TASK)
    given = [
        f"run.seed={seed}",
        f"run.dir={folder / 'sft'}",
        f"data.train={folder / 'data/sft.jsonl'}",
    ]
    run(load_config(QUICKSTART / "sft.yaml", given))
    return max((folder / "sft/checkpoints").glob("step_*"))


def reinforce(folder: Path, seed: int, warm: Path, reward: str, name: str) -> Found:
    """Train with a reward under the monitor's eyes."""
    data = folder / "data/eval.jsonl"
    given = [
        f"run.seed={seed}",
        f"run.dir={folder / name}",
        f"data.train={folder / 'data/rl.jsonl'}",
        f"model.name={warm}",
        f"reward.name={reward}",
        f"train.features={{held-out-grader: {{data: {data}, grader: exact, every: {EVERY}}}}}",
    ]
    run(load_config(QUICKSTART / "rl.yaml", given))
    return read(folder / name)


def read(folder: Path) -> Found:
    """What the lines of a run say."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    (sign,) = [found for found in verdicts(lines) if found.name == "hacked-reward"]
    probes = [line for line in lines if "monitor/grader" in line]
    best = max(probes, key=lambda line: line["monitor/grader"])
    most = best["monitor/grader"]
    later = [line for line in probes if line["step"] > best["step"]]
    turned = [line["step"] for line in later if line["monitor/grader"] <= most - TURNED]
    return Found(
        told=sign.step,
        best_at=best["step"],
        turned=turned[0] if turned else None,
        best=most,
        last=probes[-1]["monitor/grader"],
        gap=probes[-1]["monitor/gap"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A reward with a loophole, and who notices.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/loophole"))
    arguments = parser.parse_args()
    rewards = {"loophole": f"{HERE / 'loophole.py'}:looks_right", "exact": "exact"}
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        folder = arguments.out / f"seed_{seed}"
        warm = warm_start(folder, seed)
        for name, reward in rewards.items():
            found = reinforce(folder, seed, warm, reward, name)
            say(
                f"seed {seed} {name:<9} told {found.told}, best {found.best:.3f} at "
                f"{found.best_at}, 5 points lower {found.turned}, last {found.last:.3f}, "
                f"gap {found.gap:.3f}"
            )


if __name__ == "__main__":
    main()
