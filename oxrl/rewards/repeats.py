"""A check that a reward gives the same response the same score each time.

Nothing is asked for it but once before training: responses that happen to repeat are enough.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from oxrl.types import Group, Score

log = logging.getLogger(__name__)

# Responses that are remembered, the last ones.
MOST = 20_000
# What libraries round differently, in a batch of another shape for one, is no luck.
TOLERANCE = 1e-3


class Repeats:
    """A reward's scores of the responses so far; warns once where it contradicts itself.

    Args:
        name: of the reward, for the message.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: OrderedDict[int, float] = OrderedDict()
        self._told = False
        self.pending = ""  # what was found before there was a log to write it to

    def look(
        self,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]],
    ) -> None:
        """Compare scores of prompts' completions with earlier ones of the same.

        Args:
            groups: prompts with their completions, each scored by itself.
            scores: of each completion.
        """
        if self.pending:
            self._tell(self.pending)
        for (prompt, completions), values in zip(groups, scores, strict=True):
            asked = f"{prompt.uid}\0{prompt.answer!r}\0"
            for completion, score in zip(completions, values, strict=True):
                if score.value is not None:
                    self._compare(asked + completion.text, prompt.uid, score.value)

    def _compare(self, asked: str, uid: str, value: float) -> None:
        key = hash(asked)
        before = self._said.pop(key, value)
        self._said[key] = value
        if len(self._said) > MOST:
            self._said.popitem(last=False)
        if differs(before, value):
            self._tell(f"{before:g} and then {value:g} for one response to prompt {uid}")

    def _tell(self, what: str) -> None:
        self.pending = ""
        if self._told:
            return
        self._told = True
        log.warning(
            "nondeterministic-reward: %s gave %s. A model learns from that as from luck. Let the "
            "score depend on the prompt and the response alone: no random numbers, clock, order of "
            "a set or files that change; a judge samples at temperature 0",
            self._name,
            what,
        )


def differs(before: float, now: float) -> bool:
    """True if two scores are apart by more than rounding: TOLERANCE, as a share of the first where
    that is above 1.

    Args:
        before, now: finite scores.
    """
    return abs(before - now) > TOLERANCE * max(1.0, abs(before))
