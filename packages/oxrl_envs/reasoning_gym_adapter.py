"""`environment.name: reasoning-gym`: a task made anew for every prompt, judged by its own verifier.

    environment:
      name: reasoning-gym
      options: {task: chain_sum, parameters: {max_terms: 3}, attempts: 2}

The reward `reasoning-gym` is for rows that `oxrl prepare` wrote; this needs no such rows, and
allows more than one attempt.
"""

from __future__ import annotations

from typing import Any

from oxrl.environments import Message, Step
from oxrl.environments.adapting import need, seed_of, with_text
from oxrl.errors import did_you_mean
from oxrl.types import Named, Prompt


class ReasoningGymEnvironment:
    """One task, with one attempt or several.

    What the last `<answer>...</answer>` of a turn holds is judged, or the whole turn without one.
    The reward of a turn is what it adds to the best score so far.

    Args:
        task: a dataset name of reasoning-gym.
        parameters: settings of the task.
        attempts: turns that the policy has.

    Raises:
        ValueError: no such task or setting.
    """

    def __init__(self, task: str = "", parameters: Named | None = None, attempts: int = 1) -> None:
        self._library = need("reasoning_gym", "tasks")
        known = need("reasoning_gym.factory", "tasks").DATASETS
        if task not in known:
            problem = f"reasoning-gym has no task {task!r}{did_you_mean(task, known)}"
            raise ValueError(f"environment.options.task: {problem}")
        if attempts < 1:
            raise ValueError(f"environment.options.attempts must be 1 or more, got {attempts}")
        self._task = task
        self._parameters = parameters or {}
        self._left = attempts
        self._best = 0.0

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Import the library and make one task.

        Args:
            options: of the class.

        Raises:
            MissingExtraError: reasoning-gym is not installed.
            ValueError: no such task or setting.
        """
        cls(**options).make(0)

    def make(self, seed: int) -> None:
        """Make the task of a seed.

        Args:
            seed: of the task.

        Raises:
            ValueError: the task refuses its settings.
        """
        settings = {**self._parameters, "size": 1, "seed": seed}
        try:
            self._made = self._library.create_dataset(self._task, **settings)
            self._entry = self._made[0]
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(
                f"reasoning-gym refuses task={self._task} with {self._parameters}: {error}"
            ) from error

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """The row's messages, and behind them the question.

        Args:
            prompt: the row; its column `seed` goes before `seed`.
            seed: of the task.

        Raises:
            ValueError: the task refuses its settings.
        """
        self.make(seed_of(prompt, seed))
        return with_text(prompt.messages, self._entry["question"], between="\n")

    def step(self, text: str) -> Step:
        """Judge an attempt.

        Args:
            text: of the turn.

        Returns:
            What it adds to the best score so far; the end, where it is right or the last one.
        """
        answer = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        score = float(self._made.score_answer(answer=answer, entry=self._entry))
        gained = max(0.0, score - self._best)
        self._best = max(score, self._best)
        self._left -= 1
        if score >= 1.0 or not self._left:
            return Step(reward=gained, terminated=True, reason=f"score {score:g}")
        told = f"That is not right yet (score {score:g}). Try again."
        return Step(told, gained, reason=f"score {score:g}")
