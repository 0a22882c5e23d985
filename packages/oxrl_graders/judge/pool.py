"""The reward `judge`: scores of a group from what a judge says of its members.

In a run its own pool asks, and keeps what was said.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oxrl.errors import RewardDefinitionError
from oxrl.rewards.builtin import BuiltIn
from oxrl.runs.waiting import Patience
from oxrl.types import Completions, Group, GroupScores, Named, Prompt, Score, Scores
from oxrl.usercode.user_code import MOST_REASON, capped
from oxrl_graders.formats import compiled, cosine_length_value
from oxrl_graders.judge.asking import Judge, Messages, Outcome
from oxrl_graders.judge.endpoint import JudgeError
from oxrl_graders.judge.options import JudgeOptions, refuse_secrets
from oxrl_graders.judge.questions import pairs_of_group, question, verdict_of
from oxrl_graders.judge.record import FILE, Judgements

NAME = "judge"


@dataclass(frozen=True)
class _Asked:
    """One question, and whom it is about.

    Args:
        first: place in the group of the response, or of A.
        second: of B; None where A is held against the row's answer, or stands alone.
        swapped: whether the place called `first` is B in the question.
        messages: for the judge; None where two texts are equal and nobody is asked.
    """

    first: int
    second: int | None
    swapped: bool
    messages: Messages | None


@dataclass(frozen=True)
class _Verdict:
    """The verdict of one question on one response: its worth, the judge's number and reason; or a
    failure.
    """

    worth: float = 0.0
    given: float = 0.0
    reason: str = ""
    failure: Score | None = None


class JudgePool(Judge):
    """Scores groups of completions by a judge. Used as `RewardPool` is, without processes.

    Args:
        options: fields of `JudgeOptions`.
        workers: at most so many questions at a time.
        timeout_s: seconds for each verdict, with every attempt.
        field: of the config, where the reward stands, for messages.
        directory: that verdicts are kept in, `judgements.jsonl`; None: nowhere.

    Raises:
        RewardDefinitionError: an option that cannot work.
    """

    # It is waited for.
    inline = False

    def __init__(
        self,
        options: Named,
        *,
        workers: int = 8,
        timeout_s: float = 60.0,
        field: str = "reward",
        directory: Path | None = None,
    ) -> None:
        self.name = NAME
        self.field = field
        try:
            judge = JudgeOptions(**options)
        except (TypeError, ValueError) as error:
            raise RewardDefinitionError(f"{field}.options: {NAME}: {error}") from None
        record = Judgements(None if directory is None else directory / FILE)
        super().__init__(judge, record, requests=workers, timeout_s=timeout_s)

    @property
    def pools(self) -> Sequence[JudgePool]:
        """Itself: the one reward."""
        return [self]

    def start(self, patience: Patience | None = None) -> None:
        """Look for the key. The judge itself is asked nothing: what is recorded needs none.

        Raises:
            RewardDefinitionError: the key is not in the environment.
        """
        self.endpoint()

    def rehearse(self, prompts: Sequence[Prompt], patience: Patience | None = None) -> None:
        """Do nothing: a verdict costs money, and says nothing of the next one."""

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score groups of completions; a failure of the judge never raises.

        Returns:
            One score per completion, in the order of the input: "timeout" where a verdict took too
            long, "error" where none came, "invalid" where a reply holds none.

        Raises:
            RewardDefinitionError: the key is not in the environment.
            Stopped: a signal asked to stop.
            DeadlineError: no verdict came for too long.
        """
        asked = [self._asked(prompt, [c.text for c in members]) for prompt, members in groups]
        messages: list[Messages] = []
        for questions in asked:
            messages += [one.messages for one in questions if one.messages is not None]
        outcomes = iter(self.ask(messages, patience or Patience()))
        found: Scores = []
        for (prompt, members), questions in zip(groups, asked, strict=True):
            verdicts: list[list[_Verdict]] = [[] for _ in members]
            for one in questions:
                outcome = None if one.messages is None else next(outcomes)
                self._enter(verdicts, one, outcome)
            scores = [_score(said, prompt, place) for place, said in enumerate(verdicts)]
            found.append(scores)
        return found

    def _asked(self, prompt: Prompt, texts: list[str]) -> list[_Asked]:
        """The questions about one group."""
        options = self.options
        if options.compare == "none":
            return [
                _Asked(place, None, False, question(options, prompt, text))
                for place, text in enumerate(texts)
            ]
        found: list[_Asked] = []
        if options.compare == "group":
            for first, second in pairs_of_group(texts, options.opponents):
                found += self._both_orders(prompt, first, second, (texts[first], texts[second]))
        elif isinstance(prompt.answer, str):
            for place, text in enumerate(texts):
                found += self._both_orders(prompt, place, None, (text, prompt.answer))
        return found

    def _both_orders(
        self, prompt: Prompt, first: int, second: int | None, texts: tuple[str, str]
    ) -> Iterator[_Asked]:
        """A question, and with `swap` the same with A and B exchanged."""
        for swapped in range(1 + self.options.swap):
            one, other = reversed(texts) if swapped else texts
            # Of equal ones nobody is asked, and a pair weighs as much as any other.
            asked = None if one == other else question(self.options, prompt, one, other)
            yield _Asked(first, second, bool(swapped), asked)

    def _enter(self, verdicts: list[list[_Verdict]], one: _Asked, outcome: Outcome | None) -> None:
        """Add what one question said to the responses it was about."""
        verdict = _Verdict(0.5, 0.5, "the same text")
        if outcome is not None:
            verdict = self._verdict(outcome)
        if one.swapped:
            verdict = _turned(verdict)
        verdicts[one.first].append(verdict)
        if one.second is not None:
            verdicts[one.second].append(_turned(verdict))

    def _verdict(self, outcome: Outcome) -> _Verdict:
        if isinstance(outcome, JudgeError):
            status = "error"
            problem = str(outcome)
            if outcome.late:
                status = "timeout"
                limit = f"no verdict within {self.field}.timeout_s={self._timeout_s:g} s"
                problem = f"{limit}: {outcome}"
        else:
            try:
                return _Verdict(*verdict_of(self.options, outcome.text))
            except ValueError as error:
                status = "invalid"
                problem = f"the judge's reply {error}: {outcome.text[-200:]!r}"
                if outcome.finish_reason == "length":
                    problem += f"; it was cut at max_tokens={self.options.max_tokens}: allow more"
        return _Verdict(failure=Score(value=None, status=status, reason=problem))


