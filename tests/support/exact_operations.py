"""Operations of a decoder in exact mode, each on rows alone, in blocks and within many: how many of
the results differ in any bit. `python -m support.exact_operations KIND THREADS ...` prints them as
JSON; KIND is one of KINDS, or all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from oxrl.engines.sample.gumbel import sample_tokens
from oxrl.engines.sample.likeliest import likeliest
from oxrl.errors import required
from oxrl.functional.logprobs import (
    Head,
    chunked_head,
    head_logits,
    logprobs_from_logits,
    logsumexp_of_rows,
)
from oxrl.models.exact import (
    ExactSilu,
    ExactTanhGelu,
    attend_exactly,
    exact_attention,
    exact_linear,
)

# Numbers of rows, and how many there are in all.
ROWS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 20, 31, 32, 33, 48, 64, 65, 100, 127, 128, 200, 333)
ROWS = (*ROWS, 512, 1000, 2048)
ALL = 2304
# Of attention: the first query, and the number of queries from there on.
QUERIES = [(0, 1), (0, 2), (0, 5), (0, 13), (0, 17), (0, 31), (0, 32), (0, 48), (0, 50), (0, 64)]
QUERIES += [(0, 100), (0, 513), (40, 1), (40, 7), (40, 16), (99, 60), (127, 1), (128, 1), (255, 3)]
QUERIES += [(256, 1), (300, 1), (300, 9), (300, 200), (600, 1), (600, 40), (639, 1)]
TOKENS = 640
# Columns and rows of a weight.
SHAPES = ((64, 64), (64, 256), (64, 95), (16, 64), (64, 16), (576, 192), (576, 1536), (1536, 576))
WIDTHS = (256, 95, 1000)
# A vocabulary whose sum PyTorch cuts among threads where it is of one row alone, and rows of it.
WIDE = 49_157
LONE = 120

RowWise = Callable[[Tensor], Tensor]


def differ(found: Tensor, wanted: Tensor) -> bool:
    """True if any bit does."""
    bits = found.contiguous().view(torch.int32)
    return not torch.equal(bits, wanted.contiguous().view(torch.int32))


def row_wise(operation: RowWise, width: int) -> int:
    """Of an operation on rows [M, width]: in how many trials rows differ from the same within many,
    at three places.
    """
    x = torch.randn(ALL, width)
    whole = operation(x)
    wrong = 0
    for count in ROWS:
        for start in (0, 5, ALL - count):
            rows = slice(start, start + count)
            wrong += differ(operation(x[rows].clone()), whole[rows])
    return wrong


def linears() -> Iterator[tuple[str, int]]:
    for inputs, outputs in SHAPES:
        weight = torch.randn(outputs, inputs) / inputs**0.5
        bias = torch.randn(outputs) if outputs in (95, 192) else None

        def product(x: Tensor, weight: Tensor = weight, bias: Tensor | None = bias) -> Tensor:
            return exact_linear(x, weight, bias)

        yield f"linear {inputs} to {outputs}", row_wise(product, inputs)


def usual() -> Iterator[tuple[str, int]]:
    """What exact mode leaves to PyTorch and transformers, and its activations."""
    kinds: dict[str, RowWise] = {
        "silu": ExactSilu(),
        "tanh gelu": ExactTanhGelu(),
        "gelu": nn.functional.gelu,
        "relu": nn.functional.relu,
        "exp": torch.exp,
        "logsumexp": logsumexp_of_rows,
        "log softmax": lambda x: (3 * x).log_softmax(-1),
        "sum of p z": lambda x: torch.linalg.vecdot(x.softmax(-1), x),
    }
    for width in WIDTHS:
        for name, operation in kinds.items():
            yield f"{name} {width}", row_wise(operation, width)
        yield f"rms norm {width}", row_wise(Qwen3RMSNorm(width), width)
        yield f"layer norm {width}", row_wise(nn.LayerNorm(width), width)
        spread = nn.functional.pad(torch.zeros(1, width), (0, -width % 32), value=-torch.inf)

        def softmax(x: Tensor, spread: Tensor = spread) -> Tensor:
            return (nn.functional.pad(x, (0, spread.shape[1] - x.shape[1])) + spread).softmax(-1)

        yield f"softmax {width}", row_wise(softmax, width)


def attentions() -> Iterator[tuple[str, int]]:
    """Some rows, some queries, and keys that nothing looks at behind them, against all at once."""
    for width, heads in ((16, 4), (64, 3), (80, 2)):
        query, key, value = (torch.randn(4, heads, TOKENS, width) for _ in range(3))
        whole = attend_exactly(query, key, value, is_causal=True)
        wrong = 0
        for rows in ([0], [1, 3], [0, 1, 2, 3]):
            for first, count in QUERIES:
                for more in (0, 1, 30, 200):
                    span = min(TOKENS, first + count + more)
                    asked = query[rows][:, :, first : first + count]
                    at = first + torch.arange(count)
                    sees = (torch.arange(span) <= at[:, None])[None, None]
                    seen = key[rows][:, :, :span], value[rows][:, :, :span]
                    found = attend_exactly(asked, *seen, sees)
                    wrong += differ(found, whole[rows][:, :, first : first + count])
        yield f"attention {width}", wrong
        yield f"decode step {width}", decode_steps(width)


def decode_steps(width: int) -> int:
    """Six heads that share two keys, one query per row, with and without a mask."""
    model = nn.Module()
    query = torch.randn(4, 6, TOKENS, width)
    key, value = (torch.randn(4, 2, TOKENS, width) for _ in range(2))
    whole, _ = exact_attention(model, query, key, value, None)
    wrong = 0
    for at in (0, 1, 12, 31, 32, 100, 127, 255, 256, 300, 639):
        for rows in ([0], [1, 2], [0, 1, 2, 3]):
            asked = query[rows][:, :, at : at + 1]
            for span in (at + 1, min(TOKENS, at + 1 + -(at + 1) % 32)):
                mask = torch.zeros(len(rows), 1, 1, span)
                mask[..., at + 1 :] = -torch.inf
                seen = key[rows][:, :, :span], value[rows][:, :, :span]
                given = mask if span > at + 1 else None
                found, _ = exact_attention(model, asked, *seen, given)
                wrong += differ(found, whole[rows][:, at : at + 1])
    return wrong


def heads() -> Iterator[tuple[str, int]]:
    """What is said of a token by sampler and trainer, over a vocabulary that threads share."""
    hidden = torch.randn(LONE, 8)
    head = Head(torch.randn(WIDE, 8), linear=exact_linear)
    logits = head_logits(hidden, head)
    seeds = torch.arange(LONE)
    temperature = torch.full((LONE,), 0.7)

    def sampled(rows: slice) -> list[Tensor]:
        _, logprobs = sample_tokens(
            logits[rows], seeds[rows], seeds[rows], temperature=temperature[rows], stochastic=None
        )
        return [logprobs]

    def likely(rows: slice) -> list[Tensor]:
        found = likeliest(logits[rows], temperature[rows], 4)
        return [found.logprobs, found.rest]

    def trained(rows: slice) -> list[Tensor]:
        found = chunked_head(
            hidden[rows], head, seeds[rows], temperature=0.7, top_k=4, rest=True, chunk=LONE
        )
        return [required(found[at], "a field") for at in (0, 4, 5)]

    def from_logits(rows: slice) -> list[Tensor]:
        both = torch.stack([logits[rows], logits[rows]], dim=1)
        tokens = seeds[rows, None].repeat(1, 2)
        return [logprobs_from_logits(both, tokens, temperature=0.7)]

    kinds = {"sampled": sampled, "likeliest": likely, "trained": trained, "logits": from_logits}
    for name, said in kinds.items():
        whole = said(slice(0, LONE))
        wrong = 0
        for row in range(LONE):
            alone = said(slice(row, row + 1))
            pairs = zip(alone, whole, strict=True)
            wrong += any(differ(found, wanted[row : row + 1]) for found, wanted in pairs)
        yield f"{name} {WIDE}", wrong


KINDS = {"heads": heads, "linear": linears, "usual": usual, "attention": attentions}


@torch.no_grad()
def operations(threads: int, only: str = "all") -> dict[str, int]:
    """Operation -> in how many trials it differs."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    found: dict[str, int] = {}
    for kind, trials in KINDS.items():
        if only in (kind, "all"):
            found |= trials()
    return found


if __name__ == "__main__":
    _, kind, *counts = sys.argv
    found = {threads: operations(int(threads), kind) for threads in counts}
    capability = torch.backends.cpu.get_cpu_capability()
    sys.stdout.write(json.dumps({"instructions": capability, "differ": found}))
