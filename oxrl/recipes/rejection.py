"""Rejection-sampling fine-tuning: K responses per prompt, those with a good reward kept, then
imitated.

Source: arXiv:2308.01825; with one response kept per prompt, RAFT, arXiv:2304.06767.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from oxrl.config import Config
from oxrl.errors import DataError, Interrupted
from oxrl.recipes import supervised
from oxrl.recipes.evaluate import sampling_from
from oxrl.recipes.session import Session
from oxrl.rollouts.scoring import check_error_rate
from oxrl.types import Rollout


def train(cfg: Config, session: Session) -> None:
    """Sample and keep once, into kept.jsonl of the run directory, which a resumed run finds; then
    fine-tune on it.
    """
    kept = session.run.path / "kept.jsonl"
    if not kept.is_file():
        sample_and_keep(cfg, session, partial := kept.with_suffix(".partial"))
        os.replace(partial, kept)
    data = cfg.data.model_copy(update={"train": str(kept)})
    supervised.train(cfg.model_copy(update={"data": data}), session)


def sample_and_keep(cfg: Config, session: Session, out: Path) -> None:
    """Write a supervised row for every response that survives; each prompt is asked
    `rollout.n_samples` times.
    """
    samples, path, sampled, kept = cfg.rollout.n_samples, cfg.data.train_files[0], 0, 0
    with (
        sampling_from(cfg, path, False) as (prompts, sample),
        out.open("w", encoding="utf-8") as file,
    ):
        for chunk in prompts.batches(cfg.data.prompts_per_step):
            if session.stop:
                raise Interrupted(
                    f"stopped by {session.stop} while sampling; --resume samples again from the start"
                )
            asked = list(enumerate(chunk, start=sampled))
            rollouts = sample(
                asked, samples=samples, temperature=cfg.rollout.temperature, seed=cfg.run.seed
            )
            check_error_rate([rollout.score for rollout in rollouts], cfg.reward.max_error_rate)
            for first in range(0, len(rollouts), samples):
                for rollout in survivors(cfg, rollouts[first : first + samples]):
                    file.write(json.dumps(supervised_row(rollout), ensure_ascii=False) + "\n")
                    kept += 1
            sampled += len(chunk)
            session.message(f"{sampled} of {len(prompts)} prompts sampled, {kept} kept")
    if not kept:
        raise DataError(
            f"of {sampled * samples} responses none ended by itself with a reward of train.keep_reward="
            f"{cfg.train.keep_reward} or more; lower it, raise rollout.n_samples or rollout.max_tokens, or start from "
            "a model that solves some of the prompts"
        )


def survivors(cfg: Config, group: Sequence[Rollout]) -> list[Rollout]:
    """Of one prompt's responses those to learn from: ended by themselves, good, each text once, the
    best ones.
    """
    scored = [
        (r.score.value, r)
        for r in group
        if r.score.value is not None and r.completion.finish_reason == "stop"
    ]
    distinct: dict[str, Rollout] = {}
    for value, rollout in sorted(scored, key=lambda pair: -pair[0]):
        if value >= cfg.train.keep_reward:
            distinct.setdefault(rollout.completion.text, rollout)
    return list(distinct.values())[: cfg.train.keep_per_prompt]


def supervised_row(rollout: Rollout) -> dict[str, object]:
    return {
        "uid": f"{rollout.prompt.uid}/{rollout.sample}",
        "prompt": [dict(message) for message in rollout.prompt.messages],
        "completion": rollout.completion.text,
        "reward": rollout.score.value,
    }
