"""The calculator's reinforcement on vLLM in Ray actors: the rewards of the local sampler?

    python experiments/calculator/engines.py [--steps 10] [--prompts 8] [--out runs/engines]

One warm start, then the same steps with either sampler: what each sampled episode is worth, greedy
answers to held-out products with the weights of every fifth step, and seconds per step. The model
is that of run.py with heads of 32 instead of 16, which vLLM's attention on a CPU does not have.
Needs the environment of `make env-scale`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from run import HERE, TURNS, say, warm_start, write_data
from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.checkpoint.model_files import save_model
from oxrl.commands.train import run
from oxrl.config import load_config
from oxrl.modelfiles.builtin import BUILTIN_DIMS, builtin_tokenizer

ENGINES = {
    "local": [],
    "vllm": ["inference_engine.name=vllm", "inference_engine.actors=1"],
}
EVALUATED_EVERY = 5


def write_model(folder: Path, seed: int) -> str:
    """The tiny model with wider heads."""
    dims = dict(BUILTIN_DIMS["builtin:tiny"]) | {"head_dim": 32}
    torch.manual_seed(seed)
    config = Qwen3Config(
        **dims, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None
    )
    save_model(Qwen3ForCausalLM(config), folder)
    builtin_tokenizer().save_pretrained(folder)
    return str(folder)


def learn(folder: Path, engine: str, model: str, arguments: argparse.Namespace) -> Path:
    """The steps of one engine; the folder of its run."""
    target = folder / engine
    given = [
        f"run.seed={arguments.seed}",
        f"run.dir={target}",
        f"run.steps={arguments.steps}",
        f"run.eval_every={EVALUATED_EVERY}",
        f"data.train={folder / 'rl.jsonl'}",
        f"data.prompts_per_step={arguments.prompts}",
        f"data.eval={folder / 'eval.jsonl'}",
        "rollout.eval_temperature=0",
        f"model.name={model}",
        f"environment.name={TURNS}:Calculator",
        *ENGINES[engine],
    ]
    run(load_config(HERE / "rl.yaml", given))
    return target


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def compare(local: Path, other: Path) -> None:
    """Episode by episode, step by step."""
    ours, theirs = (lines_of(folder / "samples.jsonl") for folder in (local, other))
    pairs = list(zip(ours, theirs, strict=True))
    equal = sum(one["reward"] == two["reward"] for one, two in pairs)
    texts = sum(one["turns"] == two["turns"] for one, two in pairs)
    say(f"episodes: {len(pairs)}, of equal reward {equal}, of equal turns {texts}")
    for folder in (local, other):
        lines = lines_of(folder / "metrics.jsonl")
        greedy = [line["eval/reward"] for line in lines if "eval/reward" in line]
        sampled = [line["reward/mean"] for line in lines]
        # A rollout batch is worth several steps: only the first of them waited for it.
        waited = [line["time/rollout_s"] for line in lines if "time/rollout_s" in line]
        seconds = statistics.median(waited)
        worst = max(line["mismatch/abs_logdiff_max"] for line in lines)
        found = " ".join(f"{share:.4f}" for share in greedy)
        said = " ".join(f"{share:.3f}" for share in sampled)
        say(f"{folder.name}: held out, greedy {found}")
        say(f"{folder.name}: sampled, by step {said}")
        say(f"{folder.name}: rollout {seconds:.2f} s, largest log-probability off {worst:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The calculator on two engines.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/calculator_engines"))
    arguments = parser.parse_args()
    folder = arguments.out / f"seed_{arguments.seed}"
    write_data(folder, arguments.seed)
    model = warm_start(folder, arguments.seed, write_model(folder / "model", arguments.seed))
    compare(*(learn(folder, engine, model, arguments) for engine in ENGINES))


if __name__ == "__main__":
    main()
