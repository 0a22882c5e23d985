"""Does every row of the table learn? The same small budget for each, from the same warm start, on
three seeds.

    python experiments/algorithm_zoo/run.py
        every row that trains, then the table and the plot
    python experiments/algorithm_zoo/run.py --rows gspo dapo    some rows only
    python experiments/algorithm_zoo/run.py --table             table and plot from results.jsonl

The task, the model and the warm start are the quickstart's. `results.jsonl` gets a line per row and
seed as soon as it is known; a row and seed that is in it already is not run again: start an
interrupted job again to continue it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.errors import OxrlError
from oxrl.tables.policy import ROWS, Row
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
EVAL_SAMPLES = 4
GAIN = 5.0
# What a row cannot do without, or what its source asks for, beyond the shared settings.
EXTRA: dict[str, list[str]] = {
    "pkpo": ["train.pass_k=4"],
    # Its lambda is 1 - 1 / (length_alpha * length): with the default 0.05 it is 0 for answers of
    # three tokens, and the row gains 2 points on seed 0 instead.
    "vapo": ["train.critic_warmup_steps=10", "train.length_alpha=10"],
    "prorl": ["train.reference_sync_steps=20"],
}
CRITIC = ["train.critic_lr=1e-3"]


def overrides(row: Row) -> list[str]:
    """The row's own settings."""
    return [
        f"train.alg_name={row.name}",
        *(CRITIC if "critic" in row.needs else []),
        *EXTRA.get(row.name, []),
    ]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def accuracy(model: Path, folder: Path, seed: int) -> float:
    """Percent of right answers at temperature 1 over the held-out sums, four samples each."""
    files = [
        f"model.name={model}",
        f"data.train={folder / 'data/rl.jsonl'}",
        f"data.eval={folder / 'data/eval.jsonl'}",
    ]
    metrics = run_eval(
        HERE / "run.yaml", [*files, f"run.seed={seed}"], samples=EVAL_SAMPLES, temperature=1.0
    )
    return round(100 * metrics["eval/reward"], 3)


def newest(run_directory: Path) -> Path:
    return max((run_directory / "checkpoints").glob("step_*"))


def warm_start(folder: Path, seed: int) -> Path:
    """The quickstart's data and supervised warm start for this seed; made once."""
    if not (folder / "data/rl.jsonl").exists():
        PREPARERS["arithmetic"](None, folder / "data", seed=seed, **TASK)
    if not (folder / "warm/finished.json").exists():
        shutil.rmtree(folder / "warm", ignore_errors=True)
        given = [
            f"run.seed={seed}",
            f"run.dir={folder / 'warm'}",
            f"data.train={folder / 'data/sft.jsonl'}",
        ]
        run(load_config(QUICKSTART / "sft.yaml", given))
        done = {"accuracy": accuracy(newest(folder / "warm"), folder, seed)}
        (folder / "warm/finished.json").write_text(json.dumps(done))
    return newest(folder / "warm")


def learn(row: Row, folder: Path, seed: int) -> dict[str, Any]:
    """Train one row from the warm start; what was measured, or what stopped it."""
    warm = warm_start(folder, seed)
    before = json.loads((folder / "warm/finished.json").read_text())["accuracy"]
    target = folder / row.name
    shutil.rmtree(target, ignore_errors=True)
    given = [
        f"run.seed={seed}",
        f"run.dir={target}",
        f"model.name={warm}",
        f"data.train={folder / 'data/rl.jsonl'}",
    ]
    line: dict[str, Any] = {"row": row.name, "seed": seed, "before": before}
    try:
        run(load_config(HERE / "run.yaml", given + overrides(row)))
    except OxrlError as error:
        return line | {"stopped": str(error)}
    return line | {"after": accuracy(newest(target), folder, seed)}


def table(results: list[dict[str, Any]]) -> list[str]:
    """Markdown lines: one row each, then what is not run and why."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in results:
        found[line["row"]].append(line)
    lines = [
        "| row | before | after, per seed | mean gain (points) | learns |",
        "|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        if row.recipe != "rl":
            continue
        seeds = sorted(found[name], key=lambda line: line["seed"])
        if not seeds:
            lines.append(f"| {name} | | | | not run: {row.unsupported or 'no result yet'} |")
            continue
        stopped = [line["stopped"] for line in seeds if "stopped" in line]
        if stopped:
            lines.append(f"| {name} | | | | stopped: {stopped[0]} |")
            continue
        gain = statistics.mean(line["after"] - line["before"] for line in seeds)
        before = ", ".join(f"{line['before']:.1f}" for line in seeds)
        after = ", ".join(f"{line['after']:.1f}" for line in seeds)
        lines.append(
            f"| {name} | {before} | {after} | {gain:+.1f} | {'yes' if gain >= GAIN else 'NO'} |"
        )
    return lines


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Gain per row, one dot per seed, a bar for the mean."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "oxrl"
    gains: dict[str, list[float]] = defaultdict(list)
    for line in results:
        if "after" in line:
            gains[line["row"]].append(line["after"] - line["before"])
    names = sorted(gains, key=lambda name: statistics.mean(gains[name]))
    figure, axes = plt.subplots(figsize=(8, 0.2 * len(names) + 1))
    axes.barh(names, [statistics.mean(gains[name]) for name in names], color="#9db4c0", zorder=1)
    for name in names:
        axes.scatter(gains[name], [name] * len(gains[name]), color="#253237", s=9, zorder=2)
    axes.axvline(GAIN, color="#b23a48", linewidth=1)
    axes.set_xlabel(
        "points of sampled held-out accuracy over the warm start (line: the least that counts)"
    )
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.01)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def write_results(results: list[dict[str, Any]]) -> None:
    """Put the table between the markers of README.md and draw the plot beside it."""
    readme = HERE / "README.md"
    head, rest = readme.read_text(encoding="utf-8").split("<!-- table -->\n", 1)
    tail = rest.split("<!-- end of table -->\n", 1)[1]
    middle = "\n".join(table(results))
    readme.write_text(
        f"{head}<!-- table -->\n{middle}\n<!-- end of table -->\n{tail}", encoding="utf-8"
    )
    plot(results, HERE / "gains.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train every row of the table for the same small budget."
    )
    parser.add_argument("--rows", nargs="+", choices=sorted(ROWS), help="only these rows")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/algorithm_zoo"),
        help="where run directories are made",
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    record = HERE / "results.jsonl"
    results = (
        [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    )
    known = {(line["row"], line["seed"]) for line in results}
    chosen = [
        row for row in ROWS.values() if row.recipe == "rl" and row.name in (arguments.rows or ROWS)
    ]
    for seed in range(0 if arguments.table else arguments.seeds):
        for row in chosen:
            if row.unsupported or (row.name, seed) in known:
                continue
            line = learn(row, arguments.out / f"seed_{seed}", seed)
            results.append(line)
            with record.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            say(json.dumps(line))
    write_results(results)
    say("\n".join(table(results)))


if __name__ == "__main__":
    main()
