"""Rewards that are models: beside the policy in this process, or in the actor that builds one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from oxrl.assembly.assembly import Assembly
from oxrl.config import Config
from oxrl.config.sections.reward import AskedReward
from oxrl.rewards.builtin import steps_rule
from oxrl.rewards.model_pool import BuildModel, ModelPool
from oxrl.rewards.reward_model import RewardModel


def model_pool(assembly: Assembly, asked: AskedReward) -> ModelPool:
    """The pool of a reward model on the run's device."""
    build = _build_of(assembly, asked)
    return ModelPool(asked.name, build, timeout_s=asked.timeout_s, field=asked.field)


def reward_model_of_actor(cfg: Config, asked: AskedReward) -> RewardModel:
    """The reward model that an actor builds, on the device that it has."""
    return _build_of(Assembly(cfg), asked)()


def _build_of(assembly: Assembly, asked: AskedReward) -> BuildModel:
    return partial(
        RewardModel,
        Path(asked.name),
        device=assembly.device,
        budget=assembly.tokens_at_once,
        steps=steps_rule(asked.options),
        day=assembly.cfg.run.day,
    )
