"""Twenty minutes on one node of GPUs: what a delivery, a load, a checkpoint and a step take there.

    python experiments/gsm8k_scale/node.py                       # writes NODE.md beside this file
    python experiments/gsm8k_scale/node.py --config rl_1.5b_2gpus.yaml --model PATH --data FOLDER
    python experiments/gsm8k_scale/node.py --dry-run --out FOLDER      # on a CPU, tiny and random

Two stages, a process each, of a configuration as it is but for its length, its evaluations and
`run.async_checkpoints`, so that a checkpoint takes as long as it takes: some steps with a
checkpoint, and the same run resumed for one more. Beside each figure stands what `oxrl plan` says.
When --minutes are over, a stage is told to stop and ends with its step; what it has is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# What is the same on one GPU: peaks by data sheet, speed and its shares, sums for a dry run.
ONE_GPU: dict[str, Any] = runpy.run_path(str(ROOT / "experiments" / "gpu" / "run.py"))
STEPS = 8
DRY_STEPS = 3
STOPPED = 75  # the exit code of a run that was told to stop and saved
SMI = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
SMI_EVERY_S = 1.0


def write_config(options: argparse.Namespace) -> Path:
    """The configuration that is measured. JSON is YAML, too."""
    sections: dict[str, Any] = yaml.safe_load((HERE / options.config).read_text())
    data = sections["data"]
    for field in ("eval", "eval_rows"):
        data.pop(field, None)
    data["train"] = str(options.data / "train.jsonl")
    run = sections["run"]
    for field in ("eval_every", "async_checkpoints"):
        run.pop(field, None)
    run |= {"dir": str(options.work / "run"), "steps": options.steps, "mlflow": False}
    # The line of a step has the seconds of the checkpoint before it: the last one has none.
    every = max(1, options.steps // 2)
    run |= {"checkpoint_every": every, "keep_checkpoints": 1, "console": "plain"}
    if options.model:
        sections["model"]["name"] = options.model
    if options.dry_run:
        make_small(sections)
    path = options.work / "node.yaml"
    path.write_text(json.dumps(sections, indent=1))
    return path


def make_small(sections: dict[str, Any]) -> None:
    """The same sections on a CPU: a random model, few and short rows, and no vLLM.

    Two ranks and a sampler in Ray actors where Ray is installed, else one process.
    """
    sections["run"] |= {"device": "cpu", "training_gpus": 1, "threads": 1}
    for field in ("deadlines", "max_restarts"):
        sections["run"].pop(field, None)
    sections["model"] = {"name": sections["model"]["name"]}
    train = sections["train"]
    train |= {"warmup_steps": 0, "micro_batch_tokens": 256}
    for section in ("fsdp", "deepspeed", "inference_engine"):
        sections.pop(section, None)
    train.pop("backend", None)
    sections["data"] |= {"prompts_per_step": 2, "max_prompt_tokens": None}
    sections["rollout"] = {"n_samples": 2, "max_tokens": 6}
    sections["reward"] = {"name": "math", "workers": 1}
    if find_spec("ray") is not None:
        sections["run"]["training_gpus"] = 2
        train["backend"] = "fsdp"
        sections["inference_engine"] = {"actors": 1}


def run_stage(options: argparse.Namespace, config: Path, until: float, *words: str) -> bool:
    """Train to the end, or until the time is over.

    Returns:
        Whether it came to its end.

    Raises:
        SystemExit: it failed; names its log.
    """
    log = config.with_suffix(".log")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "oxrl", "train", str(config), *words]
    with log.open("a") as told:
        with subprocess.Popen(command, env=environment, stdout=told, stderr=told) as process:
            try:
                code = process.wait(max(until - time.time(), 1.0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                code = process.wait(ONE_GPU["STAGE_DEADLINE_S"])
    if code not in (0, STOPPED):
        raise SystemExit(f"`{' '.join(command[1:])}` ended with {code}: see {log}")
    return code == 0


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """The most bytes of each GPU that were taken meanwhile; empty without GPUs."""
    most: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(SMI_EVERY_S):
            said = subprocess.run(SMI, capture_output=True, text=True, check=False).stdout
            now = [int(line) * 2**20 for line in said.split()]
            most[:] = [max(pair) for pair in zip(now, most or now, strict=True)]

    watch = threading.Thread(target=look, daemon=True)
    if ONE_GPU["has_gpu"]():
        watch.start()
    try:
        yield most
    finally:
        over.set()
        if watch.is_alive():
            watch.join()


def planned(config: Path) -> dict[str, Any]:
    """What `oxrl plan` says of the configuration."""
    from oxrl.config import load_config
    from oxrl.modelfiles.dims import model_dims
    from oxrl.plan.memory import memory, sync_bytes

    cfg = load_config(config)
    dims = model_dims(cfg.model.name)
    found: dict[str, Any] = {"model": cfg.model.name, "ranks": cfg.run.training_gpus}
    if dims is None:
        return found
    of_run = memory(cfg, dims)
    return found | {
        "peak_bytes": max(of_run.phases.values()),
        "checkpoint_bytes": of_run.stored,
        "sync_bytes": sync_bytes(cfg, dims),
    }


def measured(options: argparse.Namespace, config: Path, until: float) -> dict[str, Any]:
    """Both stages, from the lines that the run wrote of its steps."""
    run = options.work / "run"
    found: dict[str, Any] = {}
    with most_memory() as gpus:
        whole = run_stage(options, config, until)
        if whole:
            begun = time.monotonic()
            more = f"run.steps={options.steps + 1}"
            run_stage(options, config, until, "--resume", more)
            found["resumed_s"] = time.monotonic() - begun
    lines = ONE_GPU["metrics_of"](run)
    checkpoint = max((run / "checkpoints").glob("step_*"))
    steps = lines[: options.steps]
    found |= {
        "steps": len(lines),
        "in_time": whole,
        "first_load_s": lines[0]["time/setup_s"],
        "checkpoint_bytes": sum(file.stat().st_size for file in checkpoint.rglob("*.safetensors")),
        "gpu_peak_bytes": max(gpus, default=0),
        "parameters": ONE_GPU["parameters_of"](checkpoint),
    }
    saved = [line["time/checkpoint_s"] for line in lines if line.get("time/checkpoint_s")]
    if saved:
        found["save_s"] = max(saved)
    synced = [line for line in steps if line.get("sync/sent_bytes")]
    if synced:
        found["sync_s"] = statistics.median(line["time/sync_s"] for line in synced)
        found["sync_bytes"] = statistics.median(line["sync/sent_bytes"] for line in synced)
        found["driver_bytes"] = max(line["sync/driver_bytes"] for line in synced)
    peak = (options.peak or ONE_GPU["peak_of"](options.gpu)) * options.gpus
    return found | ONE_GPU["speed"](steps, found["parameters"], peak)


def page(results: dict[str, Any]) -> str:
    """NODE.md from node.json."""
    plan = results["plan"]
    found = results["measured"]
    status = "**A dry run**: every stage, on a tiny random model; no figure means anything."
    if not results["dry_run"]:
        status = (
            f"Run on {results['date']} on {results['gpus']} x {results['gpu']}, commit "
            f"`{results['commit'][:12]}`, {results['seconds'] / 60:.0f} minutes in all."
        )
    rows = [
        (
            "most memory of a GPU, GB",
            gigabytes(plan, "peak_bytes"),
            gigabytes(found, "gpu_peak_bytes"),
        ),
        ("models loaded, first time, s", "", seconds(found, "first_load_s")),
        ("resumed for one more step, from start to end, s", "", seconds(found, "resumed_s")),
        (
            "a checkpoint, GB",
            gigabytes(plan, "checkpoint_bytes"),
            gigabytes(found, "checkpoint_bytes"),
        ),
        ("a checkpoint, s", "", seconds(found, "save_s")),
        ("a delivery, GB", gigabytes(plan, "sync_bytes"), gigabytes(found, "sync_bytes")),
        ("of it through the driver, GB", "", gigabytes(found, "driver_bytes")),
        ("a delivery with its proof, s", "", seconds(found, "sync_s")),
        ("a step, s", "", seconds(found, "step_s")),
        ("of it rollout, s", "", seconds(found, "rollout_s")),
        ("of it update, s", "", seconds(found, "update_s")),
        ("tokens read in the update per s", "", f"{found.get('tokens_per_s', 0):,}"),
        ("MFU by the data sheet, of the step", "", share(found, "mfu")),
        ("MFU by the data sheet, of the update", "", share(found, "mfu_of_update")),
    ]
    cells = "\n".join(f"| {name} | {said} | {seen} |" for name, said, seen in rows)
    over = "" if found["in_time"] else " The time was over before the last step."
    return f"""# One node

