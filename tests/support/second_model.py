"""A further model in a run of reinforcement learning: one row of the table of roles, and what
transformers say in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from oxrl.assembly.assembly import Assembly
from oxrl.config import Config, load_config, roles
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.tables.roles import Role
from oxrl.types import TokenBatch
from support.tiny import token_batch

WANT = frozenset({"logprobs"})


def second(folder: Path, cfg: Config) -> Iterator[Role]:
    """A model that only answers, with weights of its own."""
    yield Role(name="second", model=str(folder), temperature=cfg.rollout.temperature)


def with_second(folder: Path) -> list[Any]:
    """The table of roles with one row more."""
    return [*roles.MODELS, partial(second, folder)]


def rows() -> TokenBatch:
    return token_batch([(3, 6), (2, 2), (5, 4), (1, 5)], vocabulary=261)


def said_by_transformers(folder: Path, inputs: TokenBatch, temperature: float) -> Tensor:
    """Log-probabilities of the tokens of responses, as transformers alone compute them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=inputs.tokens, attention_mask=inputs.attention_mask).logits
    of_next = torch.log_softmax(logits[:, :-1] / temperature, dim=-1)
    of_sampled = of_next.gather(2, inputs.tokens[:, 1:, None])[..., 0]
    found = torch.zeros(inputs.tokens.shape)
    found[:, 1:] = of_sampled
    return found.masked_fill(~inputs.response_mask, 0.0)


def answer_on_ranks(config: Path, folder: Path, results: Path) -> None:
    """On one rank: build every model of a run, and ask the second one and the reference."""
    roles.MODELS = with_second(folder)
    cfg = load_config(config)
    with joined_ranks(torch.device("cpu"), cfg.run.waits) as ranks:
        trainers = Assembly(cfg, ranks).trainers()
        names = list(trainers)
        found = {name: trainers[name].forward(rows(), WANT).logprobs for name in names[2:]}
        torch.save({"names": names, "said": found}, results / f"{ranks.rank}.pt")
