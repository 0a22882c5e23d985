"""The quickstart of this tree against that of an earlier commit, in turns.

    python benchmarks/quickstart_before.py [--commit HASH] [--pairs 2] [--first-seed 0]

Each turn is `experiments/quickstart/run.py` of one seed, whole: data, warm start, two evaluations
before, 100 steps of reinforcement, two evaluations after. Seconds of the clock, and of processors
in the process and all that it waited for, on one thread. The earlier tree is unpacked from git into
a temporary folder and runs with the same installed packages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

from oxrl_stats import medians

ROOT = Path(__file__).resolve().parent.parent
# The last one before speed was worked at.
BEFORE = "3738989"
SAMPLED = re.compile(r"sampled at T = 1\s+([\d.]+) ?%(?: \[.*?\])?\s+([\d.]+) ?%")


def unpacked(commit: str, folder: Path) -> Path:
    """The tree of a commit."""
    command = ["git", "archive", "--format=tar", commit]
    packed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as tar:
        tar.extractall(folder, filter="data")
    return folder


def turn(tree: Path, seed: int, out: Path) -> dict[str, float]:
    """Run the quickstart of a tree.

    Raises:
        RuntimeError: it failed, or did not say how accurate the model is.
    """
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **threads, "PYTHONPATH": str(tree)}
    command = [sys.executable, "experiments/quickstart/run.py"]
    command += ["--seed", str(seed), "--out", str(out)]
    began = time.perf_counter()
    before = os.times()
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    after = os.times()
    found = SAMPLED.search(done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"the quickstart of {tree} failed: {done.stderr[-2000:]}")
    cpu = after.children_user - before.children_user
    cpu += after.children_system - before.children_system
    seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "cpu": cpu,
        "sampled_before": float(found.group(1)),
        "sampled_after": float(found.group(2)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commit", default=BEFORE)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    taken: dict[str, list[dict[str, float]]] = {"before": [], "now": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "before").mkdir()
        trees = {"before": unpacked(options.commit, folder / "before"), "now": ROOT}
        for pair in range(options.pairs):
            seed = options.first_seed + pair
            for side in ("before", "now")[:: 1 if pair % 2 else -1]:
                taken[side].append(turn(trees[side], seed, folder / f"runs_{side}"))
            figure: dict[str, Any] = {"case": f"seed {seed}"}
            for side, turns in taken.items():
                last = turns[-1]
                figure[f"{side}_cpu_s"] = round(last["cpu"], 1)
                figure[f"{side}_gain"] = round(last["sampled_after"] - last["sampled_before"], 1)
            figure["cpu_ratio"] = round(taken["before"][-1]["cpu"] / taken["now"][-1]["cpu"], 3)
            print(json.dumps(figure), flush=True)
    together: dict[str, Any] = {"case": "all seeds"}
    for key, suffix in (("cpu", "cpu_s"), ("seconds", "s")):
        columns = {side: [one[key] for one in turns] for side, turns in taken.items()}
        for side, values in columns.items():
            together[f"{side}_{suffix}"] = medians.median(values)
        name = "cpu_ratio" if key == "cpu" else "ratio"
        together[name] = medians.ratio(columns["before"], columns["now"])
    print(json.dumps(together), flush=True)


if __name__ == "__main__":
    main()