{status} `experiments/gsm8k_scale/node.py` writes this page.

{results["config"]}: {plan["model"]}, {found["parameters"]:,} parameters, {plan["ranks"]} training
ranks, {found["steps"]} steps.{over} Memory of a GPU as `nvidia-smi` says it: sampler, runtime and
what PyTorch keeps for later are in it, and not in the plan.

| | planned | measured |
|---|---|---|
{cells}
"""


def gigabytes(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return "none" if value is None else f"{value / 1e9:.4g}"


def seconds(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return "none" if value is None else f"{value:.3g}"


def share(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return "not known: --peak" if value is None else f"{value:.1%}"


def gpus_here() -> list[str]:
    """The names of the GPUs of this node."""
    if not ONE_GPU["has_gpu"]():
        return []
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return said.strip().splitlines()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="rl_7b_8gpus.yaml", help="rl_*.yaml beside this file")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--model", help="default: the configuration's")
    parser.add_argument("--data", type=Path, help="default: made below --work")
    parser.add_argument("--work", type=Path, default=Path("runs/node"))
    parser.add_argument("--out", type=Path, default=HERE, help="where results and page go")
    parser.add_argument("--minutes", type=float, default=20.0, help="of everything")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--peak", type=float, help="bfloat16 operations per second of one GPU")
    options = parser.parse_args()
    if options.dry_run and options.out == HERE:
        parser.error("--dry-run needs --out: its figures are not to stand in the repository")
    if not options.config.startswith("rl_"):
        parser.error("--config: one of reinforcement learning, rl_*.yaml; others deliver nothing")
    names = gpus_here()
    if not options.dry_run and not names:
        parser.error("no GPU here; --dry-run goes through every stage on a CPU")
    options.gpus = len(names)
    options.gpu = names[0] if names else ""
    options.work = options.work.absolute()
    if options.work.exists() and any(options.work.iterdir()):
        parser.error(f"{options.work} is not empty: choose another --work")
    options.work.mkdir(parents=True, exist_ok=True)
    if options.dry_run:
        options.model = options.model or "builtin:tiny"
        options.steps = min(options.steps, DRY_STEPS)
    options.data = (options.data or options.work / "data").absolute()
    return options


def main() -> None:
    options = arguments()
    begun = time.time()
    ONE_GPU["prepare"](options)
    config = write_config(options)
    results = {
        "dry_run": options.dry_run,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": ONE_GPU["commit"](),
        "config": options.config,
        "gpu": options.gpu,
        "gpus": options.gpus,
        "plan": planned(config),
        "measured": measured(options, config, begun + 60 * options.minutes),
        "seconds": round(time.time() - begun, 1),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2) + "\n"
    (options.out / "node.json").write_text(text, encoding="utf-8")
    (options.out / "NODE.md").write_text(page(results), encoding="utf-8")
    sys.stdout.write(page(results))


if __name__ == "__main__":
    main()
