"""Write README.md and the curves from what is recorded.

python experiments/smollm2/page.py                        README.md and curves.svg from results/
python experiments/smollm2/page.py --demo runs/smollm-1   demo.json and demo.svg, too
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from demo import accuracy
from families import BEFORE, FAMILIES, seeds_of

from oxrl_stats.intervals import Interval, Numbers, mean_interval

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SEEDS = [0, 1, 2]
DRAWS = 2000
# Steps at either end of a curve that a figure is the mean of.
ENDS = 5
Record = dict[str, Any]
Records = dict[tuple[str, int], Record]


def read(folder: Path) -> Records:
    """Every record, by family and seed."""
    found: Records = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[record["family"], record["seed"]] = record
    return found


def rate(asked: Record) -> float:
    """pass@1 in percent: the share of right answers."""
    return 100 * sum(asked["right"]) / (asked["samples"] * len(asked["right"]))


def some_right(asked: Record) -> float:
    """pass@k in percent, k the number of answers to each question."""
    return 100 * sum(right > 0 for right in asked["right"]) / len(asked["right"])


def rewards(asked: Record) -> Numbers:
    """1 for every right answer and 0 for every other one, [questions, answers]; the right ones of a
    question stand first.
    """
    samples = asked["samples"]
    return np.array(
        [[float(place < right) for place in range(samples)] for right in asked["right"]]
    )


def percent(found: Interval) -> str:
    """As in `57.6 [47.3, 67.3]`."""
    value, low, high = (100 * number for number in found)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def told_rate(asked: Record) -> str:
    """pass@1 in percent, with its interval over questions."""
    return percent(mean_interval(rewards(asked)))


def told_some_right(asked: Record) -> str:
    """pass@k in percent, with its interval over questions."""
    return percent(mean_interval(rewards(asked).max(1, keepdims=True)))


def told_share(share: float, among: int) -> str:
    """A share of so many in percent, with its interval."""
    right = round(share * among)
    return percent(mean_interval((np.arange(among) < right).astype(float)[:, None]))


def interval(before: Record, after: Record) -> tuple[float, float]:
    """95 % bootstrap interval of the change of pass@1 in points, over questions."""
    pairs = list(zip(before["right"], after["right"], strict=True))
    changes: list[float] = []
    for one, other in pairs:
        changes.append(100 * (other / after["samples"] - one / before["samples"]))
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(changes, k=len(changes))) for _ in range(DRAWS))
    return means[round(0.025 * DRAWS)], means[round(0.975 * DRAWS) - 1]


def before_of(record: Record, records: Records) -> Record | None:
    """What was answered before a run: its own record of it, or the untrained model's."""
    if "before" in record:
        return record["before"]
    untrained = records.get((f"{record['task']}-{BEFORE}", 0))
    return None if untrained is None else untrained["before"]


