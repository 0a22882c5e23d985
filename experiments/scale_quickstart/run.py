"""The quickstart's RL on three sets of engines: do they learn the same?

    python experiments/scale_quickstart/run.py [--seeds 3] [--engines local zero3_vllm two_vllm]
    [--steps 30]
    python experiments/scale_quickstart/run.py --engines bf16_vllm bf16_permuted --steps 50 \
        --warm-steps 1000 --out runs/bf16
        the same in bfloat16, with vLLM; and the control, whose scores go to the wrong responses
    python experiments/scale_quickstart/run.py --engines lora_local lora_zero3_vllm --steps 50 \
        --warm-steps 1000 --out runs/lora
        adapters, in one process and on two ranks with vLLM (control: lora_permuted)

One configuration, ../quickstart/rl.yaml, and the engine lines below; 30 steps from the quickstart's
warm start. Prints the mean reward of the last ten steps per seed, the share of held-out sums that
the greedy answer gets right before and after, the largest difference to the local engine, seconds
per step by phase, and the worst mismatch between sampler and trainer. Needs the environment of
`make env-scale`. `results.jsonl` in the output folder gets a line per run; what is in it is not run
again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.checkpoint.model_files import save_model
from oxrl.commands.evaluate import run_eval
from oxrl.commands.train import run
from oxrl.config import dump_config, load_config
from oxrl.config.load_evaluation import load_evaluation_config
from oxrl.modelfiles.builtin import BUILTIN_DIMS, builtin_tokenizer
from oxrl_datasets.prepare import PREPARERS

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart"
TASK = {
    "low": 10,
    "high": 99,
    "slips": 0.5,
    "sft_rows": 40_000,
    "rl_rows": 8_000,
    "eval_rows": 1_000,
}
LAST = 10
ENGINES = {
    "local": [],
    "zero3_vllm": [
        "train.backend=deepspeed",
        "run.training_gpus=2",
        "deepspeed.zero_stage=3",
        "inference_engine.name=vllm",
        "inference_engine.actors=1",
    ],
    "two_vllm": ["inference_engine.name=vllm", "inference_engine.actors=2"],
    "bf16_vllm": [
        "model.dtype=bfloat16",
        "inference_engine.name=vllm",
        "inference_engine.actors=1",
    ],
}
# The control: rewards are exchanged over the batch.
PERMUTED = "train.features={permuted-rewards: {}}"
ENGINES["bf16_permuted"] = [
    *ENGINES["bf16_vllm"],
    PERMUTED,
]
# Adapters at ten times the rate of full tuning, local and as most machines train: several ranks.
ADAPTER = ["lora.rank=16", "lora.alpha=32", "train.lr=3e-3"]
ENGINES["lora_local"] = [*ENGINES["local"], *ADAPTER]
ENGINES["qlora_local"] = [*ENGINES["lora_local"], "model.load_in_4bit=true"]
ENGINES["qlora_permuted"] = [
    *ENGINES["qlora_local"],
    PERMUTED,
]
ENGINES["lora_zero3_vllm"] = [*ENGINES["zero3_vllm"], *ADAPTER]
ENGINES["lora_bf16_vllm"] = [*ENGINES["bf16_vllm"], *ADAPTER]
ENGINES["lora_permuted"] = [
    *ENGINES["lora_local"],
    PERMUTED,
]
# Those that have to learn the same, to rounding.
FLOAT32 = ["local", "zero3_vllm", "two_vllm"]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_model(folder: Path, seed: int) -> None:
    """The quickstart's model with heads of 32 instead of 16, which vLLM's CPU attention does not
    have.
    """
    dims = dict(BUILTIN_DIMS["builtin:tiny"]) | {"head_dim": 32}
    torch.manual_seed(seed)
    config = Qwen3Config(
        **dims, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None
    )
    save_model(Qwen3ForCausalLM(config), folder)
    builtin_tokenizer().save_pretrained(folder)


def warm_start(folder: Path, seed: int, steps: int) -> Path:
    """The quickstart's data and supervised warm start; made once per seed."""
    if not (folder / "warm.done").exists():
        shutil.rmtree(folder / "warm", ignore_errors=True)
        PREPARERS["arithmetic"](None, folder / "data", seed=seed, **TASK)
        write_model(folder / "model", seed)
        given = [
            f"run.seed={seed}",
            f"run.steps={steps}",
            f"run.dir={folder / 'warm'}",
            f"data.train={folder / 'data/sft.jsonl'}",
        ]
        given.append(f"model.name={folder / 'model'}")
        run(load_config(QUICKSTART / "sft.yaml", given))
        (folder / "warm.done").touch()
    return max((folder / "warm/checkpoints").glob("step_*"))


