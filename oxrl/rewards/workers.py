"""Rewards in processes that can be killed: a hung, crashed or exiting sample costs that sample and nothing else."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from oxrl.errors import RewardError
from oxrl.rewards.base import BUILTINS, INLINE, load_reward, locate
from oxrl.rewards.worker import decode_scores, encode_task
from oxrl.types import Completion, Prompt, Score, ScoreStatus

# Loading a reward may import large libraries, so it gets longer than a sample.
START_TIMEOUT_S = 60.0
_CHUNK = 1 << 16


@dataclass
class _Task:
    """Completions scored by one call: one of them, or the whole group if the reward wants it whole."""

    group: int
    first: int
    prompt: Prompt
    completions: list[Completion]
    limit_s: float

    def failed(self, status: ScoreStatus, name: str, problem: str) -> list[Score]:
        last = self.first + len(self.completions) - 1
        where = f"sample {self.first}" if last == self.first else f"samples {self.first} to {last}"
        reason = f"{name}, {where} of prompt {self.prompt.uid}: {problem}"
        return [Score(value=None, status=status, reason=reason)] * len(self.completions)


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    task: _Task | None = None
    outgoing: bytes = b""
    incoming: bytearray = field(default_factory=bytearray)

    @property
    def busy(self) -> bool:
        return not self.ready or self.task is not None

    @property
    def pipes(self) -> tuple[int, int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin.fileno(), self.process.stdout.fileno()

    def kill(self) -> int:
        """End the worker and every process it started; returns its exit code."""
        try:
            # It has its own session, and so its own group; members may outlive their leader.
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return code


class RewardPool:
    """Scores groups of completions with the reward called `name`.

    Each sample has `timeout_s` seconds (a reward of whole groups has that times the group's size). A late sample is
    killed and gets status "timeout"; a worker that dies gives status "error"; both are replaced and the others go on.
    Results come in the order of the input. Usable from any thread, one call at a time.

    Args:
        name: as for `load_reward`.
        workers: processes; each imports the reward for itself.
        timeout_s: seconds per sample.

    Raises:
        RewardError: `name` is neither a built-in nor an existing "path.py:function".
    """

    def __init__(self, name: str, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"RewardPool needs workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}")
        if name not in BUILTINS:
            locate(name)
        self.name = name
        self._inline = load_reward(name) if name in INLINE else None
        self._size = workers
        self._timeout_s = timeout_s
        self._per_sample = True
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def start(self) -> None:
        """Start one worker and wait until it has loaded and dry-called the reward, so that a broken one fails now.

        Raises:
            RewardError: the reward cannot be loaded, or not within START_TIMEOUT_S.
        """
        with self._lock:
            if self._inline is None:
                self._exchange(deque(), [])

    def score(self, groups: Sequence[tuple[Prompt, list[Completion]]]) -> list[list[Score]]:
        """One score per completion, in order.

        Raises:
            RewardError: the reward cannot be loaded. What it does on a sample never raises: see `Score.status`.
        """
        if self._inline is not None:
            return [self._inline(prompt, completions) for prompt, completions in groups]
        with self._lock:
            if not any(worker.ready for worker in self._workers):
                self._exchange(deque(), [])  # learn whether the reward takes samples or groups
            results: list[list[Score | None]] = [[None] * len(completions) for _, completions in groups]
            self._exchange(self._tasks(groups), results)
        return [[score for score in group if score is not None] for group in results]

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        with self._lock:
            _kill_all(self._workers)

    def _tasks(self, groups: Sequence[tuple[Prompt, list[Completion]]]) -> deque[_Task]:
        limit_s = self._timeout_s
        tasks: deque[_Task] = deque()
        for group, (prompt, completions) in enumerate(groups):
            if self._per_sample:
                tasks.extend(_Task(group, i, prompt, [c], limit_s) for i, c in enumerate(completions))
            elif completions:
                tasks.append(_Task(group, 0, prompt, completions, limit_s * len(completions)))
        return tasks

    def _exchange(self, tasks: deque[_Task], results: list[list[Score | None]]) -> None:
        """Run `tasks` to the end, writing into `results`; without tasks, wait until one worker is ready."""
        wanted = max(1, min(self._size, len(tasks)))

        def ready() -> bool:
            return any(worker.ready for worker in self._workers)

        try:
            while tasks or any(worker.task for worker in self._workers) or not (results or ready()):
                for worker in [w for w in self._workers if not w.busy and w.process.poll() is not None]:
                    self._discard(worker)  # it died while idle: nobody's sample is to blame
                while len(self._workers) < wanted and (tasks or not self._workers):
                    self._workers.append(self._spawn())
                for worker in self._workers:
                    if tasks and not worker.busy:
                        self._send(worker, tasks.popleft())
                for worker in self._wait():
                    self._read(worker, results)
        finally:
            # After an exception: a reply to a question nobody asks any more must not answer the next one.
            for worker in [worker for worker in self._workers if worker.task is not None]:
                self._discard(worker)

    def _spawn(self) -> _Worker:
        paths = [*filter(None, sys.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "oxrl.rewards.worker", self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        worker = _Worker(process, deadline=time.monotonic() + START_TIMEOUT_S)
        for pipe in worker.pipes:
            os.set_blocking(pipe, False)
        return worker

    def _send(self, worker: _Worker, task: _Task) -> None:
        worker.task = task
        worker.deadline = time.monotonic() + task.limit_s
        worker.outgoing = encode_task(
            task.prompt, task.completions, first=task.first, limit_s=task.limit_s, texts_only=self._per_sample
        )

    def _wait(self) -> list[_Worker]:
        """Move bytes until a busy worker has sent something, died or run out of time; returns those workers."""
        busy = [worker for worker in self._workers if worker.busy]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                stdin, stdout = worker.pipes
                selector.register(stdout, selectors.EVENT_READ, worker)
                if worker.outgoing:
                    selector.register(stdin, selectors.EVENT_WRITE, worker)
            events = selector.select(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))
        touched = {id(key.data): key.data for key, mask in events if mask & selectors.EVENT_READ}
        for key, mask in events:
            if mask & selectors.EVENT_WRITE:
                try:
                    key.data.outgoing = key.data.outgoing[os.write(key.fd, key.data.outgoing[:_CHUNK]) :]
                except BrokenPipeError:
                    key.data.outgoing = b""  # it is dead: the end of its output says so
        now = time.monotonic()
        touched.update({id(worker): worker for worker in busy if worker.deadline <= now})
        return list(touched.values())

    def _read(self, worker: _Worker, results: list[list[Score | None]]) -> None:
        try:
            chunk = os.read(worker.pipes[1], _CHUNK)
        except BlockingIOError:
            if worker.deadline <= time.monotonic():
                self._expire(worker, results)
            return
        worker.incoming += chunk
        if b"\n" in worker.incoming:
            line, _, rest = bytes(worker.incoming).partition(b"\n")
            worker.incoming = bytearray(rest)
            self._receive(worker, line, results)
        elif not chunk:
            self._bury(worker, results)

    def _receive(self, worker: _Worker, line: bytes, results: list[list[Score | None]]) -> None:
        if not worker.ready:
            message = json.loads(line)
            if "failed" in message:
                self._discard(worker)
                raise RewardError(message["failed"])
            self._per_sample, worker.ready = message["per_sample"], True
            return
        task = worker.task
        assert task is not None
        try:
            scores = decode_scores(line)
            assert len(scores) == len(task.completions)
        except (ValueError, TypeError, KeyError, AssertionError):
            scores = task.failed("error", self.name, f"the worker wrote no scores but {line[:80]!r}")
            self._discard(worker)
        worker.task = None
        self._store(task, scores, results)

    def _expire(self, worker: _Worker, results: list[list[Score | None]]) -> None:
        self._discard(worker)
        if worker.task is None:
            raise RewardError(f"reward.name={self.name}: not loaded within {START_TIMEOUT_S:g} s; what does it import?")
        problem = f"no score within {worker.task.limit_s:g} s (reward.timeout_s={self._timeout_s:g}); killed"
        self._store(worker.task, worker.task.failed("timeout", self.name, problem), results)

    def _bury(self, worker: _Worker, results: list[list[Score | None]]) -> None:
        try:
            worker.process.wait(1.0)  # its pipe is closed: it is exiting, and the exit code is worth a moment
        except subprocess.TimeoutExpired:
            pass
        code = self._discard(worker)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if worker.task is None:
            raise RewardError(f"reward.name={self.name}: its worker ended while loading it ({how})")
        self._store(worker.task, worker.task.failed("error", self.name, f"the worker process ended ({how})"), results)

    def _store(self, task: _Task, scores: list[Score], results: list[list[Score | None]]) -> None:
        results[task.group][task.first : task.first + len(scores)] = scores

    def _discard(self, worker: _Worker) -> int:
        self._workers.remove(worker)
        return worker.kill()


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()
