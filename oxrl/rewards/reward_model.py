"""A trained reward model as a reward: `reward.name` is the folder of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import encode_conversation
from oxrl.data.steps import SEPARATOR, encode_steps
from oxrl.data.token_rows import to_token_batch
from oxrl.models.load import LoadOptions, load_critic, load_tokenizer
from oxrl.types import Completion, Prompt

# Tokens that a worker reads at a time, padding included.
BUDGET = 16_384


class _Row(NamedTuple):
    """A conversation, and the positions behind which the head is read."""

    place: int
    token_ids: Sequence[int]
    ends: Sequence[int]


class RewardModel:
    """Scores the completions of a prompt.

    The texts are rendered with the reward model's own template, as it was trained, so its tokenizer
    need not be the policy's. A score depends on the group alone, not on what else is scored.

    Args:
        folder: a checkpoint with a value head, as the reward-model recipe writes it.
        device: that reads them.
        budget: tokens that are read at a time, padding included; a longer text is read alone.
    """

    def __init__(
        self, folder: Path, *, device: torch.device | str = "cpu", budget: int = BUDGET
    ) -> None:
        tokenizer = load_tokenizer(str(folder))
        self._model = load_critic(str(folder), LoadOptions(device=torch.device(device)))
        self._encoder = ChatEncoder(tokenizer)
        self._pad_id = int(tokenizer.pad_token_id)  # pyright: ignore
        self._device = device
        self._budget = budget

    @torch.no_grad()
    def __call__(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Score completions.

        Returns:
            The head's number at the last token of each. Of a process reward model it is the chance
            that the worst step (line that is not blank) is right, as arXiv:2312.08935 has it; a
            blank reply has none: 0.
        """
        by_step = self._model.kind == "process"
        encode = self._steps if by_step else self._whole
        rows = [encode(prompt, completion, i) for i, completion in enumerate(completions)]
        scores = [0.0] * len(rows)
        for batch in _batches([row for row in rows if row.ends], self._budget):
            for row, heads in zip(batch, self._heads(batch), strict=True):
                scores[row.place] = (heads.sigmoid().min() if by_step else heads[0]).item()
        return scores

    def _whole(self, prompt: Prompt, completion: Completion, place: int) -> _Row:
        reply = {"role": "assistant", "content": completion.text}
        token_ids = encode_conversation([*prompt.messages, reply], self._encoder).token_ids
        return _Row(place, token_ids, (len(token_ids),))

    def _steps(self, prompt: Prompt, completion: Completion, place: int) -> _Row:
        steps = [line for line in completion.text.split(SEPARATOR) if line.strip()]
        if not steps:
            return _Row(place, (), ())
        token_ids, ends = encode_steps(prompt.messages, steps, self._encoder)
        return _Row(place, token_ids, ends)

    def _heads(self, batch: Sequence[_Row]) -> list[torch.Tensor]:
        """What the head says behind each of the ends of every row."""
        token_ids = [row.token_ids for row in batch]
        trained = [[False] * len(row) for row in token_ids]
        inputs = to_token_batch(token_ids, trained, self._pad_id).to(self._device)
        hidden = self._model.backbone(inputs)
        head = self._model.head
        found: list[torch.Tensor] = []
        for index, row in enumerate(batch):
            ends = torch.tensor(row.ends, device=hidden.device) - 1
            found.append(F.linear(hidden[index, ends], head.weight, head.bias)[:, 0])
        return found


def _batches(rows: Sequence[_Row], budget: int) -> Iterator[list[_Row]]:
    """Rows of about one length together, at most `budget` tokens with padding."""
    batch: list[_Row] = []
    for row in sorted(rows, key=_length, reverse=True):
        if batch and _length(batch[0]) * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _length(row: _Row) -> int:
    return len(row.token_ids)


def scorer(folder: Path) -> Callable[[Prompt, Sequence[Completion]], list[float]]:
    """Make a function that scores completions by a reward model, on the CPU of a worker."""
    return RewardModel(folder)
