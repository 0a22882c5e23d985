"""Steps that sample from kept sets, or that center their scores, in turns with plain ones.

    python benchmarks/kept_and_centered.py [--model builtin:small] [--prompts 16] [--samples 8]
    [--tokens 64] [--pairs 8] [--threads 1]

kept: `rollout.top_k: 50`. centered: `train.centering: score`, with the 64 likeliest tokens. Each
side is a process of its own that waits while the others work, as in `rl_step.py`; responses have
equal lengths. Printed: processor seconds of a step over those of a plain one, medians over the
turns with 95 % bootstraps, and the most memory that each process held over that of the plain one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import problem
from rl_step import Side, times
from teacher_step import oxrl_side

from oxrl_stats import medians

KINDS = {
    "plain": [],
    "kept": ["rollout.top_k=50"],
    "centered": ["train.centering=score", "train.center_top=64"],
}


def most_memory(side: Side) -> int:
    """Most resident kB of a process so far."""
    text = Path(f"/proc/{side.pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin:small", help="a built-in one, or a folder")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    from oxrl.checkpoint.model_files import save_model
    from oxrl.models.load import LoadOptions, load_policy, load_tokenizer

    lengths = [args.tokens] * (args.prompts * args.samples)
    chosen = problem.Setting(
        "equal", lengths, args.tokens, False, prompts=args.prompts, samples=args.samples
    )
    taken: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        save_model(load_policy(args.model, LoadOptions(seed=0)), folder / "model")
        load_tokenizer(args.model).save_pretrained(folder / "model")
        sides = {
            kind: stack.enter_context(oxrl_side(folder, kind, chosen, args.threads, overrides))
            for kind, overrides in KINDS.items()
        }
        for turn in range(args.warmup + args.pairs):
            order = list(sides) if turn % 2 else list(sides)[::-1]
            for kind in order:
                step = sides[kind].step()
                if turn >= args.warmup:
                    taken[kind].append(step)
        memory = {kind: most_memory(side) for kind, side in sides.items()}
    for kind in ("kept", "centered"):
        cpu = medians.ratio(times(taken[kind], "cpu"), times(taken["plain"], "cpu"))
        more = memory[kind] / memory["plain"]
        middle, low, high = cpu
        print(f"{kind}: {middle:.3f} [{low:.3f}, {high:.3f}] of a plain step, memory {more:.3f}")
        figure = {"case": kind, "cpu_ratio": cpu, "memory_ratio": round(more, 3)}
        print(json.dumps({**figure, "model": args.model, "pairs": args.pairs}), flush=True)


if __name__ == "__main__":
    main()