def learn(engine: str, seed: int, out: Path, *, steps: int, warm_steps: int) -> dict[str, Any]:
    """One run in a process of its own, as `oxrl train` would start it; the means of its metrics."""
    folder = out / f"seed_{seed}"
    target = folder / engine
    start = warm_start(folder, seed, warm_steps)
    shared = [
        f"model.name={start}",
        f"data.train={folder / 'data/rl.jsonl'}",
        f"run.seed={seed}",
    ]
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "oxrl", "train", str(QUICKSTART / "rl.yaml"), *shared]
    command += [
        f"run.dir={target}",
        f"run.steps={steps}",
        "run.checkpoint_every=0",
        "run.mlflow=false",
    ]
    subprocess.run(
        [*command, *ENGINES[engine]], check=True, stdout=(out / f"{engine}_{seed}.log").open("w")
    )
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    means = {
        key: statistics.mean(line[key] for line in lines)
        for key in lines[-1]
        if key.startswith("time/")
    }
    worst = {
        key: max(line[key] for line in lines) for key in lines[-1] if key.startswith("mismatch/")
    }
    last = statistics.mean(line["reward/mean"] for line in lines[-LAST:])
    if not (folder / "floor.json").exists():
        found = held_out(folder, start)
        (folder / "floor.json").write_text(json.dumps(found))
    newest = max((target / "checkpoints").glob("step_*"))
    return {
        "engine": engine,
        "seed": seed,
        "steps": steps,
        "first_reward": lines[0]["reward/mean"],
        "last_reward": last,
        "held_out": [json.loads((folder / "floor.json").read_text()), held_out(folder, newest)],
        "worst_probe": max(line.get("sync/probe_limit_share", 0.0) for line in lines),
        "retries": sum(line.get("sync/retries", 0.0) for line in lines),
        "time": means,
        "mismatch": worst,
    }


def held_out(folder: Path, model: Path) -> float:
    """Share of the held-out sums that a model answers right, greedily."""
    config = load_evaluation_config(
        QUICKSTART / "rl.yaml",
        [
            f"model.name={model}",
            f"data.train={folder / 'data/rl.jsonl'}",
            f"data.eval={folder / 'data/eval.jsonl'}",
            "rollout.eval_temperature=0",
        ],
    )
    path = folder / "eval.yaml"
    path.write_text(dump_config(config))
    return run_eval(path)["eval/reward"]


def report(results: list[dict[str, Any]]) -> None:
    rewards: dict[str, dict[int, float]] = defaultdict(dict)
    for line in results:
        rewards[line["engine"]][line["seed"]] = line["last_reward"]
    say(f"\nmean reward of the last {LAST} steps, per seed")
    local = rewards.get("local", {})
    for engine, found in rewards.items():
        off = [abs(value - local[seed]) for seed, value in found.items() if seed in local]
        values = "  ".join(f"{seed}: {value:.4f}" for seed, value in sorted(found.items()))
        mean = statistics.mean(found.values())
        largest = f"   largest difference {max(off):.4f}" if off else ""
        say(f"  {engine:<12}{values}   mean {mean:.4f}{largest}")
    for line in results:
        phases = ", ".join(
            f"{key.removeprefix('time/')} {value:.2f}" for key, value in line["time"].items()
        )
        worst = ", ".join(
            f"{key.removeprefix('mismatch/')} {value:.2e}"
            for key, value in line["mismatch"].items()
        )
        say(f"  {line['engine']} seed {line['seed']}: {phases}; worst mismatch {worst}")
        rewards = f"{line['first_reward']:.4f} -> {line['last_reward']:.4f}"
        proofs = f"{line['worst_probe']:.2f} of what is allowed, {line['retries']:.0f} retries"
        say(f"      mean reward of step 1 -> last {LAST}: {rewards}; probe at worst {proofs}")
        before, after = line["held_out"]
        say(f"      held out, greedy: {before:.3f} -> {after:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The quickstart's RL on three sets of engines.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-steps", type=int, default=550, help="of the supervised warm start")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=FLOAT32)
    parser.add_argument("--out", type=Path, default=Path("runs/scale_quickstart"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = arguments.out / "results.jsonl"
    results = (
        [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    )
    for seed in range(arguments.seeds):
        for engine in arguments.engines:
            if any((line["engine"], line["seed"]) == (engine, seed) for line in results):
                continue
            found = learn(
                engine,
                seed,
                arguments.out,
                steps=arguments.steps,
                warm_steps=arguments.warm_steps,
            )
            results.append(found)
            with record.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(results[-1]) + "\n")
    report(results)


if __name__ == "__main__":
    main()
