"""Right and wrong solutions of the same GSM8K question as preference pairs, split by question.

    python make_pairs.py .../gsm8k OUT

writes OUT/train.jsonl and OUT/eval.jsonl (every fifth question), the same pairs without their
questions in OUT/bare_*, GSM8K's own training solutions in OUT/warm.jsonl, and prints the baselines
on the held-out part.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

# Worst to best by how often each of the four models is right.
MODELS = ("6b_finetuning", "175b_finetuning", "6b_verification", "175b_verification")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(source: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[dict[str, str]]] = {"train": [], "eval": []}
    used = 0
    for row in read(source / "model_solutions.jsonl"):
        pairs = [
            (a, b)
            for a, b in product(MODELS, MODELS)
            if row[a]["is_correct"] and not row[b]["is_correct"]
        ]
        if not pairs:
            continue
        part = parts["eval" if used % 5 == 0 else "train"]
        used += 1
        for right, wrong in pairs:
            solutions = {"chosen": row[right]["solution"], "rejected": row[wrong]["solution"]}
            part.append({"prompt": row["question"], **solutions, "right": right, "wrong": wrong})
    for name, rows in parts.items():
        write(out / f"{name}.jsonl", rows)
        write(out / f"bare_{name}.jsonl", [row | {"prompt": "?"} for row in rows])
    solved = [
        (row["question"], *row["answer"].split("\n#### ")) for row in read(source / "train.jsonl")
    ]
    write(
        out / "warm.jsonl",
        [{"prompt": q, "completion": f"{solution}\nA: {last}"} for q, solution, last in solved],
    )
    held = parts["eval"]
    longer = sum(
        (len(r["chosen"]) > len(r["rejected"])) + 0.5 * (len(r["chosen"]) == len(r["rejected"]))
        for r in held
    )
    writer = sum(MODELS.index(r["right"]) > MODELS.index(r["wrong"]) for r in held)
    print(f"{used} questions, {len(parts['train'])} training pairs, {len(held)} held-out pairs")
    print(f"longer wins {longer / len(held):.3f}, shorter wins {1 - longer / len(held):.3f}")
    print(f"the better model wins (told which model wrote it) {writer / len(held):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
