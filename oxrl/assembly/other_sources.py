"""Sources of rollouts beside the default: sampled in rounds, ahead of training, or stored."""

from __future__ import annotations

from pathlib import Path

from oxrl.config import Config
from oxrl.rollouts.async_rollouts import AheadRollouts
from oxrl.rollouts.rounds import RoundRollouts
from oxrl.rollouts.sync import RolloutParts, RolloutSource
from oxrl.rollouts.whole_samples import StoredRollouts
from oxrl.runs.directory import ROLLOUTS


def other_source(cfg: Config, parts: RolloutParts) -> RolloutSource:
    """Build the source that a configuration asks for.

    Args:
        parts: what every source works with.
    """
    if cfg.rollout.from_samples is not None:
        return StoredRollouts(Path(cfg.rollout.from_samples) / ROLLOUTS, parts)
    if not cfg.sampling_block:
        return RoundRollouts(parts)
    rounds = 1 if parts.choice is None else parts.choice.rounds
    per_batch = parts.prompts_per_step * parts.requests.per_prompt * rounds
    return AheadRollouts(
        parts,
        block=cfg.sampling_block,
        capacity=2 * cfg.sampling_block * per_batch,
        rollout_steps=cfg.run.steps // cfg.train.updates,
        updates=cfg.train.updates,
        background=cfg.inference_engine.actors > 0,
    )
