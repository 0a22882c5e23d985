"""Rewards while other responses are sampled: a group is scored as soon as its samples are there.

What comes out is what would come out without: the same scores in the same order, asked for by the
same call, which then only waits for those that are not there yet. What goes wrong with a reward is
raised there as well, never in the middle of sampling, and what scoring took is counted there: with
the step that trains on the responses, not with the one that happened to be under way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock

from oxrl.engines.sample import Finished
from oxrl.errors import Stopped
from oxrl.rewards.pools import GroupScorer
from oxrl.runs.waiting import LOOK_S, Patience, StopAsked
from oxrl.types import Completion, Group, Metrics, Score, Scores

# The completions of a group, by identity: the same objects are asked for later.
Key = tuple[int, ...]
Counters = Callable[[], Metrics]


@dataclass(eq=False)
class _Asked:
    """A group that is or will be scored.

    step: its rollout step, as far as its position tells; -1 of one that was never offered.
    spent: what scoring took, of all groups that were scored with it.
    """

    group: Group
    step: int
    future: Future[list[Score]] = field(default_factory=Future[list[Score]])
    spent: Metrics = field(default_factory=Metrics)


class OverlappedScorer:
    """A GroupScorer that is told of responses when they are finished.

    Args:
        scorer: scores, in a thread of its own, as many groups at a time as are waiting.
        counters: what the scorer took since this was called last.
        samples: responses of a group. Those numbered from there on are groups of one, baselines.
        prompts: of a rollout step. Groups of two steps are never scored in one call.
        stop: whether the run was asked to stop.
        deadline_s: longest wait for the next score, in seconds.
    """

    def __init__(
        self,
        scorer: GroupScorer,
        counters: Counters,
        *,
        samples: int,
        prompts: int,
        stop: StopAsked,
        deadline_s: float,
    ) -> None:
        self._scorer = scorer
        self._count = counters
        self._counted = counters()
        self._samples = samples
        self._prompts = prompts
        self._stop = stop
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, "rewards")
        self._lock = Lock()
        self._unfinished: defaultdict[int, dict[int, Finished]] = defaultdict(dict)
        self._waiting: list[_Asked] = []
        # The groups are held, so that nothing else can have the identity of their completions.
        self._asked: dict[Key, _Asked] = {}
        self._patience = None
        self._closed = False

    def offer(self, finished: Finished) -> None:
        """A response is there; with the last one of its group the group goes to the reward."""
        request = finished.request
        completions = [finished.completion]
        if request.sample < self._samples:
            group = self._unfinished[request.draw]
            group[request.sample] = finished
            if len(group) < self._samples:
                return
            del self._unfinished[request.draw]
            completions = [group[sample].completion for sample in sorted(group)]
        step = request.draw // self._prompts
        self._asked[_key(completions)] = self._ask((request.prompt, completions), step)

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """See GroupScorer. Groups that were never offered are scored now, after those that were."""
        asked: list[_Asked] = []
        for group in groups:
            known = self._asked.pop(_key(group[1]), None)
            asked.append(self._ask(group) if known is None else known)
        while wait([one.future for one in asked], timeout=LOOK_S).not_done:
            # The thread keeps the deadline: it knows when the last score came.
            if self._stop():
                raise Stopped
        for one in asked:
            for name, number in one.spent.items():
                self._counted[name] = self._counted.get(name, 0.0) + number
        return [one.future.result() for one in asked]

    def counters(self) -> Metrics:
        """Return what it took to score the groups that were asked for since the last call."""
        found = self._counted
        self._counted = dict.fromkeys(found, 0.0)
        return found

    def close(self) -> None:
        """Give up what nobody will ask for any more."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._patience is not None:
                self._patience.cancel()
        self._thread.shutdown()

    def _ask(self, group: Group, step: int = -1) -> _Asked:
        """Have a group scored as soon as the scorer is free."""
        asked = _Asked(group, step)
        with self._lock:
            self._waiting.append(asked)
        self._thread.submit(self._work)
        return asked

    def _work(self) -> None:
        """Score the groups of a step that are waiting; none, where earlier calls took all along."""
        with self._lock:
            taken = [one for one in self._waiting if one.step == self._waiting[0].step]
            self._waiting = [one for one in self._waiting if one not in taken]
            self._patience = Patience(self._stop, self._deadline_s)
            if not taken or self._closed:
                return
        try:
            scores = self._scorer.score([one.group for one in taken], self._patience)
        except BaseException as error:  # noqa: BLE001 - raised where the scores are asked for
            for one in taken:
                one.future.set_exception(error)
            return
        taken[0].spent = self._count()
        for one, group_scores in zip(taken, scores, strict=True):
            one.future.set_result(group_scores)


def _key(completions: Sequence[Completion]) -> Key:
    return tuple(map(id, completions))
