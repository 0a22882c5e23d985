"""The interface of rewards, and the forms in which users may write one.

A reward is `reward(prompt, completions) -> list[Score]`, sync or async, over the completions of one
prompt. Users need not write that: `reward.name: my_reward.py:score` may also name a function of one
sample,

    def score(prompt: Prompt, completion: str) -> float:      # prompt.answer is the ground truth
        return 1.0 if completion.strip() == prompt.answer else 0.0

What a function gets is told by the names of its parameters (`call_forms.py`): `completion` is one
text, `completions` are those of the group, and rewards written for verl or TRL are called as these
libraries would. A float, an int, a bool, a scalar tensor or a `Score` may be returned, which also
says what it is made of and which steps of the text earned it. A failure is never the number 0: an
exception becomes status "error", a value that is no finite number status "invalid", each with a
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from oxrl.runs.waiting import Patience
from oxrl.types import Group, Scores


class GroupScorer(Protocol):
    """A scorer of completions: the pool of a reward's workers, or what stands before it."""

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score the completions of every group, in their order.

        Raises:
            DeadlineError: no score came for too long.
            Stopped: a signal asked to stop.
        """
        ...
