"""Rewards in processes that can be killed: a hung or crashed sample costs only itself.

What a worker says is believed only as a reply to its request: the reply repeats an id that nobody
can guess, on a socket of its own. Anything else on that socket makes the worker suspect. It is
killed, and the sample is scored again by a fresh one. Nothing here imports torch: workers start
fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import get_args

from oxrl.entry_points import is_ours
from oxrl.errors import RewardDefinitionError, RewardError
from oxrl.modelfiles.folder import is_reward_model
from oxrl.rewards.builtin import find_builtin
from oxrl.rewards.failures import failed_scores, told_samples
from oxrl.rewards.pools import SinglePool
from oxrl.rewards.repeats import Repeats
from oxrl.rewards.trial import DRY_GROUP, described, rehearse_all
from oxrl.runs.threads import in_threads
from oxrl.runs.waiting import Patience
from oxrl.tables.user_code import REWARD
from oxrl.types import (
    Completions,
    Group,
    GroupScores,
    Objects,
    Prompt,
    Score,
    Scores,
    ScoreStatus,
)
from oxrl.usercode.given import FIELD, is_given, load_request
from oxrl.usercode.locate import Place, place_of
from oxrl.usercode.messages import Json
from oxrl.usercode.user_code import MOST_REASON, capped
from oxrl.usercode.worker import (
    LAST_WORDS_S,
    MOST_REPLY,
    NOT_LOADED,
    START_TIMEOUT_S,
    LateReply,
    LostWorker,
    NotLoaded,
    Printed,
    SuspectWorker,
    Worker,
)

log = logging.getLogger(__name__)

# What each score adds to the longest reply, in bytes: rewards of a few thousand steps.
MOST_PER_SCORE = 1 << 17
# Fresh workers that a sample gets after suspect ones.
RETRIES = 2
ADVICE = "See what it waits for, or raise run.deadlines.rollout"
STATUSES = {*get_args(ScoreStatus)} - {"none"}


@dataclasses.dataclass(frozen=True)
class Task:
    """One call of the reward: completions of one prompt, `first` the index of the first of them."""

    prompt: Prompt
    completions: Completions
    first: int

    @property
    def samples(self) -> range:
        """Their indices in the group."""
        return range(self.first, self.first + len(self.completions))


def _end_all(workers: set[Worker]) -> None:
    while workers:
        workers.pop().end()


class RewardPool(SinglePool):
    """Scores groups of completions with a reward, in as many processes as it has workers.

    A late sample is killed and gets status "timeout"; a worker that dies gives status "error"; both
    are replaced and the others go on. Usable from any thread, one call at a time. `request` is what
    a worker is sent first.

    Args:
        name: as of `find_reward`.
        workers: processes.
        timeout_s: seconds for each sample; a reward of whole groups has that times the group's
            size.
        options: keyword arguments of a built-in reward.
        field: of the config, where the reward stands, for messages.

    Raises:
        RewardDefinitionError: `name` is neither a built-in nor an existing "path.py:function".
    """

    def __init__(
        self,
        name: str,
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        options: Objects | None = None,
        field: str = "reward",
    ) -> None:
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"need workers >= 1 and timeout_s > 0, got {workers} and {timeout_s}")
        self.name = name
        self.field = field
        try:
            is_model = not is_ours(REWARD, name) and is_reward_model(name)
            self._place = Place(Path(name).resolve()) if is_model else place_of(REWARD, name)
        except ValueError as error:
            raise RewardDefinitionError(f"{field}.name={name}: {error}") from error
        self._code: str | None = None  # what the first worker was started on
        self.request = load_request(REWARD, name, options or {})
        self._size = workers
        self._timeout_s = timeout_s
        # When a worker is killed.
        self._most_s = timeout_s
        row = find_builtin(name)
        if row and row.keeps_time:
            # A case of a program that has not begun then does not hold. The last one may wait for
            # its turn and is judged, and both once more.
            self.request["options"].setdefault("total_s", timeout_s)
            self._most_s = 5 * timeout_s
        self._per_sample: bool | None = None  # known once a worker has loaded the reward
        # One slot per process, the last used on top. None, or a worker that has died, is replaced
        # when it is needed.
        self._slots: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        self._slots.queue.extend([None] * workers)
        self._lock = threading.Lock()
        self._printed = Printed("a reward worker")
        self._told: set[str] = set()
        self._repeats = Repeats(name)
        self._alive: set[Worker] = set()
        self._finalizer = weakref.finalize(self, _end_all, self._alive)

    def start(self, patience: Patience | None = None) -> None:
        """Start one worker and wait until it has loaded the reward, so that a broken one fails now.

        Raises:
            RewardDefinitionError: the reward cannot be loaded, or not within START_TIMEOUT_S, or it
                does not return from a call on a made-up sample within `timeout_s`.
            Stopped: a signal asked to stop.
        """
        with self._lock:
            self._start(patience or Patience())

    def rehearse(self, prompts: Sequence[Prompt], patience: Patience | None = None) -> None:
        """Try the reward on prompts of the data, before anything depends on it.

        Raises:
            RewardDefinitionError: it failed on every one, with completions of several forms.
            Stopped: a signal asked to stop.
        """
        if is_ours(REWARD, self.name):
            return
        where = f"{self.field}.name={self.name}"
        problem_on = partial(self._problem_on, patience or Patience())
        with self._lock:
            rehearse_all(where, prompts, problem_on)

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score groups of completions; what the reward does on a sample never raises.

        Args:
            groups: a prompt and completions of it, each.
            patience: how long to wait for the next score; None: as long as it takes.

        Returns:
            One score per completion, in the order of the input; see `Score.status`.

        Raises:
            RewardError: the reward cannot be loaded.
            Stopped: a signal asked to stop.
            DeadlineError: no reward has answered for too long.
        """
        patience = patience or Patience()
        with self._lock:
            self._start(patience)
            scores = iter(self._run_all(self._tasks(groups), patience))
        found = [[next(scores) for _ in completions] for _, completions in groups]
        if self._per_sample:  # of whole groups the others of a group may decide
            self._repeats.look(groups, found)
        return found

    def close(self) -> None:
        """Kill the workers. A later `score` starts new ones."""
        with self._lock:
            _end_all(self._alive)
            self._printed.finish()

    def _start(self, patience: Patience) -> None:
        if self._per_sample is None:
            with self._worker(patience):
                pass

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

    def _run_all(self, tasks: Sequence[Task], patience: Patience) -> GroupScores:
        try:
            found = in_threads(partial(self._run, patience), tasks, patience, most=self._size)
        except BaseException:
            _end_all(self._alive)  # they are in the middle of something
            raise
        return [score for scores in found for score in scores]

    @contextlib.contextmanager
    def _worker(self, patience: Patience, *, fresh: bool = False) -> Iterator[Worker]:
        """A worker that has loaded the reward, which no other thread uses meanwhile.

        Args:
            fresh: it must not have scored anything.
        """
        worker = self._slots.get()
        try:
            # One that died or spoke while idle: nobody's sample is to blame.
            if worker is not None and (not worker.usable or (fresh and worker.asked)):
                self._discard(worker)
                worker = None
            worker = worker or self._load(patience)
            yield worker
        finally:
            self._slots.put(worker)

    def _load(self, patience: Patience) -> Worker:
        worker = Worker("oxrl.rewards.host", self._printed)
        self._alive.add(worker)
        try:
            self._prepare(worker, patience)
        except BaseException:
            self._discard(worker)
            raise
        return worker

    def _prepare(self, worker: Worker, patience: Patience) -> None:
        """Have a worker load the reward and call it once."""
        self._code = self._code or self._digest()
        what = f"{self.name} to answer; a fresh worker loads it. {ADVICE}"
        load = partial(worker.load, patience=patience, what=what, called="its worker")
        try:
            reply = self._loaded(load(self.request, START_TIMEOUT_S, late=NOT_LOADED))
            per_sample = bool(reply["per_sample"])
            limit_s = self._timeout_s * (1 if per_sample else DRY_GROUP)
            late = (
                f"{described(per_sample=per_sample)} did not return within {limit_s:g} s "
                f"({self.field}.timeout_s={self._timeout_s:g}); killed. Look for an endless loop "
                "or a wait for the network. What is done once, such as loading a model, belongs "
                f"outside of the function, where it has {START_TIMEOUT_S:g} s; or raise "
                "reward.timeout_s"
            )
            self._loaded(load({}, limit_s, late=late))
        except NotLoaded as error:
            problem = f"{self.field}.name={self.name}: {error}"
            raise self._kind_of_error()(problem) from error
        self._require_same_code()
        self._per_sample = per_sample

    def _digest(self) -> str:
        """Hash a user's code, or a reward model; empty of what oxRL has itself."""
        if self._place.file is None:
            return ""
        from oxrl.usercode.sources import code_digest  # code of users

        return code_digest(self._place)

    def _require_same_code(self) -> None:
        """Called after a worker has loaded it: what is there now is what the worker has, or newer.

        Raises:
            RewardError: the reward is not what it was when the first one did.
        """
        if self._digest() != self._code:
            raise RewardError(
                f"{self.field}.name={self.name}: it has changed while the run goes on, and a "
                "worker that had to be started anew would score by other rules than the first. Put "
                f"{self._place.file} and what it imports back and continue with --resume; or "
                f"accept the change, --resume --accept-changes {self.field}.name"
            )

    def _loaded(self, reply: Json) -> Json:
        """Return a reply to a request to load; its problem is told by who knows of one reward."""
        if "failed" in reply:
            problem = str(reply["failed"])
            raise self._kind_of_error()(problem.replace("reward.name=", f"{self.field}.name=", 1))
        return reply

    def _kind_of_error(self) -> type[RewardError]:
        """A reward that never worked is wrong input; one that did, and does not now, is not."""
        return RewardDefinitionError if self._per_sample is None else RewardError

    def _problem_on(self, patience: Patience, prompt: Prompt) -> str:
        """Say why the reward fails on a prompt, whatever the completion; empty if it does not."""
        what = f"{self.name} to score a made-up answer to prompt {prompt.uid}"
        limit_s = self._timeout_s * (1 if self._per_sample else DRY_GROUP)
        with self._worker(patience) as worker:
            try:
                reply = worker.channel.ask({"rehearse": prompt}, limit_s, patience, what)
                self._repeats.pending = str(reply.get("differs", ""))
                return str(reply.get("problem", ""))
            except LostWorker:
                how = self._discard(worker, LAST_WORDS_S)
                return f"the worker process ended ({how})"
            except (LateReply, SuspectWorker):
                self._discard(worker)
                return ""  # the run has its own way with those

    def _run(self, patience: Patience, task: Task) -> GroupScores:
        """The scores of a task; by a fresh worker, where the first one turns out suspect."""
        outcome: GroupScores | str = ""
        for retry in range(1 + RETRIES):
            with self._worker(patience, fresh=retry > 0) as worker:
                outcome = self._outcome(worker, task, patience)
            if not isinstance(outcome, str):
                return outcome
        problem = f"{1 + RETRIES} workers in a row could not be trusted: each {outcome}"
        return self._failed(task, "error", problem)

    def _outcome(self, worker: Worker, task: Task, patience: Patience) -> GroupScores | str:
        """The scores of a task, or what makes the worker suspect, which is then gone."""
        count = len(task.completions)
        limit_s = self._most_s * count
        fresh = not worker.asked
        worker.asked += 1
        what = (
            f"{self.name} to answer; it is at {told_samples(task.prompt, task.samples)}. {ADVICE}"
        )
        try:
            most = MOST_REPLY + MOST_PER_SCORE * count
            reply = worker.channel.ask(vars(task), limit_s, patience, what, most=most)
            scores = scores_of(reply, count)
        except LateReply:
            self._discard(worker)
            limit = f"{self.field}.timeout_s={self._timeout_s:g}"
            return self._failed(task, "timeout", f"no score within {limit_s:g} s ({limit}); killed")
        except LostWorker:
            ended = worker.ends_by_itself(LAST_WORDS_S)
            how = self._discard(worker)
            if not ended:
                return "closed the socket that its scores come by"
            return self._failed(task, "error", f"the worker process ended ({how})")
        except SuspectWorker as error:
            self._discard(worker)
            return str(error)
        patience.answered()
        changed = str(reply.get("changed", ""))
        if changed:
            self._discard(worker)
            self._tell(changed, task)
            # Its first sample can have been scored by nothing but what the file says.
            return scores if fresh else f"has changed {changed}"
        return scores

    def _tell(self, changed: str, task: Task) -> None:
        if changed in self._told:
            return
        self._told.add(changed)
        log.warning(
            "%s changed %s while it scored %s. Later scores could depend on that, so every such "
            "sample costs a fresh worker; run what a model wrote in a process of its own",
            self.name,
            changed,
            told_samples(task.prompt, task.samples),
        )

    def _failed(self, task: Task, status: ScoreStatus, problem: str) -> GroupScores:
        return failed_scores(self.name, task.prompt, task.samples, status, problem)

    def _discard(self, worker: Worker, patience_s: float = 0.0) -> str:
        self._alive.discard(worker)
        return worker.end(patience_s)


