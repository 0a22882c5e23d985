"""Does every row of the table learn? The same small budget for each, from the same warm start, on
three seeds.

    python experiments/algorithm_zoo/run.py
        every row that trains, and what is compared with it; then the tables and the plot
    python experiments/algorithm_zoo/run.py --rows gspo dapo    some rows only
    python experiments/algorithm_zoo/run.py --table             tables and plot from the records

The task, the model and the warm start are the quickstart's. The record, `results.jsonl` if
`--record` names no other, gets a line per row and seed as soon as it is known; a row and seed that
is in it already is not run again: start an interrupted job again to continue it.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.errors import Interrupted, OxrlError
from oxrl.tables.policy import ROWS
from oxrl_datasets.prepare import PREPARERS
from oxrl_stats.intervals import Interval, student

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
# What every row is compared with, and the run whose rewards say nothing of its responses.
USUAL = "sgrpo"
CONTROL = "sgrpo, permuted rewards"
# Supervised training that goes on from the warm start, on the same answers.
SFT = "sft, 100 steps more"
DFT = "dft, 100 steps more"
MORE = ["run.steps=100", "train.lr=5e-4"]
# What a row cannot do without, or what its source asks for, beyond the shared settings.
EXTRA: dict[str, list[str]] = {
    "pkpo": ["train.pass_k=4"],
    # Its lambda is 1 - 1 / (length_alpha * length): with the default 0.05 it is 0 for answers of
    # three tokens, and the row gains 2 points on seed 0 instead.
    "vapo": ["train.critic_warmup_steps=10", "train.length_alpha=10"],
    "prorl": ["train.reference_sync_steps=20"],
}
CRITIC = ["train.critic_lr=1e-3"]
# Rows without an importance ratio: one update per batch, as many samples for each.
ON_POLICY = ["train.minibatches=1", "data.prompts_per_step=32"]
# Rows that this task has nothing for.
ELSEWHERE = {
    "turn_grpo": "compares turns of an environment",
    "gdpo": "compares the parts of a reward, and this one has one",
}
# Records, one to a processor.
RECORDS = ("results.jsonl", "results_second_processor.jsonl")


class Entry(NamedTuple):
    """One line of a table: a row of the algorithms' table, what is set beside it, and the entry
    that it is compared with.
    """

    name: str
    row: str
    given: Sequence[str] = ()
    beside: str = USUAL


def entries() -> list[Entry]:
    """What is trained: every row that can be, and variants of some."""
    rows = [
        Entry(row.name, row.name)
        for row in ROWS.of("rl")
        if not row.unsupported and row.name not in ELSEWHERE
    ]
    return [
        *rows,
        Entry("maxrl, order 2", "maxrl", ["train.maxrl_order=2"]),
        Entry(CONTROL, USUAL, ["train.features={permuted-rewards: {}}"]),
        Entry(SFT, "sft", MORE, beside=SFT),
        Entry(DFT, "dft", MORE, beside=SFT),
    ]


def overrides(entry: Entry) -> list[str]:
    """An entry's own settings."""
    row = ROWS[entry.row]
    return [
        f"train.alg_name={row.name}",
        *(CRITIC if "critic" in row.needs else []),
        *(ON_POLICY if row.gate == "policy_gradient" else []),
        *EXTRA.get(row.name, []),
        *entry.given,
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


def learn(entry: Entry, folder: Path, seed: int) -> dict[str, Any]:
    """Train one entry from the warm start; what was measured, or what stopped it."""
    warm = warm_start(folder, seed)
    before = json.loads((folder / "warm/finished.json").read_text())["accuracy"]
    target = folder / entry.name.replace(", ", "_").replace(" ", "_")
    shutil.rmtree(target, ignore_errors=True)
    supervised = ROWS[entry.row].recipe == "supervised"
    given = [
        f"run.seed={seed}",
        f"run.dir={target}",
        f"model.name={warm}",
        f"data.train={folder / ('data/sft.jsonl' if supervised else 'data/rl.jsonl')}",
        *overrides(entry),
    ]
    config = QUICKSTART / "sft.yaml" if supervised else HERE / "run.yaml"
    line: dict[str, Any] = {"row": entry.name, "seed": seed, "before": before}
    try:
        run(load_config(config, given))
    except Interrupted:
        raise  # by whoever started this: it goes on another time
    except OxrlError as error:
        return line | {"stopped": str(error)}
    return line | {"after": accuracy(newest(target), folder, seed)}


def interval(values: Sequence[float]) -> Interval:
    """The mean of a figure per seed, with its 95 % interval over seeds: Student's t."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return Interval(mean, math.nan, math.nan)
    half = student(len(values)) * statistics.stdev(values) / len(values) ** 0.5
    return Interval(mean, mean - half, mean + half)


def shown(found: Interval) -> str:
    return f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def compared(found: Interval) -> str:
    """A difference, and whether it is one: its interval excludes 0."""
    verdict = "more" if found.low > 0 else "less" if found.high < 0 else ""
    return f"{shown(found)} {verdict}".rstrip()


def by_row(results: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Results of each entry, by seed."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in sorted(results, key=lambda line: line["seed"]):
        found[line["row"]].append(line)
    return found


def table(results: list[dict[str, Any]], *, whole: bool) -> list[str]:
    """Markdown lines: one entry each.

    Args:
        results: of one processor.
        whole: name the rows that are not among them, and why.
    """
    found = by_row(results)
    lines = [
        "| row | before | after, per seed | gain (points) | minus sgrpo; dft: minus sft | learns |",
        "|---|---|---|---|---|---|",
    ]
    for entry in entries():
        seeds = found[entry.name]
        stopped = [line["stopped"] for line in seeds if "stopped" in line]
        if stopped:
            lines.append(f"| {entry.name} | | | | | stopped: {stopped[0]} |")
        elif seeds:
            lines.append(f"| {' | '.join(cells(entry, seeds, found[entry.beside]))} |")
    if whole:
        shown_rows = [entry.name for entry in entries() if found[entry.name]]
        for row in ROWS.of("rl"):
            if row.name not in shown_rows:
                why = row.unsupported or ELSEWHERE.get(row.name, "in the table above")
                lines.append(f"| {row.name} | | | | | not here: {why} |")
    return lines


def cells(entry: Entry, seeds: list[dict[str, Any]], beside: list[dict[str, Any]]) -> list[str]:
    """A line of the table.

    Args:
        entry: that it is of.
        seeds: its results.
        beside: those of what it is compared with.
    """
    gain = interval([line["after"] - line["before"] for line in seeds])
    difference = ""
    if entry.beside != entry.name:
        other = {line["seed"]: line["after"] for line in beside}
        apart = [line["after"] - other[line["seed"]] for line in seeds if line["seed"] in other]
        difference = compared(interval(apart)) if apart else ""
    return [
        entry.name,
        ", ".join(f"{line['before']:.1f}" for line in seeds),
        ", ".join(f"{line['after']:.1f}" for line in seeds),
        shown(gain),
        difference,
        "yes" if gain.low > GAIN else "NO",
    ]


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


def read(record: str) -> list[dict[str, Any]]:
    """The lines of a record; none where there is no such file yet."""
    path = HERE / record
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_tables() -> None:
    """Put a table of each record between its markers of README.md, and draw the first one."""
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    for record in RECORDS:
        begin = f"<!-- {record} -->\n"
        head, rest = text.split(begin, 1)
        _, tail = rest.split("<!-- end -->\n", 1)
        rows = "\n".join(table(read(record), whole=record == RECORDS[0]))
        text = f"{head}{begin}{rows}\n<!-- end -->\n{tail}"
    readme.write_text(text, encoding="utf-8")
    plot(read(RECORDS[0]), HERE / "gains.svg")


def main() -> None:
    known_names = {entry.name: entry for entry in entries()}
    parser = argparse.ArgumentParser(
        description="Train every row of the table for the same small budget."
    )
    parser.add_argument("--rows", nargs="+", choices=sorted(known_names), help="only these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--record", choices=RECORDS, default=RECORDS[0], help="where lines go")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/algorithm_zoo"),
        help="where run directories are made",
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    arguments = parser.parse_args()
    known = {(line["row"], line["seed"]) for line in read(arguments.record)}
    chosen = [known_names[name] for name in arguments.rows or known_names]
    for seed in range(0 if arguments.table else arguments.seeds):
        for entry in chosen:
            if (entry.name, seed) in known:
                continue
            line = learn(entry, arguments.out / f"seed_{seed}", seed)
            with (HERE / arguments.record).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            say(json.dumps(line))
    write_tables()
    for record in RECORDS:
        say("\n".join(table(read(record), whole=record == RECORDS[0])))


if __name__ == "__main__":
    main()
