"""SFT and DPO steps of oxRL and of TRL's trainers, on the same rows, in turns, on this machine.

    python benchmarks/offline_step.py [--pairs 8] [--warmup 2] [--threads 1] [--kinds sft dpo]

The 3.3M-parameter built-in model in float32, AdamW, 64 rows (SFT) or 32 pairs (DPO) per step, no
checkpoints or evaluation. Answers have 8 to 128 characters. TRL gets one micro-batch of all rows of
a step, padded to the longest, and logs nothing; both ask the reference of DPO beforehand. Each side
is a process of its own that waits while the other works. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import intervals
from rl_step import Side, figures, times

ROWS = {"sft": 64, "dpo": 32}


def write_rows(folder: Path, kind: str, count: int) -> None:
    """Questions with one answer, or with a better and a worse one."""
    chance = random.Random(0)
    rows: list[dict[str, str]] = []
    for place in range(count):
        row = {"prompt": f"question {place}?"}
        for name in ("completion",) if kind == "sft" else ("chosen", "rejected"):
            size = chance.randint(8, 128)
            row[name] = "".join(chance.choices("abcdefgh 0123456789", k=size))
        rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Alternate steps of both sides; the figure.

    Args:
        folder: holds the model.
    """
    # A run never ends by itself here: one step more than is asked for.
    steps = options.warmup + options.pairs + 1
    write_rows(folder, kind, ROWS[kind] * steps)
    given = {"kind": kind, "rows": ROWS[kind], "steps": steps, "threads": options.threads}
    (folder / "given.json").write_text(json.dumps(given))
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    script = "offline_side.py"
    with (
        Side(script, folder, options.threads, "trl") as trl,
        Side(script, folder, options.threads, "oxrl") as oxrl,
    ):
        for _ in range(options.warmup):
            trl.step()
            oxrl.step()
        for pair in range(options.pairs):
            for steps_of, side in ((theirs, trl), (ours, oxrl))[:: 1 if pair % 2 else -1]:
                steps_of.append(side.step())
    ratio = intervals.ratio(times(theirs, "seconds"), times(ours, "seconds"))
    of_cpu = intervals.ratio(times(theirs, "cpu"), times(ours, "cpu"))
    return figures(kind, ours, theirs, "trl") | {"ratio": ratio, "cpu_ratio": of_cpu}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=ROWS, default=[*ROWS])
    options = parser.parse_args()
    from oxrl.models.load import load_policy, load_tokenizer
    from oxrl.models.weights import save_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(load_policy("builtin:small"), folder / "model")
        load_tokenizer("builtin:small").save_pretrained(folder / "model")
        for kind in options.kinds:
            place = folder / kind
            place.mkdir()
            (place / "model").symlink_to(folder / "model")
            print(json.dumps(compare(kind, options, place)), flush=True)


if __name__ == "__main__":
    main()
