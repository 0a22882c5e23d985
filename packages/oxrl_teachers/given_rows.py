"""Given answers beside the policy's own: its divergence from the teacher at their tokens.

    gkd_lambda (divergence on samples) + (1 - gkd_lambda) (divergence on given answers)

The teacher stays as it is, so what it says of given answers is asked once and kept. Nobody knows
who sampled them, and how likely they were then: of the tokens that are no candidates there is no
estimate without bias. They count as one token, in policy and teacher.

Source: GKD, arXiv:2306.13649.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oxrl.errors import EngineError, required
from oxrl.functional.divergences import teacher_divergence
from oxrl.functional.masks import LossAndMetrics
from oxrl.recipes.features.base import Feature, FeatureInputs, Prepared, RowsAt, Teacher
from oxrl.recipes.row_cache import RowCache, row_bytes
from oxrl.recipes.step import gradients
from oxrl.tables.numbers import (
    CANDIDATES_REST,
    DIVERGENCE_ALPHA,
    GKD_LAMBDA,
    TEACHER_CANDIDATES,
    Rest,
)
from oxrl.types import (
    CANDIDATES,
    Metrics,
    Output,
    PolicyBatch,
    SupervisedBatch,
    Tensors,
    TokenBatch,
)
from oxrl_teachers.asking import known_tokens

FOLDER = "teacher_rows"
# Rows that a teacher is shown at once, and that are kept together in a file.
ROWS_PER_PIECE = 64
# Column of a batch: [B, T, K] nats of its candidates by the teacher.
BY_TEACHER = "teacher_top_logprobs"


class GivenRows(Feature):
    """See the module; reads train.gkd_lambda. With 1 it does nothing.

    Args:
        given: what the run is made of.
    """

    def __init__(self, given: FeatureInputs) -> None:
        value = given.train.value
        self._share = value(GKD_LAMBDA)
        self._begun = 0
        if self._share == 1:
            return
        path = required(given.given_rows, "data.given_rows")
        self._rows = required(given.rows, "rows of files")(path)
        self._per_step = max(1, round(given.samples * (1 - self._share) / self._share))
        self._policy = given.policy
        self._loss = partial(given_loss, alpha=value(DIVERGENCE_ALPHA), rest=value(CANDIDATES_REST))
        top = f"top_k={value(TEACHER_CANDIDATES)}"
        self._want = frozenset({"logprobs", top})
        (teacher,) = given.teachers.values()
        folder = required(given.directory, "a run directory") / FOLDER
        cache = RowCache(folder, f"{about_teacher(teacher)} {top}")
        ask = partial(teacher.scorer.forward, want=self._want)
        vocabulary = len(required(given.tokenizer, "a tokenizer"))
        self._kept = KeptCandidates(self._rows, ask, vocabulary, cache)

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Note which optimizer step comes next."""
        self._begun = prepared.version
        return batch

    def on_minibatch(self, batch: PolicyBatch) -> PolicyBatch:
        """Begin an optimizer step: its samples weigh gkd_lambda."""
        self._begun += 1
        if self._share == 1:
            return batch
        return replace(batch, loss_weights=batch.loss_weights * self._share)

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics | None:
        """Add the gradient of given answers, which weigh the rest."""
        if self._share == 1:
            return {}
        end = self._begun * self._per_step
        given = self._rows(range(end - self._per_step, end))
        weights = given.loss_weights * (1 - self._share)
        given = replace(given, inputs=self._kept.beside(given.inputs), loss_weights=weights)
        found = gradients(self._policy, given, self._loss, self._want)
        metrics = found.metrics
        metrics["teacher/given_loss"] = metrics.pop("update/loss")
        return metrics if found.finite else None

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to training ranks with the policy's loss, in which it has no part."""
        return {}


