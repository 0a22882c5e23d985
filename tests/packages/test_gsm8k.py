"""math_reward on real data: every GSM8K row, the labelled model solutions, and math-verify's own
cases.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.rewards import math_reward

Find = Callable[[str], Path]


def rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from map(json.loads, file)


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1119)])
def test_every_published_solution_scores_one_and_gold_plus_one_scores_zero(
    real_data: Find, split: str, count: int
) -> None:
    seen = 0
    for row in rows(real_data("gsm8k") / f"{split}.jsonl"):
        gold = row["answer"].rpartition("####")[2].strip()
        assert math_reward(row["answer"], gold).value == 1.0, row["answer"]
        assert math_reward(row["answer"], int(gold.replace(",", "")) + 1).value == 0.0, row[
            "answer"
        ]
        seen += 1
    assert seen == count


def test_labels_of_model_solutions_are_reproduced(real_data: Find) -> None:
    false_accepts, false_rejects, seen = [], [], 0
    for row in rows(real_data("gsm8k") / "model_solutions.jsonl"):
        gold = row["ground_truth"].rpartition("A:")[2]
        for solution in (value for value in row.values() if isinstance(value, dict)):
            seen += 1
            accepted = math_reward(solution["solution"], gold).value == 1.0
            if accepted != solution["is_correct"]:
                (false_accepts if accepted else false_rejects).append(solution["solution"])
    assert seen == 4476
    assert (false_accepts, false_rejects) == ([], [])


def test_plain_cases_of_math_verify_get_the_expected_verdict(real_data: Find) -> None:
    cases = [
        row
        for row in rows(real_data("math_verify") / "cases.jsonl")
        if row["label_kind"] == "plain"
    ]
    wrong = [
        row["id"] for row in cases if math_reward(row["pred"], row["gold"]).value != row["expected"]
    ]
    assert len(cases) == 113
    assert wrong == []
