"""The reward `reasoning-gym`: a task's own verifier says what an answer is worth."""

from __future__ import annotations

from oxrl.environments.adapting import need
from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Prompt


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
    entry = prompt.metadata["entry"]
    # rpartition and partition return the whole text where there is no tag.
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    score_answer = need("reasoning_gym", "tasks").get_score_answer_fn(
        entry["metadata"]["source_dataset"]
    )
    return float(score_answer(answer=answer, entry=entry))


REASONING_GYM = BuiltIn(reasoning_gym_reward, takes="prompt")
