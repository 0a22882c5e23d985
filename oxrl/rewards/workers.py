"""Rewards in processes that can be killed: a hung or crashed sample costs only itself.

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
from oxrl.rewards.base import load_reward, locate, sample_range
from oxrl.rewards.builtin import INLINE
from oxrl.types import Completion, Prompt, Score, ScoreStatus, Segment

# Loading a reward may import large libraries, so it gets longer than a sample.
START_TIMEOUT_S = 60.0
# A worker that ended its replies in the middle gets this long to tell by what.
LAST_WORDS_S = 1.0

Group = tuple[Prompt, Sequence[Completion]]
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """One call of the reward: completions of one prompt, `first` the index of the first of them."""

    prompt: Prompt
    completions: Sequence[Completion]
    first: int


class RewardWorker:
    """A process that runs the reward, used by one thread at a time, which waits while it works."""

    def __init__(self, name: str) -> None:
        paths = [*sys.path, os.environ.get("PYTHONPATH")]
        search_path = os.pathsep.join(path for path in paths if path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "oxrl.rewards.workers", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": search_path},
            start_new_session=True,
        )
        self.timed_out = False

    def exchange(self, message: bytes, limit_s: float) -> bytes:
        """Send a message and wait for the line that the worker writes in reply.

        Args:
            message: what to write to it; nothing if empty.
            limit_s: seconds after which the worker is killed.

        Returns:
            The line; without its end if the worker died or was killed.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(limit_s, self._expire)
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
        """Kill the worker and every process it started.

        Args:
            patience_s: how long it may take to end by itself.

        Returns:
            How it ended, in words.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        # A broken pipe: bytes that it will never read.
        with contextlib.suppress(BrokenPipeError), self.process:  # closes the pipes, and waits
            self._kill()
        code = self.process.returncode
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def _expire(self) -> None:
        self.timed_out = True
        self._kill()  # which ends a blocked write or read, whatever the reward is doing

    def _kill(self) -> None:
        # It has its own session, and so its own group; members may outlive their leader.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _end_all(workers: set[RewardWorker]) -> None:
    while workers:
        workers.pop().end()


class RewardPool:
    """Scores groups of completions with a reward, in as many processes as it has workers.

    A late sample is killed and gets status "timeout"; a worker that dies gives status "error"; both
    are replaced and the others go on. Usable from any thread, one call at a time.

    Args:
        name: as of `load_reward`.
        workers: processes.
        timeout_s: seconds for each sample; a reward of whole groups has that times the group's
            size.

    Raises:
        RewardError: `name` is neither a built-in nor an existing "path.py:function".
    """

    def __init__(self, name: str, *, workers: int = 1, timeout_s: float = 10.0) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"need workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}")
        locate(name)
        self.name = name
        self._inline = load_reward(name) if name in INLINE else None
        self._size = workers
        self._timeout_s = timeout_s
        self._per_sample: bool | None = None  # known once a worker has loaded the reward
        # One slot per process, the last used on top. None, or a worker that has died, is replaced
        # when it is needed.
        self._slots: queue.LifoQueue[RewardWorker | None] = queue.LifoQueue()
        self._slots.queue.extend([None] * workers)
        self._lock = threading.Lock()
        self._alive: set[RewardWorker] = set()
        self._finalizer = weakref.finalize(self, _end_all, self._alive)

    def start(self) -> None:
        """Start one worker and wait until it has loaded the reward, so that a broken one fails now.

        Raises:
            RewardError: the reward cannot be loaded, or not within START_TIMEOUT_S.
        """
        with self._lock:
            if self._inline is None and self._per_sample is None:
                with self._worker():
                    pass

    def score(self, groups: Sequence[Group]) -> list[list[Score]]:
        """Score groups of completions; what the reward does on a sample never raises.

        Args:
            groups: a prompt and completions of it, each.

        Returns:
            One score per completion, in the order of the input; see `Score.status`.

        Raises:
            RewardError: the reward cannot be loaded.
        """
        if self._inline is not None:
            return [self._inline(prompt, completions) for prompt, completions in groups]
        self.start()
        with self._lock:
            scores = iter(self._run_all(self._tasks(groups)))
        return [[next(scores) for _ in completions] for _, completions in groups]

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        with self._lock:
            _end_all(self._alive)

    def _tasks(self, groups: Sequence[Group]) -> list[Task]:
        tasks: list[Task] = []
        for prompt, completions in groups:
            if self._per_sample:
                for index, completion in enumerate(completions):
                    text = dataclasses.replace(completion, segments=())  # it reads no tokens
                    tasks.append(Task(prompt, [text], index))
            elif completions:
                tasks.append(Task(prompt, completions, 0))
        return tasks

    def _run_all(self, tasks: Sequence[Task]) -> list[Score]:
        threads = ThreadPoolExecutor(self._size)
        scores: list[Score] = []
        try:
            for of_task in threads.map(self._run, tasks):
                scores += of_task
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            _end_all(self._alive)  # what the threads wait for
            raise
        finally:
            threads.shutdown()
        return scores

    @contextlib.contextmanager
    def _worker(self) -> Iterator[RewardWorker]:
        """A worker that has loaded the reward, which no other thread uses meanwhile."""
        worker = self._slots.get()
        try:
            if worker is not None and (worker.timed_out or worker.process.poll() is not None):
                self._discard(worker)  # it died while idle: nobody's sample is to blame
                worker = None
            worker = worker or self._load()
            yield worker
        finally:
            self._slots.put(worker)

    def _load(self) -> RewardWorker:
        worker = RewardWorker(self.name)
        self._alive.add(worker)
        line = worker.exchange(b"", START_TIMEOUT_S)
        reply = json.loads(line) if line.endswith(b"\n") else {}
        if "per_sample" in reply:
            self._per_sample = reply["per_sample"]
            return worker
        how = self._discard(worker)
        problem = f"its worker ended while loading it ({how})"
        if worker.timed_out:
            problem = f"not loaded within {START_TIMEOUT_S:g} s; what does it import?"
        raise RewardError(reply.get("failed", f"reward.name={self.name}: {problem}"))

    def _run(self, task: Task) -> list[Score]:
        count = len(task.completions)
        limit_s = self._timeout_s * count
        message = {**vars(task), "limit_s": limit_s}
        with self._worker() as worker:
            line = worker.exchange(_encode(message), limit_s)
            try:
                scores = [Score(**fields) for fields in json.loads(line)["scores"]]
            except (ValueError, TypeError, KeyError):  # the worker died before the end of the line
                scores = []
            if len(scores) == count:
                return scores
            how = self._discard(worker)
        status: ScoreStatus = "error"
        problem = f"the worker process ended ({how})"
        if worker.timed_out:
            status = "timeout"
            limit = f"reward.timeout_s={self._timeout_s:g}"
            problem = f"no score within {limit_s:g} s ({limit}); killed"
        samples = sample_range(task.first, count)
        reason = f"{self.name}, {samples} of prompt {task.prompt.uid}: {problem}"
        return [Score(value=None, status=status, reason=reason)] * count

    def _discard(self, worker: RewardWorker) -> str:
        self._alive.discard(worker)
        return worker.end(LAST_WORDS_S)


def _encode(message: Json) -> bytes:
    """One line of JSON; the objects of `oxrl.types` become mappings of their fields."""

    def fields(value: object) -> Json:
        return dict(value) if isinstance(value, Mapping) else vars(value)

    return json.dumps(message, default=fields).encode() + b"\n"


def _prompt(fields: Json) -> Prompt:
    for name in ("messages", "token_ids", "images"):  # `answer` may be a list and stay one
        fields[name] = tuple(fields[name])
    return Prompt(**fields)


def _completion(fields: Json) -> Completion:
    segments: list[Segment] = []
    for segment in fields["segments"]:
        for name in ("token_ids", "logprobs", "versions", "images"):
            segment[name] = tuple(segment[name])
        segments.append(Segment(**segment))
    return Completion(**{**fields, "segments": tuple(segments)})


def work(name: str) -> None:
    """Live a worker's whole life: tasks from standard input, their scores to standard output.

    Args:
        name: of the reward, as of `load_reward`.
    """
    # User code may print and may read standard input: give it neither of our pipes.
    tasks = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def reply(message: Json) -> None:
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
        prompt = _prompt(task["prompt"])
        completions = [_completion(fields) for fields in task["completions"]]
        # The parent kills a late worker. Should the parent be dead, the kernel's alarm ends even a
        # hang inside C code.
        signal.setitimer(signal.ITIMER_REAL, 2 * task["limit_s"] + 5)
        scores = reward(prompt, completions, task["first"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply({"scores": scores})


if __name__ == "__main__":
    work(sys.argv[1])
