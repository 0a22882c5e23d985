"""The verifiers of reasoning-gym: a task may have many right answers, and partial credit."""

from __future__ import annotations

from oxrl.errors import MissingExtraError
from oxrl.types import Prompt


def reasoning_gym_reward(prompt: Prompt, completion: str) -> float:
    """What the task's own verifier says, in [0, 1], of the last `<answer>...</answer>` or, without one, of everything.

    It reads the entry that `oxrl prepare reasoning-gym` leaves in `prompt.metadata["entry"]`.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError('reasoning-gym is not installed: pip install -e ".[tasks]"') from error
    entry = prompt.metadata["entry"]
    # rpartition and partition return the whole text where there is no tag.
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))
