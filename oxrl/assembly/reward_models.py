"""Rewards that are models: beside the policy in this process, or in the actor that builds one."""

from __future__ import annotations

from pathlib import Path

from oxrl.assembly.assembly import Assembly
from oxrl.config import Config
from oxrl.config.sections.reward import AskedReward
from oxrl.rewards.model_options import steps_rule
from oxrl.rewards.model_pool import ModelPool
from oxrl.rewards.reward_model import RewardModel


def model_pool(assembly: Assembly, asked: AskedReward) -> ModelPool:
    """The pool of a reward model on the run's device."""
    return ModelPool(
        asked.name,
        device=assembly.device,
        budget=assembly.tokens_at_once,
        timeout_s=asked.timeout_s,
        field=asked.field,
        steps=steps_rule(asked.options),
    )


def reward_model_of_actor(cfg: Config, asked: AskedReward) -> RewardModel:
    """The reward model that an actor builds, on the device that it has."""
    assembly = Assembly(cfg)
    return RewardModel(
        Path(asked.name),
        device=assembly.device,
        budget=assembly.tokens_at_once,
        steps=steps_rule(asked.options),
    )
