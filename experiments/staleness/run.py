"""What does the age of samples cost? Sums again, learned from samples of older and older weights.

    python experiments/staleness/run.py [--seeds 3] [--steps 60] [--out runs/staleness]

The quickstart's warm start and data. Slots for a quarter of a batch's samples, and as many decode
rounds while a batch trains as a batch takes: so weights change in the middle of answers, and the
bound is used. Every lag is run with tokens weighted by how likely they are now (truncate, the
default there), and as if they were new. Printed: a row of the table for every lag and seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl_datasets.prepare import PREPARERS

QUICKSTART = Path(__file__).parent.parent / "quickstart"
TASK = {
    "low": 10,
    "high": 99,
    "slips": 0.5,
    "sft_rows": 40_000,
    "rl_rows": 8_000,
    "eval_rows": 1_000,
}
SLOTS = 128
ROUNDS = 16
EVAL_SAMPLES = 4
# (lag, correction, features)
KINDS = [
    (0, "none", "{}"),
    *((lag, correction, "{}") for lag in (1, 4, 8) for correction in ("truncate", "none")),
    (4, "truncate", "{permuted-rewards: {}}"),
]


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


def accuracy(model: Path, folder: Path, seed: int) -> str:
    """The share of sampled answers that are right on held-out sums, with its 95 % interval."""
    given = [
        f"run.seed={seed}",
        f"model.name={model}",
        f"data.eval={folder / 'data/eval.jsonl'}",
        f"data.train={folder / 'data/rl.jsonl'}",
    ]
    found = run_eval(QUICKSTART / "rl.yaml", given, samples=EVAL_SAMPLES, temperature=1.0)
    value, low, high = (
        100 * found[name] for name in ("eval/reward", "eval/reward_low", "eval/reward_high")
    )
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def learned(
    folder: Path, seed: int, warm: Path, steps: int, lag: int, correction: str, features: str
) -> list[str]:
    """Train with a lag; the cells of a row: accuracy, mean lag, effective sample size."""
    control = "_control" if features != "{}" else ""
    out = folder / f"lag_{lag}_{correction}{control}"
    given = [
        f"run.seed={seed}",
        f"run.dir={out}",
        f"run.steps={steps}",
        "run.checkpoint_every=0",
        "run.health={nothing-trained: off}",
        f"data.train={folder / 'data/rl.jsonl'}",
        f"model.name={warm}",
        f"inference_engine.max_rows={SLOTS}",
        f"rollout.max_staleness={lag}",
        f"rollout.force_strict_on_policy={str(lag == 0).lower()}",
        f"train.correction={correction}",
        f"train.features={features}",
    ]
    if lag:
        given.append(f"rollout.rounds={ROUNDS}")
    run(load_config(QUICKSTART / "rl.yaml", given))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ages = fmean(line["data/staleness_mean"] for line in lines)
    sizes = "-"  # every token counts once
    if correction != "none":
        sizes = f"{fmean(line['mismatch/ess'] for line in lines):.2f}"
    model = max((out / "checkpoints").glob("step_*"))
    return [accuracy(model, folder, seed), f"{ages:.1f}", sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description="What does the age of samples cost?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    chosen = parser.parse_args()
    for seed in range(chosen.seeds):
        folder = chosen.out / f"seed_{seed}"
        warm = warm_start(folder, seed)
        cells = ["-", "warm start", str(seed), accuracy(warm, folder, seed), "-", "-"]
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        for lag, correction, features in KINDS:
            told = correction if features == "{}" else f"{correction}, rewards permuted"
            found = learned(folder, seed, warm, chosen.steps, lag, correction, features)
            sys.stdout.write(f"| {' | '.join([str(lag), told, str(seed), *found])} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
