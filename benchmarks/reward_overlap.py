"""How much of the reward phase is hidden by scoring while other responses are sampled.

    python benchmarks/reward_overlap.py [--engine local|ray|vllm] [--workers 16] [--steps 4]

Two rewards that only wait, 50 ms and 500 ms per response, as a judge or a service would. Each runs
twice, on the same samples: scored when the last response is there, and scored meanwhile. Prints the
seconds that a step waits for its rewards, and the share of the first that the second hides.
`--engine ray` samples in a Ray actor, `--engine vllm` in one with vLLM.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml

from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.rollouts.overlapped_scoring import OverlappedScorer

REWARD = """
import time

def waits(prompt, completion):
    time.sleep({seconds})
    return sum(c.isdigit() for c in completion) / 64
"""


def ignore(self: OverlappedScorer, finished: object) -> None:
    """In place of `OverlappedScorer.offer`: nothing is scored before it is asked for."""


def one_run(folder: Path, options: argparse.Namespace, seconds: float, meanwhile: bool) -> Path:
    """Run a few steps; where they were written."""
    folder.mkdir()
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(8) for b in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD.format(seconds=seconds))
    sampling: dict[str, Any] = {"max_rows": options.rows}
    if options.engine != "local":
        sampling["actors"] = 1
    if options.engine == "vllm":
        sampling |= {"name": "vllm", "kv_cache_gb": 0.5}
    default = "builtin:small" if options.engine == "vllm" else "builtin:tiny"
    content: dict[str, Any] = {
        "run": {"name": "overlap", "dir": str(folder / "run"), "steps": options.steps},
        "model": {"name": options.model or default},
        "data": {"train": str(folder / "rows.jsonl"), "prompts_per_step": options.prompts},
        "reward": {"name": f"{folder / 'reward.py'}:waits", "workers": options.workers},
        "rollout": {"n_samples": options.samples, "max_tokens": options.tokens},
        "train": {"alg_name": "sgrpo", "lr": 1e-6},
        "inference_engine": sampling,
    }
    content["run"] |= {"mlflow": False, "threads": 1}
    if options.engine == "vllm":
        content["model"]["max_length"] = 512
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(content))
    offer = OverlappedScorer.offer
    if not meanwhile:
        OverlappedScorer.offer = ignore  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run(load_config(config))
    finally:
        OverlappedScorer.offer = offer
    return folder / "run"


def waited(directory: Path) -> tuple[float, float, float]:
    """Medians over the steps after the first: seconds of sampling, of rewards, of the step."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    names = ("time/rollout_s", "time/reward_s", "time/step_s")
    found = [statistics.median(line[name] for line in lines[1:]) for name in names]
    return found[0], found[1], found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", default="local", choices=("local", "ray", "vllm"))
    parser.add_argument("--model", help="builtin:small for vLLM, which lacks tiny heads; else tiny")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8, help="responses sampled at the same time")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.05, 0.5])
    options = parser.parse_args()
    for seconds in options.seconds:
        figures: dict[bool, tuple[float, float, float]] = {}
        contents: list[str] = []
        for meanwhile in (False, True):
            with tempfile.TemporaryDirectory() as temporary:
                directory = one_run(Path(temporary) / "x", options, seconds, meanwhile)
                figures[meanwhile] = waited(directory)
                text = (directory / "samples.jsonl").read_text()
                contents.append(text.replace(temporary, ""))
        hidden = 1 - figures[True][1] / figures[False][1]
        same = "the same samples" if contents[0] == contents[1] else "OTHER SAMPLES"
        print(
            f"{options.engine}, {1000 * seconds:.0f} ms, {options.workers} workers, "
            f"{options.prompts} x {options.samples} responses, {options.rows} at a time: sampling "
            f"{figures[False][0]:.2f} s, rewards {figures[False][1]:.2f} s -> "
            f"{figures[True][1]:.2f} s ({100 * hidden:.0f} % hidden), step "
            f"{figures[False][2]:.2f} -> {figures[True][2]:.2f} s; {same}"
        )


if __name__ == "__main__":
    main()
