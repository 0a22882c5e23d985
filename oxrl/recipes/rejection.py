"""Rejection-sampling fine-tuning: sample responses, keep those with a good reward, imitate them.

Source: arXiv:2308.01825; with one response kept per prompt, RAFT, arXiv:2304.06767.
"""

from __future__ import annotations

import os

from oxrl.data.prompts import PromptDataset
from oxrl.errors import DataError, Interrupted, Stopped
from oxrl.recipes.scored_answers import ScoredSampler, in_groups
from oxrl.recipes.session import Session
from oxrl.rollouts.sync import check_error_rate
from oxrl.runs.files import clear, open_own, write_records
from oxrl.types import Rollout, Rollouts

# What was kept, in the run directory.
KEPT_FILE = "kept.jsonl"


def sample_and_keep(
    prompts: PromptDataset,
    answers: ScoredSampler,
    session: Session,
    *,
    prompts_per_step: int,
    max_error_rate: float,
    keep_reward: float,
    keep_per_prompt: int | None,
) -> None:
    """Write a supervised row for every response that survives; the file appears whole or not at
    all.

    Args:
        prompts, answers: who answers what.
        session: of the run, whose directory gets the file.
        prompts_per_step: answered at once.
        max_error_rate: share of failed rewards that stops the run.
        keep_reward: least reward of what is kept.
        keep_per_prompt: most responses of a prompt; None: all.

    Raises:
        DataError: none survives.
        Interrupted: a signal asked to stop.
    """
    samples = answers.samples
    sampled = 0
    count = 0
    kept = session.run.path / KEPT_FILE
    partial = kept.with_suffix(".partial")
    clear(partial)
    with open_own(partial, "wb") as file:
        for chunk in prompts.batches(prompts_per_step):
            try:
                rollouts = answers.answer(list(enumerate(chunk, start=sampled)))
            except Stopped as error:
                raise Interrupted(
                    f"stopped by {session.stop.requested} while sampling; --resume samples again "
                    "from the start"
                ) from error
            check_error_rate([rollout.score for rollout in rollouts], max_error_rate)
            for group in in_groups(rollouts, samples):
                for rollout in survivors(group, keep_reward=keep_reward, most=keep_per_prompt):
                    write_records(file, [supervised_row(rollout)])
                    count += 1
            sampled += len(chunk)
            session.message(f"{sampled} of {len(prompts)} prompts sampled, {count} kept")
    if not count:
        raise DataError(
            f"of {sampled * samples} responses none ended by itself with a reward of "
            f"train.keep_reward={keep_reward} or more; lower it, raise rollout.n_samples "
            "or rollout.max_tokens, or start from a model that solves some of the prompts"
        )
    os.replace(partial, kept)


def survivors(group: Rollouts, *, keep_reward: float, most: int | None) -> list[Rollout]:
    """Choose the responses of one prompt to learn from, the best first.

    They ended by themselves, and each text counts once.

    Args:
        keep_reward: least reward of one.
        most: how many; None: all.
    """
    good: list[tuple[float, Rollout]] = []
    for rollout in group:
        reward = rollout.score.value
        ended = rollout.completion.finish_reason == "stop"
        if ended and reward is not None and reward >= keep_reward:
            good.append((reward, rollout))
    distinct: dict[str, Rollout] = {}
    for _, rollout in sorted(good, key=lambda pair: -pair[0]):
        distinct.setdefault(rollout.completion.text, rollout)
    return list(distinct.values())[:most]


def supervised_row(rollout: Rollout) -> dict[str, object]:
    """A response as a row of a supervised data file."""
    return {
        "uid": f"{rollout.prompt.uid}/{rollout.sample}",
        "prompt": [dict(message) for message in rollout.prompt.messages],
        "completion": rollout.completion.text,
        "reward": rollout.score.value,
    }
