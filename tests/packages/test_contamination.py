"""`oxrl contamination`: held-out prompts that stand in training data, however they are written."""

from __future__ import annotations

import json
import random
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from oxrl.cli import app
from oxrl.data.rows import Record, read_rows
from oxrl.errors import ConfigError, DataError, OxrlError
from oxrl_datasets.prepare import PREPARERS
from oxrl_stats.contamination import Contamination, run_contamination, search, words_of
from support.small_runs import rl_config

ROOT = Path(__file__).resolve().parents[2]
WORDS = "tree river stone cloud lamp paper glass wind music road fish boat clock salt".split()


def story(seed: int, length: int = 30) -> str:
    """A text of its own."""
    chance = random.Random(seed)
    return " ".join(f"{chance.choice(WORDS)}{chance.randrange(1000)}" for _ in range(length))


def records(*rows: dict[str, Any]) -> list[Record]:
    return [Record(f"rows:{number}", row) for number, row in enumerate(rows, start=1)]


def numbers(found: Contamination) -> set[int]:
    """The held-out prompts that were found."""
    return {match.prompt for match in found.matches}


def planted(text: str, way: str) -> str:
    """A held-out prompt as it got into training data."""
    if way == "same":
        return text
    if way == "case and punctuation":
        return "; ".join(text.upper().split()) + "?!"
    return f"{story(10_000 + len(text))}, {text} -- {story(20_000 + len(text))}"


@pytest.mark.parametrize("way", ["same", "case and punctuation", "inside a longer text"])
@pytest.mark.parametrize("length", [5, 13, 40])
@pytest.mark.parametrize("chat", [False, True])
def test_every_planted_prompt_is_found_and_no_other(way: str, length: int, chat: bool) -> None:
    asked = [story(seed, length) for seed in range(50)]
    chosen = set(range(0, 50, 10))
    training: list[dict[str, Any]] = [{"prompt": story(1000 + seed, length)} for seed in range(200)]
    for number in chosen:
        text = planted(asked[number], way)
        if chat:
            user = {"role": "user", "content": [{"type": "text", "text": text}]}
            training.append({"messages": [{"role": "system", "content": asked[1]}, user]})
        else:
            training.append({"prompt": "Why?", "completion": text})
    found = search(records(*({"prompt": text} for text in asked)), records(*training))
    assert numbers(found) == chosen and (found.prompts, found.rows) == (50, 205)
    first = found.matches[0]
    assert list(first.rows) == ["rows:201"] and first.place == "rows:1"


def test_sums_are_told_apart_by_their_operators() -> None:
    assert words_of("3-4 =  ?") == ("3", "-", "4") and words_of("State-of-the-art!")[1] == "of"
    held_out = records({"prompt": "12+34="}, {"prompt": "5*6="}, {"prompt": "yes"})
    training = records({"prompt": "12-34="}, {"prompt": "112+34="}, {"prompt": "yes, 5+6="})
    assert not search(held_out, training).matches
    assert numbers(search(held_out, records({"text": "What is 12 + 34 ?"}))) == {0}
    assert numbers(search(held_out, records({"prompt": "Yes!"}))) == {2}


def test_fewer_words_are_enough_with_the_same_answer() -> None:
    text = story(1)
    part = " ".join(text.split()[4:13])
    held_out = records({"prompt": text, "answer": " 42. "})
    assert numbers(search(held_out, records({"prompt": part, "answer": 42}))) == {0}
    assert not search(held_out, records({"prompt": part, "answer": "43"})).matches
    assert not search(
        held_out, records({"prompt": " ".join(part.split()[:7]), "answer": 42})
    ).matches


