"""Twenty minutes on one large GPU: does it learn GSM8K, how fast, is a resumed run the same?

    pip install datasets                               # only to fetch GSM8K by name
    python experiments/gpu/run.py                      # writes README.md beside this file
    python experiments/gpu/run.py --model PATH --data FOLDER     # without a network
    python experiments/gpu/run.py --dry-run --out FOLDER         # on a CPU, tiny and random

FOLDER holds train.jsonl and test.jsonl as `oxrl prepare gsm8k` writes them. Everything is below
--work; each stage is a process of its own:

1. identity: a run of some steps; the same one killed half-way and resumed. One after the other must
   leave the same bytes: weights, optimizer, samples, metrics but for times. Where they do not, the
   first is done once more: two whole runs that differ say that it is not the resume.
2. learning: held-out accuracy, SGRPO for what is left of --minutes, accuracy again; tokens per
   second, the share of the GPU's arithmetic that is used (MFU), most memory.
3. the page: results.json and README.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
# Dense bfloat16 operations per second by data sheet, by what the GPU's name contains; first match.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}
# What two identical runs differ in; docs/metrics.md.
TIMES = ("time/", "throughput/", "system/")
PHASES = ("rollout", "reward", "logprobs", "update")
STAGE_DEADLINE_S = 3600


@dataclass(frozen=True)
class Size:
    """How much is done.

    prompts, samples, tokens: of a step of the learning run; the longest response. identity_steps,
    identity_tokens: of the runs that are compared. eval_rows, eval_samples: held-out questions and
    answers to each. longest: prompt in tokens.
    """

    prompts: int
    samples: int
    tokens: int
    identity_steps: int
    identity_tokens: int
    eval_rows: int
    eval_samples: int
    dtype: str
    longest: int | None


GPU = Size(32, 8, 512, 6, 128, 128, 2, "bfloat16", 512)
DRY = Size(2, 2, 6, 4, 6, 4, 2, "float32", None)


def write_config(options: argparse.Namespace, name: str, steps: int, **run: Any) -> Path:
    """The settings of experiments/gsm8k_qwen2.5_0.5b, or the smallest ones. JSON is YAML, too."""
    size = DRY if options.dry_run else GPU
    settings = {
        "run": {
            "name": name,
            "dir": str(options.work / name),
            "steps": steps,
            "mlflow": False,
            "console": "plain",
            **run,
        },
        "model": {
            "name": options.model,
            "dtype": size.dtype,
            "gradient_checkpointing": not options.dry_run,
        },
        "data": {
            "train": str(options.data / "train.jsonl"),
            "eval": str(options.data / "test.jsonl"),
            "eval_rows": size.eval_rows,
            "prompts_per_step": size.prompts,
            "max_prompt_tokens": size.longest,
        },
        "reward": {"name": "math", "workers": 1 if options.dry_run else 4},
        "rollout": {
            "n_samples": size.samples,
            "max_tokens": size.identity_tokens if "checkpoint_every" in run else size.tokens,
            "eval_samples": size.eval_samples,
        },
        "train": {
            "alg_name": "sgrpo",
            "lr": 1e-6,
            "warmup_steps": min(10, steps - 1),
            "micro_batch_tokens": 16384,
        },
        "inference_engine": {"max_rows": 256},
    }
    path = options.work / f"{name}.yaml"
    path.write_text(json.dumps(settings, indent=1))
    return path


def started(options: argparse.Namespace, stage: str, config: Path, *words: str) -> Any:
    """A process of this script that does one stage; its words go to a log beside the config."""
    command = [sys.executable, str(Path(__file__).resolve()), "--stage", stage, str(config), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    with config.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def finished(options: argparse.Namespace, stage: str, config: Path, *words: str) -> None:
    """Do a stage to its end.

    Raises:
        SystemExit: it failed; names its log.
    """
    with started(options, stage, config, *words) as process:
        code = process.wait(STAGE_DEADLINE_S)
    if code:
        raise SystemExit(f"{stage} ended with {code}: see {config.with_suffix('.log')}")


def killed(options: argparse.Namespace, config: Path, after: int) -> None:
    """Train, and kill the process when the line of step `after` is written.

    Raises:
        SystemExit: it ended by itself before that; names its log.
    """
    metrics = options.work / config.stem / "metrics.jsonl"
    deadline = time.monotonic() + STAGE_DEADLINE_S
    with started(options, "train", config) as process:
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= after):
            if process.poll() is not None or time.monotonic() > deadline:
                log = config.with_suffix(".log")
                raise SystemExit(f"{config.stem} ended before step {after}: see {log}")
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)


def content(run: Path) -> dict[str, str]:
    """Hash of everything that two runs of one configuration must share, by file."""
    newest = max((run / "checkpoints").glob("step_*"))
    found: dict[str, str] = {}
    for path in sorted(newest.rglob("*")):
        if path.is_file() and path.name != "manifest.json":  # it has the hashes of the others
            found[str(path.relative_to(newest))] = hashlib.sha256(path.read_bytes()).hexdigest()
    found["samples.jsonl"] = hashlib.sha256((run / "samples.jsonl").read_bytes()).hexdigest()
    kept: list[dict[str, Any]] = []
    for line in metrics_of(run):
        kept.append({key: value for key, value in line.items() if not key.startswith(TIMES)})
    found["metrics.jsonl"] = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
    return found


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    return sorted(name for name in one | other if one.get(name) != other.get(name))


def identity(options: argparse.Namespace) -> dict[str, Any]:
    """One run, and the same one killed and resumed."""
    steps = DRY.identity_steps if options.dry_run else GPU.identity_steps
    every = {"checkpoint_every": 1, "keep_checkpoints": 2}
    whole = write_config(options, "whole", steps, **every)
    resumed = write_config(options, "resumed", steps, **every)
    finished(options, "train", whole)
    killed(options, resumed, steps // 2)
    finished(options, "train", resumed, "--resume")
    first = content(options.work / "whole")
    found: dict[str, Any] = {
        "steps": steps,
        "files": len(first),
        "different": differences(first, content(options.work / "resumed")),
    }
    if found["different"]:
        again = write_config(options, "again", steps, **every)
        finished(options, "train", again)
        found["whole_runs_differ_in"] = differences(first, content(options.work / "again"))
    return found


def train_once(config: Path, resume: bool) -> None:
    """A stage: train, with kernels that add in a fixed order where PyTorch has them.

    `run.deterministic` would end the run at the first operation that has none.
    """
    import torch

    import oxrl

    torch.use_deterministic_algorithms(True, warn_only=True)
    oxrl.train(config, resume=resume)


def learn(config: Path, until: float) -> None:
    """A stage: accuracy, training, accuracy; learned.json beside the config has what was seen.

    Args:
        until: seconds since the epoch at which everything should be over.
    """
    import torch

    import oxrl
    from oxrl.commands.evaluate import run_eval
    from oxrl.errors import Interrupted

    begun = time.time()
    before = run_eval(config)
    evaluation_s = time.time() - begun
    # The last step and the checkpoint take longer than nothing.
    left = until - time.time() - 1.5 * evaluation_s
    timer = threading.Timer(max(left, 1.0), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    begun = time.time()
    try:
        oxrl.train(config)
    except Interrupted:
        sys.stderr.write("the time is over; what was saved is evaluated\n")
    timer.cancel()
    training_s = time.time() - begun
    on_gpu = torch.cuda.is_available()
    most = torch.cuda.max_memory_allocated() if on_gpu else 0
    after = run_eval(config.with_suffix(""))
    found = {
        "accuracy_before": before["eval/reward"],
        "accuracy_after": after["eval/reward"],
        "answers": before["eval/responses"],
        "training_s": round(training_s, 1),
        "evaluation_s": round(evaluation_s, 1),
        "gpu": torch.cuda.get_device_name() if on_gpu else "",
        "gpu_memory_mb": round(most / 1e6),
        "torch": torch.__version__,
    }
    config.with_suffix(".learned.json").write_text(json.dumps(found))


def learning(options: argparse.Namespace, until: float) -> dict[str, Any]:
    """Accuracy before and after, and what it cost."""
    steps = DRY.identity_steps if options.dry_run else options.steps
    config = write_config(options, "learn", steps)
    finished(options, "learn", config, str(until))
    found = json.loads(config.with_suffix(".learned.json").read_text())
    run = options.work / "learn"
    lines = metrics_of(run)
    newest = max((run / "checkpoints").glob("step_*"))
    peak = options.peak or peak_of(found["gpu"])
    return {
        **found,
        "steps": len(lines),
        "reward_by_step": [round(line["reward/mean"], 4) for line in lines],
        "process_memory_mb": round(max(line["system/rss_mb"] for line in lines)),
        **speed(lines, parameters_of(newest), peak),
    }


def peak_of(gpu: str) -> float:
    """Operations per second of a GPU that is known; 0 of another."""
    for word, peak in PEAKS.items():
        if word in gpu:
            return peak
    return 0.0


def parameters_of(model: Path) -> int:
    """Numbers in the weight files of a checkpoint, from their headers."""
    count = 0
    for path in model.glob("model*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        count += sum(math.prod(tensor["shape"]) for tensor in header.values())
    return count


def speed(lines: list[dict[str, Any]], count: int, peak: float) -> dict[str, Any]:
    """Tokens per second and MFU, of the median step after the first two.

    `mfu_recorded` is the run's own `throughput/mfu`: against what the machine did at best when the
    run began. `mfu` is against the data sheet:
    A sampled token costs 2 N operations to sample and 6 N in the update. What gradient
    checkpointing computes again, prompts, attention and the head's share beyond its weights are
    left out, so the share is a lower bound.
    """
    steady = lines[2:] or lines
    step_s = statistics.median(line["time/step_s"] for line in steady)
    sampled = statistics.median(line["rollout/tokens"] for line in steady)
    rate = statistics.median(line["throughput/tokens_per_s"] for line in steady)
    found: dict[str, Any] = {
        "parameters": count,
        "step_s": round(step_s, 3),
        "tokens_per_s": round(rate),
        "sampled_tokens_per_s": round(sampled / step_s),
    }
    for phase in PHASES:
        values = [line.get(f"time/{phase}_s", 0.0) for line in steady]
        found[f"{phase}_s"] = round(statistics.median(values), 3)
    shares = [line["throughput/mfu"] for line in steady if "throughput/mfu" in line]
    if shares:
        found["mfu_recorded"] = round(statistics.median(shares), 4)
    if peak:
        update_s = found["update_s"]
        found["mfu"] = round(8 * count * sampled / step_s / peak, 4)
        found["mfu_of_update"] = round(6 * count * sampled / update_s / peak, 4)
    return found


def prepare(options: argparse.Namespace) -> None:
    """GSM8K, or a few sums for a dry run."""
    if (options.data / "train.jsonl").is_file():
        return
    if not options.dry_run:
        command = [sys.executable, "-m", "oxrl", "prepare", "gsm8k", "--out", str(options.data)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, check=True)
        return
    options.data.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", 32), ("test", 8)):
        rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(count)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (options.data / f"{name}.jsonl").write_text(text)


def told_of_identity(same: dict[str, Any]) -> str:
    if not same["different"]:
        return f"every byte equal ({same['files']} files)"
    told = f"different: {', '.join(same['different'])}"
    control = same["whole_runs_differ_in"]
    if control:
        return f"{told}; but so are two runs that nobody killed: {', '.join(control)}"
    return f"{told}; two runs that nobody killed are equal"


def page(results: dict[str, Any]) -> str:
    """README.md from results.json."""
    found = results["learning"]
    same = results["identity"]
    status = "**A dry run**: every stage, on a tiny random model; no figure means anything."
    if not results["dry_run"]:
        status = (
            f"Run on {results['date']} on one {found['gpu']}, commit `{results['commit'][:12]}`, "
            f"PyTorch {found['torch']}, {results['seconds'] / 60:.0f} minutes in all."
        )
    mfu = "not known: --peak"
    if "mfu" in found:
        mfu = f"{found['mfu']:.1%} of the step, {found['mfu_of_update']:.1%} of the update"
    recorded = "not recorded"
    if "mfu_recorded" in found:
        recorded = f"{found['mfu_recorded']:.1%} of the step"
    before, after = found["accuracy_before"], found["accuracy_after"]
    learned = f"{before:.3f}, {after:.3f}, each of {found['answers']:.0f} answers"
    trained = f"{found['steps']} steps, {found['training_s']:.0f} s"
    rates = f"{found['tokens_per_s']:,}, {found['sampled_tokens_per_s']:,}"
    phases = ", ".join(str(found[f"{phase}_s"]) for phase in PHASES)
    memory = f"{found['gpu_memory_mb']:,} MB, {found['process_memory_mb']:,} MB"
    rows = {
        "model": f"{results['model']}, {found['parameters']:,} parameters",
        "held-out accuracy before, after": learned,
        "training": trained,
        "tokens per second: read in the update, sampled": rates,
        "median step": f"{found['step_s']} s",
        f"of it {', '.join(PHASES)}": f"{phases} s",
        "MFU by the data sheet, a lower bound": mfu,
        "MFU by what the machine does at best": recorded,
        "most memory: GPU, process": memory,
        f"killed after half of {same['steps']} steps and resumed": told_of_identity(same),
    }
    cells = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    rewards = " ".join(f"{value:.3f}" for value in found["reward_by_step"])
    return f"""# Twenty minutes on one GPU

