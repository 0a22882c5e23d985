"""Whole steps that learn from a teacher, in turns with steps that do not, on this machine.

    python benchmarks/teacher_step.py [--against reference trl] [--pairs 12] [--threads 2]
    [--model builtin:small] [--teacher FOLDER]

reference: `opd_topk` with a teacher against `sgrpo` with a reference of the same size (kl loss_k3):
16 prompts x 8 samples x 64 tokens; both read the rows once with a second model. trl: `opd_topk`
against TRL's GKDTrainer (lmbda 1, beta 1: reverse KL over the whole vocabulary), 32 prompts x 1
sample x 64 tokens, with the micro-batch that is fastest for it in a short trial; needs the `bench`
extra. Float32 models, the teacher another draw of random weights unless --teacher names a folder.
Each side is a process of its own that waits while the other works. Intervals are 95 % bootstraps of
medians over pairs. Lines that are JSON objects are figures.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import problem
from rl_step import Side, figures, times

from oxrl_stats import medians

TOKENS = 64
TRL_ROWS = (32, 16, 8, 4)


def oxrl_side(
    folder: Path, name: str, chosen: problem.Setting, threads: int, overrides: list[str]
) -> Side:
    """A process of oxRL in a folder of its own."""
    place = folder / name
    place.mkdir()
    options: dict[str, Any] = {
        "threads": threads,
        "model": str(folder / "model"),
        "micro_batch_tokens": "auto",
        "plain_linears": False,
        "overrides": overrides,
    }
    problem.write_settings(place / "oxrl.json", chosen, oxrl=options)
    return Side("oxrl_side.py", place, threads)


def with_teacher(folder: Path) -> list[str]:
    """Overrides of a run that learns from the teacher."""
    return [
        "train.alg_name=opd_topk",
        f"model.teachers={{big: {{name: {folder / 'teacher'}}}}}",
        "~reward.name",
    ]


def in_turns(
    case: str, ours: Side, theirs: Side, other: str, pairs: int, warmup: int
) -> dict[str, Any]:
    """Steps of both in turns, and what they say."""
    for _ in range(warmup):
        theirs.step()
        ours.step()
    own: list[dict[str, Any]] = []
    their: list[dict[str, Any]] = []
    for pair in range(pairs):
        for steps, side in ((their, theirs), (own, ours))[:: 1 if pair % 2 else -1]:
            steps.append(side.step())
    ratio = medians.ratio(times(their, "seconds"), times(own, "seconds"))
    of_cpu = medians.ratio(times(their, "cpu"), times(own, "cpu"))
    middle, low, high = ratio
    print(
        f"{case}: {other} over opd_topk {middle:.3f}, 95 % interval [{low:.3f}, {high:.3f}]; "
        f"a step of opd_topk is {1 / middle:.3f} [{1 / high:.3f}, {1 / low:.3f}] of the other"
    )
    return figures(case, own, their, other) | {"ratio": ratio, "cpu_ratio": of_cpu}


def against_reference(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """opd_topk with a teacher and sgrpo with a reference."""
    chosen = problem.setting("equal")
    reference = ["train.kl=loss_k3", "train.kl_coeff=0.001"]
    with (
        oxrl_side(folder, "reference", chosen, args.threads, reference) as theirs,
        oxrl_side(folder, "taught", chosen, args.threads, with_teacher(folder)) as ours,
    ):
        return in_turns("reference", ours, theirs, "sgrpo", args.pairs, args.warmup)


def trl_side(folder: Path, threads: int, rows: int, micro: int) -> Side:
    """A process of TRL in a folder of its own."""
    place = folder / f"trl_{micro}"
    place.mkdir(exist_ok=True)
    options = {
        "threads": threads,
        "model": str(folder / "model"),
        "teacher": str(folder / "teacher"),
        "rows": rows,
        "tokens": TOKENS,
        "micro_batch_rows": micro,
    }
    problem.write_settings(place / "trl.json", problem.setting("equal"), trl=options)
    return Side("trl_gkd_side.py", place, threads)


def against_trl(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """opd_topk and GKDTrainer, on responses of as many tokens."""
    rows = args.rows
    chosen = problem.Setting("equal", [TOKENS] * rows, TOKENS, False, prompts=rows, samples=1)
    seconds: dict[int, float] = {}
    for micro in (micro for micro in TRL_ROWS if micro <= rows):
        with trl_side(folder, args.threads, rows, micro) as side:
            side.step()
            seconds[micro] = side.step()["seconds"]
    print("TRL trial:", ", ".join(f"{micro} rows {s:.2f} s" for micro, s in seconds.items()))
    best = min(seconds, key=lambda micro: seconds[micro])
    with (
        trl_side(folder, args.threads, rows, best) as theirs,
        oxrl_side(folder, "taught_rows", chosen, args.threads, with_teacher(folder)) as ours,
    ):
        return in_turns("trl", ours, theirs, "gkd", args.pairs, args.warmup)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", nargs="+", default=["reference"], choices=("reference", "trl"))
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32, help="of a step, with TRL")
    parser.add_argument("--model", default="builtin:small", help="a built-in one, or a folder")
    parser.add_argument("--teacher", help="a folder; without it as the model, drawn anew")
    args = parser.parse_args()
    from oxrl.checkpoint.model_files import save_model
    from oxrl.models.load import LoadOptions, load_policy, load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for place, model, seed in (("model", args.model, 0), ("teacher", args.teacher, 1)):
            save_model(load_policy(model or args.model, LoadOptions(seed=seed)), folder / place)
            load_tokenizer(model or args.model).save_pretrained(folder / place)
        for against in args.against:
            measure = against_reference if against == "reference" else against_trl
            print(json.dumps(measure(args, folder)), flush=True)


if __name__ == "__main__":
    main()