class KeptCandidates:
    """The most likely tokens of a teacher at every trained one of the rows of a file.

    It is asked about each row once, in the order in which rows are drawn and so many at a time,
    wherever a run was stopped.

    Args:
        rows: of the file.
        ask: what the teacher says of rows, with K candidates of every trained token.
        vocabulary: tokens of the policy's tokenizer.
        cache: where its answers are kept.
    """

    def __init__(
        self,
        rows: RowsAt,
        ask: Callable[[TokenBatch], Output],
        vocabulary: int,
        cache: RowCache,
    ) -> None:
        self._rows = rows
        self._ask = ask
        self._vocabulary = vocabulary
        self._cache = cache
        # Draws that were looked at; the answer to each of their rows, by its key.
        self._read = 0
        self._known: dict[bytes, Tensors] = {}

    def beside(self, inputs: TokenBatch) -> TokenBatch:
        """Lay candidates beside the tokens of rows.

        Args:
            inputs: B rows that were drawn.

        Returns:
            The same with the columns CANDIDATES, [B, T, K] int64, and BY_TEACHER, in nats, NaN
            where there are fewer.
        """
        keys = row_keys(inputs)
        while not self._known.keys() >= set(keys):
            self._read_on()
        mask = inputs.response_mask
        columns = dict(inputs.columns)
        for name in (CANDIDATES, BY_TEACHER):
            values = torch.cat([self._known[key][name] for key in keys])
            column = values.new_zeros((*mask.shape, values.shape[1]))
            column[mask] = values
            columns[name] = column
        columns[CANDIDATES] = columns[CANDIDATES].long()
        return replace(inputs, columns=columns)

    def _read_on(self) -> None:
        """Look at the next draws, and find or keep what is said of rows that are new among them."""
        draws = range(self._read, self._read + ROWS_PER_PIECE)
        self._read = draws.stop
        drawn = self._rows(draws).inputs
        new = {key: row for row, key in enumerate(row_keys(drawn)) if key not in self._known}
        if not new:
            return
        inputs = drawn.select(torch.tensor([*new.values()]))
        counts = inputs.response_mask.sum(1).tolist()
        compute = partial(self._answers, inputs)
        kept, computed = self._cache.piece(new, sum(counts), compute)
        if computed:  # from the disk it takes no memory where it is not read
            kept, _ = self._cache.piece(new, sum(counts), compute)
        of_rows = {name: values.split(counts) for name, values in kept.items()}
        for place, key in enumerate(new):
            self._known[key] = {name: values[place] for name, values in of_rows.items()}

    def _answers(self, inputs: TokenBatch) -> Tensors:
        said = known_tokens(self._ask(inputs), self._vocabulary)
        mask = inputs.response_mask
        if required(said.logprobs, "logprobs")[mask].isnan().any():
            raise EngineError(
                "model.teachers: the teacher has no answer to some rows of data.given_rows; see "
                "the log for the first one, and continue with --resume"
            )
        ids = required(said.top_ids, "candidates")[mask]
        logprobs = required(said.top_logprobs, "their logprobs")[mask]
        return {CANDIDATES: ids.clamp(min=0).int(), BY_TEACHER: logprobs.float()}


def about_teacher(teacher: Teacher) -> str:
    """Everything that a teacher's answers depend on beside the rows: its weights, if they are here.

    Args:
        teacher: who is asked.
    """
    tell = getattr(teacher.scorer, "fingerprints", None)
    weights = {} if tell is None else tell(None)
    return f"{teacher.about} {sorted(weights.items())}"


def row_keys(inputs: TokenBatch) -> list[bytes]:
    """Return what tells rows apart, whatever is beside them.

    Args:
        inputs: B rows of text.
    """
    keys: list[bytes] = []
    for row, there in enumerate(inputs.attention_mask):
        tokens = inputs.tokens[row][there].tolist()
        trained = inputs.response_mask[row][there].tolist()
        keys.append(hashlib.sha256(row_bytes(tokens, trained, ())).digest())
    return keys


def given_loss(
    output: Output, batch: SupervisedBatch, *, alpha: float, rest: Rest
) -> LossAndMetrics:
    """The weighted sum of divergences at given tokens; a LossFn.

    Args:
        output: what the policy said of the candidates.
        batch: given answers, with the columns of `KeptCandidates.beside`.
        alpha: which divergence.
        rest: what becomes of tokens that are no candidates; as nobody knows who sampled the given
            ones, those that would be estimated from them count as one token.
    """
    logprobs = required(output.logprobs, "logprobs")
    nothing = torch.zeros_like(logprobs)
    loss, metrics = teacher_divergence(
        logprobs,
        nothing,
        nothing,
        batch.inputs.response_mask,
        batch.loss_weights,
        top_logprobs=required(output.top_logprobs, "top_logprobs"),
        teacher_top_logprobs=batch.inputs.columns[BY_TEACHER],
        teacher_logprobs=nothing,
        sampled_in_top=batch.inputs.response_mask,
        divergence_alpha=alpha,
        candidates_rest="tail_bucket" if rest == "sampled" else rest,
    )
    return loss, {"teacher/given_divergence": metrics["teacher/divergence"]}
