"""The frame of every loss of pairs: its tensors are checked, and its losses summed up.

A loss reads its tensors with `read_pairs`, writes its formula on what `Pairs` makes of them, and
ends with `Pairs.loss_and_metrics`. Everything per pair is [N], log-probabilities are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oxrl.functional.masks import (
    LossAndMetrics,
    OptionalTensor,
    at_least_float32,
    fill_masked,
    masked_mean,
)

# exp of more than this times a coefficient overflows float32; beyond it the slope of an exponential
# term is 0.
MAX_EXPONENT = 80.0


@dataclass(frozen=True)
class Pairs:
    """The tensors of a pair loss, raised to float32, with zeros for pairs that are left out.

    Gradient flows through `chosen` and `rejected` only.

    Args:
        chosen, rejected: [N] summed log-probabilities under the policy.
        ref_chosen, ref_rejected: [N] the same under the reference, None where there is none.
        chosen_lengths, rejected_lengths: [N] trained tokens, None where nobody needs them.
        loss_weights: [N], 0 for a pair to leave out.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: OptionalTensor
    ref_rejected: OptionalTensor
    chosen_lengths: OptionalTensor
    rejected_lengths: OptionalTensor
    loss_weights: Tensor

    @property
    def chosen_log_ratio(self) -> Tensor:
        """u: by how much likelier than under the reference."""
        return self.chosen - _required(self.ref_chosen, "ref_chosen_logprobs")

    @property
    def rejected_log_ratio(self) -> Tensor:
        """v: by how much likelier than under the reference."""
        return self.rejected - _required(self.ref_rejected, "ref_rejected_logprobs")

    @property
    def margin(self) -> Tensor:
        """u - v."""
        return self.chosen_log_ratio - self.rejected_log_ratio

    @property
    def chosen_length(self) -> Tensor:
        """Trained tokens, at least 1."""
        return _required(self.chosen_lengths, "chosen_lengths").clamp(min=1)

    @property
    def rejected_length(self) -> Tensor:
        """Trained tokens, at least 1."""
        return _required(self.rejected_lengths, "rejected_lengths").clamp(min=1)

    @property
    def mean_chosen(self) -> Tensor:
        """Log-probability per token."""
        return self.chosen / self.chosen_length

    @property
    def mean_rejected(self) -> Tensor:
        """Log-probability per token."""
        return self.rejected / self.rejected_length

    @property
    def mean_margin(self) -> Tensor:
        """The margin between log ratios per token."""
        chosen = self.chosen_log_ratio / self.chosen_length
        return chosen - self.rejected_log_ratio / self.rejected_length

    def constant(self, extra: Tensor, name: str) -> Tensor:
        """Read a further tensor of a loss, without gradient and with zeros for pairs left out.

        Args:
            extra: [N], or a scalar.
            name: of the argument, for the error.

        Returns:
            [N] or scalar, at least float32.

        Raises:
            ValueError: it is neither a scalar nor of the pairs' shape.
        """
        return filled(extra.detach(), self.loss_weights, name)

    def loss_and_metrics(self, losses: Tensor, beta: float = 1.0) -> LossAndMetrics:
        """Sum up the losses of the pairs, and say how the pairs stand.

        Args:
            losses: [N].
            beta: turns log ratios into rewards in the metrics.

        Returns:
            (losses * loss_weights).sum(), and detached means over the pairs that count, under
            `preference/`. Without a reference the rewards are the log-probabilities themselves.
        """
        return weighted_loss(losses, self.loss_weights), self._metrics(beta)

    def logistic_loss(self, margin: Tensor, beta: float) -> LossAndMetrics:
        """Sum up the logistic losses of margins, as in DPO, and say how the pairs stand.

            loss = -log sigmoid(beta * margin)

        Args:
            margin: [N] nats.
            beta: scale of the margins and, in the metrics, of the rewards.

        Returns:
            What `loss_and_metrics` returns.
        """
        return self.loss_and_metrics(-logsigmoid(beta * margin), beta)

    @torch.no_grad()
    def _metrics(self, beta: float) -> dict[str, Tensor]:
        """Average margins, rewards and accuracy over the pairs that count, for the metrics."""
        chosen = self.chosen
        rejected = self.rejected
        if self.ref_chosen is not None and self.ref_rejected is not None:
            chosen = self.chosen_log_ratio
            rejected = self.rejected_log_ratio
        values = {
            "margin": beta * (chosen - rejected),
            "chosen_reward": beta * chosen,
            "rejected_reward": beta * rejected,
            "accuracy": (chosen > rejected).to(chosen.dtype),
            "chosen_logprobs": self.chosen,
            "rejected_logprobs": self.rejected,
        }
        if self.chosen_lengths is not None:
            values["chosen_nll"] = -self.mean_chosen
        counted = self.loss_weights != 0
        return {f"preference/{name}": masked_mean(value, counted) for name, value in values.items()}


