"""Does a policy learn to do without a hint what it does with one, and without any reward?

    python experiments/teachers/self_distillation.py [--seeds 3] [--first 0] [--out runs/self]

A tiny model is taught by example to copy a hint, "102 72+30=" -> "102", and to add without one from
demonstrations of which half forget the carry. Then `opsd`: it samples without the hint, and what it
says of the same tokens behind the hint is its teacher. Controls: hints of other rows; and, as
answers are known here anyway, supervised learning of as many of them in as many steps. Printed per
seed: held-out accuracy of sampled answers without the hint, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl_datasets.prepare import PREPARERS
from oxrl_stats.compare import compared
from oxrl_stats.evaluated import read_answers
from oxrl_stats.intervals import Interval

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart"
TASK = {
    "low": 10,
    "high": 99,
    "slips": 0.5,
    "sft_rows": 80_000,
    "rl_rows": 8_000,
    "eval_rows": 1_000,
}
WARM_STEPS = 900
STEPS = 30
ROWS_PER_STEP = 128
EVAL_SAMPLES = 2
# Arm -> data file, weights of the teacher.
ARMS = {
    "opsd, live": ("rl", "live"),
    "opsd, frozen": ("rl", "frozen"),
    "opsd, ema 0.05": ("rl", "{ema: 0.05}"),
    "hints of other rows": ("others", "live"),
}
SUPERVISED = "answers, supervised"

Row = dict[str, Any]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def hinted(row: Row) -> Row:
    """A demonstration that copies the hint, which is right."""
    answer = str(sum(row["operands"]))
    return {**row, "prompt": f"{answer} {row['prompt']}", "completion": answer}


def prepare(folder: Path, seed: int) -> None:
    """Write what is learned, and what is asked."""
    PREPARERS["arithmetic"](None, folder, seed=seed, **TASK)
    shown = [
        hinted(row) if place % 2 else row for place, row in enumerate(rows_of(folder / "sft.jsonl"))
    ]
    write(folder / "warm.jsonl", shown)
    asked = rows_of(folder / "rl.jsonl")
    write(folder / "answers.jsonl", [row | {"completion": row["answer"]} for row in asked])
    moved = [row["answer"] for row in asked[1:] + asked[:1]]
    write(
        folder / "others.jsonl",
        [row | {"answer": answer} for row, answer in zip(asked, moved, strict=True)],
    )
    held_out = rows_of(folder / "eval.jsonl")
    write(
        folder / "eval_hinted.jsonl",
        [row | {"prompt": f"{row['answer']} {row['prompt']}"} for row in held_out],
    )


def accuracy(model: Path, data: Path, seed: int, out: Path) -> Interval:
    """Share of right answers, sampled at temperature 1."""
    given = [f"run.seed={seed}", f"model.name={model}", f"data.eval={data}", f"data.train={data}"]
    found = run_eval(QUICKSTART / "rl.yaml", given, samples=EVAL_SAMPLES, temperature=1.0, out=out)
    names = ("eval/reward", "eval/reward_low", "eval/reward_high")
    return Interval(*(found[name] for name in names))


def told(found: Interval) -> str:
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def supervise(folder: Path, seed: int, data: str, more: list[str]) -> None:
    given = [
        f"run.seed={seed}",
        f"run.dir={folder}",
        f"data.train={folder.parent / 'data' / data}",
        f"data.rows_per_step={ROWS_PER_STEP}",
    ]
    run(load_config(QUICKSTART / "sft.yaml", given + more))


def teach_itself(folder: Path, seed: int, warm: Path, data: str, weights: str, lr: str) -> None:
    teacher = f"{{prompt: {HERE / 'hint.jinja'}, reads: [answer], weights: {weights}}}"
    given = [
        f"run.seed={seed}",
        f"run.dir={folder}",
        f"run.steps={STEPS}",
        f"model.name={warm}",
        f"model.teachers={{self: {teacher}}}",
        f"data.train={folder.parent / 'data' / data}.jsonl",
        f"data.prompts_per_step={ROWS_PER_STEP}",
        f"train.lr={lr}",
    ]
    run(load_config(HERE / "opsd.yaml", given))


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*"))


def one_seed(folder: Path, seed: int, lr: str) -> None:
    """All arms from one warm start."""
    data = folder / "data"
    prepare(data, seed)
    supervise(folder / "warm", seed, "warm.jsonl", [f"run.steps={WARM_STEPS}"])
    warm = newest(folder / "warm")
    with_hint = accuracy(warm, data / "eval_hinted.jsonl", seed, folder / "hinted.jsonl")
    before = accuracy(warm, data / "eval.jsonl", seed, folder / "before.jsonl")
    say(f"seed {seed}: with the hint {told(with_hint)}, without {told(before)}")
    answered = read_answers(folder / "before.jsonl")
    for place, (arm, (rows, weights)) in enumerate(ARMS.items()):
        began = time.process_time()
        own = folder / f"arm_{place}"
        teach_itself(own, seed, warm, rows, weights, lr)
        seconds = time.process_time() - began
        report(arm, own, data, seed, answered, seconds)
    began = time.process_time()
    own = folder / "supervised"
    more = [f"run.steps={STEPS}", f"model.name={warm}", f"train.lr={lr}", "train.warmup_steps=0"]
    supervise(own, seed, "answers.jsonl", more)
    report(SUPERVISED, own, data, seed, answered, time.process_time() - began)


def report(arm: str, own: Path, data: Path, seed: int, before: Any, seconds: float) -> None:
    """Print where an arm stands after every checkpoint, and what it gained."""
    along: list[str] = []
    for checkpoint in sorted((own / "checkpoints").glob("step_*"))[1:]:
        out = own / f"{checkpoint.name}.jsonl"
        along.append(told(accuracy(checkpoint, data / "eval.jsonl", seed, out)))
    gain = compared("sums", read_answers(own / f"{newest(own).name}.jsonl"), before).gap
    say(f"  {arm:<22} {', '.join(along)}; gained {told(gain)}; {seconds:.0f} processor seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description="A hint that is not needed any more.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--lr", default="3e-4")
    parser.add_argument("--out", type=Path, default=Path("runs/self"))
    arguments = parser.parse_args()
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        one_seed(arguments.out.absolute() / f"seed_{seed}", seed, arguments.lr)


if __name__ == "__main__":
    main()
