"""The prompt of a group read once against once per response: processor time of a policy update.

    OMP_NUM_THREADS=1 python benchmarks/share_prefix.py [--pairs 10]

Loss and gradient of one batch of groups through the local engine, plain and with
`train.share_prefix`, in turns on one thread. The bound is what counting tokens promises,
G (P + R) / (P + G R); the output head and what follows it read responses alone either way.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.types import Output, TokenBatch
from oxrl_stats import medians

# Prompts, responses per prompt, tokens of a prompt, tokens of a response; the last two are small
# as a toy task is, one of them as far as sharing can be of no use.
SHAPES = (
    (2, 8, 200, 50),
    (2, 8, 100, 100),
    (2, 16, 400, 100),
    (2, 8, 50, 200),
    (64, 8, 6, 4),
    (64, 8, 1, 8),
)
BUDGET = 8192


def make_model() -> Qwen3ForCausalLM:
    """A Qwen3 of 3.3 million parameters, random."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=448,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).float().eval()


def make_batch(groups: int, count: int, prompt: int, response: int) -> TokenBatch:
    """Groups of rows of one length."""
    draw = torch.Generator().manual_seed(1)
    rows: list[Tensor] = []
    for _ in range(groups):
        shared = torch.randint(2, 448, (prompt,), generator=draw).expand(count, -1)
        own = torch.randint(2, 448, (count, response), generator=draw)
        rows.append(torch.cat([shared, own], 1))
    tokens = torch.cat(rows)
    trained = torch.zeros_like(tokens, dtype=torch.bool)
    trained[:, prompt:] = True
    real = torch.ones_like(trained)
    return TokenBatch(tokens=tokens, attention_mask=real, response_mask=trained)


def loss(output: Output, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A sum over tokens, each with a weight of its own."""
    weights = (batch.tokens % 7 - 3) * batch.response_mask
    assert output.logprobs is not None
    return (output.logprobs * weights).sum(), {}


def seconds(trainer: LocalTrainer, batch: TokenBatch) -> tuple[float, Tensor]:
    """Processor seconds of loss and gradient, and the gradient."""
    began = time.process_time()
    trainer.forward_backward(batch, loss, frozenset({"logprobs", "entropy"}))
    took = time.process_time() - began
    gradient = torch.cat([tensor.flatten().clone() for _, tensor in trainer.gradients()])
    trainer.skip_step()
    return took, gradient


def measure(shape: tuple[int, int, int, int], pairs: int) -> dict[str, object]:
    """Both ways in turns, after one of each to warm up."""
    groups, count, prompt, response = shape
    batch = make_batch(*shape)
    model = make_model()
    plain = LocalTrainer(model, TrainerOptions(lr=0.0, micro_batch_tokens=BUDGET))
    shared = LocalTrainer(
        model, TrainerOptions(lr=0.0, micro_batch_tokens=BUDGET, share_prefix=True)
    )
    _, expected = seconds(plain, batch)
    _, found = seconds(shared, batch)
    difference = float((found - expected).abs().max() / expected.abs().max())
    times: list[tuple[float, float]] = []
    for _ in range(pairs):
        times.append((seconds(plain, batch)[0], seconds(shared, batch)[0]))
    ratios = [one / other for one, other in times]
    bound = count * (prompt + response) / (prompt + count * response)
    found: dict[str, object] = {"case": f"{groups} x {count}, {prompt} + {response}"}
    found["bound"] = round(bound, 4)
    found["ratio"] = medians.median(ratios)
    found["of_bound"] = medians.median([one / bound for one in ratios])
    found["gradient_difference"] = float(f"{difference:.1e}")
    found["processor_seconds"] = [[round(taken, 4) for taken in pair] for pair in times]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for shape in SHAPES:
        print(json.dumps(measure(shape, given.pairs)), flush=True)


if __name__ == "__main__":
    main()
