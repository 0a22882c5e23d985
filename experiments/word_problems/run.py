"""Real word problems with a model that a CPU pre-trains in a minute: what each family of algorithms
adds, and what pass@k says of it.

    python experiments/word_problems/run.py --data FOLDER --seeds 0 1 2
    python experiments/word_problems/page.py                       # README.md and curves.svg
    python experiments/word_problems/run.py --data FOLDER --seeds 100 --validation --out OTHER
    python experiments/word_problems/run.py --data FOLDER --dry-run --out OTHER

FOLDER holds svamp/svamp.jsonl and gsm8k/{train,test}.jsonl as they were published. Per seed one
model learns by supervision from some problems of both (problems.py, model.py); every family goes on
from there on other problems of one dataset, for as many optimizer steps. Nothing has seen those of
the test part. Settings were chosen with --validation on seeds from 100. A family of a seed that is
in results.jsonl is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import known_share, write_model
from page import DATASETS, KS, WARM, read
from problems import Problem, floors, parts

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config

HERE = Path(__file__).resolve().parent
# Of the first model to each question that pairs are made of.
OWN_ANSWERS = 16


@dataclass(frozen=True)
class Sizes:
    """warm_steps: of the model that all begin with. steps: of a family. problems: of each part.
    samples: answers to each question of the test.
    """

    warm_steps: int
    steps: int
    problems: int
    samples: int


FULL = Sizes(warm_steps=120, steps=40, problems=1000, samples=128)
DRY = Sizes(warm_steps=3, steps=2, problems=4, samples=4)

RUN = {"mlflow": False, "checkpoint_every": 0, "console": "quiet", "threads": 1}
REWARD = {"name": f"{HERE / 'formulas.py'}:right"}
ON_POLICY = {"reward": REWARD, "rollout": {"n_samples": 8, "max_tokens": 8}}


class Trial:
    """What is learned from one seed.

    Args:
        options: of the command. seed: of everything.
    """

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.sizes = DRY if options.dry_run else FULL
        self.seed = seed
        self.folder = options.work / f"seed_{seed}"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        most = self.sizes.problems
        told: list[Problem] = []
        learned: list[Problem] = []
        self.tests: dict[str, Sequence[Problem]] = {}
        for name in DATASETS:
            found = parts(name, options.data)
            tested = found.validation if options.validation else found.test
            self.tests[name] = tested[:most]
            told += found.told[:most]
            learned += [*found.told, *found.asked]
            self.write(f"{name}.asked", [problem.row() for problem in found.asked[:most]])
            self.write(f"{name}.test", [problem.row() for problem in self.tests[name]])
        self.write(f"{WARM}.told", [problem.row() for problem in told])
        self.told = told
        texts = [problem.text for problem in learned]
        self.parameters = write_model(self.folder / "model", texts, seed)

    def about(self, dataset: str) -> dict[str, Any]:
        """What the test part of a dataset is to the model: floors, and the words that it knows."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder / "model")
        texts = [problem.text for problem in self.tests[dataset]]
        return {
            "floors": floors(self.told, self.tests[dataset]),
            "known_words": round(known_share(texts, tokenizer), 4),
            "parameters": self.parameters,
        }

    def write(self, name: str, rows: Sequence[dict[str, str]]) -> None:
        self.file(name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def file(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def train(self, name: str, model: Path, steps: int, sections: dict[str, Any]) -> Path:
        """Train; the newest checkpoint.

        Args:
            name: of the run. model: to begin with. sections: of the configuration.
        """
        shutil.rmtree(self.folder / name, ignore_errors=True)
        about = {**RUN, "name": name, "dir": str(self.folder / name), "seed": self.seed}
        settings = {"run": {**about, "steps": steps}, "model": {"name": str(model)}, **sections}
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(settings))  # JSON is YAML, too
        run(load_config(path))
        return max((self.folder / name / "checkpoints").glob("step_*"))

    def ask(
        self, model: Path, file: Path, samples: int, out: Path | None = None
    ) -> dict[str, float]:
        """What a model answers at temperature 1 to the questions of a file."""
        settings = {
            "run": {**RUN, "name": "asked", "seed": self.seed, "steps": 1},
            "model": {"name": str(model)},
            "data": {"train": str(file), "eval": str(file)},
            "train": {"alg_name": "sgrpo"},
            "inference_engine": {"max_rows": 256},
            **ON_POLICY,
        }
        path = self.folder / "asked.yaml"
        path.write_text(json.dumps(settings))
        return dict(run_eval(path, samples=samples, temperature=1.0, out=out))

    def warm(self) -> Path:
        """The model that every family begins with: supervised, on problems of both datasets."""
        steps = self.sizes.warm_steps
        sections = {
            "data": {"train": str(self.file(f"{WARM}.told")), "rows_per_step": 32},
            "train": {
                "alg_name": "sft",
                "lr": 2e-3,
                "lr_schedule": "cosine",
                "warmup_steps": min(10, steps - 1),
            },
        }
        return self.train(WARM, self.folder / "model", steps, sections)

    def rewards(self, name: str) -> list[float]:
        """Mean reward by step, where there is one."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line).get("reward/mean") for line in lines]
        return [round(value, 4) for value in found if value is not None]


def supervised(trial: Trial, dataset: str, warm: Path) -> Path:
    """The published solutions: what the others are not told."""
    sections = {
        "data": {"train": str(trial.file(f"{dataset}.asked")), "rows_per_step": 32},
        "train": {"alg_name": "sft", "lr": 3e-4},
    }
    return trial.train(f"{dataset}.sft", warm, trial.sizes.steps, sections)


def preferred(trial: Trial, dataset: str, warm: Path) -> Path:
    """Right against wrong answers of the model's own, to each question that has both."""
    answers = trial.file(f"{dataset}.answers")
    trial.ask(warm, trial.file(f"{dataset}.asked"), OWN_ANSWERS, answers)
    said: dict[str, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for line in map(json.loads, answers.read_text().splitlines()):
        responses = said[line["prompt"]][line["reward"] > 0]
        if line["response"] not in responses:
            responses.append(line["response"])
    pairs: list[dict[str, str]] = []
    for question, both in said.items():
        for chosen, rejected in zip(both[True], both[False], strict=False):
            pairs.append({"prompt": question, "chosen": chosen, "rejected": rejected})
    if not pairs:  # a dry run's model is never right
        pairs = [{"prompt": "n1 and n2", "chosen": "n1+n2", "rejected": "n1-n2"}]
    trial.write(f"{dataset}.pairs", pairs)
    sections = {
        "data": {"train": str(trial.file(f"{dataset}.pairs")), "rows_per_step": 32},
        "train": {"alg_name": "dpo", "lr": 2e-5, "beta": 0.1},
    }
    return trial.train(f"{dataset}.dpo", warm, trial.sizes.steps, sections)


Family = Callable[[Trial, str, Path], Path]


def on_policy(algorithm: str, **more: float) -> Family:
    """A row of the table that samples as it learns."""

    def learn(trial: Trial, dataset: str, warm: Path) -> Path:
        sections = {
            "data": {"train": str(trial.file(f"{dataset}.asked")), "prompts_per_step": 32},
            "train": {"alg_name": algorithm, "lr": 2e-4, **more},
            **ON_POLICY,
        }
        return trial.train(f"{dataset}.{algorithm}", warm, trial.sizes.steps, sections)

    return learn


FAMILIES: dict[str, Family] = {
    "sft": supervised,
    "dpo": preferred,
    "sgrpo": on_policy("sgrpo"),
    "ppo": on_policy("ppo", critic_lr=1e-3),
}


def measure(options: argparse.Namespace, seed: int) -> None:
    """Every family on every dataset; a line of results for each, as soon as it is known."""
    results = options.out / "results.jsonl"
    done = {(line["dataset"], line["seed"], line["family"]) for line in read(results)}
    missing: list[tuple[str, str]] = []
    for dataset in options.datasets:
        for family in (WARM, *(options.families or FAMILIES)):
            if (dataset, seed, family) not in done:
                missing.append((dataset, family))
    if not missing:
        return
    trial = Trial(options, seed)
    begun = time.process_time()
    warm = trial.warm()
    spent = time.process_time() - begun
    for dataset, family in missing:
        begun = time.process_time()
        model = warm if family == WARM else FAMILIES[family](trial, dataset, warm)
        spent = spent if family == WARM else time.process_time() - begun
        line: dict[str, Any] = {"dataset": dataset, "seed": seed, "family": family}
        found = trial.ask(model, trial.file(f"{dataset}.test"), trial.sizes.samples)
        for k in KS:
            if f"eval/pass@{k}" in found:
                line[f"pass@{k}"] = round(found[f"eval/pass@{k}"], 4)
        line["cpu_s"] = round(spent, 1)
        if family == WARM:
            line |= trial.about(dataset)
        else:
            line["curve"] = trial.rewards(f"{dataset}.{family}")
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        sys.stdout.write(f"{json.dumps({**line, 'curve': None})}\n")
        sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of svamp and gsm8k as published"
    )
    parser.add_argument("--datasets", nargs="+", choices=DATASETS, default=[*DATASETS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES)
    parser.add_argument("--validation", action="store_true", help="instead of the test part")
    parser.add_argument("--work", type=Path, default=Path("runs/word_problems"))
    parser.add_argument("--out", type=Path, default=HERE, help="folder of results.jsonl")
    parser.add_argument("--dry-run", action="store_true", help="every stage, with a few rows")
    options = parser.parse_args()
    if (options.dry_run or options.validation) and options.out == HERE:
        parser.error("--dry-run and --validation need --out: they are no results")
    options.work = options.work.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = arguments()
    for seed in options.seeds:
        measure(options, seed)


if __name__ == "__main__":
    main()
