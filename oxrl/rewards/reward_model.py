"""A trained reward model as a reward: `reward.name` is the folder of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from oxrl.data.batching import to_token_batch
from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import encode_conversation
from oxrl.data.steps import SEPARATOR, encode_steps
from oxrl.models.load import load_critic, load_tokenizer
from oxrl.models.network import unpadded
from oxrl.types import Completion, Prompt


def scorer(folder: Path) -> Callable[[Prompt, Sequence[Completion]], list[float]]:
    """Make a function that scores completions by a reward model, on the CPU.

    The texts are rendered with the reward model's own template, as it was trained, so its tokenizer
    need not be the policy's.

    Args:
        folder: a checkpoint with a value head, as the reward-model recipe writes it.

    Returns:
        A function of a prompt and completions: the head's number at the last token of each. Of a
        process reward model it is the chance that the worst step (line that is not blank) is right,
        as arXiv:2312.08935 has it; a blank reply has none: 0.
    """
    tokenizer = load_tokenizer(str(folder))
    model = load_critic(str(folder))
    encoder = ChatEncoder(tokenizer)
    pad_id = int(tokenizer.pad_token_id)  # pyright: ignore

    @torch.no_grad()
    def worst_step(prompt: Prompt, completion: Completion) -> float:
        steps = [line for line in completion.text.split(SEPARATOR) if line.strip()]
        if not steps:
            return 0.0
        token_ids, ends = encode_steps(prompt.messages, steps, encoder)
        hidden = model.backbone(unpadded(torch.tensor([token_ids])))[0, torch.tensor(ends) - 1]
        return F.linear(hidden, model.head.weight, model.head.bias).sigmoid().min().item()

    @torch.no_grad()
    def score(prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        replies = [{"role": "assistant", "content": completion.text} for completion in completions]
        rows = [encode_conversation([*prompt.messages, reply], encoder) for reply in replies]
        inputs = to_token_batch(
            [row.token_ids for row in rows], [row.trained for row in rows], pad_id
        )
        hidden = model.backbone(inputs)
        last = hidden[torch.arange(len(rows)), torch.tensor(inputs.lengths()) - 1]
        return F.linear(last, model.head.weight, model.head.bias)[:, 0].tolist()

    def score_steps(prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [worst_step(prompt, completion) for completion in completions]

    return score_steps if model.kind == "process" else score
