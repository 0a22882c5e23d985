"""The reward `judge` as a function of a group, and what may be said of its options."""

from __future__ import annotations

from typing import Any

from oxrl.rewards.builtin import BuiltIn
from oxrl.types import Completions, GroupScores, Prompt
from oxrl_graders.formats import compiled, cosine_length_value
from oxrl_graders.judge.options import JudgeOptions, refuse_secrets


def score_judge(prompt: Prompt, completions: Completions, **options: Any) -> GroupScores:
    """`judge`: see `oxrl_graders.judge`. In a run its own pool asks, and keeps what was said.

    Args:
        prompt: what was asked.
        completions: the group, which a judge may be asked to compare.
        options: fields of `JudgeOptions`.

    Returns:
        One score for each completion, in order.

    Raises:
        RewardDefinitionError: an option that cannot work.
    """
    from oxrl_graders.judge.pool import JudgePool  # that asks over the network

    return JudgePool(options).score([(prompt, completions)])[0]


JUDGE = BuiltIn(
    score_judge,
    of_groups=True,
    # It costs money or time elsewhere.
    tried=False,
    passes_on=JudgeOptions,
    refuse=refuse_secrets,
    checks={
        "pattern": compiled,
        "max_tokens": lambda count: cosine_length_value(0, True, max_tokens=count),
    },
    together=JudgeOptions,
)