def _turned(verdict: _Verdict) -> _Verdict:
    """The same verdict, seen from the other one of the two."""
    if verdict.failure is not None:
        return verdict
    return _Verdict(1.0 - verdict.worth, 1.0 - verdict.given, verdict.reason)


def _score(verdicts: Sequence[_Verdict], prompt: Prompt, place: int) -> Score:
    """The mean of the verdicts on one response; a failure of one is a failure of all."""
    failures = [verdict.failure for verdict in verdicts if verdict.failure is not None]
    where = f"{NAME}, sample {place} of prompt {prompt.uid}"
    if failures:
        reason = capped(f"{where}: {failures[0].reason}", MOST_REASON)
        return replace(failures[0], reason=reason)
    if not verdicts:
        nothing = "nothing to compare it with: a group of one, or a row whose answer is no text"
        return Score(value=None, status="invalid", reason=f"{where}: {nothing}")
    given = statistics.fmean(verdict.given for verdict in verdicts)
    reason = capped("; ".join(filter(None, (v.reason for v in verdicts))), MOST_REASON)
    value = statistics.fmean(verdict.worth for verdict in verdicts)
    return Score(value=value, parts={"verdict": given}, reason=reason)


def score_judge(prompt: Prompt, completions: Completions, **options: Any) -> GroupScores:
    """`judge`: see `oxrl_graders.judge`.

    Args:
        prompt: what was asked.
        completions: the group, which a judge may be asked to compare.
        options: fields of `JudgeOptions`.

    Returns:
        One score for each completion, in order.

    Raises:
        RewardDefinitionError: an option that cannot work.
    """
    return JudgePool(options).score([(prompt, completions)])[0]


JUDGE = BuiltIn(
    score_judge,
    takes="group",
    # It costs money or time elsewhere.
    tried=False,
    passes_on=JudgeOptions,
    refuse=refuse_secrets,
    checks={
        "pattern": compiled,
        "max_tokens": lambda count: cosine_length_value(0, True, max_tokens=count),
    },
    together=JudgeOptions,
    pool=JudgePool,
)
