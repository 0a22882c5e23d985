"""Teachers in another process: rows as they are shown them, and what comes back laid out."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxrl.runs.waiting import Patience, StopAsked
from oxrl.types import Output, TokenBatch, TokenIds, Want

log = logging.getLogger("oxrl.teachers")

TOP_K = "top_k="
# Stands for a probability of 0, whose logarithm no gradient may have; vLLM writes the same.
LEAST = -9999.0
# Rounding may make a probability of 1 a little more.
ALL = 1.001


class Said(NamedTuple):
    """The answer of a teacher on a row of T tokens, in nats; of the first nothing is said.

    logprobs: [T - 1] float32, of the row's own tokens. ids, top: [T - 1, K] int64 and float32, its
    most likely tokens before each, most likely first.
    """

    logprobs: Tensor
    ids: Tensor
    top: Tensor


# None: there will be none.
Answers = list[Said | None]


def said_of(
    logprobs: Sequence[float],
    ids: Iterable[Sequence[int]],
    top: Iterable[Sequence[float]],
    *,
    k: int,
) -> Said:
    """Return an answer as it can be learned from: no probability is exactly 0.

    Args:
        logprobs, ids, top: as of Said.
        k: most likely tokens at each place.

    Raises:
        ValueError: these are no log-probabilities.
    """
    own = torch.tensor(logprobs)
    theirs = torch.tensor([*top]).view(len(own), k)
    shares = torch.cat([own.exp(), theirs.exp().sum(1)])
    if not bool((shares <= ALL).all()):
        raise ValueError(
            f"says that tokens have {float(shares.max()):.4g} of all probability: these are no "
            "log-probabilities. A server of vLLM's gives some with --logprobs-mode raw_logprobs"
        )
    known = torch.tensor([*ids], dtype=torch.int64).view(len(own), k)
    return Said(own.clamp(min=LEAST), known, theirs.clamp(min=LEAST))


def await_all(futures: Iterable[Future[Any]], patience: Patience, what: str) -> None:
    """Wait until all are done.

    Args:
        futures: of answers.
        patience: how long to wait for the next one.
        what: is waited for.

    Raises:
        Stopped: a signal asked to stop.
        DeadlineError: nothing came for too long.
    """
    pending = {*futures}
    while pending:
        done, pending = wait(pending, timeout=patience.slice_s or 0.01)
        if done:
            patience.answered()
        patience.look(what)


class TeacherElsewhere(ABC):
    """A Scorer that asks another process.

    Args:
        field: of the config, where the teacher stands, for messages.
        stop: whether the run was asked to stop.
        deadline_s: longest wait for the next answer, in seconds.
    """

    # Why the first row since `forward` was asked last got no answer.
    reason = ""

    def __init__(self, field: str, *, stop: StopAsked, deadline_s: float) -> None:
        self.field = field
        self.deadline_s = deadline_s
        self._stop = stop

    @abstractmethod
    def ask(self, rows: Sequence[TokenIds], k: int) -> list[Future[Answers]]:
        """Have rows asked about; their answers, in the order of the rows.

        Args:
            rows: of tokens.
            k: candidates at each.
        """

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """See Scorer.

        Args:
            inputs: [B, T].
            want: "logprobs", and "top_k=<K>".

        Returns:
            NaN and id -1 in rows that were not answered.

        Raises:
            EngineError: the other process is gone.
            Stopped: a signal asked to stop.
            DeadlineError: no answer came for too long.
        """
        k = sum(int(name.removeprefix(TOP_K)) for name in want if name.startswith(TOP_K))
        pairs = zip(inputs.tokens, inputs.attention_mask, strict=True)
        rows = [tuple(tokens[real].tolist()) for tokens, real in pairs]
        futures = self.ask(rows, k)
        what = f"{self.field}: its answers on {len(rows)} rows. Is it there, and fast enough?"
        await_all(futures, Patience(self._stop, self.deadline_s), what)
        said = [answer for future in futures for answer in future.result()]
        failed = said.count(None)
        if failed:
            first = self.reason
            self.reason = ""
            log.warning("%s: no answer on %d of %d rows: %s", self.field, failed, len(rows), first)
        return laid_out(inputs, said, k)


def laid_out(inputs: TokenBatch, said: Answers, k: int) -> Output:
    """Put what was said of rows where their tokens are in the batch.

    Args:
        inputs: [B, T].
        said: of each row.
        k: of the most likely tokens.

    Returns:
        [B, T] and, where `k` is not 0, [B, T, K]: NaN and id -1 where nothing was said; 0 wherever
        `response_mask` is False.
    """
    mask = inputs.response_mask
    logprobs = torch.where(mask, float("nan"), 0.0)
    ids = torch.where(mask, -1, 0)[..., None].repeat(1, 1, k)
    top = logprobs[..., None].repeat(1, 1, k)
    known = [answer for answer in said if answer is not None]
    if known:
        # Where the answer on each row begins in all of them joined, less 1: on its first token
        # there is none.
        lengths = [0 if answer is None else len(answer.logprobs) for answer in said]
        begins = torch.tensor([0, *lengths]).cumsum(0)[:-1] - 1
        answered = torch.tensor(lengths) > 0
        rows, places = (mask & answered[:, None]).nonzero(as_tuple=True)
        found = begins[rows] + places
        logprobs[rows, places] = torch.cat([answer.logprobs for answer in known])[found]
        ids[rows, places] = torch.cat([answer.ids for answer in known])[found]
        top[rows, places] = torch.cat([answer.top for answer in known])[found]
    if not k:
        return Output(logprobs=logprobs)
    return Output(logprobs=logprobs, top_ids=ids, top_logprobs=top)
