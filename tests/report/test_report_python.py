"""Reports and curves from Python: `oxrl.report`, `Run.plot`, a run and a training in a notebook."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import oxrl
from oxrl.commands.train import run
from oxrl.errors import RunDirectoryError
from oxrl.report import notebook
from support.browser import needs_browser, opened, pieces
from support.small_runs import metric_lines, rl_config


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seeds of one run, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("seeds")
    found: list[Path] = []
    for name, changes in (
        ("a", ["run.seed=1"]),
        ("b", ["run.seed=2"]),
        ("slow", ["run.seed=1", "train.lr=1e-6"]),
    ):
        cfg = rl_config(folder, name, ["run.steps=3", *changes])
        run(cfg)
        found.append(cfg.run.directory)
    return found


def framed(shown: str) -> str:
    """The page inside what a notebook is given."""
    (source,) = re.findall('<iframe srcdoc="([^"]*)"', shown)
    assert "<script" not in shown  # of the page alone, where it is text
    assert 'sandbox="allow-scripts allow-downloads"' in shown
    return html.unescape(source)


def test_several_runs_are_one_page_whatever_was_imported_before(
    seeds: list[Path], tmp_path: Path
) -> None:
    """The function and the folder of modules have one name."""
    one = oxrl.load_run(seeds[0])
    page = oxrl.report([one, str(seeds[1]), seeds[2]], tmp_path / "all.html")
    data = pieces(page.read_text())
    assert [found["name"] for found in data["runs"]["runs"]] == ["a", "b", "slow"]
    program = (
        "import sys, oxrl\nassert 'torch' not in sys.modules\n"
        "import oxrl.report.page\nprint(oxrl.report([sys.argv[1]]))\n"
        "from oxrl import report\nprint(report([oxrl.load_run(sys.argv[1])]))\n"
    )
    command = [sys.executable, "-c", program, str(seeds[1])]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert told.splitlines() == [str(seeds[1] / "report.html")] * 2
    with pytest.raises(RunDirectoryError, match="no run directory"):
        oxrl.report([tmp_path])


def test_one_run_needs_no_list_and_an_empty_list_says_what_to_give(
    seeds: list[Path], tmp_path: Path
) -> None:
    pages: set[str] = set()
    for number, given in enumerate((oxrl.load_run(seeds[0]), seeds[0], str(seeds[0]), seeds[:1])):
        pages.add(oxrl.report(given, tmp_path / f"{number}.html").read_text())
    assert len(pages) == 1
    with pytest.raises(RunDirectoryError, match="empty list: give a run directory"):
        oxrl.report([])
    with pytest.raises(RunDirectoryError, match="^3 is no run directory"):
        oxrl.report(3)


def test_the_page_holds_what_answers_are_found_by(seeds: list[Path], tmp_path: Path) -> None:
    """Every answer has the number of its prompt, so that an early and a late one can be laid side
    by side; words stand as words.
    """
    data = pieces(oxrl.report(seeds[:1], tmp_path / "one.html").read_text())
    index, samples = data["index-0"], data["samples-0-0"]
    uids = [line["uid"] for line in samples]
    pairs = set(zip(index["prompt"], uids, strict=True))
    assert len(pairs) == len(set(index["prompt"])) == len(set(uids)) > 1
    assert index["step"] == [line["step"] for line in samples]
    assert set(index["status"]) == set(data["runs"]["runs"][0]["words"]["status"]) == {"ok"}


def test_a_run_shows_itself_and_its_curves_in_a_notebook(seeds: list[Path]) -> None:
    found = oxrl.load_run(seeds[0])
    data = pieces(framed(found._repr_html_()))
    assert data["runs"]["curves"] == [] and "samples-0-0" not in data
    lines = [line["reward/mean"] for line in metric_lines(seeds[0])]
    assert data["metrics-0"]["reward/mean"] == pytest.approx(lines, rel=1e-5)
    data = pieces(framed(found.plot("update/loss", "policy/entropy")._repr_html_()))
    assert data["runs"]["curves"] == ["update/loss", "policy/entropy"]
    assert str(seeds[0]) in repr(found.plot()) and "<" not in repr(found)


class Handle:
    """IPython's handle of an output, as far as it is used: what is drawn is made HTML at once."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, str]] = []
        HANDLES.append(self)

    def display(self, shown: Any) -> None:
        self.drawn.append(("display", framed(shown._repr_html_())))

    def update(self, shown: Any) -> None:
        self.drawn.append(("update", framed(shown._repr_html_())))


