"""Many questions to a judge at once, each answered from the record where it can be."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence

from oxrl.runs.files import Json
from oxrl.runs.waiting import LOOK_S, Patience
from oxrl.types import Metrics, Texts
from oxrl_graders.judge.endpoint import Endpoint, JudgeError
from oxrl_graders.judge.options import JudgeOptions
from oxrl_graders.judge.questions import schema
from oxrl_graders.judge.record import Judgements, Reply, content_key

Messages = list[Texts]
Outcome = Reply | JudgeError


class Judge:
    """Asks one judge, and remembers what it said.

    Args:
        options: how it is asked.
        judgements: what is recorded already, and is added to.
        requests: at most so many at a time.
        timeout_s: seconds for each question, with every attempt.
    """

    def __init__(
        self, options: JudgeOptions, judgements: Judgements, *, requests: int, timeout_s: float
    ) -> None:
        self.options = options
        self._judgements = judgements
        self._requests = requests
        self._timeout_s = timeout_s
        self._endpoint: Endpoint | None = None
        self._count_lock = threading.Lock()
        self._counts = {"questions": 0, "recorded": 0, "prompt_tokens": 0, "completion_tokens": 0}

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
            self._counts = dict.fromkeys(self._counts, 0)
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
            for name, number in more.items():
                self._counts[name] += number

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
                    key, outcome = done.get(timeout=min(patience.slice_s, LOOK_S) or 0.01)
                except queue.Empty:
                    patience.look(f"the judge at {endpoint.url}. Is it there, and fast enough?")
                    continue
                if not isinstance(outcome, Reply | JudgeError):
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
