"""The policy's numbers for every token when it learned from it, kept beside the batch for reports.

`rollouts/step_<8 digits>.update.safetensors`, with `run.record: tokens`: of the batch that was
sampled after so many optimizer steps, [B, T] each, rows as in the file of the batch. Where a batch
is gone through several times, the last time counts.

    logprobs   nats, of the policy in the update; 0 outside of the response
    entropy    nats, likewise
    ratio      of the policy in the update to that at its start
    kl         k3 estimate against the reference, where there is one
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from oxrl.errors import required
from oxrl.functional.kl import kl_k3
from oxrl.recipes.features.base import Feature, Prepared
from oxrl.runs.files import make_folder
from oxrl.runs.recorder import save_tensors
from oxrl.types import Output, PolicyBatch, Tensors


class TokenRecord(Feature):
    """Looks at every update; changes nothing.

    Args:
        folder: of the run's tensors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: Tensors = {}
        self._of_rows: list[Tensor] = []
        self._inputs = None

    def __getstate__(self) -> dict[str, object]:
        # With the loss it is sent to actors, which have nothing to keep.
        return {"_folder": self._folder, "_kept": {}, "_of_rows": [], "_inputs": None}

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """A new batch: nothing is known of its tokens."""
        shape = batch.inputs.tokens.shape
        names = ["logprobs", "entropy", "ratio"]
        if batch.ref_logprobs is not None:
            names.append("kl")
        self._kept = {name: torch.zeros(shape) for name in names}
        return batch

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """Remember what the rows of the minibatch are parts of."""
        self._inputs = batch.inputs
        return batch

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> dict[str, float]:
        """Put what was said of a minibatch where its rows are in the batch."""
        for name, values in zip(self._kept, self._of_rows, strict=False):
            self._kept[name][rows] = required(self._inputs, "a minibatch").as_given(values)
        return {}

    def loss(self, output: Output, batch: PolicyBatch) -> None:
        """Take what was said; last of the whole minibatch, without gradient."""
        if torch.is_grad_enabled() or output.entropy is None:
            return
        logprobs = required(output.logprobs, "logprobs").float()
        mask = batch.inputs.response_mask
        # Where nothing was recorded before the update, the policy is its own old one.
        old = logprobs if batch.old_logprobs is None else batch.old_logprobs
        found = [logprobs, output.entropy.float(), (logprobs - old).exp()]
        if batch.ref_logprobs is not None:
            found.append(kl_k3(logprobs, batch.ref_logprobs, mask))
        self._of_rows = [values.masked_fill(~mask, 0.0) for values in found]

    def after_updates(self, before: int, step: int) -> None:
        """Write the file of the batch."""
        make_folder(self._folder)
        save_tensors(self._kept, self._folder / f"step_{before:08d}.update.safetensors")
