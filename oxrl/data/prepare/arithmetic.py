"""Sums made on the spot: a task with an exact answer, no download, and a held-out part that training never sees."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oxrl.data.prepare.output import write_jsonl, write_report
from oxrl.errors import DataError
from oxrl.seeds import stable_seed

Operands = tuple[int, ...]


def arithmetic(
    source: Path | None,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    operands: int = 2,
    low: int = 0,
    high: int = 99,
    operators: str = "+",
    question: str = "{expression}=",
    reverse: bool = False,
    sft_rows: int = 4000,
    rl_rows: int = 4000,
    eval_rows: int = 1000,
) -> dict[str, Any]:
    """Write sft.jsonl (prompt, completion), rl.jsonl and eval.jsonl (prompt, answer) of chain sums such as 12+34=.

    eval.jsonl holds `eval_rows` different unordered operand tuples; none of them occurs in sft.jsonl or rl.jsonl in any
    order. Those two are drawn with replacement, independently of each other: a problem may come twice.

    Args:
        source: must be None: nothing is read.
        out: folder to write to.
        seed: of every random choice.
        limit: at most so many rows per file.
        operands: numbers per problem, at least 2.
        low: smallest operand, at least 0.
        high: largest operand.
        operators: characters to choose from between operands, "+", "-" or "+-".
        question: the prompt; `{expression}` becomes the sum.
        reverse: write the digits of the answer back to front, which is easier for a model that writes left to right.
        sft_rows: rows of sft.jsonl.
        rl_rows: rows of rl.jsonl.
        eval_rows: rows of eval.jsonl.

    Raises:
        DataError: an option out of range, or more held-out tuples asked for than exist.
    """
    if source is not None:
        raise DataError(f"arithmetic is generated: it reads no source, got {str(source)!r}")
    _check(operands, low, high, operators, question, (sft_rows, rl_rows, eval_rows))
    rows = {"sft": sft_rows, "rl": rl_rows, "eval": eval_rows}
    if limit is not None:
        rows = {split: min(count, limit) for split, count in rows.items()}
    tuples = math.comb(high - low + operands, operands)
    if rows["eval"] >= tuples:
        raise DataError(
            f"eval_rows={rows['eval']} would hold out every one of the {tuples} unordered tuples of {operands} numbers "
            f"in {low}..{high}; lower eval_rows or raise high"
        )
    held_out: set[Operands] = set()
    written: dict[str, int] = {}
    for split in ("eval", "rl", "sft"):  # eval first: it decides what the others may not hold
        chance = random.Random(stable_seed("arithmetic", split, seed))
        problems = _draw(chance, rows[split], operands, low, high, held_out, distinct=split == "eval")
        lines = (
            _row(numbers, chance, operators, question, reverse, f"arithmetic/{split}/{number:06d}", split == "sft")
            for number, numbers in enumerate(problems)
        )
        written[f"{split}.jsonl"] = write_jsonl(out / f"{split}.jsonl", lines)
    options = {"operands": operands, "low": low, "high": high, "operators": operators, "question": question}
    return write_report(
        out,
        {
            "dataset": "arithmetic",
            "seed": seed,
            "limit": limit,
            **options,
            "reverse": reverse,
            "written": written,
            "unordered_tuples": tuples,
            "held_out_tuples": len(held_out),
        },
    )


def _check(operands: int, low: int, high: int, operators: str, question: str, counts: tuple[int, ...]) -> None:
    if operands < 2 or not 0 <= low < high:
        raise DataError(f"needs operands >= 2 and 0 <= low < high, got operands={operands}, low={low}, high={high}")
    if not operators or set(operators) - set("+-"):
        raise DataError(f"operators={operators!r}: only + and - are known")
    if "{expression}" not in question:
        raise DataError(f"question={question!r} must contain {{expression}}")
    if min(counts) < 1:
        raise DataError(f"every file needs at least one row, got sft_rows, rl_rows, eval_rows = {counts}")


def _draw(
    chance: random.Random, count: int, operands: int, low: int, high: int, held_out: set[Operands], *, distinct: bool
) -> Iterator[Operands]:
    """`count` operand tuples outside `held_out`; with `distinct`, each is added to it."""
    while count:
        numbers = tuple(chance.randint(low, high) for _ in range(operands))
        key = tuple(sorted(numbers))
        if key in held_out:
            continue
        if distinct:
            held_out.add(key)
        count -= 1
        yield numbers


def _row(
    numbers: Operands, chance: random.Random, operators: str, question: str, reverse: bool, uid: str, sft: bool
) -> dict[str, Any]:
    expression, total = str(numbers[0]), numbers[0]
    for number in numbers[1:]:
        operator = chance.choice(operators)
        expression += f"{operator}{number}"
        total += number if operator == "+" else -number
    sign, digits = "-" if total < 0 else "", str(abs(total))
    answer = sign + (digits[::-1] if reverse else digits)
    return {
        "prompt": question.replace("{expression}", expression),
        "completion" if sft else "answer": answer,
        "operands": list(numbers),
        "uid": uid,
        "source": "arithmetic",
    }
