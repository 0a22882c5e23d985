"""Whole RL steps (rollout + update) of oxRL's local engine and of TRL's GRPOTrainer, in turns, on
this machine.

    python benchmarks/rl_step.py [--pairs 12] [--threads 2] [--settings equal heavy]
    [--plain-linears] [--model builtin:small] [--prompts 16]

Both sides get the same float32 model (3.3M parameters without --model), prompts, group size, reward
function and number of threads; each is a process of its own that waits while the other works. oxRL
runs `oxrl.recipes.rl.train` as `oxrl train` does, records included. TRL runs without logging,
checkpoints or reference model, with the micro-batch size that is fastest for it in a short trial.
Needs the `bench` extra.

equal: --prompts x 8 samples x 64 tokens. heavy: lengths drawn once (lognormal, median 32, sigma 1,
cap 256); on both sides the stop token is impossible before a response's length and certain at it.
overhead: the update phase against a bare PyTorch loop over the same micro-batches. Intervals are
95 % bootstraps of medians; a ratio is the median over pairs. Lines that are JSON objects are
figures, which `record.py` keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

import numpy as np
import problem
import torch
import transformers

from oxrl_stats import medians

HERE = Path(__file__).resolve().parent
MICRO_BATCH_TOKENS = 4096
TRL_MICRO_BATCH_ROWS = (128, 64, 32, 16)


class Side:
    """A child process that does one step per `step()`.

    words: for the script, before the folder.
    """

    def __init__(self, script: str, folder: Path, threads: int, *words: str) -> None:
        threading = {
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._log = (folder / f"{'-'.join((script, *words))}.log").open("w")
        self._child = subprocess.Popen(
            [sys.executable, str(HERE / script), *words, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **threading},
        )
        self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._log.close()

    @property
    def pid(self) -> int:
        """The child's process."""
        return self._child.pid

    def step(self) -> dict[str, Any]:
        assert self._child.stdin is not None
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a benchmark process ended early: {Path(self._log.name).read_text()[-3000:]}"
            )
        return json.loads(line)


def trl_side(folder: Path, chosen: problem.Setting, threads: int, rows: int) -> Side:
    options = {"threads": threads, "model": str(folder / "model"), "micro_batch_rows": rows}
    problem.write_settings(folder / "trl.json", chosen, trl=options)
    return Side("trl_side.py", folder, threads)


def best_micro_batch(folder: Path, chosen: problem.Setting, threads: int) -> int:
    """Rows per backward pass that TRL is fastest with: second and third step of a fresh process."""
    seconds: dict[int, float] = {}
    for rows in (rows for rows in TRL_MICRO_BATCH_ROWS if rows <= len(chosen.lengths)):
        with tempfile.TemporaryDirectory(dir=folder) as trial:
            (Path(trial) / "model").symlink_to(folder / "model")
            with trl_side(Path(trial), chosen, threads, rows) as side:
                side.step()
                seconds[rows] = min(side.step()["seconds"], side.step()["seconds"])
    print(
        "  TRL trial:", ", ".join(f"{rows} rows {value:.2f} s" for rows, value in seconds.items())
    )
    return min(seconds, key=lambda rows: seconds[rows])


def figures(
    case: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], other: str
) -> dict[str, Any]:
    """What was measured in turns, as `record.py` keeps it.

    Args:
        case: which measurement. ours, theirs: "seconds" and "cpu" of every turn. other: what
            theirs is called.
    """
    found: dict[str, Any] = {"case": case}
    for key, suffix in (("cpu", "cpu_s"), ("seconds", "s")):
        for side, steps in (("oxrl", ours), (other, theirs)):
            found[f"{side}_{suffix}"] = medians.median([step[key] for step in steps])
    return found


def times(steps: list[dict[str, Any]], key: str) -> list[float]:
    return [step[key] for step in steps]


def describe(name: str, steps: list[dict[str, Any]], tokens: int) -> None:
    seconds = np.array([step["seconds"] for step in steps])
    keys = steps[0]["phases"]
    phases = ", ".join(
        f"{key} {np.mean([step['phases'].get(key, 0.0) for step in steps]):.3f}" for key in keys
    )
    cpu = np.mean([step["cpu"] for step in steps])
    print(
        f"  {name:5} {seconds.mean():.3f} s/step "
        f"(min {seconds.min():.3f}, max {seconds.max():.3f}), {cpu:.2f} CPU s, "
        f"{tokens / seconds.mean():.0f} response tokens/s; phases: {phases}"
    )


