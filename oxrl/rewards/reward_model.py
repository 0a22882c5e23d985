"""A trained reward model as a reward: `reward.name` is the folder of its checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from oxrl.data.batching import to_token_batch
from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import encode_conversation
from oxrl.data.steps import SEPARATOR, encode_steps
from oxrl.models.load import LoadOptions, load_critic, load_tokenizer
from oxrl.models.network import fix_rotations
from oxrl.rewards.builtin import DEFAULT_STEPS, StepsRule
from oxrl.runs.checkpoints import longest_row
from oxrl.types import Completion, Completions, GroupScores, Prompt, Score

# Tokens that a worker reads at a time, padding included.
BUDGET = 16_384


class _Row(NamedTuple):
    """A conversation, and the positions behind which the head is read.

    characters: of the reply up to the end of each step.
    """

    place: int
    token_ids: Sequence[int]
    ends: Sequence[int]
    characters: Sequence[int] = ()


class RewardModel:
    """Scores the completions of a prompt.

    The texts are rendered with the reward model's own template, as it was trained, so its tokenizer
    need not be the policy's. A score depends on the group alone, not on what else is scored.

    Args:
        folder: a checkpoint with a value head, as the reward-model recipe writes it.
        device: that reads them.
        budget: tokens that are read at a time, padding included; a longer text is read alone.
        steps: what a process reward model makes of the chances that its steps are right: "mean" or
            "sum" of them, each step's share earned where it ends, or the "worst", earned at the
            end.
        day: that its template is told, where that reads the clock; None: today.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device | str = "cpu",
        budget: int = BUDGET,
        steps: StepsRule = DEFAULT_STEPS,
        day: str | None = None,
    ) -> None:
        tokenizer = load_tokenizer(str(folder), day=day)
        self._model = load_critic(str(folder), LoadOptions(device=device))
        fix_rotations(self._model, longest_row(folder, None))
        self._encoder = ChatEncoder(tokenizer)
        self._pad_id = int(tokenizer.pad_token_id)  # pyright: ignore
        self._device = device
        self._budget = budget
        self._rule: StepsRule = steps

    @torch.no_grad()
    def __call__(self, prompt: Prompt, completions: Completions) -> GroupScores:
        """Score completions.

        Args:
            prompt: what was asked.
            completions: of that prompt; each is read by itself.

        Returns:
            The head's number at the last token of each, "invalid" where it is not finite. Of a
            process reward model what its rule makes of the chances that the steps (lines that are
            not blank) are right; a blank reply has none: 0.

        Source: Math-Shepherd, arXiv:2312.08935: a solution is as good as its worst step; for PPO
        each step is rewarded where it ends ("sum"). The mean is ours: more steps earn no more.
        """
        by_step = self._model.kind == "process"
        encode = self._steps if by_step else self._whole
        rows = [encode(prompt, completion, i) for i, completion in enumerate(completions)]
        scores = [Score(value=0.0)] * len(rows)
        for batch in _batches([row for row in rows if row.ends], self._budget):
            for row, heads in zip(batch, self._heads(batch), strict=True):
                if by_step:
                    scores[row.place] = self._of_steps(row, heads.sigmoid().tolist())
                else:
                    scores[row.place] = _finite(heads[0].item())
        return scores

    def _of_steps(self, row: _Row, chances: Sequence[float]) -> Score:
        """The score of a reply from the chances that its steps are right."""
        if self._rule == "worst":
            # Of several numbers, one of which is none, the smallest depends on their order.
            return _finite(math.nan if any(map(math.isnan, chances)) else min(chances))
        parts = len(chances) if self._rule == "mean" else 1
        shares = [chance / parts for chance in chances]
        score = _finite(math.fsum(shares))
        if score.value is None:
            return score
        steps = tuple(zip(row.characters, shares, strict=True))
        return dataclasses.replace(score, steps=steps)

    def _whole(self, prompt: Prompt, completion: Completion, place: int) -> _Row:
        reply = {"role": "assistant", "content": completion.text}
        token_ids = encode_conversation([*prompt.messages, reply], self._encoder).token_ids
        return _Row(place, token_ids, (len(token_ids),))

    def _steps(self, prompt: Prompt, completion: Completion, place: int) -> _Row:
        steps: list[str] = []
        characters: list[int] = []
        start = 0
        for line in completion.text.split(SEPARATOR):
            if line.strip():
                steps.append(line)
                characters.append(start + len(line.rstrip()))
            start += len(line) + len(SEPARATOR)
        if not steps:
            return _Row(place, (), ())
        token_ids, ends = encode_steps(prompt.messages, steps, self._encoder)
        return _Row(place, token_ids, ends, characters)

    def _heads(self, batch: Sequence[_Row]) -> list[torch.Tensor]:
        """Return the head's numbers behind each of the ends of every row."""
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
    for row in sorted(rows, key=lambda row: len(row.token_ids), reverse=True):
        if batch and len(batch[0].token_ids) * (len(batch) + 1) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _finite(value: float) -> Score:
    if math.isfinite(value):
        return Score(value=value)
    return Score(value=None, status="invalid", reason=f"returned {value}, need a finite number")
