"""The verifiers of reasoning-gym: a task may have many right answers, and partial credit."""

from __future__ import annotations

from oxrl.errors import MissingExtraError
from oxrl.types import Prompt


def reasoning_gym_reward(prompt: Prompt, completion: str) -> float:
    """What the task's own verifier says of the answer, in [0, 1].

    The answer is the text in the last `<answer>...</answer>`, or the whole completion if there is none.

    Args:
        prompt: with the reasoning-gym entry in `metadata["entry"]`, as `oxrl prepare reasoning-gym` writes it.
        completion: the completion's text.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
        KeyError: the prompt has no entry.
    """
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError('reasoning-gym is not installed: pip install -e ".[tasks]"') from error
    entry = prompt.metadata["entry"]
    # rpartition and partition return the whole text where there is no tag.
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    return float(reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])(answer=answer, entry=entry))
