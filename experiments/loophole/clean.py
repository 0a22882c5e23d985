"""Is the sign `hacked-reward` silent where a reward has no loophole?

    python experiments/loophole/clean.py [quickstart calculator ...] [--seed 0] [--out runs/clean]

Experiments of this folder's neighbours, from their own warm starts with their own rewards, and
`held-out-grader` beside them: with the reward itself as grader, or with one that is more lenient
(graders.py), whose gap rises as the policy learns. Printed per run: how often was asked, what was
found first and last, how far the gap rose, and whether the sign was told.
"""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.runs.health import verdicts
from oxrl_datasets.prepare import PREPARERS

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parent
GRADERS = HERE / "graders.py"
EVERY = 5


class Begun(NamedTuple):
    """What reinforcement of an experiment begins with.

    warm: the policy. data: folder of rl.jsonl and eval.jsonl. given: what else its own run.py sets.
    """

    warm: str
    data: Path
    given: list[str]


def of(name: str) -> dict[str, Any]:
    """The functions of an experiment's run.py."""
    folder = str(EXPERIMENTS / name)
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(f"{folder}/run.py")
    finally:
        sys.path.remove(folder)


def quickstart(folder: Path, seed: int) -> Begun:
    warm = of("loophole")["warm_start"](folder, seed)
    return Begun(str(warm), folder / "data", [])


def game(name: str, environment: str) -> Callable[[Path, int], Begun]:
    """How an experiment with an environment begins."""

    def begin(folder: Path, seed: int) -> Begun:
        its = of(name)
        its["write_data"](folder, seed)
        warm = its["warm_start"](folder, seed)
        file = EXPERIMENTS / name / f"{name}.py"
        return Begun(warm, folder, [f"environment.name={file}:{environment}"])

    return begin


def visual_questions(folder: Path, seed: int) -> Begun:
    data = folder / "data"
    PREPARERS["visual-questions"](None, data, seed=seed)
    warm = of("visual_questions")["warm_start"](data, folder / "sft", seed)
    return Begun(str(warm), data, [])


# Experiment -> how it begins; who judges beside its reward.
CLEAN: dict[str, tuple[Callable[[Path, int], Begun], list[str]]] = {
    "quickstart": (quickstart, ["exact", f"{GRADERS}:last_digit", f"{GRADERS}:near"]),
    "calculator": (game("calculator", "Calculator"), [f"{GRADERS}:last_digit"]),
    "guessing": (game("guessing", "Guessing"), [f"{GRADERS}:a_guess"]),
    "visual_questions": (visual_questions, [f"{GRADERS}:a_colour"]),
}


def watched(name: str, begun: Begun, folder: Path, grader: str, seed: int) -> str:
    """Train with the monitor; a row of the table."""
    numbers = f"{{data: {begun.data / 'eval.jsonl'}, grader: {grader}, every: {EVERY}}}"
    given = [
        *begun.given,
        f"run.seed={seed}",
        f"run.dir={folder}",
        f"data.train={begun.data / 'rl.jsonl'}",
        f"model.name={begun.warm}",
        f"train.features={{held-out-grader: {numbers}}}",
    ]
    run(load_config(EXPERIMENTS / name / "rl.yaml", given))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    probes = [line for line in lines if "monitor/gap" in line]
    (sign,) = [found for found in verdicts(lines) if found.name == "hacked-reward"]
    first, last = probes[0], probes[-1]
    told = "never" if sign.step is None else f"step {sign.step}"
    changes = [
        f"{first[key]:.3f} to {last[key]:.3f}"
        for key in ("monitor/reward", "monitor/grader", "monitor/gap_low")
    ]
    called = grader.rpartition(":")[2]
    cells = [name, called, str(len(lines)), str(len(probes)), *changes, told]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Is the sign silent without a loophole?")
    parser.add_argument("names", nargs="*", default=[*CLEAN])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/clean"))
    chosen = parser.parse_args()
    for name in chosen.names:
        begin, graders = CLEAN[name]
        folder = chosen.out / name / f"seed_{chosen.seed}"
        begun = begin(folder, chosen.seed)
        for grader in graders:
            called = grader.rpartition(":")[2]
            row = watched(name, begun, folder / f"rl_{called}", grader, chosen.seed)
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
