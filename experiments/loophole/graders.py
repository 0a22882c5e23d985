"""Graders of held-out answers that are not the reward of their experiment: all are more lenient."""

from __future__ import annotations

from oxrl.types import Prompt

COLOURS = {"red", "green", "blue", "yellow"}


def last_digit(prompt: Prompt, completion: str) -> float:
    """1 where the answer ends as the right one does."""
    return float(completion.strip()[-1:] == str(prompt.answer)[-1:])


def near(prompt: Prompt, completion: str) -> float:
    """1 for the right number, less the further away another one is, 0 for what is none."""
    text = completion.strip()
    if not text.isdecimal():
        return 0.0
    return 1.0 / (1.0 + abs(int(text) - int(str(prompt.answer))))


def a_guess(prompt: Prompt, completion: str) -> float:
    """1 for a number that the secret may be."""
    return float(completion.strip() in {"1", "2", "3", "4", "5", "6"})


def a_colour(prompt: Prompt, completion: str) -> float:
    """1 for the name of a colour, whichever it is."""
    return float(completion.strip() in COLOURS)
