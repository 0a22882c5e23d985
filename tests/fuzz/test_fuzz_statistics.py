"""Whatever `oxrl compare`, `score`, `contamination` and `eval --budgets` are given, and whatever a
package declares as a command: an answer, or an error with exit code 2.

As in test_fuzz.py, every case is a function of its seed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from oxrl.cli import app
from oxrl.commands.train import run
from oxrl.data.rows import Record
from oxrl.entry_points import _all_offers
from oxrl_stats.budgets import read_budgets
from oxrl_stats.compare import Options, run_compare, table
from oxrl_stats.contamination import search, told
from support.damage import VALUES, bytes_changed, nested
from support.fuzzing import check, chunks
from support.small_runs import rl_config

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answers(choose: random.Random, path: Path, prompts: int, samples: int) -> None:
    """A file of an evaluation, of which something may be wrong."""
    lines: list[Any] = [
        {"uid": f"u{draw}", "draw": draw, "sample": sample, "step": 0, "prompt": f"q{draw}"}
        | {"reward": choose.choice((*[0.0, 1.0, 0.5] * 10, None)), "seed": 16 * draw + sample}
        for draw in range(prompts)
        for sample in range(samples)
    ]
    for _ in range(choose.choice((0, 0, 0, 1, 2))):
        place = choose.randrange(len(lines))
        kind = choose.randrange(5)
        if kind == 0:
            del lines[place]
        elif kind == 1:
            lines[place] = nested(choose)
        elif kind == 2 and isinstance(lines[place], dict) and lines[place]:
            lines[place].pop(choose.choice(sorted(map(str, lines[place]))), None)
        elif kind == 3 and isinstance(lines[place], dict):
            lines[place][choose.choice(("uid", "draw", "sample", "reward", "step"))] = (
                choose.choice(VALUES)
            )
        else:
            lines.insert(choose.randrange(len(lines)), lines[place])
    data = "".join(json.dumps(line) + "\n" for line in lines).encode("utf-8", "replace")
    path.write_bytes(bytes_changed(choose, data) if choose.random() < 0.1 else data)


def try_answers(choose: random.Random) -> None:
    names: list[str] = []
    prompts = choose.choice((4, 5, 9, 20))
    samples = choose.choice((1, 2, 3))
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        other = choose.random() < 0.1
        answers(choose, Path(name), prompts, samples + other)
        names.append(name)
    select = choose.random() < 0.3
    found = run_compare(
        names if select else names[:2],
        Options(),
        select=select,
        control=None if select or choose.random() < 0.5 else names[2],
        out=Path("found.json"),
    )
    assert table(found) and json.loads(Path("found.json").read_text())["pairs"] is not None


@pytest.mark.parametrize("seeds", chunks(200, 100), ids=str)
def test_any_files_of_answers_are_compared_or_refused(folder: Path, seeds: range) -> None:
    check(try_answers, seeds, 2)


def try_contamination(choose: random.Random) -> None:
    rows: list[list[Record]] = []
    for name in ("held_out", "training"):
        made = [
            {choose.choice(("prompt", "messages", "text", "answer")): nested(choose)}
            if choose.random() < 0.5
            else {"prompt": choose.choice(("1+1?", "", "a b c", "½ + ²", "x" * 40)), "answer": 2}
            for _ in range(choose.randrange(5))
        ]
        rows.append([Record(f"{name}:{place}", row) for place, row in enumerate(made)])
    assert told(search(*rows))


@pytest.mark.parametrize("seeds", chunks(300, 300), ids=str)
def test_any_rows_are_searched_or_refused(seeds: range) -> None:
    check(try_contamination, seeds, 2)


def try_budgets(choose: random.Random) -> None:
    parts = [str(choose.choice((*VALUES, 16, 64, 256))) for _ in range(choose.randrange(1, 4))]
    budgets = read_budgets(choose.choice((",", ", ", ";")).join(parts))
    assert budgets == sorted(set(budgets)) and budgets[0] > 0


@pytest.mark.parametrize("seeds", chunks(300, 300), ids=str)
def test_any_budgets_are_read_or_refused(seeds: range) -> None:
    check(try_budgets, seeds, 2)


def ended(result: Result) -> None:
    """Raise what a command raised; codes of the command line are those of the errors of ours."""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2), result.output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, with its samples and a checkpoint."""
    place = tmp_path_factory.mktemp("recorded")
    run(rl_config(place, "run", ["run.steps=1"]))
    answers(random.Random(0), place / "answers.jsonl", 9, 2)
    return place


COMMANDS = ("compare", "score", "contamination", "eval")
# No two of them are models that would answer: that takes seconds.
WORDS = (
    "run",
    "run.yaml",
    "answers.jsonl",
    "prompts.jsonl",
    "nowhere",
    "builtin:none",
    ".",
    "",
    "--data",
    "--samples",
    "0",
    "-1",
    "nan",
    "--temperature",
    "--seed",
    "--budgets",
    "64,32",
    "--select",
    "--control",
    "--answers",
    "--out",
    "--plot",
    "reward.name=none",
    "reward.name=exact",
    "~reward.name",
    "rollout.max_tokens=x",
    "a=b",
    "\udcff",
)


def try_command(choose: random.Random) -> None:
    command = choose.choice(COMMANDS)
    words = [choose.choice(WORDS) for _ in range(choose.randrange(1, 5))]
    answering = [word for word in words if word in ("run", "run.yaml")]
    if command == "eval" and answering and "--budgets" not in words:
        words += ["--budgets", "0"]  # so that nothing is sampled
    if command == "compare" and answering:
        words.append("nowhere")
    ended(CliRunner().invoke(app, [command, *words]))


@pytest.mark.parametrize("seeds", chunks(120, 60), ids=str)
def test_any_words_behind_a_command_are_taken_or_refused(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    monkeypatch.chdir(recorded)
    check(try_command, seeds, 2)


ENTRIES = ("train", "plan", "score", "compare", "config", "mine", "a b", "", "--help", "x" * 300)
PLACES = ("json:dumps", "nowhere:f", "nowhere", "", "a b:c", "json:", "os:", "ö:ö")


def try_declared(choose: random.Random, site: Path) -> None:
    entries = "".join(
        f"{choose.choice(ENTRIES)} = {choose.choice(PLACES)}\n" for _ in range(choose.randrange(4))
    )
    text = f"[oxrl.commands]\n{entries}".encode()
    data = bytes_changed(choose, text) if choose.random() < 0.2 else text
    (site / "odd-1.0.dist-info" / "entry_points.txt").write_bytes(data)
    _all_offers.cache_clear()
    words = choose.choice((["--help"], ["mine", "--help"], ["score", "nowhere"], ["train", "no"]))
    ended(CliRunner().invoke(app, words))


@pytest.mark.parametrize("seeds", chunks(60, 60), ids=str)
def test_whatever_a_package_declares_as_commands_is_listed_or_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seeds: range
) -> None:
    info = folder / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder))
    check(lambda choose: try_declared(choose, folder), seeds, 2)
    _all_offers.cache_clear()
