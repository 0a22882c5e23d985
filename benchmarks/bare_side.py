"""The update phase against a bare PyTorch loop: the same rows, micro-batches and loss, in turns in
one process.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import problem
import torch
from torch import Tensor

from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.micro_batches import micro_batches
from oxrl.engines.train.options import TrainerOptions
from oxrl.functional.gates import ppo_clip
from oxrl.models.load import load_policy
from oxrl.types import Output, PolicyBatch, TokenBatch

PROMPT_TOKENS = 12


def random_batch(lengths: list[int]) -> PolicyBatch:
    ends = PROMPT_TOKENS + torch.tensor(lengths)[:, None]
    column = torch.arange(int(ends.max()))
    tokens = torch.randint(
        5, 261, (len(lengths), len(column)), generator=torch.Generator().manual_seed(0)
    )
    sampled = (column >= PROMPT_TOKENS) & (column < ends)
    advantages = torch.randn(len(lengths), 1, generator=torch.Generator().manual_seed(1)) * sampled
    return PolicyBatch(
        inputs=TokenBatch(tokens=tokens, attention_mask=column < ends, response_mask=sampled),
        old_logprobs=None,
        rollout_logprobs=torch.zeros(tokens.shape),
        ref_logprobs=None,
        advantages=advantages,
        loss_weights=sampled / sampled.sum(),
        versions=torch.zeros_like(tokens),
        group_ids=torch.arange(len(lengths)) // problem.SAMPLES,
    )


def clipped(output: Output, batch: PolicyBatch) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs = output.logprobs
    assert logprobs is not None
    mask = batch.inputs.response_mask
    return ppo_clip(logprobs, logprobs.detach(), batch.advantages, mask, batch.loss_weights)


def bare_update(
    model: torch.nn.Module, adam: torch.optim.Optimizer, pieces: list[tuple[Tensor, Tensor, Tensor]]
) -> None:
    """What one would write by hand; `pieces` are (tokens, advantages, loss weights) cut
    beforehand.
    """
    for tokens, advantages, weights in pieces:
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        logprobs = logits.gather(-1, tokens[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        a = advantages[:, 1:]
        loss = -(torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) * weights[:, 1:]).sum()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    adam.zero_grad()


def main() -> None:
    channel = problem.Channel()
    given = problem.read_settings(Path(sys.argv[1]) / "bare.json")
    torch.set_num_threads(given["bare"]["threads"])
    batch = random_batch(given["setting"]["lengths"])
    budget = given["bare"]["micro_batch_tokens"]
    theirs, ours = load_policy(given["bare"]["model"]), load_policy(given["bare"]["model"])
    adam = torch.optim.AdamW(
        theirs.parameters(), lr=problem.LEARNING_RATE, weight_decay=0.0, fused=True
    )
    trainer = LocalTrainer(
        ours, TrainerOptions(lr=problem.LEARNING_RATE, micro_batch_tokens=budget)
    )
    pieces = []
    for rows, length in micro_batches(batch, budget=budget)[0]:
        part = batch.select(rows, length)
        pieces.append((part.inputs.tokens, part.advantages, part.loss_weights))

    def run_ours() -> None:
        trainer.forward_backward(batch, clipped, frozenset({"logprobs"}))
        trainer.optim_step()

    channel.send(ready=True)
    turn = 0
    while True:
        channel.wait()
        spent: dict[str, dict[str, float]] = {}
        both = [("bare", lambda: bare_update(theirs, adam, pieces)), ("oxrl", run_ours)]
        for name, update in both if turn % 2 else reversed(both):
            start = time.perf_counter()
            cpu = time.process_time()
            update()
            cpu = time.process_time() - cpu
            spent[name] = {"seconds": time.perf_counter() - start, "cpu": cpu}
        turn += 1
        worst = max(
            float((a - b).abs().max())
            for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)
        )
        channel.send(**spent, difference=worst)


if __name__ == "__main__":
    main()