def read_pairs(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: OptionalTensor,
    ref_rejected_logprobs: OptionalTensor,
    chosen_lengths: OptionalTensor,
    rejected_lengths: OptionalTensor,
    loss_weights: Tensor,
) -> Pairs:
    """Check the tensors of a pair loss and make them ready for its formula.

    Args:
        chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
        ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, of the reference, or None.
        chosen_lengths, rejected_lengths: [N] trained tokens of each, or None.
        loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.

    Returns:
        The pairs, at least float32: zeros where a pair is left out, gradient through the policy's
        two only.

    Raises:
        ValueError: a tensor has another shape than `loss_weights`.
    """

    def constant(tensor: OptionalTensor, name: str) -> OptionalTensor:
        """Read a tensor without gradient, where there is one."""
        if tensor is None:
            return None
        return filled(tensor.detach(), loss_weights, name)

    return Pairs(
        filled(chosen_logprobs, loss_weights, "chosen_logprobs"),
        filled(rejected_logprobs, loss_weights, "rejected_logprobs"),
        constant(ref_chosen_logprobs, "ref_chosen_logprobs"),
        constant(ref_rejected_logprobs, "ref_rejected_logprobs"),
        constant(chosen_lengths, "chosen_lengths"),
        constant(rejected_lengths, "rejected_lengths"),
        loss_weights,
    )


def filled(tensor: Tensor, loss_weights: Tensor, name: str) -> Tensor:
    """Put zeros where a pair is left out: it may hold nan, and nan * 0 is nan.

    Args:
        tensor: [N], or a scalar.
        loss_weights: [N], 0 for a pair to leave out.
        name: of the tensor, for the error.

    Returns:
        The same shape, at least float32.

    Raises:
        ValueError: the shapes differ.
    """
    if not tensor.ndim:
        return at_least_float32(tensor)
    if tensor.shape != loss_weights.shape:
        shapes = f"shape {tuple(tensor.shape)} but loss_weights has {tuple(loss_weights.shape)}"
        raise ValueError(f"{name} has {shapes}; a preference loss takes one number per pair, [N]")
    return fill_masked(tensor, loss_weights != 0)


def weighted_loss(losses: Tensor, loss_weights: Tensor) -> Tensor:
    """Sum the losses with their weights; what has none gives neither value nor gradient.

    Args:
        losses, loss_weights: of one shape.

    Returns:
        (losses * loss_weights).sum(), a scalar.
    """
    counted = fill_masked(losses, loss_weights != 0)
    return (counted * loss_weights.to(losses.dtype)).sum()


def bounded_exp(x: Tensor) -> Tensor:
    """exp(min(x, `MAX_EXPONENT`)), which stays finite.

    Args:
        x: any shape; there is no gradient where it is cut.

    Returns:
        A tensor of the same shape.
    """
    return x.clamp(max=MAX_EXPONENT).exp()


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, by whichever form does not cancel.

    Args:
        x: any shape, below 0: log-probabilities, in nats.

    Returns:
        A tensor of the same shape, below 0; -inf at 0 and NaN above.

    Source: Maechler 2012.
    """
    near_zero = torch.log(-torch.expm1(x))
    far_below = torch.log1p(-torch.exp(x))
    return torch.where(x > -math.log(2.0), near_zero, far_below)


def _required(tensor: OptionalTensor, name: str) -> Tensor:
    """Refuse to go on without a tensor that the loss reads."""
    if tensor is None:
        raise ValueError(f"{name} is None, but this loss reads it; pass a [N] tensor")
    return tensor
