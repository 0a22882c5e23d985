"""Tokens of a micro-batch: processor time of one update, by model, lengths and how rows are read.

    OMP_NUM_THREADS=1 python benchmarks/micro_batches.py [--models small] [--rounds 3]

Loss and gradient of one batch through the local engine, on one thread, every size of micro-batch in
turns. Rows are read sorted by length in micro-batches that are filled, or cut where that saves more
padding than it costs (what the engine does), several packed into one (`data.pack_tokens`), or with
the prompt of a group once (`train.share_prefix`). Tokens are those of the rows, so that padding
makes a way slower. A line per model, lengths and way is JSON: tokens per second by size, medians,
and how much faster than 16,384 filled, in the same turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from oxrl.data.batching import pad_rows, to_token_batch
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.micro_batches import PRICES
from oxrl.engines.train.options import TrainerOptions
from oxrl.modelfiles.builtin import BUILTIN_DIMS
from oxrl.types import Output, TokenBatch

# Prompts of 8 responses, and the sizes of micro-batches.
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
DEFAULT = 16384
SAMPLES = 8
PROMPT = 16
LONGEST = 256
MODELS: dict[str, dict[str, Any]] = {
    "tiny": dict(BUILTIN_DIMS["builtin:tiny"]),
    "small": dict(BUILTIN_DIMS["builtin:small"]),
    "25M": {
        "vocab_size": 8192,
        "max_position_embeddings": 2048,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
PROMPTS = {"tiny": 64, "small": 16, "25M": 4}
WAYS = ("filled", "cut", "packed", "shared")


def make_model(name: str) -> Qwen3ForCausalLM:
    """Random weights, float32."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**MODELS[name], tie_word_embeddings=True)).eval()


def make_rows(prompts: int, kind: str) -> tuple[list[list[int]], list[int]]:
    """Rows of groups, and how many tokens their responses have.

    Args:
        kind: "equal" lengths, 64, or "heavy": lognormal, median 32, at most LONGEST - PROMPT.
    """
    draw = torch.Generator().manual_seed(1)
    count = prompts * SAMPLES
    lengths = [64] * count
    if kind == "heavy":
        drawn = (torch.randn(count, generator=draw) + torch.tensor(32.0).log()).exp()
        lengths = drawn.round().clamp(1, LONGEST - PROMPT).int().tolist()
    rows: list[list[int]] = []
    for at, length in enumerate(lengths):
        begin = torch.Generator().manual_seed(at // SAMPLES)
        prompt = torch.randint(5, 260, (PROMPT,), generator=begin).tolist()
        rows.append(prompt + torch.randint(5, 260, (length,), generator=draw).tolist())
    return rows, lengths


def batch_of(rows: Sequence[list[int]], lengths: Sequence[int], way: str) -> TokenBatch:
    """Rows as one way reads them."""
    trained = [[False] * (len(row) - n) + [True] * n for row, n in zip(rows, lengths, strict=True)]
    if way != "packed":
        return to_token_batch(list(rows), trained, 0)
    packs: list[list[int]] = []
    for at in sorted(range(len(rows)), key=lambda at: -len(rows[at])):
        fits = [pack for pack in packs if sum(len(rows[i]) for i in pack) + len(rows[at]) <= 512]
        if fits:
            fits[0].append(at)
        else:
            packs.append([at])
    tokens = [[token for at in pack for token in rows[at]] for pack in packs]
    targets = [[on for at in pack for on in trained[at]] for pack in packs]
    positions = [[place for at in pack for place in range(len(rows[at]))] for pack in packs]
    inputs = to_token_batch(tokens, targets, 0)
    return dataclasses.replace(inputs, position_ids=pad_rows(positions, 0, torch.int64))


def loss(output: Output, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A sum over tokens, each with a weight of its own."""
    weights = (batch.tokens % 7 - 3) * batch.response_mask
    assert output.logprobs is not None
    return (output.logprobs * weights).sum(), {}


def seconds(trainer: LocalTrainer, batch: TokenBatch) -> float:
    """Processor seconds of loss and gradient."""
    began = time.process_time()
    trainer.forward_backward(batch, loss, frozenset({"logprobs", "entropy"}))
    took = time.process_time() - began
    trainer.skip_step()
    return took


def measure(name: str, kind: str, rounds: int, ways: Sequence[str], sizes: Sequence[int]) -> None:
    """All sizes and ways of one model in turns; a line of JSON per way."""
    rows, lengths = make_rows(PROMPTS[name], kind)
    tokens = sum(map(len, rows))
    model = make_model(name)
    cells: dict[tuple[str, int], tuple[LocalTrainer, TokenBatch]] = {}
    for way in ways:
        batch = batch_of(rows, lengths, way)
        for size in sizes:
            options = TrainerOptions(
                lr=0.0,
                micro_batch_tokens=size,
                price=None if way == "filled" else PRICES["cpu"],
                share_prefix=way == "shared",
                trained=False,
            )
            cells[way, size] = (LocalTrainer(model, options), batch)
    took: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    for turn in range(rounds + 1):
        for cell, (trainer, batch) in cells.items():
            spent = seconds(trainer, batch)
            print(name, kind, *cell, f"{tokens / spent:.0f} tokens/s", file=sys.stderr, flush=True)
            if turn:
                took[cell].append(spent)
    for way in ways:
        found: dict[str, object] = {"case": f"{name} {kind} {way}", "tokens": tokens}
        for size in sizes:
            found[f"rate_{size}"] = round(tokens / statistics.median(took[way, size]), 1)
            pairs = zip(took["filled", DEFAULT], took[way, size], strict=True)
            found[f"over_{size}"] = round(statistics.median(a / b for a, b in pairs), 3)
        print(json.dumps(found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--lengths", nargs="+", default=["equal", "heavy"])
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=WAYS)
    parser.add_argument("--sizes", type=int, nargs="+", default=[*SIZES])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.models:
        for kind in given.lengths:
            measure(name, kind, given.rounds, given.ways, given.sizes)


if __name__ == "__main__":
    main()
