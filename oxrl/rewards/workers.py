"""Rewards in processes that can be killed: a hung, crashed or exiting sample costs that sample and
nothing else.

A pool starts its workers as `python -m oxrl.rewards.workers NAME`. Nothing here imports torch: they
start fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from oxrl.errors import RewardError
from oxrl.rewards.base import load_reward, locate, which
from oxrl.rewards.builtin import INLINE
from oxrl.types import Completion, Prompt, Score, Segment

# Loading a reward may import large libraries, so it gets longer than a sample.
START_TIMEOUT_S = 60.0


class _Worker:
    """One process that runs the reward. Used by one thread at a time, which waits while it
    works.
    """

    def __init__(self, name: str) -> None:
        paths = [*filter(None, sys.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "oxrl.rewards.workers", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self.late = False

    def ask(self, message: bytes, limit_s: float) -> bytes:
        """The line that the worker writes in reply to `message`; empty if it died or was killed
        after `limit_s`.
        """
        assert self.process.stdin is not None and self.process.stdout is not None

        def expire() -> None:
            self.late = True
            self._kill()  # which ends a blocked write or read below, whatever the reward is doing

        timer = threading.Timer(limit_s, expire)
        timer.start()
        try:
            self.process.stdin.write(message)
            self.process.stdin.flush()
            return self.process.stdout.readline()
        except BrokenPipeError:
            return b""
        finally:
            timer.cancel()
            timer.join()

    def end(self, patience_s: float = 0.0) -> str:
        """Kill the worker and every process it started; tells how it ended, by itself if within
        `patience_s`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self._kill()
        code = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):  # bytes that it will never read
                assert pipe is not None
                pipe.close()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _kill(self) -> None:
        # It has its own session, and so its own group; members may outlive their leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _end_all(workers: set[_Worker]) -> None:
    while workers:
        workers.pop().end()


