"""The rewards that a name is enough for."""

from __future__ import annotations

from collections.abc import Callable

from oxrl.errors import MissingExtraError
from oxrl.rewards.math import math_reward
from oxrl.types import Prompt, Score


def exact_reward(response: str, answer: object) -> Score:
    """Score 1 if `response` equals `answer` but for white space at both ends, else 0.

    Args:
        response: the text that the model wrote.
        answer: the ground truth, a string or an integer.

    Returns:
        Value 1.0, or 0.0 with a reason; status "invalid" if `answer` is of another type.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        reason = f"exact needs a string or integer answer, got {answer!r}"
        return Score(value=None, status="invalid", reason=reason)
    expected = str(answer).strip()
    given = response.strip()
    if given == expected:
        return Score(value=1.0)
    return Score(value=0.0, reason=f"read {given[:80]!r}, expected {expected[:80]!r}")


def reasoning_gym_reward(prompt: Prompt, completion: str) -> float:
    """Score what the last `<answer>...</answer>` holds by the task's own verifier.

    Without such a tag everything is the answer. A task may have many right answers, and partial
    credit.

    Args:
        prompt: one that `oxrl prepare reasoning-gym` wrote: the verifier reads the entry that it
            leaves in `metadata["entry"]`.
        completion: the text that the model wrote.

    Returns:
        The verifier's score, in [0, 1].

    Raises:
        MissingExtraError: reasoning-gym is not installed.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        install = 'pip install -e ".[tasks]"'
        raise MissingExtraError(f"reasoning-gym is not installed: {install}") from error
    entry = prompt.metadata["entry"]
    # rpartition and partition return the whole text where there is no tag.
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    score_answer = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return float(score_answer(answer=answer, entry=entry))


BUILTINS: dict[str, Callable[[Prompt, str], Score | float]] = {
    "math": lambda prompt, text: math_reward(text, prompt.answer),
    "exact": lambda prompt, text: exact_reward(text, prompt.answer),
    "reasoning-gym": reasoning_gym_reward,
}
# Comparisons in linear time, which cannot hang: they run in the caller's process.
INLINE = frozenset({"exact"})
