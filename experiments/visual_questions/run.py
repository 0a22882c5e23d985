"""Does a tiny vision-language model learn which part of an image is asked for, and does it look?

    python experiments/visual_questions/run.py [--seeds 3] [--first 0] [--control]
        [--out runs/visual_questions]

The task (`oxrl prepare visual-questions`): two shapes in a drawing of 32 x 16 pixels, and a
question about the colour of one of them. A short supervised warm start teaches the colours, and a
part of where to look; reinforcement with the exact answer as its reward teaches the rest. Judged on
256 held-out drawings, greedily, before and after; with the images of other rows, which leaves
guessing (0.25); and with the questions of other rows, which leaves 0.625 to a policy that looks
where it is told to. `--control` trains once more, with rewards permuted across the batch.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from pathlib import Path

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl_datasets.prepare import PREPARERS

HERE = Path(__file__).parent
FILES = ("eval", "eval_other_images", "eval_other_questions")
# The warm start ends where this share of ASKED training questions is answered, greedily: more than
# 0.625, so that the answers depend on the question. How many steps that takes differs from one
# random model to the next. A policy that knows the colours alone learns by reinforcement to name
# one of them for certain, whatever is asked, and stays there.
FIRST_STEPS = 30
MORE_STEPS = 2
MOST_STEPS = 80
WANTED = 0.7
ASKED = 512


def cpu_seconds() -> float:
    """Processor time of this process and of those that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def accuracy(folder: Path, data: Path, name: str) -> float:
    """Share of greedy answers that are right."""
    overrides = [
        f"data.eval={data / name}.jsonl",
        "reward.name=exact",
        "rollout.max_tokens=8",
    ]
    return run_eval(folder, overrides, samples=1, temperature=0.0)["eval/reward"]


def warm_start(data: Path, folder: Path, seed: int) -> Path:
    """Imitate until WANTED of the answers to training questions are right; the checkpoint."""
    rows = (data / "rl.jsonl").read_text().splitlines(keepends=True)
    trial = data / "trial.jsonl"
    trial.write_text("".join(rows[:ASKED]))
    for steps in range(FIRST_STEPS, MOST_STEPS + 1, MORE_STEPS):
        given = [
            f"run.seed={seed}",
            f"run.dir={folder}",
            f"run.steps={steps}",
            f"data.train={data / 'sft.jsonl'}",
        ]
        run(load_config(HERE / "sft.yaml", given), resume=True)
        found = accuracy(folder, data, "trial")
        say(f"seed {seed}: {found:.3f} of the training questions after {steps} steps")
        if found >= WANTED:
            return folder / "checkpoints" / f"step_{steps:08d}"
    raise SystemExit(f"seed {seed}: after {MOST_STEPS} steps of warm start too little is right")


def reinforce(folder: Path, data: Path, seed: int, start: Path, *, permuted: bool = False) -> None:
    """Train from the warm start."""
    given = [
        f"run.seed={seed}",
        f"run.dir={folder}",
        f"data.train={data / 'rl.jsonl'}",
        f"model.name={start}",
    ]
    if permuted:
        given.append("train.features={permuted-rewards: {}}")
    run(load_config(HERE / "rl.yaml", given))


def one_seed(out: Path, seed: int, *, control: bool = False) -> dict[str, float]:
    """Both stages of one seed, and what is left of the answers in each control."""
    began = cpu_seconds()
    clock = time.monotonic()
    data = out / "data"
    PREPARERS["visual-questions"](None, data, seed=seed)
    found: dict[str, float] = {}
    sft = out / "sft"
    start = warm_start(data, sft, seed)
    found["sft"] = accuracy(sft, data, "eval")
    say(f"seed {seed}: after supervised fine-tuning {found['sft']:.3f}")
    rl = out / "rl"
    reinforce(rl, data, seed, start)
    for name in FILES:
        found[name] = accuracy(rl, data, name)
    if control:
        reinforce(out / "permuted", data, seed, start, permuted=True)
        found["permuted"] = accuracy(out / "permuted", data, "eval")
    found["cpu_s"] = cpu_seconds() - began
    found["wall_s"] = time.monotonic() - clock
    say(f"seed {seed}: {json.dumps({name: round(value, 3) for name, value in found.items()})}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="permute rewards as well")
    parser.add_argument("--out", type=Path, default=Path("runs/visual_questions"))
    chosen = parser.parse_args()
    results: list[dict[str, float]] = []
    for seed in range(chosen.first, chosen.first + chosen.seeds):
        results.append(one_seed(chosen.out / f"seed{seed}", seed, control=chosen.control))
    for name in results[0]:
        values = [result[name] for result in results]
        say(f"{name:22} mean {statistics.fmean(values):.3f}, least {min(values):.3f}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