HANDLES: list[Handle] = []


def small(folder: Path, name: str) -> oxrl.Run:
    """A run of two steps from Python."""
    return oxrl.train(
        {
            "run": {"name": name, "steps": 2, "dir": str(folder / name), "mlflow": False},
            "model": {"name": "builtin:tiny"},
            "data": {"prompts_per_step": 2},
            "rollout": {"n_samples": 2, "max_tokens": 4},
            "train": {"alg_name": "sgrpo"},
        },
        reward=lambda prompt, completion: len(set(completion)) / 4,
        dataset=[{"prompt": f"{n}="} for n in range(4)],
    )


def test_a_training_in_a_notebook_draws_its_curves_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is no notebook nothing is drawn; where there is one, one output is drawn anew."""
    HANDLES.clear()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    display = types.ModuleType("IPython.display")
    display.DisplayHandle = Handle  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook, "EVERY_S", 0.05)
    small(tmp_path, "terminal")
    assert not HANDLES
    monkeypatch.setitem(sys.modules, notebook.KERNEL, types.ModuleType(notebook.KERNEL))
    small(tmp_path, "cell")
    (handle,) = HANDLES
    kinds = [kind for kind, _ in handle.drawn]
    assert kinds[0] == "display" and set(kinds[1:]) <= {"update"} and len(kinds) > 1
    assert pieces(handle.drawn[-1][1])["metrics-0"]["step"] == [1, 2]


@needs_browser
def test_a_browser_shows_seeds_results_and_differences_and_nothing_runs_off_its_edge(
    seeds: list[Path], tmp_path: Path
) -> None:
    file = oxrl.report(seeds, tmp_path / "all.html")
    seen, dom = opened(file, "--window-size=400,800")
    assert "error" not in seen and seen["overflow"] == "0"
    assert 'data-seeds="2"' in dom and "mean ± standard deviation" in dom
    assert "train.lr 1e-06 (0.001)" in dom
    assert "One prompt, answered at the start and at the end" in dom
    main = dom[dom.index('id="main-charts"') : dom.index("Curves</h2>")]
    assert main.count("<figure") == 5 == main.count('class="uplot')
    assert "sampling responses" in dom and "time/rollout_s" in dom
    (wanted,) = re.findall(r'id="charts" data-wanted="(\d+)"', dom)
    assert int(seen["charts"]) == 5 + int(wanted) > 10, "drawn without being scrolled to"


@needs_browser
def test_a_browser_draws_in_the_frame_of_a_notebook(seeds: list[Path], tmp_path: Path) -> None:
    for number, names in enumerate([(), ("update/loss",)]):
        shown = oxrl.load_run(seeds[0]).plot(*names)._repr_html_()
        file = tmp_path / f"{number}.html"
        file.write_text(framed(shown))
        seen, dom = opened(file)
        assert "error" not in seen and seen["charts"] == ("1" if names else "5")
        assert ('class="tiles"' in dom) != bool(names) and 'id="samples"' not in dom


@needs_browser
def test_a_browser_says_which_metric_of_a_plot_is_none(seeds: list[Path], tmp_path: Path) -> None:
    for number, names in enumerate([("typo",), ("update/loss", "typo", "typos")]):
        file = tmp_path / f"{number}.html"
        file.write_text(framed(oxrl.load_run(seeds[0]).plot(*names)._repr_html_()))
        seen, dom = opened(file)
        assert "error" not in seen and seen.get("charts", "0") == str(number)
        assert dom.count("<figure") == number
        said = "typo, typos" if number else "typo"
        assert f"no metric is called {said}; there are " in dom


@needs_browser
def test_a_browser_shows_no_first_and_last_answer_of_a_single_step(
    seeds: list[Path], tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(seeds[0], copy, ignore=shutil.ignore_patterns("checkpoints"))
    lines = (seeds[0] / "samples.jsonl").read_text().splitlines()
    first = [line for line in lines if json.loads(line)["step"] == 1]
    assert 1 < len(first) < len(lines)
    for kept, shown in ((first, False), (lines, True)):
        (copy / "samples.jsonl").write_text("\n".join(kept) + "\n")
        seen, dom = opened(oxrl.report(copy))
        assert "error" not in seen and seen["ready"] == "true"
        assert ('id="before-after"' in dom) == shown


@needs_browser
def test_a_browser_sets_a_hundred_thousand_marks_only_when_they_are_asked_for(
    seeds: list[Path], tmp_path: Path
) -> None:
    lines = (seeds[0] / "samples.jsonl").read_text().splitlines()
    marks = "a" + "\u0301" * 100_000
    copy = tmp_path / "run"
    shutil.copytree(seeds[0], copy, ignore=shutil.ignore_patterns("checkpoints"))
    changed = json.dumps(json.loads(lines[-1]) | {"response": marks})
    (copy / "samples.jsonl").write_text("\n".join([*lines[:-1], changed]) + "\n")
    seen, dom = opened(oxrl.report([copy]))
    assert "error" not in seen and seen["shown"] == "25"
    assert dom.count("\u0301") < 100 and "all 100,001 characters" in dom


CHARTS = """
const runs = [0, 1, 2].map((seed) => ({ name: `a "run" <${seed}`, config: [["train.lr", "1"], ["run.seed", String(seed)]],
  metrics: { step: [1, 2, 4], "reward/mean": [0.5, seed, null] } }));
