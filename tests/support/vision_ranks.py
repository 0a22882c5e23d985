"""What one rank of several says of rows with images, left in a folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.models.load import LoadOptions, load_policy
from oxrl.recipes.supervised import loss_fn
from oxrl.runs.ranks import Ranks
from oxrl.tables.watch import Deadlines
from support.conformance import make_trainer
from support.vision_runs import batch_of, config

WANT = frozenset({"logprobs"})
# Longest first these rows are: two images, one, one, one, none. On two ranks with a row each at a
# time some rounds have images on one rank alone, and in the last one rank sits out.
ORDERS = {"all": [0, 1, 2, 3, 4], "one": [3], "text": [0], "mixed": [0, 3]}


def measure(
    engine: str, model: str, folder: Path, ranks: Ranks, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Log-probabilities, gradients, and weights after steps on rows with and without images."""
    batch = batch_of(config(folder, model, f"measure_{ranks.rank}"))
    policy = load_policy(model, LoadOptions(dtype=dtype))
    options: dict[str, Any] = {"micro_batch_tokens": 1, "max_grad_norm": 1e9, "temperature": 1.0}
    options["adam_eps"] = 1e-3  # with the usual one AdamW blows up gradients that are rounding
    trainer = make_trainer(engine, policy, ranks, **options)
    found = {"forward/logprobs": trainer.forward(batch.inputs, WANT).logprobs}
    for name, rows in ORDERS.items():
        trainer.forward_backward(batch.select(torch.tensor(rows)), loss_fn, WANT)
        for weight, gradient in trainer.gradients():
            if gradient is not None:
                found[f"gradient_{name}/{weight}"] = gradient.clone()
        trainer.skip_step()
    for rows in ([0, 1, 2, 3, 4], [3, 0], [4, 2, 1]):
        trainer.forward_backward(batch.select(torch.tensor(rows)), loss_fn, WANT)
        trainer.optim_step()
    for bucket in trainer.weights():
        found |= {f"weights/{name}": tensor.detach().clone() for name, tensor in bucket}
    return found


def measure_all(engine: str, models: list[str], folder: Path, dtypes: list[str]) -> None:
    """On one rank: every model, into `folder`."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        for model in models:
            for dtype in dtypes:
                found = measure(engine, model, folder, ranks, getattr(torch, dtype))
                kept = {name: tensor.contiguous() for name, tensor in found.items()}
                name = f"{engine}_{ranks.world}_{ranks.rank}_{Path(model).name}_{dtype}"
                save_file(kept, folder / f"{name}.safetensors")
