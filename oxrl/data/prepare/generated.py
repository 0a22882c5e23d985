"""Tasks made from a seed: sums, with a held-out part that training never sees, and those of
reasoning-gym.
"""

from __future__ import annotations

import difflib
import json
import math
import random
from typing import Any

from oxrl.errors import DataError, MissingExtraError
from oxrl.seeds import stable_seed

Row = dict[str, Any]


def arithmetic(
    *,
    seed: int,
    limit: int | None,
    operands: int = 2,
    low: int = 0,
    high: int = 99,
    operators: str = "+",
    question: str = "{expression}=",
    reverse: bool = False,
    slips: float = 0.0,
    sft_rows: int = 4000,
    rl_rows: int = 4000,
    eval_rows: int = 1000,
) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Rows of sft (prompt, completion), rl and eval (prompt, answer): chain sums such as 12+34=.

    eval holds different unordered operand tuples; none of them occurs in sft or rl in any order.
    Those two are drawn
    with replacement, independently of each other: a problem may come twice.

    Args:
        operands: numbers per problem, at least 2, from `low` (at least 0) to `high`.
        operators: characters to choose from between operands, "+", "-" or "+-".
        question: the prompt; `{expression}` becomes the sum.
        reverse: write the digits of the answer back to front, which is easier for a model that
            writes left to right.
        slips: share of the sft answers that forget every carry (27+48=65), as careless
            demonstrations do.

    Raises:
        DataError: an option out of range, or more held-out tuples asked for than exist.
    """
    counts = {
        "eval": eval_rows,
        "rl": rl_rows,
        "sft": sft_rows,
    }  # eval first: it decides what the others may not hold
    counts = {
        split: count if limit is None else min(count, limit) for split, count in counts.items()
    }
    tuples = math.comb(max(0, high - low) + operands, operands) if operands > 1 else 0
    problems = {
        f"needs operands >= 2 and 0 <= low < high, got operands={operands}, low={low}, high={high}": (
            operands < 2 or not 0 <= low < high
        ),
        f"operators={operators!r}: only + and - are known": not operators
        or bool(set(operators) - set("+-")),
        f"question={question!r} must contain {{expression}}": "{expression}" not in question,
        f"slips={slips} must lie in [0, 1] and needs operators='+' and no reverse": (
            not 0 <= slips <= 1 or bool(slips and (operators != "+" or reverse))
        ),
        f"every file needs at least one row, got {counts}": min(counts.values()) < 1,
        f"eval_rows={eval_rows} would hold out every one of the {tuples} unordered tuples of {operands} numbers "
        f"in {low}..{high}; lower eval_rows or raise high": counts["eval"] >= tuples,
    }
    for problem, there in problems.items():
        if there:
            raise DataError(problem)
    held_out: set[tuple[int, ...]] = set()
    files: dict[str, list[Row]] = {}
    for split, count in counts.items():
        chance = random.Random(stable_seed("arithmetic", split, seed))
        files[split] = []
        while len(files[split]) < count:
            numbers = [chance.randint(low, high) for _ in range(operands)]
            key = tuple(sorted(numbers))
            if key in held_out:
                continue
            if split == "eval":
                held_out.add(key)
            prompt, answer = _problem(numbers, chance, operators, question, reverse)
            if split == "sft" and slips and chance.random() < slips:
                answer = str(sum_without_carries(numbers))
            uid = f"arithmetic/{split}/{len(files[split]):06d}"
            told = {"prompt": prompt, "completion" if split == "sft" else "answer": answer}
            files[split].append({**told, "operands": numbers, "uid": uid, "source": "arithmetic"})
    return files, {"unordered_tuples": tuples, "held_out_tuples": len(held_out)}


def _problem(
    numbers: list[int], chance: random.Random, operators: str, question: str, reverse: bool
) -> tuple[str, str]:
    expression, total = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        operator = chance.choice(operators)
        expression += f"{operator}{number}"
        total += number if operator == "+" else -number
    sign, digits = "-" if total < 0 else "", str(abs(total))
    return question.replace("{expression}", expression), sign + (
        digits[::-1] if reverse else digits
    )


def sum_without_carries(numbers: list[int]) -> int:
    """Each column added on its own, the carry forgotten: 27+48 is 65."""
    columns = range(len(str(max(numbers))))
    return sum(
        sum(number // 10**column % 10 for number in numbers) % 10 * 10**column for column in columns
    )


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

    Score with `reward.name: reasoning-gym` (the task's verifier, which reads the `entry` field), or
    with "math" or "exact" where the task has one answer.

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
        raise DataError(
            f"reasoning-gym has no task {task!r}; close names: {difflib.get_close_matches(task, DATASETS)}"
        )
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
            raise DataError(
                f"reasoning-gym refuses task={task} with {settings}: {error}"
            ) from error
        taken = {row["prompt"] for row in files.get("train", ())}
        files[split] = []
        for number, entry in enumerate(entries):
            place = f"reasoning-gym/{task}/{split}/{number:06d}"
            try:
                files[split].append(_task_row(entry, verify, place, taken))
            except (TypeError, ValueError) as error:
                rejects.append({"place": place, "reason": str(error)})
        if not files[split]:
            raise DataError(f"no usable row of {task} for {split}; first rejects: {rejects[:2]}")
    return files, {"parameters": own, "rejected": len(rejects), "rejects": rejects}


def _task_row(entry: Any, verify: Any, place: str, taken: set[str]) -> Row:
    """The entry as a row, or an error if it cannot be stored as JSON and verified again."""
    stored = json.loads(json.dumps(entry))
    question, answer = stored["question"], stored["answer"]
    if question in taken:
        raise ValueError("the question is in train.jsonl")
    if answer is not None and verify(answer=answer, entry=stored) != 1.0:
        raise ValueError("its own answer does not score 1 once stored as JSON")
    source = f"reasoning-gym/{stored['metadata']['source_dataset']}"
    return {"prompt": question, "answer": answer, "uid": place, "source": source, "entry": stored}