def compare(name: str, args: argparse.Namespace, folder: Path) -> None:
    """Alternate steps of both sides in one setting, in a folder that holds the model and takes
    oxRL's run.
    """
    chosen = problem.setting(name, args.prompts)
    tokens = sum(chosen.lengths)
    print(
        f"{name}: {chosen.prompts} prompts x {chosen.samples} samples, "
        f"{tokens} response tokens, cap {chosen.cap}"
    )
    rows = args.trl_rows or best_micro_batch(folder, chosen, args.threads)
    print(
        f"  TRL: per_device_train_batch_size={rows}, "
        f"gradient_accumulation_steps={len(chosen.lengths) // rows}, "
        "use_cpu, float32, beta=0, no gradient checkpointing, no vLLM (fused AdamW is its default)"
    )
    print(
        "  oxRL: sgrpo, as by default (micro_batch_tokens: auto, share_prefix: auto, max_rows: 128)"
    )
    options: dict[str, Any] = {"threads": args.threads, "model": str(folder / "model")}
    options |= {"micro_batch_tokens": "auto", "plain_linears": args.plain_linears}
    problem.write_settings(folder / "oxrl.json", chosen, oxrl=options)
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    with (
        trl_side(folder, chosen, args.threads, rows) as trl,
        Side("oxrl_side.py", folder, args.threads) as oxrl,
    ):
        for _ in range(args.warmup):
            trl.step()
            oxrl.step()
        for pair in range(args.pairs):
            for steps, side in ((theirs, trl), (ours, oxrl))[:: 1 if pair % 2 else -1]:
                steps.append(side.step())
    if any(step["tokens"] != tokens for step in theirs):
        raise RuntimeError(f"TRL trained on {theirs[0]['tokens']} tokens instead of {tokens}")
    describe("TRL", theirs, tokens)
    describe("oxRL", ours, tokens)
    ratio = medians.ratio(times(theirs, "seconds"), times(ours, "seconds"))
    of_cpu = medians.ratio(times(theirs, "cpu"), times(ours, "cpu"))
    middle, low, high = ratio
    between = f"95 % interval [{low:.2f}, {high:.2f}]"
    print(f"  ratio TRL / oxRL {middle:.2f}, {between} over {args.pairs} pairs\n")
    found = figures(name, ours, theirs, "trl") | {"ratio": ratio, "cpu_ratio": of_cpu}
    print(json.dumps(found), flush=True)


def overhead(name: str, args: argparse.Namespace, folder: Path) -> None:
    chosen = problem.setting(name)
    options = {
        "threads": args.threads,
        "model": str(folder / "model"),
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
    }
    problem.write_settings(folder / "bare.json", chosen, bare=options)
    with Side("bare_side.py", folder, args.threads) as side:
        for _ in range(args.warmup):
            side.step()
        steps = [side.step() for _ in range(args.pairs)]
    ours: list[dict[str, Any]] = [step["oxrl"] for step in steps]
    bare: list[dict[str, Any]] = [step["bare"] for step in steps]
    ratio = medians.ratio(times(ours, "seconds"), times(bare, "seconds"))
    of_cpu = medians.ratio(times(ours, "cpu"), times(bare, "cpu"))
    middle, low, high = (100 * (end - 1) for end in ratio)
    print(
        f"overhead, {name} lengths: update {np.mean(times(ours, 'seconds')):.3f} s against "
        f"{np.mean(times(bare, 'seconds')):.3f} s of a bare loop: {middle:+.1f} %, "
        f"95 % interval [{low:+.1f}, {high:+.1f}] %; "
        f"largest difference of a weight afterwards {steps[-1]['difference']:.1e}"
    )
    found = figures(f"overhead {name}", ours, bare, "bare") | {"ratio": ratio, "cpu_ratio": of_cpu}
    print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--settings", nargs="+", default=["equal", "heavy", "overhead"])
    parser.add_argument(
        "--trl-rows", type=int, help="TRL's micro-batch in rows; without it the fastest of a trial"
    )
    parser.add_argument("--model", default="builtin:small", help="a built-in one, or a folder")
    parser.add_argument("--prompts", type=int, default=problem.PROMPTS, help="of a step")
    parser.add_argument(
        "--plain-linears", action="store_true", help="oxRL without oneDNN for matrix products"
    )
    args = parser.parse_args()
    from oxrl.checkpoint.model_files import save_model
    from oxrl.models.load import LoadOptions, load_policy, load_tokenizer

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{versions}, {args.threads} threads per side")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(load_policy(args.model, LoadOptions(seed=0)), folder / "model")
        load_tokenizer(args.model).save_pretrained(folder / "model")
        for chosen in args.settings:
            place = folder / chosen
            place.mkdir()
            (place / "model").symlink_to(folder / "model")
            if chosen == "overhead":
                overhead("equal", args, place)
                overhead("heavy", args, place)
            else:
                compare(chosen, args, place)


if __name__ == "__main__":
    main()
