"""Write README.md and curves.svg from results.jsonl: python experiments/word_problems/page.py"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from oxrl_stats.intervals import student, wilson_bounds

HERE = Path(__file__).resolve().parent
DATASETS = ("svamp", "gsm8k")
KS = (1, 2, 4, 8, 16, 32, 64, 128)
# Of the test part of each dataset.
QUESTIONS = {"svamp": 80, "gsm8k": 64}
# The model that every family begins with.
WARM = "warm"


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file of results; none where there is none."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def told(dataset: str, share: float) -> str:
    """A share in percent, and between which two it likely is.

    How often each question was answered rightly was not kept, so a question counts once, however
    many answers it has: no interval over questions can be wider.
    """
    questions = QUESTIONS[dataset]
    mean = np.array(share)
    low, high = wilson_bounds(
        mean,
        mean * (1 - mean) / questions,
        prompts=questions,
        samples=1,
        reach=student(questions),
    )
    return f"{100 * share:.1f} [{100 * float(low):.0f}, {100 * float(high):.0f}]"


def table(lines: list[dict[str, Any]]) -> list[str]:
    """pass@k of every family: mean over seeds; of pass@1 also every seed."""
    heads = " | ".join(f"pass@{k}" for k in KS[1:])
    found = [f"| dataset | family | pass@1, per seed | mean | {heads} | processor s |"]
    found.append("|---" * (len(KS) + 4) + "|")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        groups[line["dataset"], line["family"]].append(line)
    for (dataset, family), rows in groups.items():
        rows.sort(key=lambda row: row["seed"])
        each = ", ".join(told(dataset, row["pass@1"]) for row in rows)
        means = (statistics.mean(row[f"pass@{k}"] for row in rows) for k in KS)
        cells = [told(dataset, mean) for mean in means]
        seconds = statistics.mean(row["cpu_s"] for row in rows)
        found.append(f"| {dataset} | {family} | {each} | {' | '.join(cells)} | {seconds:.0f} |")
    return found


def told_floors(lines: list[dict[str, Any]]) -> list[str]:
    """A sentence on what can be had without reading, for each dataset."""
    found: list[str] = []
    for dataset in DATASETS:
        rows = [row for row in lines if row["dataset"] == dataset and row["family"] == WARM]
        if not rows:
            continue
        names = rows[0]["floors"]
        shares = {
            name: 100 * statistics.mean(row["floors"][name] for row in rows) for name in names
        }
        found.append(
            f"Floors of {dataset}: always the most frequent formula {shares['most_frequent']:.1f}, "
            f"the right formula of another question {shares['shuffled']:.1f}. Of the words of its "
            f"test part the model knows {100 * rows[0]['known_words']:.0f} %."
        )
    return found


def draw(lines: list[dict[str, Any]], path: Path) -> None:
    """Mean reward by step of what samples as it learns: a panel per dataset."""
    sys.path.insert(0, str(HERE.parent))
    import matplotlib.pyplot as plt
    from curves import smooth

    plt.rcParams["svg.fonttype"] = "none"
    plt.rcParams["svg.hashsalt"] = "oxrl"
    figure, panels = plt.subplots(1, len(DATASETS), figsize=(9, 3), sharey=True)
    colors = {"sgrpo": "#1f77b4", "ppo": "#ff7f0e"}
    for dataset, axes in zip(DATASETS, panels, strict=True):
        axes.set_title(dataset)
        axes.set_xlabel("optimizer step")
        for line in lines:
            if line["dataset"] == dataset and line.get("curve") and line["family"] in colors:
                label = line["family"] if line["seed"] == 0 else None
                values = smooth(line["curve"])
                axes.plot(range(1, len(values) + 1), values, c=colors[line["family"]], label=label)
        axes.legend(frameon=False)
    panels[0].set_ylabel("share of right samples")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def page(text: str, lines: list[dict[str, Any]]) -> str:
    """README.md with the results between its two marks."""
    head, _, rest = text.partition("<!-- results -->\n")
    _, _, tail = rest.partition("<!-- end of results -->")
    body = "Not run yet.\n"
    if lines:
        drawn = "![Share of right samples by step](curves.svg)"
        body = "\n".join([*table(lines), "", *told_floors(lines), "", drawn]) + "\n"
    return f"{head}<!-- results -->\n{body}<!-- end of results -->{tail}"


def main() -> None:
    lines = read(HERE / "results.jsonl")
    readme = HERE / "README.md"
    readme.write_text(page(readme.read_text(encoding="utf-8"), lines), encoding="utf-8")
    if lines:
        draw(lines, HERE / "curves.svg")


if __name__ == "__main__":
    main()
