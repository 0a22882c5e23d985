"""What `oxrl plan` predicts of the memory of an update, beside what tensors really take.

    python benchmarks/plan_memory.py [--widths 128 256] [--cases sft muon ...]

Measured: bytes of the weights, and of every tensor that two optimizer steps make and that is alive
at a time, at their peak. Predicted: `memory` of oxrl/config/plan.py, from the configuration and the
model's config.json alone. One process, random models of four layers, two micro-batches of 512
tokens; state is everything but activations: weights, masters, gradients, what the optimizer keeps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
ROWS, LENGTH = 16, 64
CASES: dict[str, list[str]] = {
    "sft": [],
    "sft, checkpointing": ["model.gradient_checkpointing=true"],
    "sft, bfloat16": ["model.dtype=bfloat16"],
    "sft, bfloat16, no masters": ["model.dtype=bfloat16", "train.master_weights=none"],
    "sft, muon": ["train.optimizer=muon"],
    "sft, lora": ["lora.rank=8"],
}


class Found(NamedTuple):
    """Bytes: predicted and measured, of the state alone and of everything at its peak."""

    predicted_state: int
    measured_state: int
    predicted_peak: int
    measured_peak: int


def write_model(folder: Path, width: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from oxrl.models.load import load_tokenizer

    config = Qwen3Config(
        vocab_size=261,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    load_tokenizer("builtin:small").save_pretrained(folder)


def compare(folder: Path, overrides: list[str]) -> Found:
    """Plan an SFT update on the model in `folder`/model, and make it."""
    import torch
    from head_memory import PeakBytes

    from oxrl.config import load_config
    from oxrl.config.dims import model_dims
    from oxrl.config.plan import activation_bytes, memory
    from oxrl.recipes.build import build_trainer, load_policy_to_train
    from oxrl.types import SupervisedBatch, TokenBatch

    (folder / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    sections = {
        "run": {"name": "plan", "steps": 2, "device": "cpu"},
        "model": {"name": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl"), "rows_per_step": ROWS},
        "train": {"alg_name": "sft", "lr": 1e-3, "micro_batch_tokens": ROWS * LENGTH // 2},
    }
    (folder / "plan.yaml").write_text(json.dumps(sections))
    cfg = load_config(folder / "plan.yaml", overrides)
    dims = model_dims(cfg.model.name)
    assert dims is not None
    predicted = memory(cfg, dims).phases["update"]
    activations = activation_bytes(cfg, dims, ROWS * LENGTH // 2).on_device

    def loss_of(output: Any, batch: Any) -> Any:
        return -(output.logprobs * batch.loss_weights).sum(), {}

    model = load_policy_to_train(cfg)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    whole = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    answered = whole.clone()
    answered[:, 0] = False
    inputs = TokenBatch(
        tokens=torch.randint(2, 261, (ROWS, LENGTH)),
        attention_mask=whole,
        response_mask=answered,
    )
    batch = SupervisedBatch(inputs=inputs, loss_weights=answered.float() / answered.sum())
    trainer: Any = build_trainer(cfg, model)
    own = {id(parameter) for parameter in model.parameters()}
    weights += sum(held.nbytes for held in trainer._masters.values() if id(held) not in own)
    with PeakBytes() as bytes_now:
        for _ in range(2):
            trainer.forward_backward(batch, loss_of, frozenset({"logprobs"}))
            held = bytes_now.now
            trainer.optim_step()
    return Found(predicted - activations, weights + held, predicted, weights + bytes_now.peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    options = parser.parse_args()
    for width in options.widths:
        with tempfile.TemporaryDirectory() as name:
            write_model(Path(name) / "model", width)
            for case in options.cases:
                found = compare(Path(name), CASES[case])
                line: dict[str, float | str] = {"case": f"{case}, width {width}"}
                line |= {key: round(value / 1e6, 3) for key, value in found._asdict().items()}
                line["state_off"] = round(found.predicted_state / found.measured_state - 1, 3)
                line["peak_off"] = round(found.predicted_peak / found.measured_peak - 1, 3)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
