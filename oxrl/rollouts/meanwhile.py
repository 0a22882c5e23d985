"""Rewards while other responses are sampled: a group is scored as soon as its samples are there.

What comes out is what would come out without: the same scores in the same order, asked for by the
same call, which then only waits for those that are not there yet. What goes wrong with a reward is
raised there as well, never in the middle of sampling.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from oxrl.engines.sample.base import Finished
from oxrl.errors import Stopped
from oxrl.rewards.base import Group, GroupScorer
from oxrl.runs.patience import LOOK_S, Patience, StopAsked
from oxrl.types import Completion, Score

# The completions of a group, by identity: the same objects are asked for later.
Key = tuple[int, ...]


class MeanwhileScorer:
    """A GroupScorer that is told of responses when they are finished.

    Args:
        scorer: scores, in a thread of its own, as many groups at a time as are waiting.
        samples: responses of a group. Those numbered from there on are groups of one, baselines.
        stop: whether the run was asked to stop.
        deadline_s: longest wait for the next score, in seconds.
    """

    def __init__(
        self, scorer: GroupScorer, *, samples: int, stop: StopAsked, deadline_s: float
    ) -> None:
        self._scorer = scorer
        self._samples = samples
        self._stop = stop
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(1, "rewards")
        self._lock = threading.Lock()
        self._unfinished: defaultdict[int, dict[int, Finished]] = defaultdict(dict)
        self._waiting: list[tuple[Group, Future[list[Score]]]] = []
        # The groups are held, so that nothing else can have the identity of their completions.
        self._asked: dict[Key, tuple[Group, Future[list[Score]]]] = {}
        self._patience: Patience | None = None
        self._closed = False

    def offer(self, finished: Finished) -> None:
        """A response is there; with the last one of its group the group goes to the reward."""
        request = finished.request
        if request.sample >= self._samples:
            self._ask((request.prompt, [finished.completion]))
            return
        group = self._unfinished[request.draw]
        group[request.sample] = finished
        if len(group) == self._samples:
            del self._unfinished[request.draw]
            completions = [group[sample].completion for sample in sorted(group)]
            self._ask((request.prompt, completions))

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> list[list[Score]]:
        """See GroupScorer. Groups that were never offered are scored now, after those that were."""
        asked: list[Future[list[Score]]] = []
        for group in groups:
            known = self._asked.pop(_key(group[1]), None)
            asked.append(self._ask(group, kept=False) if known is None else known[1])
        while wait(asked, timeout=LOOK_S).not_done:
            # The thread keeps the deadline: it knows when the last score came.
            if self._stop():
                raise Stopped
        return [future.result() for future in asked]

    def close(self) -> None:
        """Give up what nobody will ask for any more."""
        with self._lock:
            self._closed = True
            self._waiting.clear()
            if self._patience is not None:
                self._patience.cancel()
        self._thread.shutdown()

    def _ask(self, group: Group, *, kept: bool = True) -> Future[list[Score]]:
        """Have a group scored as soon as the scorer is free."""
        future: Future[list[Score]] = Future()
        if kept:
            self._asked[_key(group[1])] = (group, future)
        with self._lock:
            self._waiting.append((group, future))
        self._thread.submit(self._work)
        return future

    def _work(self) -> None:
        """Score all groups that are waiting; none, where an earlier call took them along."""
        with self._lock:
            taken = self._waiting
            self._waiting = []
            self._patience = Patience(self._stop, self._deadline_s)
            if not taken or self._closed:
                return
        try:
            scores = self._scorer.score([group for group, _ in taken], self._patience)
        except BaseException as error:  # noqa: BLE001 - raised where the scores are asked for
            for _, future in taken:
                future.set_exception(error)
            return
        for (_, future), group_scores in zip(taken, scores, strict=True):
            future.set_result(group_scores)


def _key(completions: Sequence[Completion]) -> Key:
    return tuple(map(id, completions))
