"""Rejection-sampling fine-tuning: K responses per prompt, those with a good reward kept, then imitated.

Source: arXiv:2308.01825; with one response kept per prompt, RAFT, arXiv:2304.06767.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from oxrl.config import Config
from oxrl.errors import DataError, Interrupted
from oxrl.recipes import supervised
from oxrl.recipes.evaluate import sampling_from
from oxrl.recipes.rollouts import check_error_rate
from oxrl.recipes.session import Session
from oxrl.runs.files import write_atomically
from oxrl.types import Rollout


def train(cfg: Config, session: Session) -> None:
    """Sample and keep once, into kept.jsonl of the run directory, which a resumed run finds; then fine-tune on it."""
    kept = session.run.path / "kept.jsonl"
    if not kept.is_file():
        rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in sample_and_keep(cfg, session)]
        write_atomically(kept, "".join(rows))
    data = cfg.data.model_copy(update={"train": str(kept)})
    supervised.train(cfg.model_copy(update={"data": data}), session)


def sample_and_keep(cfg: Config, session: Session) -> list[dict[str, object]]:
    """Supervised rows of every response that survives; each prompt is asked `rollout.n_samples` times.

    Raises:
        DataError: none survives.
        Interrupted: a signal asked to stop.
    """
    samples, chunk, rows = cfg.rollout.n_samples, cfg.data.prompts_per_step, list[dict[str, object]]()
    with sampling_from(cfg, cfg.data.train_files[0], False) as (prompts, sample):
        asked = list(enumerate(prompts.in_order()))
        for start in range(0, len(asked), chunk):
            if session.stop:
                raise Interrupted(f"stopped by {session.stop} while sampling; --resume samples again from the start")
            rollouts = sample(
                asked[start : start + chunk], samples=samples, temperature=cfg.rollout.temperature, seed=cfg.run.seed
            )
            check_error_rate([rollout.score for rollout in rollouts], cfg.reward.max_error_rate)
            for first in range(0, len(rollouts), samples):
                rows += [supervised_row(rollout) for rollout in survivors(cfg, rollouts[first : first + samples])]
            session.message(f"{start + len(rollouts) // samples} of {len(asked)} prompts sampled, {len(rows)} kept")
    if not rows:
        raise DataError(
            f"of {len(asked) * samples} responses none ended by itself with a reward of train.keep_reward="
            f"{cfg.train.keep_reward} or more; lower it, raise rollout.n_samples or rollout.max_tokens, or start from "
            "a model that solves some of the prompts"
        )
    return rows


def survivors(cfg: Config, group: Sequence[Rollout]) -> list[Rollout]:
    """Of one prompt's responses those to learn from: ended by themselves, good, each text once, the best ones."""
    scored = [(r.score.value, r) for r in group if r.score.value is not None and r.completion.finish_reason == "stop"]
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
