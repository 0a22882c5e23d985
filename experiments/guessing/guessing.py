"""A guessing game of two turns, and the control whose answers say nothing."""

from __future__ import annotations

import random

from oxrl.environments import Step
from oxrl.types import Prompt

LOW, HIGH = 1, 9


class Guessing:
    """A secret number, two guesses; after the first the game says how far off it was.

    Who begins in the middle cannot tell above from below; who begins at an end knows the number.
    """

    def reset(self, prompt: Prompt, seed: int) -> str:
        """A question that says nothing of the secret."""
        self.chance = random.Random(seed)
        self.secret = self.chance.randint(LOW, HIGH)
        self.guesses = 0
        return "?"

    def step(self, text: str) -> Step:
        """Right, how far off, or over."""
        guess = text.strip()
        self.guesses += 1
        if guess == str(self.secret):
            return Step(reward=1.0, terminated=True)
        if self.guesses == 2 or not (guess.isdecimal() and LOW <= int(guess) <= HIGH):
            return Step(terminated=True)
        return Step(self.hint(abs(int(guess) - self.secret)))

    def hint(self, distance: int) -> str:
        """How far off."""
        return f"off {distance}"


class Nonsense(Guessing):
    """The control for use of the answer: it says some other distance."""

    def hint(self, distance: int) -> str:
        """Anything."""
        return f"off {self.chance.randint(1, HIGH - LOW)}"
