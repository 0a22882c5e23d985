"""Environments in processes that can be killed: the parent's side.

One process loads the environment (`serve.py`); every episode is a fork of it with a socket of its
own, so that a hung or crashed episode costs only itself.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Sequence
from copy import copy
from typing import Literal, NamedTuple

from oxrl.data.actions import Action
from oxrl.data.messages import Tools
from oxrl.environments.serve import Episode, load
from oxrl.errors import EnvironmentDefinitionError
from oxrl.runs.waiting import Patience
from oxrl.tables.user_code import ENVIRONMENT
from oxrl.types import EpisodeEnd, Named, Prompt
from oxrl.usercode.environment_answers import as_messages, as_step
from oxrl.usercode.environments import Message, Step
from oxrl.usercode.given import FIELD, is_given, load_request
from oxrl.usercode.locate import locate
from oxrl.usercode.messages import Json, decode, encode
from oxrl.usercode.worker import (
    NOT_LOADED,
    START_TIMEOUT_S,
    Channel,
    LateReply,
    LostWorker,
    NotLoaded,
    Printed,
    SuspectWorker,
    Worker,
)

log = logging.getLogger(__name__)

# A fork, or the end of one.
FORK_TIMEOUT_S = 20.0
# Longest answer of an environment, in bytes.
MOST_ANSWER = 1 << 24


class LostEpisode(Exception):
    """The environment of an episode is of no use any more.

    end: `timeout` or `environment_error`.

    Args:
        end: what the episode's end is called.
        reason: what happened, for samples.jsonl.
    """

    def __init__(self, end: Literal["timeout", "environment_error"], reason: str) -> None:
        super().__init__(reason)
        self.end: EpisodeEnd = end


class Opening(NamedTuple):
    """The beginning of an episode: what the policy reads first, and JSON schemas of its tools."""

    messages: list[Message]
    tools: Tools


class EpisodeProcess:
    """One episode's instance of the environment, used by one thread at a time.

    Args:
        pid: of the process.
        channel: to it.
        worker: that it is a fork of.
        pool: that started it, and is told of its end.
    """

    # Whether the environment wants to be told of the end.
    closes = False
    # Whether another episode may begin where this one was.
    reusable = False

    def __init__(self, pid: int, channel: Channel, worker: Worker, pool: EnvironmentPool) -> None:
        self.pid = pid
        self.channel = channel
        self.worker = worker
        self._pool = pool

    def reset(self, prompt: Prompt, seed: int, patience: Patience) -> Opening:
        """Begin the episode.

        Args:
            prompt: the row of data.
            seed: of everything random.
            patience: how long to wait, and whom to ask whether to stop.

        Returns:
            What the policy reads first, and which tools it has.

        Raises:
            Stopped: a signal asked to stop.
        """
        reply = self._ask({"reset": prompt, "seed": seed}, "reset", patience)
        try:
            self.closes = bool(reply["closes"])
            self.reusable = bool(reply["reusable"])
            return Opening(as_messages(reply["messages"], "reset"), tuple(reply["tools"]))
        except (KeyError, TypeError, ValueError) as error:
            raise LostEpisode("environment_error", f"reset's reply is invalid: {error}") from error

    def step(
        self,
        text: str,
        patience: Patience,
        *,
        last: bool = False,
        actions: Sequence[Action] | None = None,
    ) -> Step:
        """Answer a turn.

        Args:
            text: of the turn.
            patience: how long to wait, and whom to ask whether to stop.
            last: a limit of the run ends the episode here, whatever the answer.
            actions: of the turn, where it is not text.

        Returns:
            What the environment answered, made sure of.

        Raises:
            Stopped: a signal asked to stop.
        """
        reply = self._ask({"step": text, "act": actions, "last": last}, "step", patience)
        del reply["id"]
        try:
            return as_step(reply)
        except (TypeError, ValueError) as error:
            raise LostEpisode("environment_error", f"step's reply is invalid: {error}") from error

    def finish(self) -> None:
        """Let the environment close, and end its process."""
        try:
            self._ask({"close": True}, "close", Patience())
        except LostEpisode as error:
            log.warning("%s: %s", self._pool.name, error)
        self.end()

    def end(self) -> int:
        """Kill it; twice is harmless.

        Returns:
            How it had ended: an exit code, or the negative number of a signal; 0 where unknown.
        """
        self.channel.close()
        return self._pool.end(self)

    def _ask(self, message: Json, call: str, patience: Patience) -> Json:
        limit_s = self._pool.timeout_s
        advice = "Raise run.deadlines.rollout, or see what it waits for"
        what = f"{self._pool.name} to answer {call}. {advice}"
        try:
            reply = self.channel.ask(message, limit_s, patience, what, most=MOST_ANSWER)
        except LateReply as error:
            limit = f"environment.timeout_s={limit_s:g}"
            reason = f"{call} did not return within {limit}; killed"
            raise LostEpisode("timeout", reason) from error
        except LostWorker as error:
            code = self.end()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            reason = f"the process ended in {call} ({how})"
            raise LostEpisode("environment_error", reason) from error
        except SuspectWorker as error:
            raise LostEpisode("environment_error", f"in {call} it {error}") from error
        if "failed" in reply:
            raise LostEpisode("environment_error", f"{call} raised {reply['failed']}")
        return reply


class EpisodeHere(EpisodeProcess):
    """An episode in this process, of an environment that cannot leave it; it cannot be killed.

    Args:
        pool: that it belongs to.
        episode: of this process, not begun.
    """

    def __init__(self, pool: EnvironmentPool, episode: Episode) -> None:
        self._pool = pool
        self._episode = episode

    def end(self) -> int:
        """Nothing has to be ended."""
        return 0

    def _ask(self, message: Json, call: str, patience: Patience) -> Json:
        # Through JSON as with a process, so that an environment sees the same.
        reply = self._episode.answer(decode(encode(message)))
        if "failed" in reply:
            raise LostEpisode("environment_error", f"{call} raised {reply['failed']}")
        return decode(encode({"id": 0} | reply))


class EnvironmentPool:
    """Starts episodes of one environment. Usable from any thread.

    Args:
        name: as of `find_environment`.
        options: keyword arguments of the environment's class.
        timeout_s: seconds for `reset`, and for each step.
        memory_mb: address space that an episode's process may take beyond what loading the
            environment took; 0: no limit.

    Raises:
        EnvironmentDefinitionError: `name` is neither a built-in nor an existing "path.py:Class".
    """

    def __init__(self, name: str, *, options: Named, timeout_s: float, memory_mb: int) -> None:
        locate(ENVIRONMENT, name)
        self.name = name
        self.timeout_s = timeout_s
        self._request = load_request(ENVIRONMENT, name, options)
        self._loaded_here: Episode | None = None
        self._memory_mb = memory_mb
        self._printed = Printed("an environment")
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._alive: set[EpisodeProcess] = set()
        # Processes of episodes that are over, for others.
        self._idle: list[EpisodeProcess] = []

    def start(self, prompt: Prompt, patience: Patience) -> Opening:
        """Load the environment and begin one episode, so that a broken one fails now.

        Args:
            prompt: the row of data to begin with, with seed 0.
            patience: how long to wait, and whom to ask whether to stop.

        Returns:
            What the environment said to that, as EpisodeProcess.reset.

        Raises:
            EnvironmentDefinitionError: that failed; says why.
            Stopped: a signal asked to stop.
        """
        try:
            episode = self.open(patience)
            try:
                return episode.reset(prompt, 0, patience)
            finally:
                episode.end()
        except LostEpisode as error:
            raise EnvironmentDefinitionError(
                f"environment.name={self.name}: on prompt {prompt.uid} {error}"
            ) from error

    def open(self, patience: Patience) -> EpisodeProcess:
        """Start the process of an episode, or take one that is over and can be used again.

        Args:
            patience: how long to wait, and whom to ask whether to stop.

        Returns:
            The process, in which nothing has begun.

        Raises:
            Stopped: a signal asked to stop.
        """
        # A class that cannot leave this process is used here.
        if is_given(self.name) and FIELD not in self._request:
            self._loaded_here = self._loaded_here or load(self._request)
            return EpisodeHere(self, copy(self._loaded_here))
        with self._lock:
            worker = self._loaded(patience)
            if self._idle:
                return self._idle.pop()
            ours, theirs = socket.socketpair()
            what = f"a process for an episode of {self.name}"
            message = {"memory_mb": self._memory_mb}
            try:
                with theirs:
                    reply = worker.channel.ask(
                        message, FORK_TIMEOUT_S, patience, what, hand_over=theirs
                    )
            except (LateReply, LostWorker, SuspectWorker) as error:
                ours.close()
                how = self._drop(worker)
                reason = f"no process for an episode could be started ({how})"
                raise LostEpisode("environment_error", reason) from error
            except BaseException:  # a signal to stop
                ours.close()
                raise
            process = EpisodeProcess(int(reply["pid"]), Channel(ours), worker, self)
            self._alive.add(process)
            process.channel.read_too(worker.output, worker.read_output)
            return process

    def keep(self, process: EpisodeProcess) -> None:
        """Keep the process of an episode that is over, for another one to begin there.

        Args:
            process: whose environment promises to be `reusable`; not used any more by the caller.
        """
        with self._lock:
            if process in self._alive and process.worker is self._worker:
                self._idle.append(process)

    def end(self, process: EpisodeProcess) -> int:
        """End the process of an episode; see EpisodeProcess.end.

        Args:
            process: of the episode.

        Returns:
            How it had ended; 0 where nothing is known of that any more.
        """
        with self._lock:
            known = process in self._alive
            self._alive.discard(process)
            if not known or process.worker is not self._worker:
                return 0
            what = f"the end of an episode of {self.name}"
            message = {"end": process.pid}
            try:
                reply = process.worker.channel.ask(message, FORK_TIMEOUT_S, Patience(), what)
            except (LateReply, LostWorker, SuspectWorker):
                self._drop(process.worker)
                return 0
            return int(reply["code"])

    def close(self) -> None:
        """Kill every process, while nothing waits for one. A later `open` starts new ones."""
        with self._lock:
            if self._worker is not None:
                self._drop(self._worker)
            for process in self._alive:
                process.channel.close()
            self._alive.clear()
            self._printed.finish()

    def _loaded(self, patience: Patience) -> Worker:
        """The process that has loaded the environment, started anew where it has died."""
        if self._worker is not None and self._worker.usable:
            return self._worker
        if self._worker is not None:
            self._drop(self._worker)
        worker = Worker("oxrl.environments.serve", self._printed)
        try:
            self._load(worker, patience)
        except BaseException:
            worker.end()
            raise
        self._worker = worker
        return worker

    def _load(self, worker: Worker, patience: Patience) -> None:
        """Have a process load the environment."""
        try:
            reply = worker.load(
                self._request,
                START_TIMEOUT_S,
                patience,
                f"{self.name} to be loaded",
                called="its process",
                late=NOT_LOADED,
            )
        except NotLoaded as error:
            raise ENVIRONMENT.problem(self.name, str(error)) from error
        if "failed" in reply:
            raise EnvironmentDefinitionError(str(reply["failed"]))

    def _drop(self, worker: Worker) -> str:
        """Kill a worker and its episodes."""
        self._worker = None
        self._idle.clear()
        return worker.end()
