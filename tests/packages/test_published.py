"""Preparers of published files: counts on the real ones, what is rejected and why, and that the
results load.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxrl.data.conversations import ConversationDataset
from oxrl.data.preferences import PreferenceDataset
from oxrl.data.prompts import PromptDataset
from oxrl.errors import DataError
from oxrl.modelfiles.builtin import builtin_tokenizer
from oxrl.rewards import math_reward
from oxrl_datasets.prepare import PREPARERS

Find = Callable[[str], Path]
# name, raw file or folder, rows written per file, rejected raw rows, what reads the result
REAL: list[tuple[str, str, dict[str, int], int, Any]] = [
    ("svamp", "svamp", {"svamp.jsonl": 900}, 0, PromptDataset),
    ("aqua", "aqua", {"dev.jsonl": 254, "test.jsonl": 200}, 0, PromptDataset),
    ("humaneval", "humaneval", {"HumanEval.jsonl": 114}, 0, ConversationDataset),
    ("mbpp", "mbpp", {"mbpp.jsonl": 900}, 0, ConversationDataset),
    ("bbh", "bbh", {"examples.jsonl": 1800}, 0, PromptDataset),
    ("ifeval", "ifeval", {"input_data.jsonl": 480}, 0, PromptDataset),
    ("pandalm", "pandalm", {"testset.jsonl": 816}, 84, PreferenceDataset),
    ("ranked", "oasst_zh/ranked.jsonl", {"ranked.jsonl": 1633}, 0, PreferenceDataset),
    ("instructions", "oasst_zh/sft.jsonl", {"sft.jsonl": 610}, 0, ConversationDataset),
    ("oasst-pairs", "oasst_en", {"trees.jsonl": 696}, 0, PreferenceDataset),
    ("oasst-chats", "oasst_en", {"trees.jsonl": 92}, 0, ConversationDataset),
]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


@pytest.mark.parametrize(("name", "source", "written", "rejected", "dataset"), REAL)
def test_the_real_files_are_prepared_and_load(
    real_data: Find,
    tmp_path: Path,
    name: str,
    source: str,
    written: dict[str, int],
    rejected: int,
    dataset: Any,
) -> None:
    report = PREPARERS[name](real_data(source), tmp_path)
    assert report["written"] == written and report["rejected"] == rejected
    for file, count in written.items():
        assert len({row["uid"] for row in read(tmp_path / file)}) == count
        loaded = dataset.load(tmp_path / file, builtin_tokenizer()).report
        assert loaded["kept"] + loaded["empty"] + loaded.get("identical", 0) == count
        assert loaded["kept"] >= 0.93 * count


# Programs of others have strings with a backslash before any character: a warning from 3.12 on.
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_prepared_code_passes_its_own_tests(real_data: Find, tmp_path: Path) -> None:
    PREPARERS["humaneval"](real_data("humaneval"), tmp_path, limit=10)
    PREPARERS["mbpp"](real_data("mbpp"), tmp_path, limit=10)
    for row in read(tmp_path / "HumanEval.jsonl"):
        names: dict[str, Any] = {}
        exec(row["completion"] + row["answer"]["test"], names)
        names["check"](names[row["answer"]["entry_point"]])
    for row in read(tmp_path / "mbpp.jsonl"):
        exec("\n".join([row["answer"]["setup"], row["completion"], *row["answer"]["tests"]]), {})


def test_a_box_with_braces_inside_is_the_answer(tmp_path: Path) -> None:
    rows = [
        {
            "problem": "a?",
            "solution": "so \\boxed{1}, or rather \\boxed{\\frac{1}{2}}.",
            "level": "Level 1",
        },
        {"problem": "b?", "solution": "no box"},
        {"problem": "c?", "solution": "open \\boxed{1"},
        {"solution": "\\boxed{1}"},
    ]
    raw = tmp_path / "raw.jsonl"
    raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = PREPARERS["math"](raw, tmp_path / "out")
    (row,) = read(tmp_path / "out" / "raw.jsonl")
    assert row["answer"] == "\\frac{1}{2}" and row["level"] == "Level 1"
    assert math_reward(row["completion"], row["answer"]).value == 1.0
    reasons = [reject["reason"] for reject in report["rejects"]]
    assert reasons == [
        *["no \\boxed{} in the solution, or it never ends"] * 2,
        "no field 'problem'",
    ]
    assert report["rejects"][0]["place"].endswith("raw.jsonl:2")


def test_any_columns_are_read_by_their_names(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text('{"q": "1+1", "good": "2", "bad": "3"}\n{"q": "1+1", "good": "2", "bad": "2"}\n')
    report = PREPARERS["preference"](
        raw, tmp_path / "out", prompt="q", chosen="good", rejected="bad"
    )
    assert (
        report["written"] == {"raw.jsonl": 1}
        and report["rejects"][0]["reason"] == "both replies are the same"
    )
    PREPARERS["prompt-response"](raw, tmp_path / "sft", prompt="q", response="good")
    assert [row["completion"] for row in read(tmp_path / "sft" / "raw.jsonl")] == ["2", "2"]
    with pytest.raises(DataError, match="option promt='q': Extra inputs"):
        PREPARERS["preference"](raw, tmp_path / "out", promt="q")
    with pytest.raises(DataError, match="pass --source"):
        PREPARERS["preference"](None, tmp_path / "out")
    with pytest.raises(DataError, match="no row can be used"):
        PREPARERS["svamp"](raw, tmp_path / "out")


def test_a_tree_gives_the_best_ranked_way_to_each_last_reply(tmp_path: Path) -> None:
    def message(role: str, text: str, *replies: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"role": role, "text": text, "replies": list(replies), **fields}

    worse = message("assistant", "no", rank=1)
    best = message(
        "assistant",
        "yes",
        message("prompter", "and?", message("assistant", "more", rank=0)),
        rank=0,
    )
    gone = message("assistant", "spam", rank=2, deleted=True)
    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps({"prompt": message("prompter", "hi", worse, best, gone)}) + "\n")
    PREPARERS["oasst-chats"](raw, tmp_path / "out")
    (row,) = read(tmp_path / "out" / "raw.jsonl")
    assert [m["content"] for m in row["messages"]] == ["hi", "yes", "and?", "more"]
    PREPARERS["oasst-pairs"](raw, tmp_path / "pairs")
    (pair,) = read(tmp_path / "pairs" / "raw.jsonl")
    assert (pair["chosen"], pair["rejected"], len(pair["prompt"])) == ("yes", "no", 1)


def test_a_deleted_or_unranked_reply_never_hides_the_best_one(tmp_path: Path) -> None:
    def message(role: str, text: str, *replies: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return {"role": role, "text": text, "replies": list(replies), **fields}

    gone = message("assistant", "spam", rank=None, deleted=True)
    unread = message("assistant", "?", rank=None)
    cut = message("prompter", "and?", message("assistant", "spam", deleted=True))
    best = message("assistant", "yes", cut, rank=0)
    raw = tmp_path / "raw.jsonl"
    raw.write_text(json.dumps({"prompt": message("prompter", "hi", gone, unread, best)}) + "\n")
    PREPARERS["oasst-chats"](raw, tmp_path / "out")
    (row,) = read(tmp_path / "out" / "raw.jsonl")
    assert [m["content"] for m in row["messages"]] == ["hi", "yes"]


def test_a_row_that_no_line_of_json_can_hold_is_rejected(tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    raw.write_text(
        '{"prompt": "a\\ud800", "completion": "b"}\n{"prompt": "a", "completion": "b"}\n'
    )
    report = PREPARERS["prompt-response"](raw, tmp_path / "out")
    assert (
        report["written"] == {"raw.jsonl": 1}
        and "surrogates not allowed" in report["rejects"][0]["reason"]
    )


def test_two_files_of_one_name_are_not_chosen_from(tmp_path: Path) -> None:
    for name in ("raw.jsonl", "raw.parquet"):
        (tmp_path / name).write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(DataError, match=r"holds raw\.parquet beside raw\.jsonl; pass one of them"):
        PREPARERS["prompt-response"](tmp_path, tmp_path / "out")
