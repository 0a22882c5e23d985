"""Memory that log-probabilities, entropy and their gradient take, against the logits as a whole.

    python benchmarks/head_memory.py [VOCABULARY] [WIDTH]

Peak bytes of tensors that are alive at a time beside the inputs and the gradients that are asked
for, forward and backward, of 1k, 2k, 4k and 8k tokens: `oxrl.functional.logprobs.chunked_head`
against float32 logits [tokens, vocabulary], which a plain loss holds several times.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tensor_bytes import PeakBytes

from oxrl.functional.logprobs import Head, chunked_head

FLOAT32 = 4


def head_peak(tokens: int, vocabulary: int, width: int = 8) -> tuple[int, int]:
    """Peak bytes of `chunked_head`, forward and backward.

    Args:
        tokens: positions that are asked about. vocabulary: of the head. width: of hidden states.

    Returns:
        Everything, and without the gradients of hidden states and of the weight, which any way of
        computing them has to hold.
    """
    noise = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=noise).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=noise).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=noise)
    with PeakBytes() as measured:
        said = chunked_head(hidden, Head(weight, None), targets, entropy=True)
        assert said.entropy is not None
        (said.logprobs.sum() - 0.01 * said.entropy.sum()).backward()
    gradients = FLOAT32 * (hidden.numel() + weight.numel())
    return measured.peak, measured.peak - gradients


def main() -> None:
    """Print a row per number of tokens."""
    vocabulary = int(sys.argv[1]) if len(sys.argv) > 1 else 151_936
    width = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    torch.set_num_threads(1)
    print(f"vocabulary {vocabulary:,}, width {width}")
    smallest = 0
    for tokens in (1024, 2048, 4096, 8192):
        peak, beside = head_peak(tokens, vocabulary, width)
        smallest = smallest or beside
        logits = FLOAT32 * tokens * vocabulary
        figure: dict[str, object] = {"case": f"{tokens} tokens", "logits_mb": _mb(logits)}
        figure |= {"peak_mb": _mb(peak), "beside_mb": _mb(beside)}
        figure["times_less"] = round(logits / beside, 2)
        figure["times_less_with_gradients"] = round(logits / peak, 2)
        figure["of_first_row"] = round(beside / smallest, 3)
        print(json.dumps(figure), flush=True)


def _mb(count: int) -> float:
    return round(count / 1e6, 1)


if __name__ == "__main__":
    main()
