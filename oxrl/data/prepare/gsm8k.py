"""GSM8K: grade-school word problems whose published solutions end in a line `#### N`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from oxrl.data.prepare.output import choose, write_jsonl, write_report
from oxrl.data.rows import Row, file_hash, read_rows
from oxrl.errors import DataError, MissingExtraError

HUB_NAME = "openai/gsm8k"
INSTRUCTION = 'Think step by step, then write the final number alone on the last line as "#### N".'
_SPLITS = ("train", "test")


def gsm8k(
    source: Path | None,
    out: Path,
    *,
    seed: int = 0,
    limit: int | None = None,
    instruction: str = INSTRUCTION,
    calculator: bool = False,
) -> dict[str, Any]:
    """Write train.jsonl and test.jsonl with `prompt`, `answer` (bare number), `completion` (solution) and `uid`.

    The same file serves RL (prompt, answer) and SFT (prompt, completion).

    Args:
        source: a folder with the raw train.jsonl and test.jsonl, or one such file; None fetches the hub's copy.
        out: folder to write to.
        seed: chooses rows where `limit` is smaller than a split.
        limit: at most so many rows per split.
        instruction: added to every question after a line feed; empty for none.
        calculator: keep the `<<48/2=24>>` notes in completions.

    Raises:
        DataError: no usable source.
        MissingExtraError: `source` is None and the `datasets` library is not installed.
    """
    hashes: dict[str, str] = {}
    rejects: list[dict[str, str]] = []
    written: dict[str, int] = {}
    for split, rows in _raw(source, hashes):
        good: list[dict[str, Any]] = []
        for number, row in enumerate(rows):
            problem = _convert(row, f"gsm8k/{split}/{number:05d}", instruction, calculator)
            if isinstance(problem, str):
                rejects.append({"place": row.place, "reason": problem})
            else:
                good.append(problem)
        if not good:
            raise DataError(f"{source}: no row of GSM8K's {split} part; {len(rejects)} rejected, first: {rejects[:1]}")
        written[f"{split}.jsonl"] = write_jsonl(out / f"{split}.jsonl", choose(good, limit, seed))
    return write_report(
        out,
        {
            "dataset": "gsm8k",
            "source": str(source or HUB_NAME),
            "source_sha256": hashes,
            "seed": seed,
            "limit": limit,
            "instruction": instruction,
            "calculator": calculator,
            "written": written,
            "rejected": len(rejects),
            "rejects": rejects,
        },
    )


def _convert(row: Row, uid: str, instruction: str, calculator: bool) -> dict[str, Any] | str:
    """The prepared row, or why there is none."""
    question, answer = row.fields.get("question"), row.fields.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
        return f"needs text 'question' and 'answer', has {sorted(row.fields)}"
    solution, marker, last = answer.rpartition("####")
    gold = last.strip().replace(",", "")
    if not marker or not re.fullmatch(r"-?\d+(\.\d+)?", gold):
        return f"the answer does not end in '#### N' but in {answer[-40:]!r}"
    if not calculator:
        solution = re.sub(r"<<[^<>]*>>", "", solution)
    return {
        "prompt": question.strip() + (f"\n{instruction}" if instruction else ""),
        "answer": gold,
        "completion": f"{solution.strip()}\n#### {gold}",
        "uid": uid,
        "source": "gsm8k",
    }


def _raw(source: Path | None, hashes: dict[str, str]) -> Iterator[tuple[str, Iterable[Row]]]:
    """(split, raw rows) of every split that the source holds."""
    if source is None:
        yield from _hub()
        return
    if source.is_dir():
        files = {split: source / f"{split}.jsonl" for split in _SPLITS if (source / f"{split}.jsonl").is_file()}
        if not files:
            raise DataError(f"{source} holds neither train.jsonl nor test.jsonl of GSM8K")
    else:
        files = {source.stem if source.stem in _SPLITS else "train": source}
    for split, path in files.items():
        rows = read_rows(path)
        yield split, rows
        hashes[path.name] = file_hash(path)


def _hub() -> Iterator[tuple[str, Iterable[Row]]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            "fetching GSM8K by name needs the datasets library: pip install datasets; or pass --source with the folder "
            "that holds the raw train.jsonl and test.jsonl"
        ) from error
    try:
        data = datasets.load_dataset(HUB_NAME, "main")
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot fetch {HUB_NAME} from the hub ({type(error).__name__}: {error}); pass --source with the folder "
            "that holds the raw train.jsonl and test.jsonl"
        ) from error
    for split in _SPLITS:
        yield split, [Row(f"{HUB_NAME} {split} row {n}", dict(row)) for n, row in enumerate(data[split], start=1)]