class RewardPool:
    """Scores groups of completions with the reward called `name`.

    Each sample has `timeout_s` seconds (a reward of whole groups has that times the group's size).
    A late sample is killed and gets status "timeout"; a worker that dies gives status "error"; both
    are replaced and the others go on. Results come in the order of the input. Usable from any
    thread, one call at a time.

    Raises:
        RewardError: `name` is neither a built-in nor an existing "path.py:function".
    """

    def __init__(self, name: str, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(
                f"RewardPool needs workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}"
            )
        locate(name)
        self.name = name
        self._inline = load_reward(name) if name in INLINE else None
        self._size, self._timeout_s = workers, timeout_s
        self._per_sample: bool | None = None  # known once a worker has loaded the reward
        # One slot per process, the last used on top. None, or a worker that has died, is replaced
        # when it is needed.
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._slots.queue.extend([None] * workers)
        self._lock = threading.Lock()
        self._alive: set[_Worker] = set()
        self._finalizer = weakref.finalize(self, _end_all, self._alive)

    def start(self) -> None:
        """Start one worker and wait until it has loaded and dry-called the reward, so that a broken
        one fails now.

        Raises:
            RewardError: the reward cannot be loaded, or not within START_TIMEOUT_S.
        """
        with self._lock:
            if self._inline is None and self._per_sample is None:
                with self._worker():
                    pass

    def score(self, groups: Sequence[tuple[Prompt, list[Completion]]]) -> list[list[Score]]:
        """One score per completion, in order.

        Raises:
            RewardError: the reward cannot be loaded. What it does on a sample never raises: see
                `Score.status`.
        """
        if self._inline is not None:
            return [self._inline(prompt, completions) for prompt, completions in groups]
        self.start()
        with self._lock:
            # (prompt, completions, index of the first) of one call each.
            tasks = [(prompt, completions, 0) for prompt, completions in groups if completions]
            if self._per_sample:  # of a reward of single texts the worker is not sent the tokens
                texts = [
                    (prompt, [dataclasses.replace(c, segments=()) for c in group])
                    for prompt, group, _ in tasks
                ]
                tasks = [
                    (prompt, [text], index)
                    for prompt, group in texts
                    for index, text in enumerate(group)
                ]
            threads = ThreadPoolExecutor(self._size)
            try:
                scores = iter(
                    [score for scores in threads.map(self._run, tasks) for score in scores]
                )
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                _end_all(self._alive)  # what the threads wait for
                raise
            finally:
                threads.shutdown()
        return [[next(scores) for _ in completions] for _, completions in groups]

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        with self._lock:
            _end_all(self._alive)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[_Worker]:
        """A worker that has loaded the reward, which no other thread uses meanwhile."""
        worker = self._slots.get()
        try:
            if worker is not None and (worker.late or worker.process.poll() is not None):
                self._discard(worker)  # it died while idle: nobody's sample is to blame
                worker = None
            worker = worker or self._load()
            yield worker
        finally:
            self._slots.put(worker)

    def _load(self) -> _Worker:
        worker = _Worker(self.name)
        self._alive.add(worker)
        line = worker.ask(b"", START_TIMEOUT_S)
        message = json.loads(line) if line.endswith(b"\n") else {}
        if "per_sample" not in message:
            how = self._discard(worker, patience_s=1.0)
            late = f"not loaded within {START_TIMEOUT_S:g} s; what does it import?"
            problem = late if worker.late else f"its worker ended while loading it ({how})"
            raise RewardError(message.get("failed", f"reward.name={self.name}: {problem}"))
        self._per_sample = message["per_sample"]
        return worker

    def _run(self, task: tuple[Prompt, list[Completion], int]) -> list[Score]:
        prompt, completions, first = task
        limit_s = self._timeout_s * len(completions)
        message = {"prompt": prompt, "completions": completions, "first": first, "limit_s": limit_s}
        with self._worker() as worker:
            line = worker.ask(_encode(message), limit_s)
            try:
                scores = [Score(**fields) for fields in json.loads(line)["scores"]]
            except (ValueError, TypeError, KeyError):  # the worker died before the end of the line
                scores = []
            if len(scores) == len(completions):
                return scores
            problem = f"the worker process ended ({self._discard(worker, patience_s=1.0)})"
        if worker.late:
            problem = (
                f"no score within {limit_s:g} s (reward.timeout_s={self._timeout_s:g}); killed"
            )
        reason = f"{self.name}, {which(first, len(completions))} of prompt {prompt.uid}: {problem}"
        return [
            Score(value=None, status="timeout" if worker.late else "error", reason=reason)
        ] * len(completions)

    def _discard(self, worker: _Worker, patience_s: float = 0.0) -> str:
        self._alive.discard(worker)
        return worker.end(patience_s)


def _encode(message: Mapping[str, Any]) -> bytes:
    """One line of JSON; the objects of `oxrl.types` become mappings of their fields."""

    def plain(value: Any) -> dict[str, Any]:
        return dict(value) if isinstance(value, Mapping) else vars(value)

    return json.dumps(message, default=plain).encode() + b"\n"


def _tuples(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: tuple(value) if name in names else value for name, value in fields.items()}


def _completion(fields: Mapping[str, Any]) -> Completion:
    segments = [
        Segment(**_tuples(s, "token_ids", "logprobs", "versions", "images"))
        for s in fields["segments"]
    ]
    return Completion(
        segments=tuple(segments), text=fields["text"], finish_reason=fields["finish_reason"]
    )


def work(name: str) -> None:
    """A worker's whole life: tasks as lines of JSON from standard input, their scores to standard
    output.
    """
    # User code may print and may read standard input: give it neither of our pipes.
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(_encode(message))
        replies.flush()

    try:
        reward = load_reward(name)
    except RewardError as error:
        reply({"failed": str(error)})
        return
    reply({"per_sample": reward.per_sample})
    for line in tasks:
        task = json.loads(line)
        # The parent kills a late worker. Should the parent be dead, the kernel's alarm ends even a
        # hang inside C code.
        signal.setitimer(signal.ITIMER_REAL, 2 * task["limit_s"] + 5)
        prompt = Prompt(**_tuples(task["prompt"], "messages", "token_ids", "images"))
        scores = reward(
            prompt, [_completion(fields) for fields in task["completions"]], task["first"]
        )
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply({"scores": scores})


if __name__ == "__main__":
    work(sys.argv[1])
