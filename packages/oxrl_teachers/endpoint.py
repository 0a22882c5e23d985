"""A teacher behind a server that speaks vLLM's API: asked about rows of token ids, many at a time.

A row is the prompt of a completion of one token, which nobody reads; what is read are the
log-probabilities of the prompt, `prompt_logprobs`. OpenAI's own API has none. Redirects are not
followed, and the key is in no message.

Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html, Completions API with
its extra parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any

from transformers import PreTrainedTokenizerBase

from oxrl.errors import ConfigError, EngineError
from oxrl.runs.waiting import StopAsked
from oxrl.tables.watch import Deadlines
from oxrl.types import TokenIds
from oxrl_graders.judge.endpoint import PASSING, Client, NoReplyError, key_of
from oxrl_teachers.elsewhere import Answers, Said, TeacherElsewhere, said_of

Json = dict[str, Any]
# Rows that the server has at the same time: it puts them into batches itself.
AT_ONCE = 16
# The longest that one row may take, with every attempt, in seconds: at most half of what the run
# waits for an answer, so that a row that never comes is left out before the run ends over it.
ROW_S = 120.0
# The longest reply that is read, in bytes.
MOST_REPLY = 1 << 28
# Rows whose answers are kept until somebody asks: nobody does of samples that are not trained on.
MOST_KEPT = 1 << 13
LACKS = (
    "answers without prompt_logprobs, which say how likely given tokens are: OpenAI's own API and "
    "others have none, and a server of vLLM's has"
)


class UnlikeError(Exception):
    """A server answers with something else than what was asked for, and would do so again."""


class EndpointTeacher(TeacherElsewhere):
    """A Scorer, on a server.

    Args:
        field, stop, deadline_s: as of TeacherElsewhere.
        client: of the server.
        model: its name there.
        k: candidates that a row is asked for while others are sampled.
    """

    def __init__(
        self, field: str, client: Client, model: str, k: int, *, stop: StopAsked, deadline_s: float
    ) -> None:
        super().__init__(field, stop=stop, deadline_s=deadline_s)
        self._client = client
        self._model = model
        self._k = k
        self._pool = ThreadPoolExecutor(AT_ONCE, "teacher")
        # What is or was asked: a row, and how many candidates.
        self._asked: dict[tuple[TokenIds, int], Future[Answers]] = {}
        # A row has failed with all its attempts, and none has been answered since.
        self._failing = False

    def ask(self, rows: Sequence[TokenIds], k: int) -> list[Future[Answers]]:
        """See TeacherElsewhere. A row that was begun is not asked about again."""
        futures = [self._future(row, k) for row in rows]
        for row in rows:
            self._asked.pop((row, k), None)
        return futures

    def begin(self, row: TokenIds) -> None:
        """Ask about a row that somebody will want to know of later.

        Args:
            row: its tokens.
        """
        self._future(row, self._k)

    def try_out(self, row: TokenIds) -> None:
        """Ask about a row before the run begins.

        Args:
            row: any tokens.

        Raises:
            ConfigError: the server cannot say what is needed, or refuses to.
            EngineError: it is not there.
        """
        try:
            self._said(row, self._k, retried=True)
        except (NoReplyError, UnlikeError) as error:
            kind = EngineError if _may_pass(error) else ConfigError
            advice = ""
            if "max allowed" in str(error):
                advice = f": start it with --max-logprobs {self._k}, or lower teacher_candidates"
            raise kind(f"{self.field}.url: {error}{advice}") from error

    def close(self) -> None:
        """Cut every connection, and ask nothing more."""
        self._client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _future(self, row: TokenIds, k: int) -> Future[Answers]:
        """Have a row asked about, unless it is already."""
        if (row, k) not in self._asked:
            if len(self._asked) == MOST_KEPT:
                del self._asked[next(iter(self._asked))]
            self._asked[row, k] = self._pool.submit(self._answer, row, k)
        return self._asked[row, k]

    def _answer(self, row: TokenIds, k: int) -> Answers:
        """Ask about a row; of a server that is gone every further one is asked once."""
        try:
            said = self._said(row, k, retried=not self._failing)
        except (NoReplyError, UnlikeError) as error:
            self._failing |= _may_pass(error)
            self.reason = self.reason or str(error)
            return [None]
        self._failing = False
        return [said]

    def _said(self, row: TokenIds, k: int, *, retried: bool) -> Said:
        """Ask the server.

        Raises:
            NoReplyError: it did not answer.
            UnlikeError: it answered with something else.
        """
        until = monotonic() + min(ROW_S, self.deadline_s / 2)
        question = {"model": self._model, "prompt": list(row), "prompt_logprobs": k}
        sampling = {"max_tokens": 1, "temperature": 1.0}
        found = self._client.ask("/completions", question | sampling, until, retried=retried)
        try:
            return read_reply(found, row, k)
        except ValueError as error:
            raise UnlikeError(f"the server at {self._client.url} {error}") from error


def _may_pass(error: Exception) -> bool:
    """True if a server is not there or overloaded, rather than of another opinion."""
    return isinstance(error, NoReplyError) and (not error.status or error.status in PASSING)


def read_reply(found: Json, row: TokenIds, k: int) -> Said:
    """Read what a server answered.

    Args:
        found: its answer.
        row: that it was asked about.
        k: candidates that it was asked for. The row's own token may be there beside them.

    Returns:
        The most likely ones of each place, whatever their order in the answer.

    Raises:
        ValueError: it is no answer to that.
    """
    try:
        entries = found["choices"][0]["prompt_logprobs"]
    except (KeyError, IndexError, TypeError):
        entries = None
    if not isinstance(entries, list):
        raise ValueError(LACKS)
    if len(entries) != len(row):
        raise ValueError(
            f"says something of {len(entries)} tokens, and was asked about {len(row)}: it adds "
            "some, or cuts them off"
        )
    known = [_entry(entry, row[place + 1], k) for place, entry in enumerate(entries[1:])]
    likeliest = [_likeliest(here, own, k) for here, own in zip(known, row[1:], strict=True)]
    return said_of(
        [here[own] for here, own in zip(known, row[1:], strict=True)],
        likeliest,
        [[here[token] for token in ids] for here, ids in zip(known, likeliest, strict=True)],
        k=k,
    )


def _entry(entry: Any, own: int, k: int) -> dict[int, float]:
    """Return the log-probabilities at a token, by id."""
    try:
        pairs = entry.items()
        known = {int(token): float(told["logprob"]) for token, told in pairs if token.isdecimal()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"says of token {own} of a row what cannot be read: {error!r}") from None
    if own not in known or len(known) < k:
        raise ValueError(
            f"gives {len(known)} candidates at token {own} of a row, and was asked for {k} and for "
            "the token itself"
        )
    return known


def _likeliest(known: Mapping[int, float], own: int, k: int) -> list[int]:
    """Return the ids of the most likely tokens.

    Which ones these are must not depend on the row's own token: where it is there beside them, it
    loses against one that is as likely.
    """
    beside = len(known) == k + 1
    ranked = sorted(known, key=lambda token: (-known[token], beside and token == own, token))
    return ranked[:k]


def endpoint(
    field: str,
    asked: Mapping[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase,
    waits: Deadlines,
    stop: StopAsked,
    closing: Callable[[Callable[[], None]], object],
) -> EndpointTeacher:
    """Build a teacher on a server, and try it.

    Args:
        field: of the config, "model.teachers.NAME".
        asked: what stands there, and of the run: `candidates`, how many are asked for at each
            token, and `only`, the tokens that the policy may sample, empty: all.
        tokenizer: of the policy.
        waits: how long answers may take.
        stop: whether the run was asked to stop.
        closing: is told what ends it.

    Returns:
        The teacher.

    Raises:
        ConfigError: it cannot say what is needed.
        EngineError: it is not there.
    """
    if asked["only"]:
        raise ConfigError(
            f"{field}.engine: the policy samples {len(asked['only'])} tokens alone, and a server "
            "compares all: set it to local or vllm"
        )
    try:
        key = key_of(asked["key_env"])
    except ValueError as error:
        raise ConfigError(f"{field}.key_env: {error}") from None
    teacher = EndpointTeacher(
        field,
        Client(asked["url"], key=key, most_bytes=MOST_REPLY),
        asked["name"],
        asked["candidates"],
        stop=stop,
        deadline_s=waits.seconds["rollout"],
    )
    closing(teacher.close)
    # With the last token of the vocabulary: who has fewer does not know it.
    ids = sorted(tokenizer.get_vocab().values())
    teacher.try_out((*ids[:3], ids[-1]))
    return teacher
