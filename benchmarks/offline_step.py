"""SFT and DPO steps of oxRL and of TRL's trainers, on the same rows, in turns, on this machine.

    python benchmarks/offline_step.py [--pairs 8] [--warmup 2] [--kinds sft dpo]
    [--model builtin:small] [--rows 64]

A model in float32 (3.3M parameters without --model), AdamW, 64 rows (SFT) or half as many pairs
(DPO) per step, no checkpoints or evaluation. Answers have 8 to 128 characters. Each side has the
settings that it is fastest with in a trial of `CANDIDATES`, which is printed. TRL logs nothing;
both ask the reference of DPO beforehand. Each side is a process of its own, of one thread, that
waits while the other works. Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from rl_step import Side, figures, times

from oxrl_stats import medians

ROWS = 64
KINDS = ("sft", "dpo")
# What each side is tried with first; the fastest settings are measured. A pair of DPO is two rows.
# TRL takes the rows of a micro-batch; it may lay them end to end (SFT alone has that) or sort rows
# of a like length together, which its DPO cannot.
CANDIDATES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("sft", "trl"): [
        {"rows": 64},
        {"rows": 16},
        {"rows": 8},
        {"rows": 4},
        {"rows": 16, "train_sampling_strategy": "group_by_length"},
        {"rows": 8, "padding_free": True, "max_length": None},
    ],
    ("dpo", "trl"): [{"rows": 32}, {"rows": 8}, {"rows": 4}],
    ("sft", "oxrl"): [
        {"micro_batch_tokens": "auto"},
        {"micro_batch_tokens": 2048},
        {"micro_batch_tokens": "auto", "pack_tokens": 256},
    ],
    ("dpo", "oxrl"): [{"micro_batch_tokens": "auto"}, {"micro_batch_tokens": 2048}],
}


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


def side_of(
    kind: str, side: str, settings: dict[str, Any], steps: int, rows: int, folder: Path
) -> Side:
    """A process that takes steps of so many rows or pairs, in a folder of its own."""
    folder.mkdir()
    (folder / "model").symlink_to(folder.parent / "model")
    write_rows(folder, kind, rows * steps)
    given = {"kind": kind, "rows": rows, "steps": steps, "threads": 1, "settings": settings}
    (folder / "given.json").write_text(json.dumps(given))
    return Side("offline_side.py", folder, 1, side)


def best(kind: str, side: str, rows: int, folder: Path) -> dict[str, Any]:
    """The settings that a side is fastest with: second and third step of a fresh process each."""
    candidates = [{**given} for given in CANDIDATES[kind, side]]
    for given in candidates:  # no micro-batch is larger than the step
        if "rows" in given:
            given["rows"] = min(given["rows"], rows)
    candidates = [
        given for place, given in enumerate(candidates) if given not in candidates[:place]
    ]
    if len(candidates) == 1:
        return candidates[0]
    taken: list[float] = []
    for place, settings in enumerate(candidates):
        with side_of(kind, side, settings, 4, rows, folder / f"{side}_{place}") as trial:
            trial.step()
            taken.append(min(trial.step()["cpu"], trial.step()["cpu"]))
        print(f"{kind}, {side} with {json.dumps(settings)}: {taken[-1]:.3f} s", flush=True)
    return candidates[taken.index(min(taken))]


def compare(kind: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Alternate steps of both sides; the figure.

    Args:
        folder: holds the model.
    """
    # A run never ends by itself here: one step more than is asked for.
    steps = options.warmup + options.pairs + 1
    rows = options.rows if kind == "sft" else options.rows // 2
    chosen = {side: best(kind, side, rows, folder) for side in ("oxrl", "trl")}
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    with (
        side_of(kind, "trl", chosen["trl"], steps, rows, folder / "trl") as trl,
        side_of(kind, "oxrl", chosen["oxrl"], steps, rows, folder / "oxrl") as oxrl,
    ):
        for _ in range(options.warmup):
            trl.step()
            oxrl.step()
        for pair in range(options.pairs):
            for steps_of, side in ((theirs, trl), (ours, oxrl))[:: 1 if pair % 2 else -1]:
                steps_of.append(side.step())
    # Where TRL sorts rows by length its steps are unlike, and only all of them are the same work.
    ratio = medians.ratio_of_sums(times(theirs, "seconds"), times(ours, "seconds"))
    of_cpu = medians.ratio_of_sums(times(theirs, "cpu"), times(ours, "cpu"))
    found = figures(kind, ours, theirs, "trl") | {"ratio": ratio, "cpu_ratio": of_cpu}
    return found | {"settings": chosen}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--model", default="builtin:small", help="a built-in one, or a folder")
    parser.add_argument("--rows", type=int, default=ROWS, help="of a step; of DPO half as many")
    options = parser.parse_args()
    from oxrl.checkpoint.model_files import save_model
    from oxrl.models.load import load_policy, load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(load_policy(options.model), folder / "model")
        load_tokenizer(options.model).save_pretrained(folder / "model")
        for kind in options.kinds:
            place = folder / kind
            place.mkdir()
            (place / "model").symlink_to(folder / "model")
            print(json.dumps(compare(kind, options, place)), flush=True)


if __name__ == "__main__":
    main()
