"""Procedural tasks of the reasoning-gym library: made from a seed, each with a verifier of its own."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oxrl.data.prepare.output import write_jsonl, write_report
from oxrl.errors import DataError, MissingExtraError
from oxrl.seeds import stable_seed


def reasoning_gym(
    source: Path | None,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    task: str = "chain_sum",
    parameters: str = "{}",
    train_rows: int = 2000,
    eval_rows: int = 500,
) -> dict[str, Any]:
    """Write train.jsonl and eval.jsonl of one task; no question of eval.jsonl occurs in train.jsonl.

    Score with `reward.name: reasoning-gym` (the task's verifier, which reads the `entry` field), or with "math" or
    "exact" where the task has one answer.

    Args:
        source: must be None: nothing is read.
        out: folder to write to.
        seed: of the questions.
        limit: at most so many rows per file.
        task: a dataset name of reasoning-gym.
        parameters: JSON object of the task's own settings, such as {"max_terms": 3}.
        train_rows: questions generated for train.jsonl.
        eval_rows: questions generated for eval.jsonl; those that train.jsonl has too are rejected.

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
    if source is not None:
        raise DataError(f"reasoning-gym tasks are generated: no source is read, got {str(source)!r}")
    if task not in DATASETS:
        raise DataError(f"reasoning-gym has no task {task!r}; close names: {difflib.get_close_matches(task, DATASETS)}")
    seen: set[str] = set()
    rejects: list[dict[str, str]] = []
    written: dict[str, int] = {}
    verify = library.get_score_answer_fn(task)
    for split, count in (("train", train_rows), ("eval", eval_rows)):
        size = count if limit is None else min(count, limit)
        settings = {**_settings(parameters), "size": size, "seed": stable_seed("reasoning-gym", split, seed) % 2**31}
        try:
            entries = library.create_dataset(task, **settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise DataError(f"reasoning-gym refuses task={task} with {settings}: {error}") from error
        rows = list(
            _rows(entries, verify, f"reasoning-gym/{task}/{split}", seen if split == "eval" else set(), rejects)
        )
        if not rows:
            raise DataError(f"no usable row of {task} for {split}; first rejects: {rejects[:2]}")
        seen.update(row["prompt"] for row in rows)
        written[f"{split}.jsonl"] = write_jsonl(out / f"{split}.jsonl", rows)
    return write_report(
        out,
        {
            "dataset": "reasoning-gym",
            "task": task,
            "parameters": _settings(parameters),
            "seed": seed,
            "limit": limit,
            "written": written,
            "rejected": len(rejects),
            "rejects": rejects,
        },
    )


def _settings(parameters: str) -> dict[str, Any]:
    try:
        settings = json.loads(parameters)
    except json.JSONDecodeError as error:
        raise DataError(f"parameters={parameters!r} is no JSON object: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"parameters={parameters!r} is no JSON object")
    return settings


def _rows(
    entries: Any, verify: Any, prefix: str, taken: set[str], rejects: list[dict[str, str]]
) -> Iterator[dict[str, Any]]:
    for number, entry in enumerate(entries):
        place = f"{prefix}/{number:06d}"
        try:
            stored = json.loads(json.dumps(entry))
        except TypeError as error:
            rejects.append({"place": place, "reason": f"cannot be stored as JSON: {error}"})
            continue
        if stored["question"] in taken:
            rejects.append({"place": place, "reason": "the question is in train.jsonl"})
        elif stored["answer"] is not None and verify(answer=stored["answer"], entry=stored) != 1.0:
            rejects.append({"place": place, "reason": "its own answer does not score 1 once stored as JSON"})
        else:
            yield {
                "prompt": stored["question"],
                "answer": stored["answer"],
                "uid": place,
                "source": f"reasoning-gym/{stored['metadata']['source_dataset']}",
                "entry": stored,
            }
