"""Trials of a teacher before a run: whether its tokens and its answers can be relied on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from oxrl.data.batching import to_token_batch
from oxrl.engines.train import Scorer
from oxrl.errors import EngineError, required
from oxrl.seeds import stable_seed
from oxrl.types import TokenIds

# Ids that stand for other tokens, of which an error names so many.
NAMED = 3
# Lengths of the rows by which a teacher is compared with itself.
LENGTHS = (7, 19, 12)


def why_other_tokens(policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase) -> str:
    """Say which ids of the policy stand for other tokens in a teacher; empty if none does.

    Args:
        policy, teacher: their tokenizers. A teacher may have more tokens.
    """
    ours = {index: token for token, index in policy.get_vocab().items()}
    theirs = {index: token for token, index in teacher.get_vocab().items()}
    if len(theirs) < len(ours):
        return (
            f"has {len(theirs):,} tokens and the policy {len(ours):,}: a teacher says how likely "
            "each of the policy's is, so take one with the policy's tokenizer"
        )
    differ = [index for index in sorted(ours) if theirs.get(index) != ours[index]]
    if not differ:
        return ""
    told = "; ".join(
        f"{index} is {ours[index]!r} for the policy and {theirs.get(index)!r} for the teacher"
        for index in differ[:NAMED]
    )
    return (
        f"has other tokens, at {len(differ):,} ids: {told}. Take a teacher with the policy's "
        "tokenizer"
    )


def compare_with_itself(
    field: str, scorer: Scorer, token_ids: Sequence[int], pad_id: int, bound: float
) -> None:
    """Ask a teacher about rows alone, in a batch of other lengths, and twice.

    Args:
        field: that names the teacher.
        scorer: who is asked.
        token_ids: that rows may hold.
        pad_id: fills rows on the right.
        bound: how far apart answers may be, in nats.

    Raises:
        EngineError: they are further apart.
    """
    draw = torch.Generator().manual_seed(stable_seed("teachers"))
    rows: list[TokenIds] = []
    for length in LENGTHS:
        chosen = torch.randint(len(token_ids), (length,), generator=draw)
        rows.append(tuple(token_ids[place] for place in chosen.tolist()))
    together = _said(field, scorer, rows, pad_id)
    alone = torch.cat([_said(field, scorer, [row], pad_id) for row in rows])
    again = _said(field, scorer, rows, pad_id)
    for how, other in (("alone and in a batch", alone), ("asked twice", again)):
        apart = float((together - other).abs().max())
        if not apart <= bound:
            raise EngineError(
                f"{field} says something else of the same rows {how}: up to {apart:.3g} nats "
                f"apart, and {bound:g} are allowed. What it teaches would depend on what else is "
                "in a batch"
            )


def _said(field: str, scorer: Scorer, rows: Sequence[TokenIds], pad_id: int) -> Tensor:
    """Ask a scorer about the tokens of rows, in nats, one after another."""
    trained = [[place > 0 for place in range(len(row))] for row in rows]
    batch = to_token_batch(rows, trained, pad_id)
    said = scorer.forward(batch, frozenset({"logprobs"}))
    logprobs = required(said.logprobs, "logprobs")[batch.response_mask]
    if logprobs.isnan().any():
        lengths = ", ".join(str(len(row)) for row in rows)
        raise EngineError(f"{field} does not answer on rows of {lengths} tokens: see the log")
    return logprobs
