"""Two teachers, each of its own kind of question, against one reward for both.

    python experiments/teachers/two_teachers.py [--seeds 3] [--out runs/two_teachers]

A tiny model is shown sums and differences whose answers forget the carry half of the time. From
there one teacher is trained by reinforcement on sums alone, another on differences alone. Then,
with as many samples and steps: `opd_topk`, where each row is asked of the teacher of its source;
sgrpo on both kinds of question; and as a control the same teachers, each asked what the other one
knows. Printed: held-out accuracy of sampled answers by kind, with 95 % intervals, and what the
teachers are worth question by question.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl_stats.compare import compared
from oxrl_stats.evaluated import read_answers
from oxrl_stats.intervals import Interval

QUICKSTART = Path(__file__).parent.parent / "quickstart"
KINDS = ("sums", "differences")
ROWS = {"sft": 20_000, "rl": 4_000, "eval": 500}
WARM_STEPS = 900
SAMPLES = 32
STEPS = 60
GROUP = 8
CANDIDATES = 8
# Arm -> which kind of question the teachers are asked.
ARMS = {
    "two teachers": {"sums": "sums", "differences": "differences"},
    "sgrpo": None,
    "teachers exchanged": {"sums": "differences", "differences": "sums"},
}

Row = dict[str, Any]


def say(*cells: object) -> None:
    """Print a row of the table."""
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def digits_of(number: int) -> tuple[int, int]:
    return number // 10, number % 10


def without_carry(first: int, second: int, kind: str) -> int:
    """Each column on its own: 27+48 is 65, and 52-17 is 45."""
    sign = 1 if kind == "sums" else -1
    tens, units = digits_of(first)
    other_tens, other_units = digits_of(second)
    column = (units + sign * other_units) % 10
    return 10 * (tens + sign * other_tens) + column


def question(chance: random.Random, kind: str, *, slips: bool) -> Row:
    """One row; where it slips, the answer forgets the carry half of the time."""
    second, first = sorted((chance.randint(10, 99), chance.randint(10, 99)))
    right = first + second if kind == "sums" else first - second
    sign = "+" if kind == "sums" else "-"
    prompt = f"{first}{sign}{second}="
    row: Row = {"prompt": prompt, "answer": str(right), "source": kind}
    if slips:
        slipped = chance.random() < 0.5
        said = without_carry(first, second, kind) if slipped else right
        row["completion"] = str(said)
    return row


def prepare(folder: Path, seed: int) -> None:
    """Write what is shown, what is asked, and what is held out; no question is in two files."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed)
    known: set[str] = set()
    for split in ("eval", "rl", "sft"):
        both: list[Row] = []
        for kind in KINDS:
            rows: list[Row] = []
            while len(rows) < ROWS[split]:
                row = question(chance, kind, slips=split == "sft")
                if row["prompt"] in known:
                    continue
                rows.append(row | {"uid": f"{kind}/{split}/{len(rows):06d}"})
            if split == "eval":
                known |= {row["prompt"] for row in rows}
            write(folder / f"{split}_{kind}.jsonl", rows)
            both += rows
        chance.shuffle(both)
        write(folder / f"{split}.jsonl", both)


def write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step_*"))


