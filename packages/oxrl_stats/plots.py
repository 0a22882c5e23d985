"""Pictures of comparisons, as SVG: a dot for what was measured, a bar for its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # no window
from matplotlib import pyplot
from matplotlib.axes import Axes

from oxrl_stats.budgets import AtBudget
from oxrl_stats.compare import Comparison
from oxrl_stats.intervals import Interval

# Inches: of the picture, and of one line of it.
WIDTH = 7.0
LINE = 0.4
COLORS = {"model": "#2563eb", "difference": "#111827"}


def draw_comparison(found: Comparison, path: Path) -> None:
    """Draw every model and every difference of a comparison.

    Args:
        found: by `run_compare`.
        path: of the SVG file.
    """
    rows: list[tuple[str, Interval, str]] = []
    for one in found.pairs:
        rows.append((one.names[0], one.first, "model"))
        rows.append((one.names[1], one.second, "model"))
        rows.append(("difference", one.gap, "difference"))
    for one in found.selections:
        rows += [(name, told, "model") for name, told in one.others.items()]
    draw_rows(rows, path)


def draw_rows(rows: list[tuple[str, Interval, str]], path: Path) -> None:
    """Draw intervals below each other.

    Args:
        rows: name, interval and kind of each.
        path: of the SVG file.
    """
    # The same comparison is the same file: text stays text, and names of parts are no chance.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oxrl"}):
        figure, axes = pyplot.subplots(figsize=(WIDTH, LINE * (len(rows) + 2)))
        for place, (_, found, kind) in enumerate(rows):
            color = COLORS[kind]
            axes.plot([found.low, found.high], [place, place], color=color, linewidth=2)
            axes.plot([found.value], [place], "o", color=color)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.invert_yaxis()
        axes.axvline(0, color="#d1d5db", linewidth=1, zorder=0)
        axes.set_xlabel("reward, with its 95 % interval over prompts")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def draw_budgets(found: Sequence[AtBudget], path: Path) -> None:
    """Draw reward by budget, and pass@k and maj@k by tries, each with its band.

    Args:
        found: by budget.
        path: of the SVG file.
    """
    largest = found[-1].at_k
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oxrl"}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH, 3), sharey=True)
        budgets = [one.budget for one in found]
        _band(left, budgets, [one.reward for one in found], "reward")
        for kind in ("pass", "maj"):
            named = {name: told for name, told in largest.items() if name.startswith(kind)}
            tries = [int(name.partition("@")[2]) for name in named]
            _band(right, tries, list(named.values()), f"{kind}@k")
        left.set_xlabel("most tokens of a response")
        right.set_xlabel("tries k")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def _band(axes: Axes, places: Sequence[int], found: Sequence[Interval], label: str) -> None:
    axes.plot(places, [one.value for one in found], marker="o", label=label)
    low, high = ([one.low for one in found], [one.high for one in found])
    axes.fill_between(places, low, high, alpha=0.2)
