"""The needs of features that few rows have."""

from __future__ import annotations

import math
from collections.abc import Mapping

from oxrl.config.checks.base import Check, Problems, at, several_samples
from oxrl.config.schema import Config
from oxrl.config.source import Problem
from oxrl.tables.cells import OVERLONG_PENALTY
from oxrl.tables.numbers import KL_COEFF


def check_dynamic_sampling(cfg: Config) -> Problems:
    """Samples of one prompt that can differ, and no second batch sampled ahead."""
    yield from several_samples(cfg, cfg.train.row.name)
    if cfg.sampling_block > 1:
        most = 3 * cfg.train.updates - 1
        yield at(
            "rollout.max_staleness",
            f"dynamic sampling decides batch by batch what to draw next: at most {most}",
        )


def check_overlong_penalty(cfg: Config) -> Problems:
    """Responses that are punished are trained on."""
    # A row that is not trained on cannot be taught; its penalty would only move the baseline of the
    # others.
    if cfg.train.mask_truncated:
        yield at(
            "train.mask_truncated",
            f"{cfg.train.row.name} punishes the responses that this leaves out: set it to false",
        )


def check_interpolated_anchor(cfg: Config) -> Problems:
    """Old logprobs that can be interpolated, and weights from there to the sampler."""
    row = cfg.train.row
    if cfg.train.old_logprobs != "auto":
        yield at("train.old_logprobs", f"{row.name} interpolates them: set it to auto")
    if row.correction == "none":
        rule = f"{row.name} weighs its interpolated policy against the sampler: set it to truncate"
        yield at("train.correction", rule)


def _kl_needed(cfg: Config) -> Problems:
    if cfg.train.row.kl == "none" or cfg.train.value(KL_COEFF) == 0:
        yield at(
            "train.alg_name",
            "needs a KL term: set train.kl and train.kl_coeff",
            "train.kl",
            "train.kl_coeff",
        )


def check_adaptive_kl(cfg: Config) -> Problems:
    """A KL term in the reward, which can be steered."""
    yield from _kl_needed(cfg)
    row = cfg.train.row
    if row.kl.startswith("loss_"):
        yield Problem(
            "train.kl",
            f"{row.name} steers a KL in the reward: set it to reward_k1",
            row.kl,
            also=("train.kl_coeff",),
        )


def check_reference_reset(cfg: Config) -> Problems:
    """A KL term, to a reference that can be replaced."""
    yield from _kl_needed(cfg)
    if cfg.lora.rank:
        yield at(
            "lora.rank",
            (
                f"{cfg.train.row.name} resets the reference, "
                "which an adapter's base cannot be: set it to 0"
            ),
        )


# What chooses the advantage.
CHOSEN = ("train.alg_name", "train.advantage")


def _kept_rewards(cfg: Config, whole: str, read: str, most: float) -> Problems:
    """Rewards that reach the advantage as they were given.

    Args:
        whole: what would be changed, in words; read: what the advantage makes of it.
        most: bounds of rewards from there on change nothing.
    """
    row = cfg.train.row
    rule = f"changes {whole}, and {row.advantage} {read}: remove it, or change train.alg_name"
    if cfg.reward.normalize != "none":
        yield at("reward.normalize", rule, *CHOSEN)
    if cfg.reward.clip is not None and cfg.reward.clip < most:
        yield at("reward.clip", rule, *CHOSEN)
    if row.kl.startswith("reward_") and cfg.train.value(KL_COEFF) > 0:
        rule = f"is subtracted from {whole}, and {row.advantage} {read}: set loss_k3 here"
        yield Problem("train.kl", rule, row.kl, also=CHOSEN)
    if row.has(OVERLONG_PENALTY):
        rule = f"the overlong penalty of {row.name} is added to {whole}, and {row.advantage} {read}"
        yield Problem("train.advantage", f"{rule}: choose another of the two", also=CHOSEN)


def check_reward_parts(cfg: Config) -> Problems:
    """A reward of parts, which nothing is added to that is no part."""
    if not cfg.reward.parts:
        name = cfg.train.row.name
        rule = f"{name} compares the parts of a reward: write reward.parts, not reward.name"
        yield Problem("reward.parts", rule, also=("reward.name", *CHOSEN))
    yield from _kept_rewards(cfg, "the sum", "reads the parts", math.inf)


def check_binary_rewards(cfg: Config) -> Problems:
    """Rewards that stay 0 or 1: normalised ones are no successes, and cannot be counted."""
    yield from _kept_rewards(cfg, "the reward", "counts successes, which are 0 or 1", 1.0)


OF_FEATURE: Mapping[str, Check] = {
    "reward_parts": check_reward_parts,
    "binary_rewards": check_binary_rewards,
    "dynamic_sampling": check_dynamic_sampling,
    "overlong_penalty": check_overlong_penalty,
    "interpolated_anchor": check_interpolated_anchor,
    "adaptive_kl": check_adaptive_kl,
    "reference_reset": check_reference_reset,
}
