"""A preference method as an object: what it reads of completions, and what a step minimizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from oxrl.data.preferences import Judged, to_preference_batch
from oxrl.engines.train import Scorer
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import required
from oxrl.functional.preference_losses import PAIR_LOSSES, SINGLE_LOSSES
from oxrl.functional.preference_pairs import LossAndMetrics
from oxrl.functional.preference_statistics import length_desensitized_logprobs, sequence_logprobs
from oxrl.tables.preference import METHODS, Method
from oxrl.types import Images, Output, PreferenceBatch, Tensors, TokenBatch

WANT = frozenset({"logprobs"})


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """A method with the numbers of a run and the models that it reads.

    Args:
        method: row of the table.
        numbers: of the loss and of what surrounds it, as the run has them.
        mix: further methods -> weight, with their own default numbers.
        policy: what learns.
        moving_reference: where it follows the policy; a reference that stays is read once.
        pad_id: what rows are padded with.
        images: those of the rows; None: they have none.
    """

    method: Method
    numbers: Mapping[str, float]
    mix: Mapping[str, float]
    policy: Trainer
    moving_reference: Trainer | None
    pad_id: int
    images: Images = None

    def completion_logprobs(self, model: Scorer, inputs: TokenBatch) -> Tensor:
        """Log-probability [R * N] of every row under `model`, in nats."""
        return self.sums(model.forward(inputs, WANT), inputs)[0]

    def batch(self, units: Sequence[Judged], rows: int) -> PreferenceBatch:
        """The first `rows` rows of each unit, with what a moving reference says of them now."""
        batch = to_preference_batch(units, self.pad_id, rows=rows, images=self.images)
        if self.moving_reference is None:
            return batch
        logprobs = self.completion_logprobs(self.moving_reference, batch.inputs)
        return replace(batch, ref_logprobs=logprobs)

    def sums(self, output: Output, inputs: TokenBatch) -> tuple[Tensor, Tensor]:
        """Log-probability, in nats, and trained tokens of every row, [R * N] each."""
        logprobs = required(output.logprobs, "logprobs")
        total, lengths = sequence_logprobs(logprobs, inputs.response_mask)
        tail_coeff = self.numbers.get("tail_coeff")
        if tail_coeff is not None:
            shared = lengths.view(-1, 2).amin(1).repeat_interleave(2)
            total = length_desensitized_logprobs(
                logprobs, inputs.response_mask, shared, tail_coeff=tail_coeff
            )
        return total, lengths

    def loss(self, output: Output, batch: PreferenceBatch) -> LossAndMetrics:
        """Weigh and add the method's loss, or its parts, and the mix, over one forward."""
        sums, lengths = self.sums(output, batch.inputs)
        total = sums.new_zeros(())
        metrics: Tensors = {}
        for part, weight, numbers in self._parts():
            loss, more = part_loss(part, numbers, batch, sums, lengths)
            total = total + weight * loss
            metrics = more | metrics
        if batch.ref_logprobs is not None and batch.desirable is None:
            metrics["preference/displacement"] = displacement(batch, sums, lengths)
        return total, metrics

    def _parts(self) -> list[tuple[Method, float, Mapping[str, float]]]:
        """The losses to add: method, weight, and the numbers that are not its defaults."""
        own = {METHODS[name]: weight for name, weight in self.method.parts.items()}
        if not own:
            own = {self.method: 1.0}
        parts = [(method, weight, self.numbers) for method, weight in own.items()]
        return parts + [(METHODS[name], weight, {}) for name, weight in self.mix.items()]


def part_loss(
    method: Method,
    given: Mapping[str, float],
    batch: PreferenceBatch,
    sums: Tensor,
    lengths: Tensor,
) -> LossAndMetrics:
    """The loss of one method on a batch, with its default for each number that is not `given`.

    Args:
        sums, lengths: [R * N], of every row.
    """
    numbers = {name: given.get(name, default) for name, default in method.numbers.items()}
    extras = [batch.extras[name] for name in method.extras]
    ref = batch.ref_logprobs
    if batch.desirable is not None:
        single_loss = SINGLE_LOSSES[method.loss]
        ref = required(ref, "reference log-probabilities")
        return single_loss(sums, ref, batch.desirable, batch.loss_weights, *extras, **numbers)
    pair_loss = PAIR_LOSSES[method.loss]
    return pair_loss(
        sums[0::2],
        sums[1::2],
        None if ref is None else ref[0::2],
        None if ref is None else ref[1::2],
        lengths[0::2],
        lengths[1::2],
        batch.loss_weights,
        *extras,
        **numbers,
    )


def displacement(batch: PreferenceBatch, sums: Tensor, lengths: Tensor) -> Tensor:
    """Nats per token by which the chosen completions are less likely than under the reference."""
    ref = required(batch.ref_logprobs, "reference log-probabilities")
    counts = batch.loss_weights != 0
    fallen = (ref[0::2] - sums[0::2].detach()) / lengths[0::2].clamp(min=1)
    return (fallen * counts).sum() / counts.sum().clamp(min=1)
