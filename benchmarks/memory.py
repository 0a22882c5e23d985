"""Most resident memory of two RL steps, by the size of the model.

    python benchmarks/memory.py [--widths 64 256 512 768 1024]

Every model is random, of the architecture of the built-in ones with another width, in float32, and
is trained in a process of its own: 4 prompts x 4 samples x 32 tokens. `bytes_per_parameter` is
what a process needs above that of the smallest model; weights, gradients and AdamW's two moments
are 16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.models.load import load_tokenizer

CONFIG = """
run: {{name: memory, dir: {folder}/run, steps: 2, mlflow: false, checkpoint_every: 0}}
model: {{name: {folder}/model}}
data: {{train: {folder}/rows.jsonl, prompts_per_step: 4}}
reward: {{name: exact}}
rollout: {{n_samples: 4, max_tokens: 32}}
train: {{alg_name: sgrpo, lr: 1.0e-4}}
"""
CHILD = """
import resource, sys
from oxrl.config import load_config
from oxrl.commands.train import run
run(load_config(sys.argv[1], ["run.console=quiet"]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def write_model(folder: Path, width: int) -> int:
    """A random model of a width; how many parameters it has."""
    config = Qwen3Config(
        vocab_size=261,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=max(16, width // 8),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    load_tokenizer("builtin:small").save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512, 768, 1024])
    options = parser.parse_args()
    first: tuple[int, float] | None = None
    for width in options.widths:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            parameters = write_model(folder / "model", width)
            rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(16)]
            (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
            done = subprocess.run(
                [sys.executable, "-c", CHILD, str(folder / "config.yaml")],
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        peak = int(done.stdout.splitlines()[-1]) * 1024
        first = first or (parameters, peak)
        line: dict[str, float | int | str] = {
            "case": f"width {width}",
            "parameters": parameters,
            "peak_mb": round(peak / 1e6),
        }
        if parameters > first[0]:
            line["bytes_per_parameter"] = round((peak - first[1]) / (parameters - first[0]), 1)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
