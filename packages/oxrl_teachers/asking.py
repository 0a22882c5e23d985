"""Every row of a step is shown to its own teacher, by the source of its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from oxrl.engines.sample import Finished
from oxrl.engines.train import TrainEngine
from oxrl.errors import DataError, EngineError, required
from oxrl.recipes.features.base import Feature, FeatureInputs, Hint, Prepared, Teacher
from oxrl.recipes.session import RolloutProgress
from oxrl.types import (
    Metrics,
    Output,
    PolicyBatch,
    Rollout,
    RolloutBatch,
    Rollouts,
    TokenIds,
    Want,
)
from oxrl_teachers.hints import HintedRows

# The column of recorded batches, in nats.
TEACHER_LOGPROBS = "teacher_logprobs"
# More rows of a step without a teacher's answer end the run; those that are shown to none do not.
MOST_UNANSWERED = 0.5
# Of samples, those of such rows.
DROPPED = "dropped_teacher"


@runtime_checkable
class AsksEarly(Protocol):
    """A Scorer elsewhere, which answers on a row while others are sampled."""

    def begin(self, row: TokenIds) -> None:
        """Ask about a row that somebody will want to know of later."""
        ...


class AsksTeachers(Feature):
    """The base of what learns from teachers.

    A row that its teacher did not answer, or that lacks what its template reads, is not trained on,
    and counted: no number stands for what was not said.

    Args:
        given: what the run is made of.
    """

    def __init__(self, given: FeatureInputs) -> None:
        self.teachers = given.teachers
        self._by_source = sources_of(given.teachers)
        tokenizer = required(given.tokenizer, "a tokenizer")
        self._hinted = {
            name: HintedRows(name, teacher.hint, tokenizer)
            for name, teacher in given.teachers.items()
            if teacher.hint is not None
        }
        self._vocabulary = len(tokenizer)
        self._rollouts: Rollouts = []
        self._said = torch.zeros(0, 0)
        self._unanswered = torch.zeros(0, dtype=torch.bool)
        self._policy = given.policy
        self._early = {
            name: teacher.scorer
            for name, teacher in given.teachers.items()
            if isinstance(teacher.scorer, AsksEarly) and teacher.hint is None
        }
        if self._early and not given.plays:  # rows of episodes are known when they are laid out
            self.heard = self._begin

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to training ranks with the policy's loss, in which it has no part."""
        return {}

    def on_sampled(self, rollouts: Rollouts) -> None:
        """Keep what the rows of the step were made of."""
        self._rollouts = rollouts
        for hinted in self._hinted.values():
            hinted.take(rollouts)

    def _begin(self, finished: Finished) -> None:
        """Have a response scored meanwhile, where its teacher can do that."""
        prompt = finished.request.prompt
        scorer = self._early.get(self._named(prompt.source) or "")
        if scorer is not None:
            scorer.begin(prompt.token_ids + finished.completion.token_ids)

    def _named(self, source: str) -> str | None:
        return self._by_source.get(source) or self._by_source.get(None)

    def ask(self, rollouts: RolloutBatch, want: Want) -> Output:
        """Show rows to their teachers.

        Args:
            rollouts: B rows of the step that `on_sampled` saw.
            want: "logprobs", and "top_k=<K>".

        Returns:
            On the CPU, [B, T] and [B, T, K]: NaN and id -1 where nothing was said.

        Raises:
            DataError: no teacher is there for the source of a row.
            EngineError: more than half of the rows that were shown were not answered.
        """
        places = required(rollouts.places, "places").tolist()
        names = [self.teacher_of(self._rollouts[place]) for place in places]
        answers = Answers(rollouts.inputs.tokens.shape, want)
        shown = torch.ones(len(names), dtype=torch.bool)
        for name, teacher in self.teachers.items():
            rows = torch.tensor([row for row, own in enumerate(names) if own == name])
            if not len(rows):
                continue
            if name in self._hinted:
                asked = [places[row] for row in rows.tolist()]
                own = rollouts.select(rows)
                said, shown[rows] = self._hinted[name].ask(teacher.scorer, asked, own, want)
            else:
                said = rollouts.select(rows).inputs.said_by(teacher.scorer.forward, want)
            answers.put(rows, known_tokens(said, self._vocabulary))
        mask = rollouts.inputs.response_mask
        self._said = answers.logprobs.masked_fill(~mask, 0.0)
        self._unanswered = (answers.logprobs.isnan() & mask).any(1)
        lost = int((self._unanswered & shown).sum())
        if lost > MOST_UNANSWERED * int(shown.sum()):
            raise EngineError(
                f"model.teachers: {lost} of {int(shown.sum())} rows of a step have no answer of "
                "their teacher, and at most half may: see the log for the first one"
            )
        return answers.output()

    def teacher_of(self, rollout: Rollout) -> str:
        """Name the teacher of a row.

        Args:
            rollout: a sample of the step.

        Raises:
            DataError: there is none.
        """
        source = rollout.prompt.source
        name = self._named(source)
        if name is None:
            known = ", ".join(sorted(filter(None, self._by_source)))
            raise DataError(
                f"model.teachers: a row's source is {source!r}, which no teacher names; they name "
                f"{known}. Add it to one, or leave sources out of one, which then has all others"
            )
        return name

    def on_prepared(self, batch: PolicyBatch, prepared: Prepared) -> PolicyBatch:
        """Leave rows without an answer out of the update; keep the others for the record."""
        inputs = batch.inputs
        mask = inputs.response_mask & ~self._unanswered[:, None]
        columns = {**inputs.columns, TEACHER_LOGPROBS: self._said}
        return replace(batch, inputs=replace(inputs, response_mask=mask, columns=columns))

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Count rows without an answer: they are dropped, and the loop took them for trained."""
        left_out = int(self._unanswered.sum())
        counts = progress.samples
        counts["trained"] = counts.get("trained", 0) - left_out
        counts[DROPPED] = counts.get(DROPPED, 0) + left_out
        return {"teacher/left_out": float(left_out)}

    def after_updates(self, before: int, step: int) -> None:
        """Let teachers follow the policy that are averages of it."""
        for teacher in self.teachers.values():
            if teacher.hint is not None and teacher.hint.follows:
                follow(cast("TrainEngine", teacher.scorer), self._policy, teacher.hint)


def follow(teacher: TrainEngine, policy: TrainEngine, hint: Hint) -> None:
    """Move an averaged teacher towards the policy.

        teacher = follows * policy + (1 - follows) * teacher

    Args:
        teacher: a copy of the policy without adapter, in float32.
        policy: as it computes.
        hint: of the teacher; how far, and which weights of the policy are the teacher's.

    Source: mean teachers, arXiv:1703.01780; of the policy itself SDPO, arXiv:2601.20802.
    """
    held_weights = chain.from_iterable(teacher.weights())
    pairs = zip(held_weights, chain.from_iterable(policy.weights(hint.part)), strict=True)
    teacher.set_weights(
        (name, held.lerp(current.to(held), hint.follows)) for (name, held), (_, current) in pairs
    )


def known_tokens(said: Output, vocabulary: int) -> Output:
    """Leave out candidates that are no tokens of the vocabulary.

    Args:
        said: by a teacher.
        vocabulary: tokens of the policy's tokenizer.

    Returns:
        The same, with id -1 and NaN in place of these.

    Raises:
        EngineError: one of them has probability.
    """
    ids, logprobs = said.top_ids, said.top_logprobs
    if ids is None or logprobs is None:
        return said
    beyond = ids >= vocabulary
    mass = float(torch.where(beyond, logprobs.exp(), 0.0).sum(-1).max()) if ids.numel() else 0.0
    if mass > 1e-6:
        raise EngineError(
            f"model.teachers: a teacher gives {mass:.3g} of its probability to tokens that the "
            f"policy's tokenizer has not, ids from {vocabulary} on: take one of the same family"
        )
    return replace(
        said,
        top_ids=ids.masked_fill(beyond, -1),
        top_logprobs=logprobs.masked_fill(beyond, float("nan")),
    )


def sources_of(teachers: Mapping[str, Teacher]) -> dict[str | None, str]:
    """Map each source to the name of its teacher; None to that of all sources that none names.

    Args:
        teachers: by name.
    """
    found: dict[str | None, str] = {}
    for name, teacher in teachers.items():
        found |= dict.fromkeys(teacher.sources, name) if teacher.sources else {None: name}
    return found


class Answers:
    """The answers of several teachers, put together.

    Args:
        shape: B rows, T tokens.
        want: what is asked.
    """

    def __init__(self, shape: torch.Size, want: Want) -> None:
        asked = [int(field.partition("=")[2]) for field in want if field.startswith("top_k=")]
        nothing = float("nan")
        self.logprobs = torch.full(shape, nothing)
        self._ids: Tensor | None = None
        self._top: Tensor | None = None
        if asked:
            self._ids = torch.full((*shape, asked[0]), -1)
            self._top = torch.full((*shape, asked[0]), nothing)

    def put(self, rows: Tensor, said: Output) -> None:
        """Take in what a teacher said.

        Args:
            rows: [N] int64, of which.
            said: [N, T], [N, T, K].
        """
        length = required(said.logprobs, "logprobs").shape[1]
        self.logprobs[rows, :length] = required(said.logprobs, "logprobs").float()
        if self._ids is not None and self._top is not None:
            self._ids[rows, :length] = required(said.top_ids, "candidates")
            self._top[rows, :length] = required(said.top_logprobs, "their logprobs").float()

    def output(self) -> Output:
        """Return what was said of all rows."""
        return Output(logprobs=self.logprobs, top_ids=self._ids, top_logprobs=self._top)
