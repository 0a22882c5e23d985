"""What experiments have measured is told with its interval, and with its control where it learned."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from oxrl_stats.intervals import mean_interval

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "experiments").glob("*/README.md"))
# An interval, and a share of 1 or in percent that has none behind it.
INTERVAL = re.compile(r"\s\[[-+]?[\d.]+, [-+]?[\d.]+\]")
FIGURE = re.compile(r"(?<![\d.])(?:\d+(?:\.\d+)? ?%|[01]\.\d{3}(?!\d))(?!\s*\[)")
# (page, what stands around a figure) -> why it has no interval.
EXEMPT = {
    ("quickstart", "so 38 % of the answers are wrong"): "true by construction",
    ("quickstart", "right less than 60 % of the time"): "a bound of the figures below it",
    ("raster_world", "succeeds in 80 % of 200 sampled"): "a threshold",
    ("raster_world", "| 0.209 |"): "its parts were not kept, which the page says",
    ("raster_world", "| 0.231 |"): "its parts were not kept, which the page says",
    ("raster_world", "| 0.221 |"): "its parts were not kept, which the page says",
    ("raster_world", "95 % of the groups then have equal"): "of a training curve, not measured",
    ("visual_questions", "it answers 70 % of 512 training"): "a threshold",
    ("visual_questions", "0.625"): "a floor, by construction",
    ("word_problems", "the model knows 89 %"): "counted, of all words",
    ("word_problems", "the model knows 70 %"): "counted, of all words",
    ("smollm2", "1.939 | 1.8"): "a loss: those of single conversations were not kept",
    ("loophole", "| 0.661 to 0.955 |"): "single grades were not kept, which the page says",
    ("teachers", "samples to 90 % of the teacher"): "a threshold",
    ("teachers", "is at 90 % of the teacher"): "a threshold",
    ("simulators", "and 0.135 of the sampled episodes"): "how many episodes was not kept",
    ("simulators", "0.117 of the episodes succeeded"): "how many episodes was not kept",
    ("simulators", "(0.133 blind), of 5 bins 0.100 to 0.172"): "how many episodes was not kept",
}
# Figures of these are shares of so many prompts with one answer each.
PROMPTS = {"calculator": 256, "guessing": 256, "visual_questions": 256, "simulators": 200}
# Pages with nothing that was learned: not run, or no result.
NOTHING_LEARNED = (
    "cluster",
    "gpu",
    "gsm8k_qwen2.5_0.5b",
    "gsm8k_scale",
    "libero",
    "robots",
)


def without_interval(name: str, text: str) -> list[str]:
    """Figures of a page that have no interval and no reason, with what stands around them."""
    told = INTERVAL.sub(" []", text)
    told = re.sub(r"95 %(?=\s+(?:interval|bootstrap)|\])", "", told)
    for page, around in EXEMPT:
        if page == name:
            told = told.replace(around, "")
    rows = r"(?m)^\| \d \| (?:step 50|warm start), step .*$"
    if name == "quickstart":  # of common noise: intervals are of the differences
        told = re.sub(rows, "", told)
    return [told[max(found.start() - 40, 0) : found.end() + 20] for found in FIGURE.finditer(told)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_every_share_has_its_interval(page: Path) -> None:
    assert without_interval(page.parent.name, page.read_text(encoding="utf-8")) == []


def test_every_reason_is_of_a_figure_that_stands_there() -> None:
    texts = {page.parent.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert [key for key in EXEMPT if key[1] not in texts[key[0]]] == []


@pytest.mark.parametrize("name", PROMPTS)
def test_an_interval_is_the_one_of_its_figure(name: str) -> None:
    text = (ROOT / "experiments" / name / "README.md").read_text(encoding="utf-8")
    prompts = PROMPTS[name]
    pairs = re.findall(r"([01]\.\d{3}) \[([\d.]+), ([\d.]+)\]", text)
    assert len(pairs) >= 6
    for value, low, high in pairs:
        right = np.arange(prompts) < round(float(value) * prompts)
        found = mean_interval(right.astype(float)[:, None])
        assert found.text == f"{found.value:.3f} [{low}, {high}]", (value, low, high)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_what_learned_names_its_control(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.parent.name in NOTHING_LEARNED:
        assert INTERVAL.search(text) is None, "it has results: name its control"
    else:
        assert re.search(r"\b[Cc]ontrols?\b", text)


def test_a_figure_without_an_interval_is_noticed() -> None:
    assert without_interval("other", "from 0.523 [0.462, 0.584] to 73 % [64, 80].") == []
    for told in (
        "it went to 0.996",
        "| 0.523 [0.462, 0.584] to 0.996 |",
        "right in 38.1 % of them",
    ):
        assert len(without_interval("other", told)) == 1
