"""A model whose samples are worth looking at, requests to sample, and what the trainer says of the
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.seeds import sample_seed
from oxrl.types import Completion, Prompt, Request, Sampling, TokenBatch

TOKENIZER = load_tokenizer("builtin:tiny")
END = int(TOKENIZER.eos_token_id)  # pyright: ignore
# Matrices of a random model times these numbers: (embeddings, others).
SCALES = {"builtin:tiny": (10, 12), "builtin:small": (5, 6)}


def lively(
    name: str = "builtin:small", seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random model, neither uniform nor certain about a token: mean logprob about -4 at
    temperature 1.
    """
    policy, (embeddings, others) = (
        load_policy(name, LoadOptions(seed=seed, dtype=dtype)),
        SCALES[name],
    )
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(embeddings if "embed_tokens" in parameter_name else others)
    return policy


def make_requests(
    prompts: int, samples: int = 1, *, words: int = 1, prefix: str = "", **sampling: Any
) -> list[Request]:
    """`samples` requests of each prompt, ids `<prefix><draw>/<sample>`; up to 12 tokens unless
    `sampling` says more.
    """
    options = Sampling(**{"max_tokens": 12, "stop_token_ids": (END,), **sampling})
    texts = [f"{draw} + {draw * 37} =" * words for draw in range(prompts)]
    return [
        Request(
            id=f"{prefix}{draw}/{sample}",
            prompt=Prompt(
                uid=str(draw), messages=(), token_ids=tuple(TOKENIZER(text)["input_ids"])
            ),
            draw=draw,
            sample=sample,
            sampling=options,
            seed=sample_seed(7, draw, sample),
        )
        for draw, text in enumerate(texts)
        for sample in range(samples)
    ]


def trainer_logprobs(
    model: PreTrainedModel,
    requests: Sequence[Request],
    done: Sequence[Completion],
    temperature: float,
) -> list[list[float]]:
    """What the trainer says of the sampled tokens."""
    rows = [[*r.prompt.token_ids, *c.token_ids] for r, c in zip(requests, done, strict=True)]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    column = torch.arange(width)
    real = column < torch.tensor([[len(row)] for row in rows])
    sampled = real & (column >= torch.tensor([[len(r.prompt.token_ids)] for r in requests]))
    inputs = TokenBatch(tokens=tokens, attention_mask=real, response_mask=sampled)
    output = LocalTrainer(model, TrainerOptions(lr=1e-3, temperature=temperature)).forward(
        inputs, frozenset({"logprobs"})
    )
    assert output.logprobs is not None
    return [output.logprobs[row][sampled[row]].tolist() for row in range(len(rows))]


def largest(done: Sequence[Completion], expected: Sequence[Sequence[float]]) -> float:
    """Largest |difference| of a sampled token's log-probability, nats."""
    return max(
        abs(ours - theirs)
        for completion, row in zip(done, expected, strict=True)
        for ours, theirs in zip(completion.segments[0].logprobs, row, strict=True)
    )
