"""Choice of the pool that scores by a reward, and its trial on prompts of the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oxrl.errors import RewardDefinitionError
from oxrl.rewards.builtin import find_builtin, inline_reward
from oxrl.rewards.pools import InlinePool, ScoringPool, SinglePool
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Group, Objects, Prompt

# Prompts of each file that a reward is tried on.
REHEARSED = 3


def reward_pool(
    name: str,
    *,
    workers: int = 1,
    timeout_s: float = 10.0,
    options: Objects | None = None,
    field: str = "reward",
    directory: Path | None = None,
) -> SinglePool:
    """The pool of a reward: its own, this process where it cannot hang or leave, else workers.

    Args:
        name, workers, timeout_s, options, field: as of `RewardPool`.
        directory: of the run, where a pool of its own keeps what it was told; None: nowhere.

    Raises:
        RewardDefinitionError: as of `RewardPool`.
    """
    row = find_builtin(name)
    if row and row.pool:
        return row.pool(
            options=options or {},
            workers=workers,
            timeout_s=timeout_s,
            field=field,
            directory=directory,
        )
    if row and row.inline:
        return InlinePool(name, inline_reward(name, row, options or {}), field)
    from oxrl.rewards.workers import users_pool  # processes, which an inline reward does without

    return users_pool(name, workers=workers, timeout_s=timeout_s, options=options, field=field)


def try_reward(pool: ScoringPool, prompts: Sequence[Prompt], patience: Patience) -> None:
    """Try a reward that has started on some prompts of a file, before anything depends on it.

    Args:
        pool: of the reward.
        prompts: of the data.
        patience: how long to wait for each next score.

    Raises:
        RewardDefinitionError: it, or a part of it, scores none of them, whatever the completion.
        Stopped: a signal asked to stop.
    """
    for one in pool.pools:
        one.rehearse(prompts, patience)
        row = find_builtin(one.name)
        if row and row.tried and prompts:
            _try_built_in(one, prompts, patience)


def _try_built_in(pool: SinglePool, prompts: Sequence[Prompt], patience: Patience) -> None:
    groups: list[Group] = []
    for prompt in prompts:
        # A made-up completion that states the right answer.
        right = Completion(segments=(), text=f"#### {prompt.answer}", finish_reason="stop")
        groups.append((prompt, [right]))
    scores = [score for group in pool.score(groups, patience) for score in group]
    if all(score.value is None for score in scores):
        raise RewardDefinitionError(
            f"{pool.field}.name={pool.name}: it can score none of {len(prompts)} prompts of "
            f'the data: {scores[0].reason}. Most rewards read "answer", a column of the data: make '
            "that what this one reads, or choose another reward"
        )
