"""The trial of a reward before anything depends on it, as whoever asks for it sees it.

What is called, and judged, is in dry_call.py, in the process that loaded the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oxrl.errors import RewardDefinitionError
from oxrl.types import Prompt

DRY_TEXT = "#### 2"
# Completions of a group: one that returns a list of one thing would pass with one.
DRY_GROUP = 2


def described(*, per_sample: bool) -> str:
    """Describe what the dry call passes, for a message.

    Args:
        per_sample: the reward scores one text, and not a group.

    Returns:
        A phrase, such as "a dry call with ...".
    """
    many = "" if per_sample else f"{DRY_GROUP} times "
    return f"a dry call with prompt.answer='2' and {many}completion {DRY_TEXT!r}"


def rehearse_all(
    where: str, prompts: Sequence[Prompt], problem_on: Callable[[Prompt], str]
) -> None:
    """Try a reward on prompts until it works on one.

    Args:
        where: the reward stands in the config, with its name.
        prompts: of the data.
        problem_on: tries one: why the reward fails on it, empty where it does not.

    Raises:
        RewardDefinitionError: it failed on every one.
    """
    first = ""
    for prompt in prompts:
        problem = problem_on(prompt)
        if not problem:
            return
        first = first or f"prompt {prompt.uid}: {problem}"
    if not first:
        return
    raise RewardDefinitionError(
        f"{where}: it failed on {len(prompts)} of {len(prompts)} prompts of the data, whatever "
        f"the completion. On {first}. A text that it cannot read is worth a score, such as "
        "0.0; an exception says that the reward itself is broken"
    )
