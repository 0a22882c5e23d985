"""Packed, padded and single rows: by how much do the supervised loss and its gradient differ?

    python benchmarks/packing.py ROWS.jsonl [rows]
        (rows as `oxrl prepare` writes them, say of gsm8k)

The same rows are laid out one by one (what the others are compared with), padded to the longest of
the batch, padded in small micro-batches, and packed by best fit. Differences are relative: of the
loss; of the gradient's largest entry; of the gradient's norm.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from oxrl.data.conversations import ConversationDataset
from oxrl.data.dataset import ReadOptions
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.recipes.supervised import loss_fn, to_supervised_batch
from oxrl.types import Example

MODEL = "builtin:tiny"
# Tokens of a packed row and of a small micro-batch; the largest micro-batch holds everything.
PACK, SMALL, WHOLE = 2048, 1024, 10**9
LAYOUTS = {
    "one by one": (None, 1),
    "padded, one batch": (None, WHOLE),
    "padded, micro-batches": (None, SMALL),
    "packed, one batch": (PACK, WHOLE),
    "packed, micro-batches": (PACK, SMALL),
}


def learn(
    examples: list[Example], dtype: torch.dtype, pack: int | None, budget: int
) -> tuple[float, Tensor, float]:
    """(loss, gradient of all weights as one vector, share of padding) of one step."""
    trainer = LocalTrainer(
        load_policy(MODEL, LoadOptions(seed=0, dtype=dtype)),
        TrainerOptions(lr=1e-3, micro_batch_tokens=budget),
    )
    batch = to_supervised_batch(examples, 0, pack_tokens=pack)
    output = trainer.forward_backward(batch, loss_fn, frozenset({"logprobs"}))
    gradient = torch.cat(
        [gradient.flatten() for _, gradient in sorted(trainer.gradients())]
    ).double()
    return (
        float(loss_fn(output, batch)[0]),
        gradient,
        1 - float(batch.inputs.attention_mask.double().mean()),
    )


def main() -> None:
    path, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 64
    data = ConversationDataset.load(
        path, load_tokenizer(MODEL), ReadOptions(limit=count, max_tokens=PACK)
    )
    examples = data.in_order()
    tokens = sum(len(example.token_ids) for example in examples)
    lines = [f"{len(examples)} rows of {path.name}, {tokens} tokens, {MODEL}"]
    for dtype in (torch.float32, torch.float64):
        base: tuple[float, Tensor, float] | None = None
        for name, (pack, budget) in LAYOUTS.items():
            loss, gradient, padding = found = learn(examples, dtype, pack, budget)
            base = base or found
            entry = (gradient - base[1]).abs().max() / base[1].abs().max()
            norm = (gradient - base[1]).norm() / base[1].norm()
            off = f"loss {abs(loss / base[0] - 1):.1e}, "
            off += f"gradient {float(entry):.1e} (entry) {float(norm):.1e} (norm)"
            lines.append(
                f"{str(dtype).removeprefix('torch.')}  {name:<22} padding {padding:4.0%}  {off}"
            )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