class Study:
    """Data, warm start and teachers, and the runs from there.

    Args:
        folder: for everything.
        seed: of data, warm start and teachers.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.data = folder / "data"
        prepare(self.data, seed)
        given = [f"run.seed={seed}", "run.console=quiet"]
        shown = [f"data.train={self.data / 'sft.jsonl'}", f"run.steps={WARM_STEPS}"]
        run(load_config(QUICKSTART / "sft.yaml", [*given, *shown, f"run.dir={folder / 'warm'}"]))
        self.warm = newest(folder / "warm")
        self.teachers: dict[str, Path] = {}
        for kind in KINDS:
            own = [f"data.train={self.data / f'rl_{kind}.jsonl'}", f"model.name={self.warm}"]
            directory = folder / f"teacher_{kind}"
            run(load_config(QUICKSTART / "rl.yaml", [*given, *own, f"run.dir={directory}"]))
            self.teachers[kind] = newest(directory)

    def accuracy(self, model: Path, kind: str, label: str) -> Interval:
        """Share of right answers to the held-out questions of a kind, sampled at temperature 1."""
        given = [
            "run.console=quiet",
            f"model.name={model}",
            f"data.eval={self.data / f'eval_{kind}.jsonl'}",
            f"data.train={self.data / 'rl.jsonl'}",
        ]
        out = self.answers(label, kind)
        found = run_eval(QUICKSTART / "rl.yaml", given, samples=4, temperature=1.0, out=out)
        names = ("eval/reward", "eval/reward_low", "eval/reward_high")
        return Interval(*(found[name] for name in names))

    def answers(self, label: str, kind: str) -> Path:
        return self.folder / f"{label.replace(' ', '_')}_{kind}.jsonl"

    def report(self, seed: object, arm: str, model: Path, seconds: float | None) -> None:
        """Print how a model does on each kind."""
        label = f"{arm} {seed}"
        found = [told(self.accuracy(model, kind, label)) for kind in KINDS]
        say(seed, arm, *found, "-" if seconds is None else f"{seconds:.0f}")

    def train(self, arm: str, seed: int) -> Path:
        """Train an arm from the warm start."""
        asked = ARMS[arm]
        size = GROUP if asked is None else 1
        directory = self.folder / f"{arm.replace(' ', '_')}_{seed}"
        given = [
            f"run.seed={seed}",
            "run.console=quiet",
            f"run.dir={directory}",
            f"run.steps={STEPS}",
            "run.checkpoint_every=0",
            "run.health={nothing-trained: off}",
            f"model.name={self.warm}",
            f"data.train={self.data / 'rl.jsonl'}",
            f"data.prompts_per_step={SAMPLES // size}",
            f"rollout.n_samples={size}",
        ]
        if asked is not None:
            named = [
                f"{knows}: {{name: {self.teachers[knows]}, sources: [{kind}]}}"
                for knows, kind in asked.items()
            ]
            given += [
                f"model.teachers={{{', '.join(named)}}}",
                "train.alg_name=opd_topk",
                f"train.teacher_candidates={CANDIDATES}",
                "~train.kl_coeff",
            ]
        run(load_config(QUICKSTART / "rl.yaml", given))
        return newest(directory)

    def compare(self, seed: int) -> None:
        """All arms with one seed, and what the teachers are worth."""
        for arm in ARMS:
            began = time.process_time()
            model = self.train(arm, seed)
            self.report(seed, arm, model, time.process_time() - began)
        gaps: list[str] = []
        for kind in KINDS:
            both = [
                read_answers(self.answers(f"{arm} {seed}", kind))
                for arm in ("two teachers", "sgrpo")
            ]
            gaps.append(told(compared(kind, *both).gap, signed=True))
        say(seed, "two teachers less sgrpo", *gaps, "-")


def told(found: Interval, *, signed: bool = False) -> str:
    """An interval in per cent."""
    form = "+.1f" if signed else ".1f"
    value, low, high = (100 * part for part in (found.value, found.low, found.high))
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="Two teachers of two kinds of question.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start", type=int, default=0, help="seed of warm start and teachers")
    parser.add_argument("--out", type=Path, default=Path("runs/two_teachers"))
    chosen = parser.parse_args()
    say("seed", "arm", *KINDS, "cpu s")
    say(*5 * ["---"])
    made = Study(chosen.out.absolute() / f"start_{chosen.start}", chosen.start)
    made.report("-", "warm start", made.warm, None)
    for kind, teacher in made.teachers.items():
        made.report("-", f"teacher of {kind}", teacher, None)
    for seed in range(1, 1 + chosen.seeds):
        made.compare(seed)


if __name__ == "__main__":
    main()
