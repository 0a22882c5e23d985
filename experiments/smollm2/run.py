"""Experiments on SmolLM2-135M-Instruct, a model that others have pre-trained, on a CPU.

    python experiments/smollm2/run.py --model MODEL --data DATA                 all that is missing
    python experiments/smollm2/run.py --model MODEL --data DATA --families arithmetic sft --seeds 0
    python experiments/smollm2/run.py --list                                    what is missing
    python experiments/smollm2/page.py                                          README.md, curves

MODEL is the folder that `oxrl prepare gguf` makes. DATA holds svamp/svamp.jsonl,
ifeval/input_data.jsonl and oasst_en/trees.jsonl as they were published. Every family and seed is a
process of its own that leaves one file in results/; what is there is not run again, so that a
stopped job goes on where it was started again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import problems
from families import (
    BEFORE,
    CALLS_WARM,
    CALLS_WARM_STEPS,
    FAMILIES,
    LOOK_EVERY,
    OWN_ANSWERS,
    TASKS,
    Family,
    sections_of,
    seeds_of,
)
from problems import Split

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE / "results"
# Answers that a record shows.
SHOWN = 4


class Trial:
    """One family with one seed.

    Args:
        options: of the command.
        name, seed: which.
    """

    def __init__(self, options: argparse.Namespace, name: str, seed: int) -> None:
        self.options = options
        self.name = name
        self.family: Family = FAMILIES[name]
        self.seed = seed
        self.steps = min(self.family.steps, options.steps or self.family.steps)
        # The answers of the untrained model are kept for all seeds: pairs are made of them.
        self.shared = options.work / "shared"
        self.folder = options.work / f"{name}-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.seconds: dict[str, float | None] = {}
        self.split = split_of(self.family.task, options.data, options.rows)
        self.train_file = problems.write(self.folder / "train.jsonl", self.split.train)
        self.held_out_file = problems.write(self.folder / "held_out.jsonl", self.split.held_out)

    def config(self, name: str, sections: Mapping[str, Mapping[str, Any]], **run: Any) -> Path:
        """A configuration of this trial as a file."""
        given: dict[str, Any] = {
            "name": name,
            "dir": str(self.folder / name),
            "seed": self.seed,
            "steps": self.steps,
            "threads": self.options.threads,
            "checkpoint_every": 10,
            "keep_checkpoints": 1,
            "first_checkpoint": "reference",
            "mlflow": False,
            "console": "plain",
            # Idle priority on a busy machine: nothing is hurried.
            "deadline_s": 7200,
            **run,
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps({"run": given, **sections}, indent=1))  # JSON is YAML, too
        return path

    def train(
        self,
        name: str,
        model: Path,
        sections: Mapping[str, Mapping[str, Any]],
        data: Mapping[str, str],
        **run: Any,
    ) -> Path:
        """Train, or go on where another sitting was stopped; the newest checkpoint.

        Args:
            name: of the run.
            model: to begin with.
            sections: of the configuration.
            data: files, by the names of their fields.
        """
        from oxrl.commands.train import run as train
        from oxrl.config import load_config

        joined = {
            **sections,
            "model": {"name": str(model), **sections.get("model", {})},
            "data": {**data, **sections.get("data", {})},
        }
        cfg = load_config(self.config(name, joined, **run))
        begun = clocks()
        resumed = (self.folder / name).is_dir()
        train(cfg, resume=resumed)
        self.seconds = since(begun)
        if resumed:  # the processor time of a sitting that was stopped is lost
            steps = [line.get("time/step_s", 0.0) for line in self.metrics(name)]
            self.seconds = {"clock": round(sum(steps), 1), "processor": None}
        return max((self.folder / name / "checkpoints").glob("step_*"))

    def asked(
        self,
        model: Path,
        name: str,
        *,
        file: Path | None = None,
        samples: int | None = None,
        temperature: float = 1.0,
        environment: str | None = None,
    ) -> dict[str, Any]:
        """How a model answers held-out questions: right answers of each, and a few answers.

        Args:
            model: folder of a model or checkpoint.
            name: of the file of answers.
            file: other questions than the held-out ones.
            samples: answers to each, instead of the task's number.
            temperature: 0 is greedy.
            environment: another one than the task's.
        """
        from oxrl.commands.evaluate import run_eval

        task = TASKS[self.family.task]
        samples = samples or task.samples
        sections: dict[str, Any] = {part: dict(told) for part, told in task.scored.items()}
        if environment is not None:
            sections["environment"]["name"] = environment
        sections["model"] = {"name": str(model)}
        sections["model"] |= self.family.sections.get("model", {})
        questions = file or self.held_out_file
        sections["data"] = {"train": str(self.train_file), "eval": str(questions)}
        sections["train"] = {"alg_name": "sgrpo"}
        path = self.config(f"{name}_asked", sections)
        # Not {name}.jsonl: train.jsonl and held_out.jsonl are the questions.
        out = self.folder / f"{name}_answers.jsonl"
        found = run_eval(path, samples=samples, temperature=temperature, out=out)
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        rewards = [line["reward"] for line in lines]
        right: list[int] = []
        for start in range(0, len(rewards), samples):
            group = rewards[start : start + samples]
            right.append(sum(reward is not None and reward > 0.5 for reward in group))
        shown: list[list[Any]] = []
        for line in lines[: SHOWN * samples : samples]:
            shown.append([line["prompt"], line["response"], line["reward"]])
        return {
            "samples": samples,
            "right": right,
            "errors": int(found["eval/errors"]),
            "length_mean": round(found["eval/length_mean"], 2),
            "truncated": round(found["eval/truncated_frac"], 4),
            "shown": shown,
        }

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The lines that a run has recorded."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def curve(self, name: str, key: str) -> list[list[float]]:
        """(step, value) of a metric, where it was recorded."""
        found: list[list[float]] = []
        for line in self.metrics(name):
            if line.get(key) is not None:
                found.append([line["step"], round(line[key], 4)])
        return found


def split_of(task: str, data: Path | None, rows: int | None) -> Split:
    """The rows of a task.

    Args:
        data: folder of published files.
        rows: at most so many of each part.
    """
    if task == "arithmetic":
        found = problems.arithmetic()
    elif task == "calls":
        found = problems.calls()
    elif data is None:
        raise SystemExit(f"{task} needs --data: the folder with its published file")
    elif task == "svamp":
        found = problems.svamp(data)
    elif task == "ifeval":
        found = problems.ifeval(data)
    else:
        found = problems.chats(data)
    return Split(found.train[:rows], found.held_out[:rows])


def reinforced(trial: Trial) -> dict[str, Any]:
    """Sample, score, learn; then ask the held-out questions."""
    model = trial.options.model
    found: dict[str, Any] = {}
    if trial.family.task == "calls":
        model = warm_start(trial)
        found["before"] = trial.asked(model, "before")
    data = {"train": str(trial.train_file), "eval": str(trial.held_out_file)}
    learned = trial.train("rl", model, sections_of(trial.family), data, eval_every=LOOK_EVERY)
    found["seconds"] = trial.seconds
    found["curve"] = trial.curve("rl", "reward/mean")
    found["held_out_curve"] = trial.curve("rl", "eval/reward")
    found["after"] = trial.asked(learned, "after")
    if trial.family.task == "calls":
        broken = f"{HERE / 'calls.py'}:Broken"
        found["broken"] = trial.asked(learned, "broken", environment=broken, samples=1)
    return found


def warm_start(trial: Trial) -> Path:
    """What a call looks like, from demonstrations."""
    rows = [{"messages": row["messages"]} for row in trial.split.train]
    file = problems.write(trial.folder / "demonstrations.jsonl", rows)
    steps = min(CALLS_WARM_STEPS, trial.options.steps or CALLS_WARM_STEPS)
    data = {"train": str(file)}
    return trial.train("warm", trial.options.model, CALLS_WARM, data, steps=steps)


def imitated(trial: Trial) -> dict[str, Any]:
    """Held-out loss of conversations before and after learning from others."""
    from oxrl.commands.evaluate import run_eval

    data = {"train": str(trial.train_file), "eval": str(trial.held_out_file)}
    sections = sections_of(trial.family)
    asked = {
        **sections,
        "model": {"name": str(trial.options.model), **sections["model"]},
        "data": {**data, **sections["data"]},
    }
    before = run_eval(trial.config("before", asked))
    trial.train("sft", trial.options.model, sections, data, eval_every=LOOK_EVERY)
    held_out = trial.curve("sft", "eval/loss")
    return {
        "seconds": trial.seconds,
        "before": {"loss": round(before["eval/loss"], 4), "tokens": before["eval/tokens"]},
        "after": {"loss": held_out[-1][1]},
        "curve": trial.curve("sft", "update/loss"),
        "held_out_curve": [[0, round(before["eval/loss"], 4)], *held_out],
    }


def preferred(trial: Trial) -> dict[str, Any]:
    """Right against wrong answers that the untrained model gave itself."""
    pairs = pairs_of(trial, trial.train_file, "train", OWN_ANSWERS)
    held_out = pairs_of(trial, trial.held_out_file, "held_out", OWN_ANSWERS)
    train_file = problems.write(trial.folder / "pairs.jsonl", pairs)
    held_out_file = problems.write(trial.folder / "held_out_pairs.jsonl", held_out)
    data = {"train": str(train_file), "eval": str(held_out_file)}
    sections = sections_of(trial.family)
    learned = trial.train("dpo", trial.options.model, sections, data, eval_every=LOOK_EVERY)
    last = trial.metrics("dpo")[-1]
    return {
        "seconds": trial.seconds,
        "pairs": len(pairs),
        "held_out_pairs": len(held_out),
        "curve": trial.curve("dpo", "update/loss"),
        "held_out_curve": trial.curve("dpo", "eval/accuracy"),
        "margins": trial.curve("dpo", "eval/margin"),
        "longer_wins": round(last["eval/longer_wins"], 4),
        "after": trial.asked(learned, "after"),
    }


def pairs_of(trial: Trial, questions: Path, part: str, samples: int) -> list[dict[str, str]]:
    """A right and a wrong answer to every question that got both, at most four of each question."""
    kept = trial.shared / f"{part}_answers.jsonl"
    if not kept.is_file():
        trial.asked(trial.options.model, part, file=questions, samples=samples)
        trial.shared.mkdir(parents=True, exist_ok=True)
        shutil.copy(trial.folder / f"{part}_answers.jsonl", kept)
    said: dict[str, dict[bool, list[str]]] = defaultdict(lambda: {True: [], False: []})
    for line in map(json.loads, kept.read_text(encoding="utf-8").splitlines()):
        answers = said[asked_text(line["prompt"])][line["reward"] > 0.5]
        if line["response"] not in answers:
            answers.append(line["response"])
    pairs: list[dict[str, str]] = []
    for prompt, both in said.items():
        for chosen, rejected in list(zip(both[True], both[False], strict=False))[:4]:
            pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    if not pairs:  # a dry run's model is never right
        pairs = [{"prompt": "?", "chosen": "yes", "rejected": "no"}]
    return pairs


def asked_text(prompt: Any) -> str:
    """What was asked, of a recorded prompt."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def untrained(trial: Trial) -> dict[str, Any]:
    """What the model answers before anything is learned."""
    return {"before": trial.asked(trial.options.model, "before")}


