"""Closed forms of what a model has to compute and to read: floating-point operations and bytes.

A multiplication and the addition after it are two operations. A matrix of n parameters takes 2n per
token; attention takes 4 x layers x heads x width per pair of a token and one that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Backward is twice a forward pass: the gradient of the inputs, and that of the weights.
FORWARD_AND_BACKWARD = 3.0


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """Operations of a forward pass, and bytes of what it reads.

    body: operations per token, of every matrix but the output head.
    head: per token whose successor is predicted.
    attention: per token and token that it sees, itself included.
    weight_bytes: of all weights. kv_bytes: keys and values of one token.
    parameters: as many weights.
    """

    body: float
    head: float = 0.0
    attention: float = 0.0
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    parameters: float = 0.0

    def forward(self, lengths: Tensor, predicted: Tensor | float = 0.0) -> Tensor:
        """Operations of a causal forward pass, per row.

        Args:
            lengths: [B] tokens of every row.
            predicted: [B] tokens that the head is asked about.

        Returns:
            [B] float64.
        """
        tokens = lengths.double()
        seen = tokens * (tokens + 1) / 2
        return self.body * tokens + self.head * predicted + self.attention * seen

    def decode_floor(
        self, prompts: Tensor, responses: Tensor, *, flops: float, bandwidth: float
    ) -> float:
        """Least time to sample responses, token by token, all rows side by side.

        Every step reads all weights once, and the keys and values of the rows that go on.

        Args:
            prompts, responses: [B] tokens of every row.
            flops: operations per second. bandwidth: bytes per second.

        Returns:
            Seconds.
        """
        if not len(responses):
            return 0.0
        steps = int(responses.max())
        at = torch.arange(steps, dtype=torch.float64)
        # How many rows, with how many prompt tokens together, still go on at each step.
        ended = torch.zeros(2, steps + 1, dtype=torch.float64)
        ended[0].index_add_(0, responses, torch.ones(len(responses), dtype=torch.float64))
        ended[1].index_add_(0, responses, prompts.double())
        rows, read = ended.sum(1, keepdim=True) - ended.cumsum(1)[:, :steps]
        context = read + rows * at
        computed = rows * (self.body + self.head) + self.attention * context
        moved = self.weight_bytes + self.kv_bytes * context
        return float(torch.maximum(computed / flops, moved / bandwidth).sum())
