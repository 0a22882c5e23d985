"""Seconds per step when the next batch is sampled while one trains, against taking turns; and the
most it can gain.

    python benchmarks/overlap.py [PAIRS]        default 3; needs Ray

One rollout actor with the local sampler and one training process, a thread each. Runs of both kinds
alternate; the first two steps of each (start, and the first batch, which nothing overlaps) are left
out. The bound is that of two
stages in parallel: (rollout + rest) / max(rollout, rest), from the times of the runs that take
turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from oxrl.commands.train import run
from oxrl.config import load_config

STEPS = 10
CONFIG = """
run: {{name: overlap, dir: {folder}/run, steps: {steps}, threads: 1, checkpoint_every: 0,
      mlflow: false}}
model: {{name: "builtin:small"}}
data: {{train: {folder}/prompts.jsonl, prompts_per_step: 16}}
reward: {{name: exact}}
rollout: {{max_tokens: 48, n_samples: 8, max_staleness: {staleness},
          force_strict_on_policy: {strict}}}
inference_engine: {{actors: 1, probe_every: 0}}
train: {{alg_name: cispo, lr: 1e-5}}
"""


def step_times(staleness: int) -> tuple[float, float]:
    """(seconds per step, seconds of it waiting for samples), medians over the steps that count."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            {"prompt": f"{a}+{b}=", "answer": str(a + b)}
            for a in range(10, 30)
            for b in range(10, 30)
        ]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        strict = "true" if staleness == 0 else "false"
        text = CONFIG.format(folder=folder, steps=STEPS, staleness=staleness, strict=strict)
        (folder / "config.yaml").write_text(text)
        run(load_config(folder / "config.yaml"))
        lines = [
            json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
        ][2:]
    return tuple(
        statistics.median(line[key] for line in lines) for key in ("time/step_s", "time/rollout_s")
    )


def main(pairs: int = 3) -> None:
    found = [(step_times(0), step_times(1)) for _ in range(pairs)]
    ratios = [turns[0] / ahead[0] for turns, ahead in found]
    bounds = [step / max(rollout, step - rollout) for (step, rollout), _ in found]
    for (turns, ahead), bound in zip(found, bounds, strict=True):
        in_turns = f"turns {turns[0]:.2f} s/step (sampling {turns[1]:.2f})"
        in_advance = f"ahead {ahead[0]:.2f} (waiting {ahead[1]:.2f})"
        print(f"{in_turns}, {in_advance}: {turns[0] / ahead[0]:.2f}x, at most {bound:.2f}x")
    median = statistics.median(ratios)
    print(f"median of {pairs}: {median:.2f}x of at most {statistics.median(bounds):.2f}x")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
