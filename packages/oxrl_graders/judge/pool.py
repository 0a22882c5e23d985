"""The reward `judge`: scores of a group from what a judge says of its members.

In a run its own pool asks, and keeps what was said.
"""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oxrl.errors import RewardDefinitionError
from oxrl.rewards.builtin import BuiltIn
from oxrl.runs.files import Json
from oxrl.runs.waiting import Patience
from oxrl.types import Completions, Group, GroupScores, Metrics, Named, Prompt, Score, Scores
from oxrl.usercode.user_code import MOST_REASON, capped
from oxrl_graders.formats import compiled, cosine_length_value
from oxrl_graders.judge.endpoint import Endpoint, NoReplyError
from oxrl_graders.judge.options import JudgeOptions, refuse_secrets
from oxrl_graders.judge.questions import pairs_of_group, question, schema, verdict_of
from oxrl_graders.judge.record import FILE, Judgements, Reply, content_key

NAME = "judge"
Messages = list[dict[str, str]]
Outcome = Reply | NoReplyError


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


class JudgePool:
    """Scores groups of completions by a judge, many questions at once, each answered from the
    record where it can be. Used as `RewardPool` is, without processes.

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
            self.options = JudgeOptions(**options)
        except (TypeError, ValueError) as error:
            raise RewardDefinitionError(f"{field}.options: {NAME}: {error}") from None
        self._judgements = Judgements(None if directory is None else directory / FILE)
        self._requests = workers
        self._timeout_s = timeout_s
        self._endpoint: Endpoint | None = None
        self._count_lock = threading.Lock()
        self._counts = Counter(questions=0, recorded=0, prompt_tokens=0, completion_tokens=0)

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
                verdict = _Verdict(0.5, 0.5, "the same text")
                if one.messages is not None:
                    verdict = self._verdict(next(outcomes))
                if one.swapped:
                    verdict = _turned(verdict)
                verdicts[one.first].append(verdict)
                if one.second is not None:
                    verdicts[one.second].append(_turned(verdict))
            scores = [_score(said, prompt, place) for place, said in enumerate(verdicts)]
            found.append(scores)
        return found

    def endpoint(self) -> Endpoint:
        """Return what sends the requests.

        Raises:
            RewardDefinitionError: the key is not in the environment.
        """
        if self._endpoint is None:
            key = self.options.key()
            self._endpoint = Endpoint(self.options.url, key=key, retries=self.options.retries)
        return self._endpoint

    def unreachable(self, timeout_s: float = 5.0) -> str:
        """Ask the endpoint whether it is there; nothing is paid for that.

        Args:
            timeout_s: seconds to wait for an answer.

        Returns:
            Why nobody answers, in words; empty if somebody does.
        """
        return self.endpoint().look(timeout_s)

    def counters(self) -> Metrics:
        """`system/judge/<name>` since the last call: questions, those of them that were recorded,
        requests, requests that were sent again, and tokens.
        """
        with self._count_lock:
            found = {**self._counts, "requests": 0, "retried": 0}
            self._counts = Counter(dict.fromkeys(self._counts, 0))
        endpoint = self._endpoint
        if endpoint is not None:
            found |= {"requests": endpoint.requests, "retried": endpoint.retried}
            endpoint.requests = endpoint.retried = 0
        return {f"system/judge/{name}": float(number) for name, number in found.items()}

    def ask(self, asked: Sequence[Messages], patience: Patience) -> list[Outcome]:
        """Put questions to the judge; the same one twice is put once.

        Args:
            asked: messages of each question.
            patience: how long to wait for the next reply.

        Returns:
            A reply for each question, or why there is none.

        Raises:
            RewardDefinitionError: the key is not in the environment.
            RunDirectoryError: the record is damaged.
            Stopped: a signal asked to stop.
            DeadlineError: no reply came for too long.
        """
        questions = [self._question(messages) for messages in asked]
        keys = list(map(content_key, questions))
        by_key = dict(zip(keys, questions, strict=True))
        known = {key: self._judgements.find(key) for key in by_key}
        missing = {key: by_key[key] for key in by_key if known[key] is None}
        self._count(questions=len(keys), recorded=sum(key not in missing for key in keys))
        answers = self._answers(missing, patience) if missing else {}
        return [known[key] or answers[key] for key in keys]

    def close(self) -> None:
        """Cut every connection."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

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

    def _verdict(self, outcome: Outcome) -> _Verdict:
        if isinstance(outcome, NoReplyError):
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

    def _question(self, messages: Messages) -> Json:
        return {
            "model": self.options.model,
            "messages": messages,
            "temperature": self.options.temperature,
            "max_tokens": self.options.max_tokens,
            "seed": self.options.seed,
        }

    def _count(self, **more: int) -> None:
        with self._count_lock:
            self._counts.update(more)

    def _answers(self, missing: dict[str, Json], patience: Patience) -> dict[str, Outcome]:
        """The outcome of every question, by key.

        The threads are daemons: one that hangs where nothing can be cut, in a look-up of a name
        say, keeps nobody from leaving.
        """
        endpoint = self.endpoint()
        # Taken from by all threads at once.
        waiting = list(reversed(missing))
        done: queue.SimpleQueue[tuple[str, Outcome | BaseException]] = queue.SimpleQueue()

        def work() -> None:
            with contextlib.suppress(IndexError):
                while True:
                    key = waiting.pop()
                    done.put((key, self._outcome(endpoint, key, missing[key])))

        for _ in range(min(self._requests, len(missing))):
            threading.Thread(target=work, name="judge", daemon=True).start()
        found: dict[str, Outcome] = {}
        try:
            while len(found) < len(missing):
                try:
                    key, outcome = done.get(timeout=patience.slice_s or 0.01)
                except queue.Empty:
                    patience.look(f"the judge at {endpoint.url}. Is it there, and fast enough?")
                    continue
                if not isinstance(outcome, Reply | NoReplyError):
                    raise outcome
                patience.answered()
                found[key] = outcome
        except BaseException:
            waiting.clear()
            self.close()
            raise
        return found

    def _outcome(self, endpoint: Endpoint, key: str, question: Json) -> Outcome | BaseException:
        """A reply that is recorded already; why there is none; or what went wrong here."""
        form = None
        if self.options.constrained and self.options.verdict == "json":
            form = schema(self.options)
        try:
            reply = endpoint.complete(question, form, time.monotonic() + self._timeout_s)
            self._count(
                prompt_tokens=reply.prompt_tokens, completion_tokens=reply.completion_tokens
            )
            return self._judgements.add(key, reply)
        except BaseException as error:  # noqa: BLE001 - a full disk, say: raised where it is waited for
            return error


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
