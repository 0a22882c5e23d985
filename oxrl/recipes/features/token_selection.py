"""Tokens chosen over the whole rollout batch, and candidates beside the sampled one."""

from __future__ import annotations

from dataclasses import replace

import torch

from oxrl.functional.selections import SELECTIONS
from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared
from oxrl.tables.numbers import TOP_CANDIDATES
from oxrl.types import CANDIDATES, PolicyBatch


class TokenSelection(Feature):
    """The signals of the whole batch that the row's gate reads, put into the policy batch."""

    want_before = frozenset({"logprobs"})

    def __init__(self, given: FeatureInputs) -> None:
        gate = given.row.gate
        self.select = SELECTIONS[gate]
        self.numbers = given.train.numbers("selection", gate)

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Choose by what the policy said, and by noise that depends on the seed alone."""
        said = prepared.before
        inputs = batch.inputs
        generator = torch.Generator().manual_seed(prepared.seed)
        noise = torch.rand(inputs.tokens.shape, generator=generator, dtype=torch.float64)
        known = {
            "tokens": inputs.tokens,
            "mask": inputs.response_mask,
            "advantages": batch.advantages,
            "noise": noise,
        }
        known |= {name: value for name, value in vars(said).items() if value is not None}
        signals = self.select(known, **self.numbers)
        # The update asks for the same candidates, whatever is most likely by then.
        if said.top_ids is not None:
            inputs = replace(inputs, columns={**inputs.columns, CANDIDATES: said.top_ids})
        return replace(batch, signals=signals, inputs=inputs)


class TopCandidates(TokenSelection):
    """A gate that reads the logprobs of the most likely tokens, before and in the update."""

    def __init__(self, given: FeatureInputs) -> None:
        super().__init__(given)
        self.want = frozenset({f"top_k={given.train.value(TOP_CANDIDATES)}"})
        self.want_before = self.want | {"entropy"}
