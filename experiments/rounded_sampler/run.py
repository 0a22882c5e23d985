"""A sampler with rounded weights: what do the two corrections do for the policy?

    python experiments/rounded_sampler/run.py [--seeds 5] [--bits 8 2] [--out runs/rounded_sampler]

Sums, from the quickstart's warm start; the sampler has the policy's weights, rounded after every
step. Arms: no correction, truncated weights (`train.correction: truncate`), score centering
(`train.centering: score`), both. Beside them, with each seed, a sampler that is not rounded, and a
control that is rewarded for the answers of other sums. Bits other than 8 are no setting of the
product: this program puts them where it keeps its 8.

Printed: a row of each arm, means over seeds with 95 % intervals (Student's t): accuracy of the
policy, as it is trained and not rounded, on held-out sums; how much more that is than without a
correction, seed by seed; and the sampler's KL to the trainer over the last ten steps.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.models import rounded
from oxrl_datasets.prepare import PREPARERS
from oxrl_stats.intervals import Interval, student

QUICKSTART = Path(__file__).parent.parent / "quickstart"
TASK = {
    "low": 10,
    "high": 99,
    "slips": 0.5,
    "sft_rows": 40_000,
    "rl_rows": 8_000,
    "eval_rows": 1_000,
}
LAST = 10
SIZES = ["data.prompts_per_step=16", "rollout.n_samples=8", "~train.kl_coeff"]


class Arm(NamedTuple):
    """What is done against rounding."""

    name: str
    weights: str = "int8"
    correction: str = "none"
    centering: str = "none"
    answers: str = "rl"


NOTHING = Arm("none")
ARMS = (
    NOTHING,
    Arm("truncate", correction="truncate"),
    Arm("centering", centering="score"),
    Arm("both", correction="truncate", centering="score"),
)
UNROUNDED = Arm("not rounded", weights="trained")
CONTROL = Arm("control: other sums' answers", answers="other")


class Found(NamedTuple):
    """Of one run: accuracy in percent, and KL of the sampler to the trainer in nats a token."""

    accuracy: float
    kl: float


class Study:
    """Data and warm start as of the quickstart, and the runs from there.

    Args:
        folder: for everything.
        steps: of every run.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        data = folder / "data"
        PREPARERS["arithmetic"](None, data, seed=0, **TASK)
        self._mix_answers(data)
        sft = [f"run.dir={folder / 'sft'}", f"data.train={data / 'sft.jsonl'}"]
        run(load_config(QUICKSTART / "sft.yaml", ["run.seed=0", "run.console=quiet", *sft]))
        self.warm = newest(folder / "sft")

    def _mix_answers(self, data: Path) -> None:
        """Give every sum the answer of another one, for the control."""
        rows = [json.loads(line) for line in (data / "rl.jsonl").read_text().splitlines()]
        answers = [row["answer"] for row in rows]
        random.Random(0).shuffle(answers)
        mixed = [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]
        (data / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in mixed))

    def trained(self, arm: Arm, bits: int, seed: int) -> Found:
        """Train one arm with one seed, and measure it on held-out sums."""
        rounded.BITS["int8"] = bits
        directory = self.folder / f"{arm.name.split(':')[0].replace(' ', '_')}_{bits}_{seed}"
        given = [
            f"run.seed={seed}",
            f"run.dir={directory}",
            f"run.steps={self.steps}",
            "run.console=quiet",
            "run.checkpoint_every=0",
            "run.health={nothing-trained: off}",
            f"model.name={self.warm}",
            f"data.train={self.folder / 'data' / arm.answers}.jsonl",
            f"inference_engine.weights={arm.weights}",
            f"train.correction={arm.correction}",
            f"train.centering={arm.centering}",
            *SIZES,
        ]
        run(load_config(QUICKSTART / "rl.yaml", given))
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        kl = fmean(json.loads(line)["mismatch/kl_k3"] for line in lines[-LAST:])
        return Found(self.accuracy(newest(directory)), kl)

    def accuracy(self, model: Path) -> float:
        """Share of four answers to each held-out sum that is right, in percent."""
        given = [
            "run.seed=0",
            "run.console=quiet",
            f"model.name={model}",
            f"data.eval={self.folder / 'data/eval.jsonl'}",
            f"data.train={self.folder / 'data/rl.jsonl'}",
        ]
        found = run_eval(QUICKSTART / "rl.yaml", given, samples=4, temperature=1.0)
        return 100 * found["eval/reward"]


def newest(directory: Path) -> Path:
    """The last checkpoint of a run."""
    return max((directory / "checkpoints").glob("step_*"))


def over_seeds(values: Sequence[float]) -> Interval:
    """The mean of a figure per seed, with its interval: Student's t."""
    mean = fmean(values)
    half = student(len(values)) * stdev(values) / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half)


def shown(found: Interval, form: str) -> str:
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]"


def row(*cells: object) -> None:
    """Print a row of the table."""
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="What do corrections do for a rounded sampler?")
    parser.add_argument("--seeds", type=int, default=5, help="2 or more")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/rounded_sampler"))
    chosen = parser.parse_args()
    study = Study(chosen.out, chosen.steps)
    row("bits", "arm", "accuracy, %", "more than none", "KL, nats", "of each seed")
    row(*6 * ["---"])
    row("-", "warm start", f"{study.accuracy(study.warm):.1f}", "-", "-", "-")
    for bits in chosen.bits:
        found: dict[Arm, list[Found]] = defaultdict(list)
        unrounded = (UNROUNDED,) if bits == chosen.bits[0] else ()
        for seed in range(1, 1 + chosen.seeds):
            for arm in (*ARMS, *unrounded, CONTROL):
                found[arm].append(study.trained(arm, bits, seed))
        for arm, runs in found.items():
            accuracy = [one.accuracy for one in runs]
            without = [one.accuracy for one in found[NOTHING]]
            gaps = [mine - other for mine, other in zip(accuracy, without, strict=True)]
            more = "-" if arm is NOTHING else shown(over_seeds(gaps), "+.1f")
            kl = shown(over_seeds([one.kl for one in runs]), ".2g")
            each = ", ".join(f"{one:.1f}" for one in accuracy)
            where = "-" if arm is UNROUNDED else bits
            row(where, arm.name, shown(over_seeds(accuracy), ".1f"), more, kl, each)


if __name__ == "__main__":
    main()
