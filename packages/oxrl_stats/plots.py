"""Pictures as SVG: a dot or a line for what was measured, a bar or a band for its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("agg")  # no window
from matplotlib import pyplot
from matplotlib.axes import Axes

from oxrl_stats.intervals import Interval

# Inches: of the picture, of one line of intervals, and of curves.
WIDTH = 7.0
LINE = 0.4
HEIGHT = 3.0
# As in the report.
COLORS = ("#3566c9", "#d9792b", "#2f9461")
LINES = "#8884"


def draw_intervals(rows: Sequence[tuple[str, Interval]], path: Path) -> None:
    """Draw intervals below each other.

    Args:
        rows: name and interval of each.
        path: of the SVG file.
    """
    with picture(path, 1, LINE * (len(rows) + 2)) as [axes]:
        for place, (_, found) in enumerate(rows):
            axes.plot([found.low, found.high], [place, place], color=COLORS[0], linewidth=2)
            axes.plot([found.value], [place], "o", color=COLORS[0])
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.axvline(0, color=LINES, linewidth=1, zorder=0)
        axes.set_xlabel("reward, with its 95 % interval over prompts")


class Curves(NamedTuple):
    """Curves over one axis, which doubles from mark to mark.

    label: of the axis. places: along it. found: the intervals at those places, by what they are of.
    """

    label: str
    places: Sequence[int]
    found: Mapping[str, Sequence[Interval]]


def draw_curves(curves: Sequence[Curves], path: Path) -> None:
    """Draw curves beside each other, each with its band.

    Args:
        curves: from left to right.
        path: of the SVG file.
    """
    with picture(path, len(curves), HEIGHT) as every:
        for axes, one in zip(every, curves, strict=True):
            for label, found in one.found.items():
                axes.plot(one.places, [at.value for at in found], marker="o", label=label)
                low = [at.low for at in found]
                high = [at.high for at in found]
                axes.fill_between(one.places, low, high, alpha=0.2)
            axes.set_xscale("log", base=2)
            axes.set_xlabel(one.label)
            axes.legend(frameon=False)


@contextmanager
def picture(path: Path, columns: int, height: float) -> Iterator[list[Axes]]:
    """Open a picture for a block that draws, and write it.

    Args:
        path: of the SVG file; the same drawing is the same file.
        columns: axes beside each other.
        height: in inches.
    """
    # Text stays text, and names of parts are no chance.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oxrl"}):
        figure, [every] = pyplot.subplots(
            1, columns, figsize=(WIDTH, height), sharey=True, squeeze=False
        )
        for axes in every:
            axes.set_prop_cycle(color=COLORS)
            axes.spines[["top", "right"]].set_visible(False)
        yield list(every)
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)
