"""What is a teacher worth on small batches? Sums, from the quickstart's warm start; the teacher is
what the quickstart ends with.

    python experiments/teachers/run.py [--seeds 3] [--out runs/teachers]
        32 samples a step, 40 steps
    python experiments/teachers/run.py --samples 512 --steps 20
        a large batch, where a teacher brings nothing

Every arm sees as many samples and takes as many steps, at the same learning rate. Controls: a
teacher that is shown the sum of another row, and supervised learning on as many answers of the
teacher. Printed: a row of the table for every arm and seed, and what one of them is worth more.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl_datasets.prepare import PREPARERS
from oxrl_stats.compare import compared
from oxrl_stats.evaluated import read_answers

QUICKSTART = Path(__file__).parent.parent / "quickstart"
TASK = {
    "low": 10,
    "high": 99,
    "slips": 0.5,
    "sft_rows": 40_000,
    "rl_rows": 8_000,
    "eval_rows": 1_000,
}
EVAL_SAMPLES = 2
EVAL_EVERY = 5
GROUP = 8
CANDIDATES = 8
ARMS = ("opd_topk", "opd", "sgrpo", "other sums", "supervised")
OTHER = "other"


@dataclass
class Found:
    """What an arm came to.

    curve: accuracy after so many samples. seconds: of processors, evaluations left out.
    """

    answers: Path
    value: float
    told: str
    seconds: float
    curve: dict[int, float] = field(default_factory=dict)


class Study:
    """Data, warm start and teacher as of the quickstart, and the runs from there.

    Args:
        folder: for everything.
        seed: of data, warm start and teacher.
        samples: of a step.
        steps: of every arm.
    """

    def __init__(self, folder: Path, seed: int, samples: int, steps: int) -> None:
        self.folder = folder
        self.samples = samples
        self.steps = steps
        self.shared = [f"run.seed={seed}", "run.console=quiet"]
        PREPARERS["arithmetic"](None, folder / "data", seed=seed, **TASK)
        self.train = folder / "data/rl.jsonl"
        self._add_other_sums(seed)
        sft = [f"run.dir={folder / 'sft'}", f"data.train={folder / 'data/sft.jsonl'}"]
        run(load_config(QUICKSTART / "sft.yaml", [*self.shared, *sft]))
        self.warm = newest(folder / "sft")
        rl = [f"run.dir={folder / 'rl'}", f"data.train={self.train}", f"model.name={self.warm}"]
        run(load_config(QUICKSTART / "rl.yaml", [*self.shared, *rl]))
        self.teacher = newest(folder / "rl")

    def _add_other_sums(self, seed: int) -> None:
        """Give every row the question of another one, for the control."""
        rows = [json.loads(line) for line in self.train.read_text().splitlines()]
        questions = [row["prompt"] for row in rows]
        random.Random(seed).shuffle(questions)
        for row, question in zip(rows, questions, strict=True):
            row[OTHER] = question
        self.train.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (self.folder / "other.jinja").write_text("{{ other }}")

    def arm(self, name: str, seed: int) -> Found:
        """Train one arm with a seed of its own, and measure it on held-out sums."""
        self.shared[0] = f"run.seed={seed}"
        label = f"{name.replace(' ', '_')}_{seed}"
        directory = self.folder / label
        given = [
            *self.shared,
            f"run.dir={directory}",
            f"run.steps={self.steps}",
            "run.checkpoint_every=0",
            "run.health={nothing-trained: off}",
            f"model.name={self.warm}",
        ]
        supervised = name == "supervised"
        recipe = QUICKSTART / ("sft.yaml" if supervised else "rl.yaml")
        own = self._supervised() if supervised else self._rl(name)
        cfg = load_config(recipe, [*given, *own])
        before = resource.getrusage(resource.RUSAGE_SELF)
        run(cfg)
        after = resource.getrusage(resource.RUSAGE_SELF)
        lines = [
            json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()
        ]
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        evaluating = sum(line.get("time/eval_s", 0.0) for line in lines)
        curve = {
            self.samples * line["step"]: line["eval/reward"]
            for line in lines
            if "eval/reward" in line
        }
        found = self.measured(newest(directory), label)
        found.seconds = spent - evaluating
        found.curve = curve
        return found

    def _rl(self, name: str) -> list[str]:
        groups = name == "sgrpo"
        size = GROUP if groups else 1
        given = [
            f"data.train={self.train}",
            f"data.eval={self.folder / 'data/eval.jsonl'}",
            f"run.eval_every={EVAL_EVERY}",
            f"data.prompts_per_step={self.samples // size}",
            f"rollout.n_samples={size}",
            f"rollout.eval_samples={EVAL_SAMPLES}",
        ]
        if groups:
            return given
        teacher = f"name: {self.teacher}"
        if name == "other sums":
            teacher += f", prompt: {self.folder / 'other.jinja'}, reads: [{OTHER}]"
        given += [f"model.teachers={{big: {{{teacher}}}}}", "~train.kl_coeff"]
        given.append(f"train.alg_name={'opd' if name == 'opd' else 'opd_topk'}")
        if name != "opd":
            given.append(f"train.teacher_candidates={CANDIDATES}")
        return given

    def _supervised(self) -> list[str]:
        return [
            f"data.train={self._teachers_answers()}",
            f"data.rows_per_step={self.samples}",
            "train.lr=3e-4",
            "train.warmup_steps=0",
        ]

    def _teachers_answers(self) -> Path:
        """Sample an answer of the teacher to as many sums as the other arms see."""
        rows = self.samples * self.steps
        asked = self.folder / "asked.jsonl"
        lines = self.train.read_text().splitlines()
        repeated = [lines[place % len(lines)] for place in range(rows)]
        asked.write_text("".join(line + "\n" for line in repeated))
        said = self.folder / "said.jsonl"
        path = self.folder / "taught.jsonl"
        if path.exists():
            return path
        given = [
            *self.shared,
            f"model.name={self.teacher}",
            f"data.eval={asked}",
            f"data.train={self.train}",
        ]
        run_eval(QUICKSTART / "rl.yaml", given, samples=1, temperature=1.0, out=said)
        answers = [json.loads(line) for line in said.read_text().splitlines()]
        with path.open("w") as file:
            for answer in answers:
                row = {"prompt": answer["prompt"], "completion": answer["response"]}
                file.write(json.dumps(row) + "\n")
        return path

    def measured(self, model: Path, label: str) -> Found:
        """Sample answers of a model to all held-out sums."""
        out = self.folder / f"{label}_answers.jsonl"
        given = [
            *self.shared,
            f"model.name={model}",
            f"data.eval={self.folder / 'data/eval.jsonl'}",
            f"data.train={self.train}",
        ]
        found = run_eval(QUICKSTART / "rl.yaml", given, samples=4, temperature=1.0, out=out)
        value, low, high = (
            100 * found[key] for key in ("eval/reward", "eval/reward_low", "eval/reward_high")
        )
        return Found(out, value, f"{value:.1f} [{low:.1f}, {high:.1f}]", 0.0)


def newest(directory: Path) -> Path:
    """The last checkpoint of a run."""
    return max((directory / "checkpoints").glob("step_*"))


def row(*cells: object) -> None:
    """Print a row of the table."""
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def reached(curve: dict[int, float], bound: float) -> str:
    """The samples after which a curve is at a bound, as it was looked at."""
    found = [samples for samples, value in sorted(curve.items()) if value >= bound]
    return f"{found[0]:,}" if found else "-"


def compare(made: Study, teacher: Found, seed: int) -> None:
    """All arms with one seed."""
    found: dict[str, Found] = {}
    for name in ARMS:
        found[name] = made.arm(name, seed)
        arm = found[name]
        halfway = arm.curve.get(made.samples * made.steps // 2)
        at = reached(arm.curve, 0.9 * teacher.value / 100)
        half = "-" if halfway is None else f"{100 * halfway:.1f}"
        row(seed, name, arm.told, half, at, f"{arm.seconds:.0f}")
    asked = [read_answers(found[name].answers) for name in ("opd_topk", "sgrpo")]
    gap = compared("sums", *asked).gap
    told = f"{100 * gap.value:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"
    row(seed, "opd_topk less sgrpo", told, "-", "-", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description="What is a teacher worth on small batches?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--start", type=int, default=0, help="seed of warm start and teacher")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/teachers"))
    chosen = parser.parse_args()
    row("seed", "arm", "accuracy", "at half time", "samples to 90 % of the teacher", "cpu s")
    row(*6 * ["---"])
    folder = chosen.out / f"start_{chosen.start}_{chosen.samples}_samples"
    made = Study(folder, chosen.start, chosen.samples, chosen.steps)
    row("-", "warm start", made.measured(made.warm, "warm").told, "-", "-", "-")
    teacher = made.measured(made.teacher, "teacher")
    row("-", "teacher", teacher.told, "-", "-", "-")
    for seed in range(1, 1 + chosen.seeds):
        compare(made, teacher, seed)


if __name__ == "__main__":
    main()
