"""Every preference loss by name, and how all of them are called.

    loss, metrics = dpo(chosen_logprobs, rejected_logprobs, ref_chosen_logprobs,
                        ref_rejected_logprobs, chosen_lengths, rejected_lengths, loss_weights,
                        beta=0.1)

All losses of pairs take the same tensors, so that a recipe picks one by name, or adds several over
one shared forward. Args, [N] each:
    chosen_logprobs, rejected_logprobs: nats, sums over a completion's trained tokens. Gradient
        flows here only.
    ref_chosen_logprobs, ref_rejected_logprobs: the same of the frozen reference; None where the
        loss has none.
    chosen_lengths, rejected_lengths: trained tokens (counts below 1 are read as 1); None where not
        needed.
    loss_weights: 1 / (pairs of the global batch), 0 for a pair to leave out. The loss is
        (losses * loss_weights).sum(), so micro-batches and ranks add up to the same gradient.
    extras (some losses): data columns, or what depends on the whole batch, scalar or [N], detached,
        from a function of `preference_statistics` run once over the global batch: micro-batching
        stays exact.
    numbers: keyword only.

Returns the scalar to minimize, in at least float32, and detached metrics, means over the pairs that
count, under `preference/`: margin, chosen_reward and rejected_reward (nats, times beta if it is a
number of the loss), accuracy, chosen_logprobs (watch them: a loss on margins may lower both) and
rejected_logprobs, chosen_nll per token where lengths are given. Raises ValueError when a tensor has
another shape, or is missing.

The losses of single completions are called as `preference_singles` says.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from oxrl.functional.preference_adjusted_margins import (
    bpo,
    c2_dpo,
    dpo_shift,
    dpop,
    minor_dpo,
    odpo,
    r_dpo,
    rpo,
)
from oxrl.functional.preference_batch_losses import (
    alpha_dpo,
    aot,
    aot_unpaired,
    beta_dpo,
    dr_dpo,
    wpo,
)
from oxrl.functional.preference_levels import (
    apo_down,
    apo_zero,
    bco,
    cal_dpo,
    chi_po,
    f_dpo_alpha,
    f_dpo_forward_kl,
    f_dpo_jensen_shannon,
    h_dpo,
    nca,
    sppo,
)
from oxrl.functional.preference_margins import (
    cdpo,
    discopop,
    dpo,
    exo,
    focal_po,
    gpo_exponential,
    gpo_savage,
    gpo_squared_hinge,
    hinge,
    ipo,
    ipo_sum,
    robust_dpo,
    sigmoid_norm,
)
from oxrl.functional.preference_pairs import LossAndMetrics, OptionalTensor
from oxrl.functional.preference_reference_free import (
    alpha_po,
    cpo,
    nll,
    orpo,
    power,
    simpo,
)
from oxrl.functional.preference_singles import bco_unpaired, kto


class PairLoss(Protocol):
    """A loss of pairs; its extras follow the seven tensors, its numbers are keywords."""

    def __call__(
        self,
        chosen_logprobs: Tensor,
        rejected_logprobs: Tensor,
        ref_chosen_logprobs: OptionalTensor,
        ref_rejected_logprobs: OptionalTensor,
        chosen_lengths: OptionalTensor,
        rejected_lengths: OptionalTensor,
        loss_weights: Tensor,
        *extras: Any,
        **numbers: Any,
    ) -> LossAndMetrics:
        """The loss of N pairs; see the top of this file.

        Args:
            chosen_logprobs, rejected_logprobs: [N] nats, sums over trained tokens, with gradient.
            ref_chosen_logprobs, ref_rejected_logprobs: [N] nats, of the frozen reference; None
                without one.
            chosen_lengths, rejected_lengths: [N] trained tokens of each; None where nobody reads
                them.
            loss_weights: [N], 1 / (pairs of the global batch); 0 leaves a pair out.
            extras: columns of the data or statistics of the batch, [N] or scalar, where a loss
                reads some.
            numbers: of the loss.

        Returns:
            The scalar to minimize, and the metrics of a pair loss.

        Raises:
            ValueError: a tensor has another shape, or one that is read is None.
        """
        ...


class SingleLoss(Protocol):
    """A loss of single completions; its statistic follows the tensors, its numbers are keywords."""

    def __call__(
        self,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        desirable: Tensor,
        loss_weights: Tensor,
        *extras: Any,
        **numbers: Any,
    ) -> LossAndMetrics:
        """The loss of B judged completions; see `preference_singles`.

        Args:
            logprobs, ref_logprobs: [B] nats, sums over trained tokens; the gradient flows to the
                first.
            desirable: [B] bool, the verdicts.
            loss_weights: [B], 1 / (completions of the global batch); 0 leaves one out.
            extras: the statistic of the batch that the loss reads, a scalar.
            numbers: of the loss.

        Returns:
            The scalar to minimize, and its metrics.

        Raises:
            ValueError: a tensor has another shape.
        """
        ...


PAIR_LOSSES: dict[str, PairLoss] = {
    loss.__name__: loss
    for loss in (
        # One function of the margin.
        dpo,
        cdpo,
        robust_dpo,
        ipo,
        ipo_sum,
        hinge,
        sigmoid_norm,
        exo,
        discopop,
        gpo_exponential,
        gpo_squared_hinge,
        gpo_savage,
        focal_po,
        # Absolute levels, and other links between log ratio and reward.
        nca,
        bco,
        sppo,
        apo_zero,
        apo_down,
        cal_dpo,
        f_dpo_forward_kl,
        f_dpo_jensen_shannon,
        f_dpo_alpha,
        chi_po,
        h_dpo,
        # Margins changed per pair, and anchors.
        odpo,
        r_dpo,
        dpop,
        dpo_shift,
        bpo,
        minor_dpo,
        c2_dpo,
        rpo,
        # With a statistic of the global batch.
        aot,
        aot_unpaired,
        beta_dpo,
        dr_dpo,
        wpo,
        alpha_dpo,
        # Without a reference.
        simpo,
        alpha_po,
        cpo,
        orpo,
        power,
        nll,
    )
}
SINGLE_LOSSES: dict[str, SingleLoss] = {"kto": kto, "bco_unpaired": bco_unpaired}
