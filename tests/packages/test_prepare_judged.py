"""`oxrl prepare judged`: pairs from samples and a judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.data.preferences import PreferenceDataset
from oxrl.errors import DataError, RewardDefinitionError
from oxrl.models.load import load_tokenizer
from oxrl_datasets.prepare import PREPARERS
from support.judge_server import JudgeServer, judge_server, refused

SAMPLES = [
    {"prompt": "a", "response": "1", "uid": "x"},
    {"prompt": "a", "response": "12"},
    {"prompt": "a", "response": "none"},
    {"prompt": "a", "response": "12"},
    {"prompt": "b", "completions": ["7", "8"]},
    {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "c"}]}
    | {"prompt": "c", "response": "5"},
]


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as judge:
        yield judge


def prepared(folder: Path, server: JudgeServer, **options: Any) -> dict[str, Any]:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SAMPLES))
    asked = {"url": server.url, "model": "m", **options}
    return PREPARERS["judged"](run, folder / "out", **asked)


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(map(json.loads, (folder / "out" / "samples.jsonl").read_text().splitlines()))


def test_the_best_and_the_worst_response_to_a_prompt_are_a_pair(
    tmp_path: Path, server: JudgeServer
) -> None:
    report = prepared(tmp_path, server)
    (row,) = rows(tmp_path)
    assert (row["chosen"], row["rejected"]) == ("12", "none")
    assert row["uid"] == "judged/samples/000000"
    assert row["prompt"] == [{"role": "user", "content": "a"}]
    assert report["samples"] == {"prompts": 3, "responses": 6, "failed": 0, "failures": []}
    asked = len(server.requests)
    prepared(tmp_path, server)
    assert len(server.requests) == asked == 6  # every verdict was kept
    data = PreferenceDataset.load(
        tmp_path / "out" / "samples.jsonl", load_tokenizer("builtin:tiny")
    )
    assert len(data.in_order()) == 1


def test_all_pairs_that_differ_by_enough_and_comparisons_within_the_group(
    tmp_path: Path, server: JudgeServer
) -> None:
    prepared(tmp_path, server, pairs="all")
    assert [(r["chosen"], r["rejected"]) for r in rows(tmp_path)] == [
        ("12", "1"),
        ("12", "none"),
        ("1", "none"),
    ]
    assert [r["uid"] for r in rows(tmp_path)] == [f"judged/samples/000000/{n}" for n in range(3)]
    prepared(tmp_path, server, pairs="all", least_gap="0.5")
    assert [(r["chosen"], r["rejected"]) for r in rows(tmp_path)] == [("12", "none")]
    prepared(tmp_path, server, compare="group")
    assert [(r["chosen"], r["rejected"]) for r in rows(tmp_path)] == [("12", "none")]


def test_what_cannot_work_is_named(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="name that one in key_env"):
        prepared(tmp_path, server, api_key="sk-1")
    with pytest.raises(DataError, match="options of judged and their defaults"):
        prepared(tmp_path, server, compare="answer")
    with pytest.raises(RewardDefinitionError, match="url is required"):
        prepared(tmp_path, server, url="")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(RewardDefinitionError, match="NO_SUCH_KEY is not set"):
        prepared(tmp_path, server, key_env="NO_SUCH_KEY")
    server.answer = lambda request: refused(403, "not you")
    with pytest.raises(DataError, match="no two responses.*403 not you"):
        prepared(tmp_path, server)
