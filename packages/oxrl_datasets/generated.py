"""Tasks made from a seed: sums with a part that training never sees, and those of reasoning-gym."""

from __future__ import annotations

import difflib
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from oxrl.data.rows import Fields, Json, JsonObject, Rows
from oxrl.errors import DataError, MissingExtraError
from oxrl.seeds import stable_seed

# The rows of each file, by its name without `.jsonl`.
Files = dict[str, Rows]
# Those, and facts for the report.
Made = tuple[Files, JsonObject]


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Chain sums such as 12+34=, in rows of sft (prompt, completion), rl and eval (prompt, answer).

    eval holds different unordered operand tuples; none of them occurs in sft or rl in any order.
    Those two are drawn with replacement, independently of each other: a problem may come twice.

    Args:
        operands: numbers per problem, at least 2, from `low` (at least 0) to `high`.
        low, high: smallest and largest number of a problem.
        operators: characters to choose from between operands, "+", "-" or "+-".
        question: the prompt; `{expression}` becomes the sum.
        reverse: write the digits of the answer back to front, which is easier for a model that
            writes left to right.
        slips: share of the sft answers that forget every carry (27+48=65), as careless
            demonstrations do.
        sft_rows, rl_rows, eval_rows: how many of each.
    """

    operands: int = 2
    low: int = 0
    high: int = 99
    operators: str = "+"
    question: str = "{expression}="
    reverse: bool = False
    slips: float = 0.0
    sft_rows: int = 4000
    rl_rows: int = 4000
    eval_rows: int = 1000

    def make(self, seed: int, limit: int | None) -> Made:
        """Make the rows of the three files, at most `limit` of each.

        Args:
            seed: of every random choice.
            limit: at most so many rows in each file; None: as the fields say.

        Returns:
            The rows of eval, rl and sft; and how many tuples there are, and are held out.

        Raises:
            DataError: an option out of range, or more held-out tuples asked for than exist.
        """
        self._check()
        # eval first: it decides what the others may not hold.
        counts = counts_of(limit, eval=self.eval_rows, rl=self.rl_rows, sft=self.sft_rows)
        tuples = math.comb(self.high - self.low + self.operands, self.operands)
        if counts["eval"] >= tuples:
            raise DataError(
                f"eval_rows={self.eval_rows} would hold out every one of the {tuples} unordered "
                f"tuples of {self.operands} numbers in {self.low}..{self.high}; lower eval_rows or "
                "raise high"
            )
        held_out: set[tuple[int, ...]] = set()
        files: Files = {}
        for split, count in counts.items():
            chance = random.Random(stable_seed("arithmetic", split, seed))
            rows = files[split] = []
            while len(rows) < count:
                numbers = [chance.randint(self.low, self.high) for _ in range(self.operands)]
                key = tuple(sorted(numbers))
                if key in held_out:
                    continue
                if split == "eval":
                    held_out.add(key)
                uid = f"arithmetic/{split}/{len(rows):06d}"
                told = self._row(numbers, chance, learned=split == "sft")
                rows.append({**told, "operands": numbers, "uid": uid, "source": "arithmetic"})
        return files, {"unordered_tuples": tuples, "held_out_tuples": len(held_out)}

    def _check(self) -> None:
        if self.operands < 2 or not 0 <= self.low < self.high:
            raise DataError(
                f"needs operands >= 2 and 0 <= low < high, got operands={self.operands}, "
                f"low={self.low}, high={self.high}"
            )
        if not self.operators or not set(self.operators) <= {"+", "-"}:
            raise DataError(f"operators={self.operators!r}: only + and - are known")
        if "{expression}" not in self.question:
            raise DataError(f"question={self.question!r} must contain {{expression}}")
        if not 0 <= self.slips <= 1 or (self.slips and (self.operators != "+" or self.reverse)):
            raise DataError(
                f"slips={self.slips} must lie in [0, 1] and needs operators='+' and no reverse"
            )

    def _row(self, numbers: list[int], chance: random.Random, *, learned: bool) -> Fields:
        total, *others = numbers
        expression = str(total)
        for number in others:
            operator = chance.choice(self.operators)
            expression += f"{operator}{number}"
            total += number if operator == "+" else -number
        prompt = self.question.replace("{expression}", expression)
        if not learned:
            return {"prompt": prompt, "answer": self._written(total)}
        if self.slips and chance.random() < self.slips:
            total = sum_without_carries(numbers)
        return {"prompt": prompt, "completion": self._written(total)}

    def _written(self, number: int) -> str:
        digits = str(abs(number))
        return "-" * (number < 0) + (digits[::-1] if self.reverse else digits)


def counts_of(limit: int | None, **counts: int) -> dict[str, int]:
    """Count the rows of each file.

    Args:
        limit: at most so many in each; None: no limit.
        counts: how many there are without one, by the name of the file.

    Raises:
        DataError: a file would have none.
    """
    if limit is not None:
        counts = {split: min(count, limit) for split, count in counts.items()}
    if min(counts.values()) < 1:
        raise DataError(f"every file needs at least one row, got {counts}")
    return counts


def sum_without_carries(numbers: list[int]) -> int:
    """Add each column on its own, the carry forgotten: 27+48 is 65.

    Args:
        numbers: at least one, none below 0.
    """
    powers = [10**column for column in range(len(str(max(numbers))))]
    return sum(sum(number // power for number in numbers) % 10 * power for power in powers)


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """Train and eval rows of one task; an eval question that train has too is rejected.

    Score with `reward.name: reasoning-gym` (the task's verifier, which reads the `entry` field), or
    with "math" or "exact" where the task has one answer.

    Args:
        task: a dataset name of reasoning-gym.
        parameters: JSON object of the task's own settings, such as {"max_terms": 3}.
        train_rows, eval_rows: how many of each, those that are rejected included.
    """

    task: str = "chain_sum"
    parameters: str = "{}"
    train_rows: int = 2000
    eval_rows: int = 500

    def make(self, seed: int, limit: int | None) -> Made:
        """Make the rows of both files, at most `limit` of each.

        Args:
            seed: of the tasks; both files have different ones.
            limit: at most so many rows in each file; None: as the fields say.

        Returns:
            The rows of train and eval; and the task's settings and what was rejected.

        Raises:
            MissingExtraError: reasoning-gym is not installed.
            DataError: an unknown task or setting, or no usable row.
        """
        try:
            import reasoning_gym as library  # pyright: ignore[reportMissingImports]
            from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtraError(
                'reasoning-gym is not installed: pip install -e ".[tasks]" (one of its '
                "dependencies needs a C compiler)"
            ) from error
        task = self.task
        if task not in DATASETS:
            close = difflib.get_close_matches(task, DATASETS)
            raise DataError(f"reasoning-gym has no task {task!r}; close names: {close}")
        try:
            own = dict(json.loads(self.parameters))
        except (TypeError, ValueError) as error:
            raise DataError(f"parameters={self.parameters!r} is no JSON object: {error}") from error
        verify = library.get_score_answer_fn(task)
        taken: set[str] = set()
        files: Files = {}
        rejects: Rows = []
        for split, count in {"train": self.train_rows, "eval": self.eval_rows}.items():
            settings = {
                **own,
                "size": count if limit is None else min(count, limit),
                "seed": stable_seed("reasoning-gym", split, seed) % 2**31,
            }
            try:
                entries = library.create_dataset(task, **settings)
            except (TypeError, ValueError, AssertionError) as error:
                raise DataError(
                    f"reasoning-gym refuses task={task} with {settings}: {error}"
                ) from error
            rows = files[split] = []
            for number, entry in enumerate(entries):
                place = f"reasoning-gym/{task}/{split}/{number:06d}"
                try:
                    rows.append(_task_row(entry, verify, place, taken))
                except (TypeError, ValueError) as error:
                    rejects.append({"place": place, "reason": str(error)})
            if not rows:
                raise DataError(
                    f"no usable row of {task} for {split}; first rejects: {rejects[:2]}"
                )
            taken = {row["prompt"] for row in rows}
        return files, {"parameters": own, "rejected": len(rejects), "rejects": rejects}


def _task_row(entry: Json, verify: Callable[..., float], place: str, taken: set[str]) -> Fields:
    """The entry as a row, or an error if it cannot be stored as JSON and verified again."""
    stored = json.loads(json.dumps(entry))
    question = stored["question"]
    answer = stored["answer"]
    if question in taken:
        raise ValueError("the question is in train.jsonl")
    if answer is not None and verify(answer=answer, entry=stored) != 1.0:
        raise ValueError("its own answer does not score 1 once stored as JSON")
    source = f"reasoning-gym/{stored['metadata']['source_dataset']}"
    return {"prompt": question, "answer": answer, "uid": place, "source": source, "entry": stored}
