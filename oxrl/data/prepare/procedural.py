"""Procedural tasks of the reasoning-gym library: made from a seed, each with a verifier of its own."""

from __future__ import annotations

import difflib
import json
from typing import Any

from oxrl.errors import DataError, MissingExtraError
from oxrl.seeds import stable_seed

Row = dict[str, Any]


def reasoning_gym(
    *,
    seed: int,
    limit: int | None,
    task: str = "chain_sum",
    parameters: str = "{}",
    train_rows: int = 2000,
    eval_rows: int = 500,
) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Train and eval rows of one task; an eval question that train has too is rejected.

    Score with `reward.name: reasoning-gym` (the task's verifier, which reads the `entry` field), or with "math" or
    "exact" where the task has one answer.

    Args:
        task: a dataset name of reasoning-gym.
        parameters: JSON object of the task's own settings, such as {"max_terms": 3}.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        DataError: an unknown task or setting, or no usable row.
    """
    try:
        import reasoning_gym as library  # pyright: ignore[reportMissingImports]
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            'reasoning-gym is not installed: pip install -e ".[tasks]" (one of its dependencies needs a C compiler)'
        ) from error
    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {task!r}; close names: {difflib.get_close_matches(task, DATASETS)}")
    try:
        own = dict(json.loads(parameters))
    except (TypeError, ValueError) as error:
        raise DataError(f"parameters={parameters!r} is no JSON object: {error}") from error
    verify = library.get_score_answer_fn(task)
    files: dict[str, list[Row]] = {}
    rejects: list[dict[str, str]] = []
    for split, count in (("train", train_rows), ("eval", eval_rows)):
        size = count if limit is None else min(count, limit)
        settings = {**own, "size": size, "seed": stable_seed("reasoning-gym", split, seed) % 2**31}
        try:
            entries = library.create_dataset(task, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise DataError(f"reasoning-gym refuses task={task} with {settings}: {error}") from error
        taken = {row["prompt"] for row in files.get("train", ())}
        files[split] = []
        for number, entry in enumerate(entries):
            place = f"reasoning-gym/{task}/{split}/{number:06d}"
            try:
                files[split].append(_row(entry, verify, place, taken))
            except (TypeError, ValueError) as error:
                rejects.append({"place": place, "reason": str(error)})
        if not files[split]:
            raise DataError(f"no usable row of {task} for {split}; first rejects: {rejects[:2]}")
    return files, {"parameters": own, "rejected": len(rejects), "rejects": rejects}


def _row(entry: Any, verify: Any, place: str, taken: set[str]) -> Row:
    """The entry as a row, or an error if it cannot be stored as JSON and verified again."""
    stored = json.loads(json.dumps(entry))
    question, answer = stored["question"], stored["answer"]
    if question in taken:
        raise ValueError("the question is in train.jsonl")
    if answer is not None and verify(answer=answer, entry=stored) != 1.0:
        raise ValueError("its own answer does not score 1 once stored as JSON")
    source = f"reasoning-gym/{stored['metadata']['source_dataset']}"
    return {"prompt": question, "answer": answer, "uid": place, "source": source, "entry": stored}
