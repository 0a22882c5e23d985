"""Sums made on the spot: a task with an exact answer, no download, and a held-out part that training never sees."""

from __future__ import annotations

import math
import random
from typing import Any

from oxrl.errors import DataError
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

    eval holds different unordered operand tuples; none of them occurs in sft or rl in any order. Those two are drawn
    with replacement, independently of each other: a problem may come twice.

    Args:
        operands: numbers per problem, at least 2, from `low` (at least 0) to `high`.
        operators: characters to choose from between operands, "+", "-" or "+-".
        question: the prompt; `{expression}` becomes the sum.
        reverse: write the digits of the answer back to front, which is easier for a model that writes left to right.
        slips: share of the sft answers that forget every carry (27+48=65), as careless demonstrations do.

    Raises:
        DataError: an option out of range, or more held-out tuples asked for than exist.
    """
    counts = {"eval": eval_rows, "rl": rl_rows, "sft": sft_rows}  # eval first: it decides what the others may not hold
    counts = {split: count if limit is None else min(count, limit) for split, count in counts.items()}
    tuples = math.comb(max(0, high - low) + operands, operands) if operands > 1 else 0
    problems = {
        f"needs operands >= 2 and 0 <= low < high, got operands={operands}, low={low}, high={high}": (
            operands < 2 or not 0 <= low < high
        ),
        f"operators={operators!r}: only + and - are known": not operators or bool(set(operators) - set("+-")),
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
    return question.replace("{expression}", expression), sign + (digits[::-1] if reverse else digits)


def sum_without_carries(numbers: list[int]) -> int:
    """Each column added on its own, the carry forgotten: 27+48 is 65."""
    columns = range(len(str(max(numbers))))
    return sum(sum(number // 10**column % 10 for number in numbers) % 10 * 10**column for column in columns)
