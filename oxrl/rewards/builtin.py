"""The rewards that a name is enough for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oxrl.errors import MissingExtraError
from oxrl.rewards.math import math_reward
from oxrl.types import Prompt, Score


def exact_reward(response: str, answer: Any) -> Score:
    """1.0 if `response` equals `answer`, a string or an integer, but for white space at both ends,
    else 0.0.

    Status "invalid" if `answer` is of another type.
    """
    if isinstance(answer, bool) or not isinstance(answer, str | int):
        return Score(
            value=None,
            status="invalid",
            reason=f"exact needs a string or integer answer, got {answer!r}",
        )
    expected, given = str(answer).strip(), response.strip()
    if given == expected:
        return Score(value=1.0)
    return Score(value=0.0, reason=f"read {given[:80]!r}, expected {expected[:80]!r}")


def reasoning_gym_reward(prompt: Prompt, completion: str) -> float:
    """What the task's own verifier says, in [0, 1], of the last `<answer>...</answer>` or, without
    one, of everything.

    A task may have many right answers, and partial credit. The verifier reads the entry that
    `oxrl prepare reasoning-gym` leaves in `prompt.metadata["entry"]`.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError(
            'reasoning-gym is not installed: pip install -e ".[tasks]"'
        ) from error
    entry = prompt.metadata["entry"]
    # rpartition and partition return the whole text where there is no tag.
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return float(
        reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(
            answer=answer, entry=entry
        )
    )


BUILTINS: dict[str, Callable[[Prompt, str], Score | float]] = {
    "math": lambda prompt, text: math_reward(text, prompt.answer),
    "exact": lambda prompt, text: exact_reward(text, prompt.answer),
    "reasoning-gym": reasoning_gym_reward,
}
# Linear-time comparisons that cannot hang: they run in the caller's process. Everything else gets a
# worker.
INLINE = frozenset({"exact"})
