"""What each of several ranks says of rows in exact mode, left in a folder."""

from __future__ import annotations

from pathlib import Path

import torch

from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.models.load import LoadOptions, load_policy
from oxrl.tables.watch import Deadlines
from oxrl.types import TokenBatch
from support.conformance import make_trainer

LAYOUTS = {
    "padded": {},
    "one row at a time": {"micro_batch_tokens": 1},
    "prompts once": {"share_prefix": True},
}


def score_on_ranks(folder: Path, on_meta: bool) -> None:
    """On one rank: all rows, with its pieces of the weights."""
    batch = TokenBatch(**torch.load(folder / "batch.pt"))
    options = LoadOptions(exact=True, on_meta=on_meta)
    found = {}
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        for name, changed in LAYOUTS.items():
            model = load_policy(str(folder / "model"), options)
            trainer = make_trainer("fsdp", model, ranks, temperature=1.0, **changed)
            found[name] = trainer.forward(batch, frozenset({"logprobs"})).logprobs
        torch.save(found, folder / f"logprobs_{ranks.rank}.pt")