def test_a_file_without_text_is_refused() -> None:
    with pytest.raises(DataError, match="none of 2 held-out rows has a prompt or messages"):
        search(records({"image": "a.png"}, {"prompt": "..."}), records({"prompt": "x"}))


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rewards_are_told_with_and_without_what_was_found(tmp_path: Path) -> None:
    asked = [story(seed, 9) for seed in range(20)]
    held_out = write(tmp_path / "held_out.jsonl", [{"question": text} for text in asked])
    rl_config(tmp_path, "run", data={"columns": {"prompt": "question"}})
    write(tmp_path / "prompts.jsonl", [{"question": text.upper()} for text in asked[:5]])
    config = tmp_path / "run.yaml"
    rewards = np.r_[np.ones(5), np.arange(15) % 3 == 0].astype(float)
    answers = write(
        tmp_path / "answers.jsonl",
        [
            {"uid": f"u{draw}", "draw": draw, "sample": 0, "prompt": text, "seed": 0}
            | {"reward": reward}
            for draw, (text, reward) in enumerate(zip(asked, rewards, strict=True))
        ],
    )
    out = tmp_path / "found.json"
    options = ["--data", str(held_out), "--answers", str(answers), "--out", str(out)]
    done = CliRunner().invoke(app, ["contamination", str(config), *options])
    assert done.exit_code == 0, done.output
    assert "5 of 20 held-out prompts (25.0%) stand in 5 training rows" in done.output
    assert "reward with all prompts      0.500" in done.output
    assert "reward without those found   0.333" in done.output
    told = json.loads(out.read_text())
    assert [match["prompt"] for match in told["matches"]] == [0, 1, 2, 3, 4]
    assert told["matches"][2]["rows"] == {f"{tmp_path / 'prompts.jsonl'}:3": asked[2]}
    with pytest.raises(ConfigError, match="20 prompts, and the held-out file 5"):
        run_contamination(config, data=str(tmp_path / "prompts.jsonl"), answers=answers)
    with pytest.raises(ConfigError, match=r"data\.eval is not set: write --data FILE"):
        run_contamination(config)
    with pytest.raises(ConfigError, match="is no run and no configuration"):
        run_contamination(tmp_path)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of the quickstart."""
    folder = tmp_path_factory.mktemp("sums") / "data"
    quickstart = runpy.run_path(str(ROOT / "experiments" / "quickstart" / "run.py"))
    PREPARERS["arithmetic"](None, folder, seed=0, limit=None, test=None, **quickstart["TASK"])
    return folder


def asked_of(training: list[Path], held_out: Path, out: Path) -> dict[str, Any]:
    """What `oxrl contamination` says of the quickstart with other data."""
    shares = json.dumps({str(path): 1.0 for path in training})
    fields = [f"data.train={shares}", "model.name=builtin:tiny"]
    config = str(ROOT / "experiments" / "quickstart" / "rl.yaml")
    words = ["contamination", config, *fields, "--data", str(held_out), "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output or done.exception
    return json.loads(out.read_text())


def test_the_quickstart_is_not_contaminated(sums: Path, tmp_path: Path) -> None:
    training = [sums / "sft.jsonl", sums / "rl.jsonl"]
    found = asked_of(training, sums / "eval.jsonl", tmp_path / "found.json")
    assert (found["prompts"], found["rows"]) == (1_000, 48_000) and found["matches"] == []


def test_a_tenth_of_the_quickstarts_held_out_sums_is_found_in_whatever_way_they_are_planted(
    sums: Path, tmp_path: Path
) -> None:
    held_out = [row.fields["prompt"] for row in read_rows(sums / "eval.jsonl")]
    chosen = range(0, len(held_out), 10)
    ways: list[Callable[[str], str]] = [
        str,
        lambda text: f" {text.replace('+', ' + ')} ??",
        lambda text: f"Please add these two numbers for me: {text} And do it with care!",
    ]
    rows: list[Mapping[str, Any]] = [
        row.fields for row in islice(read_rows(sums / "rl.jsonl"), 2_000)
    ]
    for place, number in enumerate(chosen):
        rows.insert(7 * place, {"prompt": ways[place % 3](held_out[number]), "answer": "0"})
    training = write(tmp_path / "training.jsonl", rows)
    found = asked_of([training], sums / "eval.jsonl", tmp_path / "found.json")
    assert [match["prompt"] for match in found["matches"]] == [*chosen]
    assert all(len(match["rows"]) == 1 for match in found["matches"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "data.eval is not set: write --data FILE, the held-out prompts"),
        (["--data", "images.jsonl"], "none of 2 held-out rows has a prompt .*data.columns"),
        (["--data", "none.jsonl"], "data.eval = 'none.jsonl'"),
        (["--data", "."], "data.eval = '.'"),
        (["--data", "run.yaml"], "run.yaml"),
        (["--data", "prompts.jsonl", "--answers", "prompts.jsonl"], "line 1: not a response"),
        (["--data", "prompts.jsonl", "--answers", "none.jsonl"], "none.jsonl is no evaluation"),
        (["--data", "prompts.jsonl", "--out", "."], "is a folder"),
        (["--data", "prompts.jsonl", "data.colums=x"], "did you mean 'data.columns'|columns"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rl_config(tmp_path, "run")
    write(tmp_path / "images.jsonl", [{"image": "a.png"}, {"prompt": "..."}])
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["contamination", "run.yaml", *words])
    error = done.exception
    told = str(error) if isinstance(error, OxrlError) else done.output
    assert (error.exit_code if isinstance(error, OxrlError) else done.exit_code) == 2, told
    assert re.search(said, told.replace("\n", " ")), told