KINDS = {"rl": reinforced, "sft": imitated, "dpo": preferred, BEFORE: untrained}


def clocks() -> tuple[float, float]:
    """Seconds of the clock, and of the processor in this process and those it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return time.monotonic(), sum(each.ru_utime + each.ru_stime for each in used)


def since(begun: tuple[float, float]) -> dict[str, float | None]:
    clock, processor = clocks()
    return {"clock": round(clock - begun[0], 1), "processor": round(processor - begun[1], 1)}


def record(options: argparse.Namespace, name: str, seed: int) -> None:
    """Run one family with one seed in this process, and keep what came of it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from record import git, load, machine

    load_before = load()
    begun = clocks()
    random.seed(seed)
    trial = Trial(options, name, seed)
    found = KINDS[trial.family.kind](trial)
    family = trial.family
    told: dict[str, Any] = {
        "family": name,
        "seed": seed,
        "task": family.task,
        "kind": family.kind,
        "settings": sections_of(family),
        "steps": trial.steps,
        "threads": options.threads,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git("log", "-1", "--format=%H", "--", "oxrl"),
        "machine": machine(),
        "busy": {"before": load_before, "after": load()},
        "all_seconds": since(begun),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
        "rows": {"train": len(trial.split.train), "held_out": len(trial.split.held_out)},
    }
    if family.task in ("arithmetic", "svamp", "calls"):
        told["floors"] = {"most_frequent": round(trial.split.most_frequent(), 4)}
    path = options.out / f"{name}-{seed}.json"
    # A record says where in the repository a file is, not where that is on a machine.
    text = json.dumps(told | found, ensure_ascii=False).replace(f"{ROOT}/", "")
    path.write_text(text.replace(', "', ',\n "') + "\n", encoding="utf-8")
    if not options.keep:
        shutil.rmtree(trial.folder, ignore_errors=True)