def scores_of(reply: Json, count: int) -> GroupScores:
    """The scores in a reply.

    Args:
        reply: what a worker sent.
        count: completions that it was asked about.

    Returns:
        As many scores, in order.

    Raises:
        SuspectWorker: they are not `count` scores as a worker of ours sends them.
    """
    try:
        scores = [score_of(fields) for fields in reply["scores"]]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SuspectWorker(f"sent invalid scores: {error}") from error
    if len(scores) != count:
        raise SuspectWorker(f"sent {len(scores)} scores for {count} completions")
    return scores


def score_of(fields: Json) -> Score:
    """One score from its fields.

    Args:
        fields: `value`, `status`, `reason`, `parts`, `steps` and `answer`, as JSON has them.

    Returns:
        The score; a long reason is cut.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    value = fields["value"]
    if value is not None and not math.isfinite(value):
        raise ValueError(f"the value is {value}")
    if fields["status"] not in STATUSES:
        raise ValueError(f"the status is {fields['status']!r}"[:80])
    parts = {name: float(part) for name, part in fields["parts"].items()}
    reason = capped(fields["reason"], 2 * MOST_REASON)
    steps = tuple((int(end), float(share)) for end, share in fields["steps"])
    if not all(math.isfinite(share) for _, share in steps):
        raise ValueError("the reward of a step is not finite")
    answer = fields["answer"]
    if answer is not None:
        answer = capped(answer, 2 * MOST_REASON)
    return Score(
        value=value,
        status=fields["status"],
        parts=parts,
        reason=reason,
        steps=steps,
        answer=answer,
    )


def users_pool(
    name: str, *, workers: int, timeout_s: float, options: Objects | None, field: str
) -> SinglePool:
    """Make a pool of processes; a function of Python's that cannot leave this one stays here.

    Args:
        name, workers, timeout_s, options, field: as of `RewardPool`.

    Raises:
        RewardDefinitionError: as of `RewardPool`.
    """
    pool = RewardPool(name, workers=workers, timeout_s=timeout_s, options=options, field=field)
    if not is_given(name) or FIELD in pool.request:
        return pool
    from oxrl.rewards.own_function import OwnFunctionPool  # others can leave this process

    return OwnFunctionPool(name, options, field)
