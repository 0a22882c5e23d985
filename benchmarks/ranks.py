"""Supervised fine-tuning over several processes of this machine: what sharding costs.

    python benchmarks/ranks.py [--ranks 1 2 3] [--steps 12] [--backend fsdp]

One process uses the local engine; several share the batch, with the model sharded over them, and
have one thread each. Each number of ranks trains twice, for 2 steps and for --steps: the processor
time of all processes that the second needs beyond the first is that of the steps between. On a
machine with fewer cores than ranks they take turns on them, which the wall time shows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from oxrl_stats import medians

ROOT = Path(__file__).resolve().parent.parent
CONFIG = """
run: {{name: ranks, dir: {folder}/run, steps: {steps}, mlflow: false, checkpoint_every: 0}}
model: {{name: "builtin:small"}}
data: {{train: {folder}/rows.jsonl, rows_per_step: 96}}
train: {{alg_name: sft, lr: 1.0e-4, micro_batch_tokens: 2048}}
"""


SHORT = 2  # steps of the run that is taken off


def train(ranks: int, backend: str, steps: int) -> tuple[float, list[dict[str, Any]]]:
    """Processor seconds of a run in all its processes, and its metrics."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answers = [" ".join(str(row * k % 97) for k in range(1, 33)) for row in range(384)]
        rows = [{"prompt": f"count by {n}", "completion": text} for n, text in enumerate(answers)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.yaml").write_text(CONFIG.format(folder=folder, steps=steps))
        command = [sys.executable]
        overrides = ["run.console=quiet", "run.threads=1"]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", f"{ranks}"]
            overrides += [f"train.backend={backend}", f"run.training_gpus={ranks}"]
        command += [str(ROOT / "main_sl.py"), "--config", str(folder / "config.yaml"), *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        before = of_children()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        spent = of_children() - before
        text = (folder / "run" / "metrics.jsonl").read_text()
    return spent, [json.loads(line) for line in text.splitlines()]


def of_children() -> float:
    """Processor seconds of the processes that are over."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(ranks: int, backend: str, steps: int) -> dict[str, Any]:
    """The figure of one number of ranks."""
    short_s, _ = train(ranks, backend, SHORT)
    long_s, lines = train(ranks, backend, steps)
    rates = [line["throughput/tokens_per_s"] for line in lines[SHORT:]]
    return {
        "case": f"ranks {ranks}",
        "engine": backend if ranks > 1 else "local",
        "step_cpu_s": medians.rounded((long_s - short_s) / (steps - SHORT)),
        "tokens_per_s": medians.median(rates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--backend", default="fsdp")
    options = parser.parse_args()
    alone = 0.0
    for ranks in options.ranks:
        line = measure(ranks, options.backend, options.steps)
        alone = alone or line["step_cpu_s"]
        line["cpu_of_first"] = medians.rounded(line["step_cpu_s"] / alone)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