def ends(curve: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Means of the first and of the last steps of a curve."""
    values = [value for _, value in curve]
    return statistics.mean(values[:ENDS]), statistics.mean(values[-ENDS:])


def cost(record: Record) -> str:
    """Seconds of a step by the clock and of the processor, and how busy the machine was."""
    clock, processor = record["seconds"]["clock"], record["seconds"]["processor"]
    spent = "–" if processor is None else f"{processor / record['steps']:.1f}"
    loads = record["busy"].values()
    busy = f" (busy: load {min(loads):.0f} to {max(loads):.0f})" if max(loads) > 3 else ""
    return f"{clock / record['steps']:.1f}{busy} | {spent} | {record['peak_gb']:.1f}"


def reinforcement(records: Records) -> list[str]:
    """A row for each run that samples as it learns."""
    found = [
        "| family | seed | pass@1 before | after | change [95 %] | pass@k before | after | k "
        "| training reward | s a step | processor s | peak GB |",
        "|---" * 12 + "|",
    ]
    for (name, seed), record in in_order(records, "rl"):
        after = record["after"]
        first, last = ends(record["curve"])
        before = before_of(record, records)
        if before is None:
            told = f"– | {told_rate(after)} | – | – | {told_some_right(after)}"
        else:
            low, high = interval(before, after)
            change = rate(after) - rate(before)
            told = (
                f"{told_rate(before)} | {told_rate(after)} | {change:+.1f} [{low:+.1f}, "
                f"{high:+.1f}] | {told_some_right(before)} | {told_some_right(after)}"
            )
        found.append(
            f"| {name} | {seed} | {told} | {after['samples']} | {first:.2f} to {last:.2f} "
            f"| {cost(record)} |"
        )
    return found if len(found) > 2 else []


def in_order(records: Records, kind: str) -> list[tuple[tuple[str, int], Record]]:
    """The records of a kind, families in the order of their table."""
    places = list(FAMILIES)
    chosen = [item for item in records.items() if item[1]["kind"] == kind]
    return sorted(chosen, key=lambda item: (places.index(item[0][0]), item[0][1]))


def imitation(records: Records) -> list[str]:
    """A row for each supervised run."""
    found = [
        "| family | seed | held-out loss before | after | perplexity before | after "
        "| training loss | s a step | processor s | peak GB |",
        "|---" * 10 + "|",
    ]
    for (name, seed), record in in_order(records, "sft"):
        before, after = record["before"]["loss"], record["after"]["loss"]
        first, last = ends(record["curve"])
        found.append(
            f"| {name} | {seed} | {before:.3f} | {after:.3f} | {math.exp(before):.2f} "
            f"| {math.exp(after):.2f} | {first:.2f} to {last:.2f} | {cost(record)} |"
        )
    return found if len(found) > 2 else []


def preference(records: Records) -> list[str]:
    """A row for each run on pairs."""
    found = [
        "| family | seed | pairs | held-out pairs | put right (start 50.0) | margin "
        "| longer wins | pass@1 before | after | change [95 %] "
        "| s a step | processor s | peak GB |",
        "|---" * 13 + "|",
    ]
    for (name, seed), record in in_order(records, "dpo"):
        before = before_of(record, records)
        after = record["after"]
        told = f"– | {rate(after):.1f} | –"
        if before is not None:
            low, high = interval(before, after)
            change = rate(after) - rate(before)
            by = f"{change:+.1f} [{low:+.1f}, {high:+.1f}]"
            told = f"{told_rate(before)} | {told_rate(after)} | {by}"
        found.append(
            f"| {name} | {seed} | {record['pairs']} | {record['held_out_pairs']} "
            f"| {told_share(record['held_out_curve'][-1][1], record['held_out_pairs'])} "
            f"| {record['margins'][-1][1]:+.3f} "
            f"| {100 * record['longer_wins']:.1f} | {told} | {cost(record)} |"
        )
    return found if len(found) > 2 else []


def floors(records: Records) -> list[str]:
    """What can be had without reading the question, and what the untrained model has."""
    found: list[str] = []
    for (name, _), record in in_order(records, BEFORE):
        before = record["before"]
        sentence = (
            f"{name.removesuffix(f'-{BEFORE}')}: the untrained model {told_rate(before)} at pass@1 "
            f"and {told_some_right(before)} at pass@{before['samples']}, on {len(before['right'])} "
            "held-out questions"
        )
        if "floors" in record:
            share = 100 * record["floors"]["most_frequent"]
            sentence += f"; always the training rows' most frequent answer {share:.1f}"
        found.append(f"- {sentence}.")
    for (name, seed), record in in_order(records, "rl"):
        if "broken" in record:
            share = told_rate(record["broken"])
            found.append(f"- {name}, seed {seed}: with a tool that says another number {share}.")
    return found


def answers(records: Records) -> list[str]:
    """The same questions before and after, in plain text."""
    trained = records.get(("arithmetic", 0))
    untrained = records.get((f"arithmetic-{BEFORE}", 0))
    if trained is None or untrained is None:
        return []
    found = ["| held-out question | untrained | after, seed 0 |", "|---|---|---|"]
    shown = zip(untrained["before"]["shown"], trained["after"]["shown"], strict=True)
    for (question, before, was_right), (_, after, is_right) in shown:
        cells = [question, marked(before, was_right), marked(after, is_right)]
        found.append(f"| {' | '.join(cells)} |")
    return found


def marked(text: str, reward: float) -> str:
    """An answer in one line, and whether it is right."""
    line = " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    return f"{line} ({'right' if reward else 'wrong'})"


def missing(records: Records) -> list[str]:
    """What nobody has run yet."""
    absent: list[str] = []
    for family in FAMILIES:
        seeds = [seed for seed in seeds_of(family, SEEDS) if (family, seed) not in records]
        if seeds:
            absent.append(f"{family} ({', '.join(map(str, seeds))})")
    if not absent:
        return ["Every family has its three seeds."]
    return [f"**Not recorded yet** (seeds): {'; '.join(absent)}."]


def machines(records: Records) -> list[str]:
    """When and on what it was measured."""
    if not records:
        return []
    dates = sorted({record["date"] for record in records.values()})
    kinds = sorted(
        {
            f"{record['machine']['processor']}, {record['machine']['cores']} cores, torch "
            f"{record['machine']['packages']['torch']}"
            for record in records.values()
        }
    )
    when = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
    return [f"Measured {when}: {'; '.join(kinds)}."]


def body(records: Records) -> str:
    """The block of results."""
    parts = [reinforcement(records), imitation(records), preference(records), floors(records)]
    parts += [answers(records), missing(records), machines(records)]
    if any("curve" in record for record in records.values()):
        parts.append(["![Training and held-out curves of every family](curves.svg)"])
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def page(text: str, records: Records) -> str:
    """README.md with the results between its two marks."""
    head, _, rest = text.partition("<!-- results -->\n")
    _, _, tail = rest.partition("<!-- end of results -->")
    return f"{head}<!-- results -->\n{body(records)}<!-- end of results -->{tail}"


def draw(records: Records, path: Path) -> None:
    """A panel per family: training curve of each seed, and its looks at the held-out rows."""
    sys.path.insert(0, str(HERE.parent))
    import matplotlib.pyplot as plt
    from curves import smooth

    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "oxrl"
    drawn = [name for name in FAMILIES if any(key[0] == name for key in records)]
    drawn = [name for name in drawn if FAMILIES[name].kind != BEFORE]
    columns = min(3, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.4 * rows), squeeze=False)
    for axes in panels.flat[len(drawn) :]:
        axes.axis("off")
    labels = {"rl": "mean reward", "sft": "loss", "dpo": "loss; share put right"}
    for name, axes in zip(drawn, panels.flat, strict=False):
        axes.set_title(name, fontsize=9)
        axes.set_ylabel(labels[FAMILIES[name].kind], fontsize=8)
        for seed in SEEDS:
            record = records.get((name, seed))
            if record is None:
                continue
            steps = [step for step, _ in record["curve"]]
            values = smooth([value for _, value in record["curve"]])
            axes.plot(steps, values, c=f"C{seed}", label=f"seed {seed}")
            looks = record["held_out_curve"]
            axes.plot(*zip(*looks, strict=True), "o--", c=f"C{seed}", ms=4, lw=0.8)
        axes.tick_params(labelsize=7)
    panels[0][0].legend(frameon=False, fontsize=7)
    figure.supxlabel(
        "optimizer step (lines: training, mean of 11 steps; dots: held out)", fontsize=8
    )
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def answered(path: Path) -> dict[str, Any]:
    """How the questions were answered: share of right ones, its interval, eight answers."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    mean, low, high = accuracy(lines)
    shown = [
        [line["prompt"], line["response"], line["reward"]] for line in lines[:: len(lines) // 8]
    ]
    return {"answers": len(lines), "right": mean, "interval": [low, high], "shown": shown}


def demonstration(folder: Path) -> Record:
    """What a run of `make smollm` has left, as a record."""
    lines = [json.loads(line) for line in (folder / "rl/metrics.jsonl").read_text().splitlines()]
    told = json.loads((folder / "rl/environment.json").read_text())
    curves: dict[str, list[list[float]]] = {}
    for name, key in (("curve", "reward/mean"), ("held_out_curve", "eval/reward")):
        recorded = [line for line in lines if line.get(key) is not None]
        curves[name] = [[line["step"], round(line[key], 4)] for line in recorded]
    before = answered(folder / "before.jsonl")
    curves["held_out_curve"].insert(0, [0, round(before["right"], 4)])
    return {
        "commit": told["git"]["commit"],
        "cpus": told["cpus"],
        "torch": told["packages"]["torch"],
        "step_seconds": round(statistics.median(line["time/step_s"] for line in lines), 1),
        "before": before,
        "after": answered(folder / "after.jsonl"),
        **curves,
    }


def draw_demonstration(record: Record, path: Path) -> None:
    """Training reward and held-out accuracy of `make smollm`."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "oxrl"
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    axes.plot(*zip(*record["curve"], strict=True), c="C0", label="reward of 64 samples")
    looks = record["held_out_curve"]
    axes.plot(*zip(*looks, strict=True), "o--", c="C1", label="held-out questions")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("right answers, share")
    axes.set_ylim(0, 1)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--demo", type=Path, help="folder of a run of `make smollm`")
    demo = parser.parse_args().demo
    if demo is not None:
        record = demonstration(demo)
        (HERE / "demo.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        draw_demonstration(record, HERE / "demo.svg")
    records = read(RESULTS)
    readme = HERE / "README.md"
    readme.write_text(page(readme.read_text(encoding="utf-8"), records), encoding="utf-8")
    if any("curve" in record for record in records.values()):
        draw(records, HERE / "curves.svg")


if __name__ == "__main__":
    main()
