"""A reward model next to the policy: scores on the run's device, without processes of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from oxrl.errors import OxrlError, RewardDefinitionError
from oxrl.rewards.failures import failed_group, named_failures
from oxrl.rewards.pools import SinglePool
from oxrl.rewards.reward_model import RewardModel
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Group, GroupScores, Prompt, Scores
from oxrl.usercode.user_code import text_of

BuildModel = Callable[[], RewardModel]


class RewardModelPool(SinglePool):
    """A pool that scores by one reward model, in this process or in processes of its own.

    Args:
        name: folder of the reward model; every node sees that of actors.
        build: loads it; picklable where it is loaded in an actor.
        timeout_s: seconds for each sample; a group has that times its size.
        field: of the config, where the reward stands, for messages.
    """

    def __init__(self, name: str, build: BuildModel, *, timeout_s: float, field: str) -> None:
        self.name = name
        self.field = field
        self._build = build
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def rehearse(self, prompts: Sequence[Prompt], patience: Patience | None = None) -> None:
        """Score a made-up answer to each prompt.

        Raises:
            RewardDefinitionError: it failed on every one.
        """
        answer = Completion(segments=(), text="1", finish_reason="stop")
        scored = self.score([(prompt, [answer]) for prompt in prompts], patience)
        failures = [score.reason for (score,) in scored if score.value is None]
        if prompts and len(failures) == len(prompts):
            number = len(prompts)
            raise RewardDefinitionError(
                f"{self.field}.name={self.name}: it failed on {number} of {number} prompts of the "
                f"data: {failures[0]}"
            )

    def _failed(self, group: Group, error: Exception) -> GroupScores:
        """The scores of a group on which the model raised something."""
        problem = f"raised {type(error).__name__}: {text_of(error)}"
        return failed_group(self.name, group, "error", problem)

    def _late(self, group: Group, limit_s: float) -> GroupScores:
        """The scores of a group that took too long."""
        problem = f"no score within {limit_s:g} s ({self.field}.timeout_s={self._timeout_s:g})"
        return failed_group(self.name, group, "timeout", problem)


class ModelPool(RewardModelPool):
    """Scores groups of completions by a reward model here. Used as `RewardPool` is."""

    # It computes where the sampler does: at the same time both would only be slower.
    inline = True
    _model: RewardModel | None = None

    def start(self, patience: Patience | None = None) -> None:
        """Load the model.

        Raises:
            RewardDefinitionError: it cannot be loaded.
        """
        with self._lock:
            self._loaded()

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """Score groups of completions; what the model cannot read never raises.

        Raises:
            RewardDefinitionError: the model cannot be loaded.
            Stopped: a signal asked to stop.
            DeadlineError: a group took too long.
        """
        patience = patience or Patience()
        found: Scores = []
        with self._lock:
            model = self._loaded()
            for group in groups:
                patience.look(f"the reward model {self.name}. Raise run.deadlines.rollout")
                found.append(self._group(model, group))
                patience.answered()
        return found

    def close(self) -> None:
        """Let go of the model."""
        self._model = None

    def _loaded(self) -> RewardModel:
        if self._model is None:
            try:
                self._model = self._build()
            except (OxrlError, OSError) as error:
                problem = f"{self.field}.name={self.name}: {error}"
                raise RewardDefinitionError(problem) from error
        return self._model

    def _group(self, model: RewardModel, group: Group) -> GroupScores:
        began = time.monotonic()
        try:
            scores = model(*group)
        except (OxrlError, RuntimeError, ValueError) as error:  # a full device, a broken text
            return self._failed(group, error)
        limit_s = self._timeout_s * len(group[1])
        if time.monotonic() - began > limit_s:
            return self._late(group, limit_s)
        return named_failures(self.name, group, scores)
