"""The reward of a run as pools that score: one, or those of its parts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from oxrl.assembly.assembly import Assembly
from oxrl.config.conditions import is_model_folder
from oxrl.config.sections.reward import AskedReward, asked_rewards
from oxrl.rewards.builtin import STEPS, kind_of
from oxrl.rewards.pool_choice import reward_pool
from oxrl.rewards.pools import ScoringPool, SinglePool
from oxrl.runs.waiting import Patience


def start_rewards(
    assembly: Assembly, stack: ExitStack, pool: ScoringPool | None = None
) -> ScoringPool | None:
    """The reward's pool, proved to load; None where an environment is all that rewards, or nothing
    is scored.

    Args:
        stack: closes it.
        pool: one that is there already.
    """
    cfg = assembly.cfg
    if not cfg.reward.exists or cfg.scores_nothing:
        return None
    pool = pool or build_rewards(assembly)
    stack.callback(pool.close)
    pool.start(Patience(assembly.stop))
    return pool


def build_rewards(assembly: Assembly) -> ScoringPool:
    """The pool of the reward, or those of its parts."""
    asked = asked_rewards(assembly.cfg.reward)
    if not assembly.cfg.reward.parts:
        return _reward_pool(assembly, asked[0])
    from oxrl.rewards.parts import Part, PartsPool  # one reward does without

    parts = {
        one.part: Part(pool=_reward_pool(assembly, one), weight=one.weight, optional=one.optional)
        for one in asked
    }
    return PartsPool(parts)


def build_other_reward(assembly: Assembly, name: str) -> SinglePool:
    """The pool of another reward under the limits of `reward`, to choose between responses by.

    A process reward model chooses by the worst step, Math-Shepherd, arXiv:2312.08935.
    """
    by_steps = is_model_folder(name) and kind_of(Path(name)) == "process"
    options = {STEPS: "worst"} if by_steps else {}
    changed = {"name": name, "parts": {}, "options": options}
    reward = assembly.cfg.reward.model_copy(update=changed)
    return _reward_pool(assembly, asked_rewards(reward)[0])


def _reward_pool(assembly: Assembly, asked: AskedReward) -> SinglePool:
    cfg = assembly.cfg
    is_model = is_model_folder(asked.name)
    if is_model and cfg.reward.actors:
        from oxrl.assembly.ray_engines import actor_pool  # Ray is an extra

        return actor_pool(cfg, asked)
    # Where several processes train, it scores on the CPU of workers.
    if is_model and not cfg.train.engine.several_ranks:
        from oxrl.assembly.reward_models import model_pool  # other rewards read no model

        return model_pool(assembly, asked)
    return reward_pool(
        asked.name,
        workers=asked.workers,
        timeout_s=asked.timeout_s,
        options=asked.options,
        field=asked.field,
        directory=cfg.run.directory,
    )