{status} `experiments/gpu/run.py` writes this page.

| | |
|---|---|
{cells}

Mean reward of each step: {rewards}
"""


def commit() -> str:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def has_gpu() -> bool:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--model", help=f"default: {MODEL}")
    parser.add_argument("--data", type=Path, help="default: made below --work")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--out", type=Path, default=HERE, help="where results and page go")
    parser.add_argument("--minutes", type=float, default=20.0, help="of everything")
    parser.add_argument("--steps", type=int, default=300, help="of learning, at most")
    parser.add_argument("--peak", type=float, help="bfloat16 operations per second of the GPU")
    options = parser.parse_args()
    if options.dry_run and options.out == HERE:
        parser.error("--dry-run needs --out: its figures are not to stand in the repository")
    if not options.dry_run and not has_gpu():
        parser.error("no GPU here; --dry-run goes through every stage on a CPU")
    options.work = options.work.absolute()
    if options.work.exists() and any(options.work.iterdir()):
        parser.error(f"{options.work} is not empty: choose another --work")
    options.work.mkdir(parents=True, exist_ok=True)
    options.model = options.model or ("builtin:tiny" if options.dry_run else MODEL)
    options.data = (options.data or options.work / "data").absolute()
    return options


def main() -> None:
    if sys.argv[1:3] == ["--stage", "train"]:
        train_once(Path(sys.argv[3]), resume="--resume" in sys.argv)
        return
    if sys.argv[1:3] == ["--stage", "learn"]:
        learn(Path(sys.argv[3]), float(sys.argv[4]))
        return
    options = arguments()
    begun = time.time()
    prepare(options)
    same = identity(options)
    found = learning(options, begun + 60 * options.minutes)
    results = {
        "dry_run": options.dry_run,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "python": platform.python_version(),
        "seconds": round(time.time() - begun, 1),
        "model": options.model,
        "identity": same,
        "learning": found,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2) + "\n"
    (options.out / "results.json").write_text(text, encoding="utf-8")
    (options.out / "README.md").write_text(page(results), encoding="utf-8")
    sys.stdout.write(page(results))


if __name__ == "__main__":
    main()