def missing(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Families and seeds without a record: the first seed of every family, then the second."""
    found: list[tuple[str, int]] = []
    for seed in options.seeds:
        for family in options.families:
            asked = seed in seeds_of(family, options.seeds)
            if asked and not (options.out / f"{family}-{seed}.json").is_file():
                found.append((family, seed))
    return found


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder made by `oxrl prepare gguf`")
    parser.add_argument("--data", type=Path, help="folder of svamp, ifeval and oasst_en")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--keep", action="store_true", help="keep what a record was made of")
    parser.add_argument("--list", action="store_true", help="tell what is missing and run nothing")
    parser.add_argument("--steps", type=int, help="at most so many; needs --out")
    parser.add_argument("--rows", type=int, help="at most so many of each part; needs --out")
    parser.add_argument("--here", action="store_true", help="run the first that is missing here")
    options = parser.parse_args(given)
    if (options.steps or options.rows) and options.out == RESULTS:
        parser.error("--steps and --rows need --out: they are no results")
    if not options.list and options.model is None:
        parser.error("--model is missing")
    options.work = options.work.absolute()
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def main() -> None:
    options = arguments()
    todo = missing(options)
    if options.list:
        for name, seed in todo:
            print(f"{name} {seed}")
        return
    if options.here:
        record(options, *todo[0])
        return
    failed: list[str] = []
    for name, seed in todo:
        if (options.out / f"{name}-{seed}.json").is_file():  # another sitting was faster
            continue
        print(f"{name} {seed} ...", flush=True)
        words = [sys.executable, *sys.argv, "--here", "--families", name, "--seeds", str(seed)]
        done = subprocess.run(words, check=False, env={**os.environ})
        if done.returncode:
            failed.append(f"{name} {seed}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
