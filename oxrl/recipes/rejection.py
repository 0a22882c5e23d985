"""Rejection-sampling fine-tuning: sample responses, keep those with a good reward, imitate them.

Source: arXiv:2308.01825; with one response kept per prompt, RAFT, arXiv:2304.06767.
"""

from __future__ import annotations

import os
from pathlib import Path

from oxrl.commands.evaluate import in_groups, sampling_from
from oxrl.config import Config
from oxrl.errors import DataError, Interrupted, Stopped
from oxrl.recipes import supervised
from oxrl.recipes.session import Session
from oxrl.rollouts.sync import check_error_rate
from oxrl.runs.files import clear, encode_line, open_own, write_all
from oxrl.tables.numbers import KEEP_PER_PROMPT, KEEP_REWARD
from oxrl.types import Rollout, Rollouts

# Columns of the rows that are kept, as far as training reads them.
KEPT = ("prompt", "completion")


def train(cfg: Config, session: Session) -> None:
    """Sample and keep once, into a file that a resumed run finds; then fine-tune on it."""
    kept = session.run.path / "kept.jsonl"
    if not kept.is_file():
        partial = kept.with_suffix(".partial")
        clear(partial)
        sample_and_keep(cfg, session, partial)
        os.replace(partial, kept)
    # What was kept is in our words; rows of data.eval still have their own.
    columns = {ours: theirs for ours, theirs in cfg.data.columns.items() if ours in KEPT}
    data = cfg.data.model_copy(update={"train": str(kept), "columns": columns})
    supervised.train(cfg.model_copy(update={"data": data}), session)


def sample_and_keep(cfg: Config, session: Session, out: Path) -> None:
    """Write a supervised row for every response that survives, of `rollout.n_samples` per prompt.

    Raises:
        DataError: none survives.
        Interrupted: a signal asked to stop.
    """
    samples = cfg.rollout.n_samples
    sampled = 0
    kept = 0
    with (
        sampling_from(
            cfg,
            cfg.data.train_files[0],
            held_out=False,
            samples=samples,
            temperature=cfg.rollout.temperature,
            seed=cfg.run.seed,
            stop=session.stopping,
        ) as (prompts, scored),
        open_own(out, "wb") as file,
    ):
        for chunk in prompts.batches(cfg.data.prompts_per_step):
            try:
                rollouts = scored.answer(list(enumerate(chunk, start=sampled)))
            except Stopped as error:
                raise Interrupted(
                    f"stopped by {session.stop.requested} while sampling; --resume samples again "
                    "from the start"
                ) from error
            check_error_rate([rollout.score for rollout in rollouts], cfg.reward.max_error_rate)
            for group in in_groups(rollouts, samples):
                for rollout in survivors(cfg, group):
                    write_all(file, encode_line(supervised_row(rollout)))
                    kept += 1
            sampled += len(chunk)
            session.message(f"{sampled} of {len(prompts)} prompts sampled, {kept} kept")
    if not kept:
        raise DataError(
            f"of {sampled * samples} responses none ended by itself with a reward of "
            f"train.keep_reward={cfg.train.value(KEEP_REWARD)} or more; lower it, raise "
            "rollout.n_samples "
            "or rollout.max_tokens, or start from a model that solves some of the prompts"
        )


def survivors(cfg: Config, group: Rollouts) -> list[Rollout]:
    """Of one prompt's responses those to learn from, the best first.

    They ended by themselves with a reward of `train.keep_reward`, and each text counts once.
    """
    good: list[tuple[float, Rollout]] = []
    for rollout in group:
        reward = rollout.score.value
        ended = rollout.completion.finish_reason == "stop"
        if ended and reward is not None and reward >= cfg.train.value(KEEP_REWARD):
            good.append((reward, rollout))
    distinct: dict[str, Rollout] = {}
    for _, rollout in sorted(good, key=lambda pair: -pair[0]):
        distinct.setdefault(rollout.completion.text, rollout)
    return list(distinct.values())[: cfg.train.value(KEEP_PER_PROMPT)]


def supervised_row(rollout: Rollout) -> dict[str, object]:
    """A response as a row of a supervised data file."""
    return {
        "uid": f"{rollout.prompt.uid}/{rollout.sample}",
        "prompt": [dict(message) for message in rollout.prompt.messages],
        "completion": rollout.completion.text,
        "reward": rollout.score.value,
    }
