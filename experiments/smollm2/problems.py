"""What SmolLM2 is taught and asked: rows to train on and held-out rows, which share no question.

The split of every task is the same for all seeds; a seed decides the order of the training rows and
everything that is sampled.
"""

from __future__ import annotations

import json
import operator
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oxrl_datasets.published import ifeval as ifeval_row
from oxrl_datasets.published import oasst_chats
from oxrl_datasets.published import svamp as svamp_row

Row = dict[str, Any]

# Of each operation: words, what it does, least and largest number.
OPERATIONS: Mapping[str, tuple[Callable[[int, int], int], int, int]] = {
    "plus": (operator.add, 2, 30),
    "minus": (operator.sub, 2, 30),
    "times": (operator.mul, 2, 12),
}
ONLY_NUMBER = "Answer with only the number."
# Training questions of each operation, and held-out questions of all.
EACH = 100
HELD_OUT = 64
# Kinds of IFEval's instructions that 64 tokens can follow and break.
SHORT_KINDS = {
    "change_case:capital_word_frequency",
    "change_case:english_capital",
    "change_case:english_lowercase",
    "detectable_content:postscript",
    "detectable_format:json_format",
    "detectable_format:title",
    "keywords:existence",
    "keywords:forbidden_words",
    "keywords:letter_frequency",
    "punctuation:no_comma",
    "startend:quotation",
}
IFEVAL_HELD_OUT = 48
SVAMP_HELD_OUT = 64
# Rows between training and held-out part: neighbours are variations of one another.
SVAMP_GAP = 20
TREES_HELD_OUT = 30
# Characters of a conversation: about 400 tokens.
LONGEST_CHAT = 1600
CALLS_RULES = (
    "Use the calculator: write <12*3>, <12+3> or <12-3> and nothing else to have one step worked "
    "out. When you know the result, write only the number."
)


@dataclass(frozen=True)
class Split:
    """Rows to train on, and rows that are only asked."""

    train: Sequence[Row]
    held_out: Sequence[Row]

    def most_frequent(self) -> float:
        """What always the training rows' most frequent answer scores on the held-out rows."""
        ((answer, _),) = Counter(row["answer"] for row in self.train).most_common(1)
        return sum(row["answer"] == answer for row in self.held_out) / len(self.held_out)


def arithmetic() -> Split:
    """Sums, differences and products in words.

    A question and the one with its numbers exchanged are in the same part.
    """
    chance = random.Random(0)
    train: list[Row] = []
    held_out: list[Row] = []
    for place, (word, (work, low, high)) in enumerate(OPERATIONS.items()):
        numbers = range(low, high + 1)
        pairs = [(small, large) for small in numbers for large in numbers if small <= large]
        chance.shuffle(pairs)
        # 64 are 22, 21 and 21.
        asked = HELD_OUT // len(OPERATIONS) + (place < HELD_OUT % len(OPERATIONS))
        held_out += [question(word, work, *pair, chance) for pair in pairs[:asked]]
        learned = [question(word, work, *pair, chance) for pair in pairs[asked:]]
        while len(learned) < EACH:  # products alone: there are only so many
            learned += learned[: EACH - len(learned)]
        train += learned[:EACH]
    chance.shuffle(train)
    return Split(train, held_out)


def question(
    word: str, work: Callable[[int, int], int], small: int, large: int, chance: random.Random
) -> Row:
    """One question; a difference is never negative."""
    first, second = (large, small) if word == "minus" else chance.sample((small, large), 2)
    return {
        "prompt": f"What is {first} {word} {second}? {ONLY_NUMBER}",
        "answer": str(work(first, second)),
    }


def calls() -> Split:
    """A product of three and two digits and a number added or taken off: two calls of a tool.

    Rows have the messages of a demonstration as well, from which the warm start learns.
    """
    chance = random.Random(1)
    rows: dict[str, Row] = {}
    while len(rows) < 3 * EACH + HELD_OUT:
        first = chance.randint(100, 999)
        second = chance.randint(11, 99)
        third = chance.randint(100, 999)
        sign, word = chance.choice((("+", "plus"), ("-", "minus")))
        product = first * second
        result = product + third if sign == "+" else product - third
        prompt = f"What is {first} times {second}, {word} {third}? {CALLS_RULES}"
        said = [
            f"<{first}*{second}>",
            str(product),
            f"<{product}{sign}{third}>",
            str(result),
            str(result),
        ]
        messages = [{"role": "user", "content": prompt}]
        for turn, text in enumerate(said):
            messages.append({"role": "user" if turn % 2 else "assistant", "content": text})
        rows[prompt] = {"prompt": prompt, "answer": str(result), "messages": messages}
    made = list(rows.values())
    return Split(made[HELD_OUT:], made[:HELD_OUT])


def svamp(data: Path) -> Split:
    """Word problems as published; the last ones are held out."""
    rows = [svamp_row(fields)[0] for fields in read(data / "svamp" / "svamp.jsonl")]
    for row in rows:
        row["prompt"] = f"{row['prompt']} {ONLY_NUMBER}"
    held_out = rows[-SVAMP_HELD_OUT:]
    asked = {row["prompt"] for row in held_out}
    learned = rows[: -SVAMP_HELD_OUT - SVAMP_GAP]
    return Split([row for row in learned if row["prompt"] not in asked], held_out)


def ifeval(data: Path) -> Split:
    """Prompts of IFEval all of whose instructions short answers can follow."""
    rows: list[Row] = []
    for fields in read(data / "ifeval" / "input_data.jsonl"):
        if SHORT_KINDS.issuperset(fields["instruction_id_list"]):
            rows += ifeval_row(fields)
    random.Random(0).shuffle(rows)
    return Split(rows[IFEVAL_HELD_OUT:], rows[:IFEVAL_HELD_OUT])


def chats(data: Path) -> Split:
    """Conversations of OpenAssistant: every reply of some trees, the best ones of others."""
    trees = read(data / "oasst_en" / "trees.jsonl")
    random.Random(0).shuffle(trees)
    train: list[Row] = []
    for tree in trees[TREES_HELD_OUT:]:
        train += replies((), tree["prompt"])
    held_out: list[Row] = []
    for tree in trees[:TREES_HELD_OUT]:
        held_out += oasst_chats(tree)
    return Split([*filter(short, train)], [*filter(short, held_out)])


def replies(said: tuple[Row, ...], node: Row) -> list[Row]:
    """Every reply of the assistant in a tree, after all that was said before.

    Args:
        said: before the node.
        node: a message with replies.
    """
    role = {"prompter": "user", "assistant": "assistant"}[node["role"]]
    path = (*said, {"role": role, "content": node["text"]})
    found: list[Row] = [{"messages": list(path)}] if role == "assistant" else []
    for reply in node.get("replies", ()):
        found += replies(path, reply)
    return found


def short(row: Row) -> bool:
    """Whether a conversation is not too long to learn from on a CPU."""
    return sum(len(message["content"]) for message in row["messages"]) <= LONGEST_CHAT


def read(path: Path) -> list[Row]:
    """The rows of a published file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def write(path: Path, rows: Sequence[Row]) -> Path:
    """Rows as a data file; where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
