"""A teacher on vLLM in a process of its own, which ends with the run.

vLLM takes over its process, so it cannot be that of the run; see `oxrl.engines.sample.hosted`,
which starts such processes for samplers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from oxrl.engines.sample.hosted import HostProcess, ThisMachine
from oxrl.engines.sample.vllm import VllmEngine, VllmOptions
from oxrl.engines.sample.workers import EngineActor
from oxrl.errors import EngineError
from oxrl.runs.waiting import Patience, StopAsked
from oxrl.tables.watch import Deadlines
from oxrl.types import TokenIds
from oxrl_teachers.elsewhere import Answers, TeacherElsewhere, await_all, said_of

# Rows that are handed over at once, and that vLLM reads at the same time.
ROWS = 64
TOO_LONG = "they are as long as the model's context, or longer"
# Numbers of a row, as Said has them, in lists.
Told = tuple[list[float], list[list[int]], list[list[float]]]


class VllmScores(VllmEngine):
    """vLLM in this process, asked how likely given tokens are.

    Args:
        model: a folder, a hub name or `builtin:...`.
        options: of vLLM.
        only: tokens that share all probability; empty: all do.
    """

    def __init__(self, model: str, options: VllmOptions, only: Collection[int] = ()) -> None:
        super().__init__(model, options, only=only)
        self._found: dict[str, Any] = {}

    def told(self, rows: Sequence[TokenIds], k: int) -> list[Told | None]:
        """Say how likely the tokens of rows are.

        Args:
            rows: of tokens.
            k: of the most likely tokens before each.

        Returns:
            The numbers of each row; None of one that is longer than the model reads.
        """
        asked = {f"{place}": row for place, row in enumerate(rows) if len(row) < self.context}
        self._found = {}
        for name, row in asked.items():
            self._add(name, list(row), temperature=0.0, max_tokens=1, prompt_logprobs=k)
        while len(self._found) < len(asked):
            self._work()
        return [self._read(place, k) for place in map(str, range(len(rows)))]

    def _work(self) -> None:
        """Make one forward pass of vLLM's batch; see VllmEngine."""
        for output in self._engine.step():
            self._found[output.request_id] = output.prompt_logprobs

    def _read(self, name: str, k: int) -> Told | None:
        """Read vLLM's FlatLogprobs: at each place the row's own token, and behind it the others."""
        flat = self._found.get(name)
        if flat is None:
            return None
        starts = flat.start_indices[1:]  # of the first token nothing is said
        ids = [flat.token_ids[start + 1 : start + 1 + k] for start in starts]
        top = [flat.logprobs[start + 1 : start + 1 + k] for start in starts]
        return [flat.logprobs[start] for start in starts], ids, top


class VllmTeacher(TeacherElsewhere):
    """A Scorer, on vLLM in another process. Rows that are longer than it reads have no answer.

    Args:
        field, stop, deadline_s: as of TeacherElsewhere.
        process: that serves a VllmScores.
    """

    def __init__(
        self, field: str, process: HostProcess, *, stop: StopAsked, deadline_s: float
    ) -> None:
        super().__init__(field, stop=stop, deadline_s=deadline_s)
        self._process = process

    def ask(self, rows: Sequence[TokenIds], k: int) -> list[Future[Answers]]:
        """See TeacherElsewhere."""
        self.reason = TOO_LONG
        parts = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]
        return [self._process.calls.submit(self._said, part, k) for part in parts]

    def _said(self, rows: Sequence[TokenIds], k: int) -> Answers:
        """Ask the process, and wait.

        Raises:
            LostActorError: it died.
            EngineError: it says what are no log-probabilities.
        """
        answers: list[Told | None] = self._process.ask("call", (VllmScores.told, rows, k))
        try:
            return [None if told is None else said_of(*told, k=k) for told in answers]
        except ValueError as error:
            raise EngineError(f"{self.field}: vLLM {error}") from error


def vllm(
    field: str,
    asked: Mapping[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase,
    waits: Deadlines,
    stop: StopAsked,
    closing: Callable[[Callable[[], None]], object],
) -> VllmTeacher:
    """Start vLLM with a teacher in a process of its own.

    Args:
        field: of the config, "model.teachers.NAME".
        asked: what stands there, and of the run: `candidates`, how many are asked for at each
            token, `only`, the tokens that the policy may sample, empty: all, `max_model_len`, as
            vLLM has it, `directory`, `threads` and `trust_remote_code`.
        tokenizer: of the policy.
        waits: how long answers may take.
        stop: whether the run was asked to stop.
        closing: is told what ends it.

    Returns:
        The teacher.

    Raises:
        MissingExtraError: vLLM is not installed.
        EngineError: it does not start, or its process died.
    """
    log_file = f"vllm_{field.removeprefix('model.')}_{os.getpid()}.log"
    options = VllmOptions(
        log_file=str(asked["directory"] / log_file),
        dtype=asked["dtype"],
        max_rows=ROWS,
        trust_remote_code=asked["trust_remote_code"],
        revision=asked["revision"],
        max_model_len=asked["max_model_len"],
        further={
            "max_logprobs": max(asked["candidates"], 1),
            "enable_prefix_caching": False,
        },
    )
    machine = ThisMachine(asked["threads"])
    closing(machine.close)
    process = machine.start(EngineActor, None)
    build = partial(VllmScores, asked["name"], options, tuple(asked["only"]))
    built = process.build.remote(os.getcwd(), build)
    await_all([built], Patience(stop, waits.seconds["load"]), f"{field}: vLLM to start")
    built.result()
    return VllmTeacher(field, process, stop=stop, deadline_s=waits.seconds["rollout"])