runs.push({ name: "other", config: [["train.lr", "2"]], metrics: { step: [1, 3], "reward/mean": [0.25, 0.75] } });
const chart = chartOf("reward/mean", { runs }, { mean: true });
document.body.innerHTML = svgOf(chart);
document.body.append(make("pre", {}, csvOf(chart)));
"""


@needs_browser
def test_the_files_of_a_chart_have_its_numbers_means_and_titles(tmp_path: Path) -> None:
    """Three seeds of one run are a mean and its deviation; what is another run stays a line."""
    folder = Path(notebook.__file__).parent
    scripts = [(folder / name).read_text() for name in ("uPlot.iife.min.js", "report.js")]
    file = tmp_path / "charts.html"
    tags = "".join(f"<script>{script}</script>" for script in [*scripts, CHARTS])
    file.write_text(f"<html><body></body>{tags}</html>")
    _, dom = opened(file)
    (csv,) = re.findall("<pre>(.*?)</pre>", dom, re.DOTALL)
    rows = [line.split(",") for line in html.unescape(csv).splitlines()[1:]]
    assert rows == [
        ["1", "0.5", "0.5", "0.5", "0.25"],
        ["2", "1", "0", "2", ""],
        ["3", "", "", "", "0.75"],
        ["4", "", "", "", ""],
    ]
    assert '"a ""run"" <0, mean of 3 seeds"' in html.unescape(csv)
    (svg,) = re.findall("<svg.*?</svg>", dom, re.DOTALL)
    assert "optimizer step" in svg and "reward (reward/mean)" in svg and "&lt;0, mean of" in svg
    assert svg.count("<polyline") == 2 and svg.count("<polygon") == 1


INTERVALS = """
const runs = [{ name: "a", config: [], metrics: { step: [1, 2], "eval/reward": [0.5, 0.75], "eval/reward_low": [0.25, 0.5], "eval/reward_high": [0.625, 1] } }];
const chart = chartOf("eval/reward", { runs });
document.body.innerHTML = svgOf(chart);
document.body.append(make("pre", {}, csvOf(chart)), make("code", {}, namesOf({ runs }).join(" ")));
"""


@needs_browser
def test_a_curve_has_the_band_of_its_interval_and_no_curves_of_the_ends(tmp_path: Path) -> None:
    folder = Path(notebook.__file__).parent
    scripts = [(folder / name).read_text() for name in ("uPlot.iife.min.js", "report.js")]
    file = tmp_path / "charts.html"
    tags = "".join(f"<script>{script}</script>" for script in [*scripts, INTERVALS])
    file.write_text(f"<html><body></body>{tags}</html>")
    _, dom = opened(file)
    (csv,) = re.findall("<pre>(.*?)</pre>", dom, re.DOTALL)
    head, *rows = csv.strip().splitlines()
    ends = ['"eval/reward, lower end of 95 %"', '"eval/reward, upper end of 95 %"']
    assert head == ",".join(["step", "eval/reward", *ends])
    assert rows == ["1,0.5,0.25,0.625", "2,0.75,0.5,1"]
    assert "<code>eval/reward</code>" in dom and dom.count("<polygon") == 1
