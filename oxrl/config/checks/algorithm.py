"""The algorithm: cells, features and numbers that fit together and into the batch, and code of the
user's own, as far as it can be judged without running it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from oxrl.config.checks.usual import check_groups, several_samples
from oxrl.config.conditions import SHARING, has_teacher, obstacles
from oxrl.config.schema import Config
from oxrl.config.sections.train import CELLS
from oxrl.config.source import Check, Problem, Problems, at
from oxrl.tables.cells import DISCRIMINATOR, INTERPOLATED_ANCHOR, OVERLONG_PENALTY
from oxrl.tables.numbers import (
    CORRECTION_MAX,
    CORRECTION_MIN,
    KL_COEFF,
    MAXRL_ORDER,
    PASS_K,
    WEIGHT_MAX,
    WEIGHT_MIN,
)
from oxrl.tables.user_code import FEATURE

# Corrections that are ratios themselves; the others keep a token or drop it.
WEIGHTING = ("truncate", "mask")
# Policy losses that are another one where the ratio is 1.
AT_RATIO_ONE = {"fipo": "ppo_clip", "dro": "policy_gradient", "drpo": "importance_sampling"}
# What chooses the advantage.
CHOSEN = ("train.alg_name", "train.advantage")


# --- The batch.
def check_batch(cfg: Config) -> Problems:
    """Batch equation: whole groups per minibatch, whole rollout steps per run."""
    prompts = cfg.data.prompts_per_step
    minibatches = cfg.train.minibatches
    updates = cfg.train.updates
    steps = cfg.run.steps
    passes = ("train.epochs", "train.minibatches")
    equation = f"{updates} = train.epochs {cfg.train.epochs} x train.minibatches {minibatches}"
    if prompts % minibatches:
        divisors = [number for number in range(1, prompts + 1) if prompts % number == 0]
        yield at(
            "train.minibatches",
            (
                f"must divide data.prompts_per_step={prompts}, "
                "so that each minibatch holds whole groups; nearest valid: "
                f"train.minibatches {_nearest(divisors, minibatches)}, "
                f"or data.prompts_per_step {_multiples(minibatches, prompts)}"
            ),
            "data.prompts_per_step",
        )
    if steps % updates:
        yield at(
            "run.steps",
            (
                f"must be a multiple of {equation}, the optimizer steps of one rollout step; "
                f"nearest valid: {_multiples(updates, steps)}"
            ),
            *passes,
        )
    if cfg.train.row.gate == "policy_gradient" and updates > 1:
        yield at(
            passes[0] if cfg.train.epochs > 1 else passes[1],
            (
                f"{cfg.train.row.name} has no importance ratio, so of the updates on a rollout "
                f"batch, {equation}, only the first would follow its gradient: the others learn "
                "from samples of older weights as if the policy had just drawn them; set "
                "train.epochs and train.minibatches to 1, or train.loss: ppo_clip with "
                "train.ratio: token"
            ),
            *passes,
            "train.loss",
        )
    if cfg.train.old_logprobs == "current" and updates > 1:
        yield at(
            "train.old_logprobs",
            (
                f"needs one optimizer step per rollout batch, this run has {equation}; "
                "set it to recompute or auto"
            ),
            *passes,
        )


def _multiples(unit: int, value: int) -> str:
    below = value - value % unit
    return _nearest([number for number in (below, below + unit) if number], value)


def _nearest(candidates: list[int], value: int) -> str:
    closest = sorted(candidates, key=lambda candidate: abs(candidate - value))[:2]
    return " or ".join(str(number) for number in sorted(closest))


def check_share_prefix(cfg: Config) -> Problems:
    """Nothing is in the way where it is asked for; auto does without."""
    if cfg.train.share_prefix is not True:
        return
    for why, instead, field in obstacles(cfg):
        yield at(SHARING, f"{why}; set it to false{instead}", field)


# --- Cells.
def check_correction(cfg: Config) -> Problems:
    """Old logprobs, correction and denominator: the sampler's mismatch is corrected once."""
    row = cfg.train.row
    also = ("train.correction", "train.denominator")
    if row.correction == "none":
        return
    if cfg.train.old_logprobs == "bypass":
        yield at(
            "train.old_logprobs",
            (
                "puts the sampler's logprobs into the ratio, "
                f"and correction {row.correction} would count them twice; "
                "set train.correction: none or recompute"
            ),
            *also,
        )
    if row.denominator == "rollout" and row.correction in WEIGHTING:
        yield at(
            "train.correction",
            (
                f"a ratio against the rollout policy and correction {row.correction} "
                "count the mismatch twice; set train.correction: none or train.denominator: old"
            ),
            *also,
        )


def check_cells(cfg: Config) -> Problems:
    """Cells and numbers that do not fit together."""
    row = cfg.train.row
    if row.unsupported:
        yield at("train.alg_name", row.unsupported, *(f"train.{name}" for name in CELLS))
    if row.gate == "policy_gradient":
        rule = f"has no effect: {row.gate} reads no importance ratio; remove it, or set train.loss"
        if cfg.train.ratio not in (None, "none"):
            yield at("train.ratio", rule, "train.loss")
        if cfg.train.denominator is not None:
            yield at("train.denominator", rule, "train.loss")
    elif row.ratio == "none":
        yield Problem(
            "train.ratio",
            (
                f"{row.gate} needs an importance ratio: "
                "set train.ratio, or train.loss: policy_gradient"
            ),
            row.ratio,
            also=("train.loss",),
        )
    samples = cfg.rollout.n_samples
    if row.advantage == "pass_at_k" and cfg.train.value(PASS_K) > samples:
        yield at(
            "train.pass_k",
            f"cannot exceed rollout.n_samples {samples}: lower it, or sample more",
            "rollout.n_samples",
        )
    order = cfg.train.value(MAXRL_ORDER)
    if row.advantage == "mean_normalize" and order is not None and order >= samples:
        yield at(
            "train.maxrl_order",
            f"must be below rollout.n_samples {samples}: lower it, or sample more",
            "rollout.n_samples",
        )
    read = row.defaults
    for low, high in ((WEIGHT_MIN, WEIGHT_MAX), (CORRECTION_MIN, CORRECTION_MAX)):
        above = f"train.{high.key}"
        upper = cfg.train.value(high)
        if low.key in read and high.key in read and cfg.train.value(low) >= upper:
            yield at(f"train.{low.key}", f"must be below {above}={upper}", above)


def check_centering(cfg: Config) -> Problems:
    """The expectation that is subtracted from the loss can be computed."""
    if cfg.train.row.centering == "none":
        return
    from oxrl.config.checks.centering import centering_problems  # few rows subtract anything

    yield from centering_problems(cfg)


def check_moving_ratio(cfg: Config) -> Problems:
    """A ratio that can leave 1, for losses that are another one without."""
    row = cfg.train.row
    if row.gate not in AT_RATIO_ONE or cfg.train.updates > 1:
        return
    anchor = "sampler" if row.denominator == "rollout" else cfg.train.old_logprobs
    to_sampler = anchor in ("sampler", "bypass") or row.has(INTERPOLATED_ANCHOR)
    sampler_differs = cfg.rollout.max_staleness > 0 or cfg.inference_engine.name != "local"
    if to_sampler and sampler_differs:
        return
    other = AT_RATIO_ONE[row.gate]
    yield at(
        "train.epochs",
        (
            f"and train.minibatches make one update per rollout batch, whose ratio is 1, where "
            f"{row.gate} is {other}: set one of them to 2 or more, or train.loss: {other}"
        ),
        "train.minibatches",
        "train.loss",
    )


# --- Features.
def check_dynamic_sampling(cfg: Config) -> Problems:
    """Samples of one prompt that can differ."""
    yield from several_samples(cfg, cfg.train.row.name)


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
        yield at(
            "train.correction",
            f"{row.name} weighs its interpolated policy against the sampler: set it to truncate",
        )


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
        yield Problem(
            "reward.parts",
            (
                f"{cfg.train.row.name} compares the parts of a reward: write reward.parts, not "
                "reward.name"
            ),
            also=("reward.name", *CHOSEN),
        )
    yield from _kept_rewards(cfg, "the sum", "reads the parts", math.inf)


def check_binary_rewards(cfg: Config) -> Problems:
    """Rewards that stay 0 or 1: normalised ones are no successes, and cannot be counted."""
    yield from _kept_rewards(cfg, "the reward", "counts successes, which are 0 or 1", 1.0)


OF_FEATURE: Mapping[str, Check] = {
    "groups": check_groups,
    "reward_parts": check_reward_parts,
    "binary_rewards": check_binary_rewards,
    "dynamic_sampling": check_dynamic_sampling,
    "overlong_penalty": check_overlong_penalty,
    "interpolated_anchor": check_interpolated_anchor,
    "adaptive_kl": check_adaptive_kl,
    "reference_reset": check_reference_reset,
}


def check_features(cfg: Config) -> Problems:
    """Check that what the row adds to its cells has what it needs."""
    for need in cfg.train.row.needs:
        if need in OF_FEATURE:
            yield from OF_FEATURE[need](cfg)
    if has_teacher(cfg):
        from oxrl.config.checks.teachers import check_teachers  # most rows have none

        yield from check_teachers(cfg)
    if cfg.train.row.has(DISCRIMINATOR):
        from oxrl.config.checks.teachers import check_text_alone  # as above

        yield from check_text_alone(cfg)


# --- Code of the user's own.
def check_own_gate(cfg: Config) -> Problems:
    """The function is there and takes what a gate is given, and the numbers of its run.

    Args:
        cfg: of a run of reinforcement learning.
    """
    loss = cfg.train.row.gate
    if not cfg.train.row.has_own_loss:
        return
    from oxrl.usercode.gate_signature import gate_signature, number_problems, why_no_gate  # rare

    try:
        taken = gate_signature(loss)
    except ValueError as error:
        yield at("train.loss", str(error))
        return
    if taken is None:
        return
    problem = why_no_gate(taken)
    if problem:
        yield at("train.loss", problem)
        return
    for rule in number_problems(loss, taken, cfg.train.loss_numbers):
        yield at("train.loss_numbers", rule, "train.loss")


def check_own_features(cfg: Config) -> Problems:
    """Every file is there and may define its class; what a program gave is still given.

    Args:
        cfg: of a run of reinforcement learning.
    """
    if not cfg.train.features:
        return
    from oxrl.usercode.locate import place_of  # as above

    named: dict[str, str] = {}
    for name in cfg.train.features:
        try:
            place_of(FEATURE, name)
        except ValueError as error:
            yield Problem("train.features", str(error), name)
            continue
        short = name.rpartition(":")[2]
        if short in named:
            yield Problem(
                "train.features",
                f"two features are called {short}, here and in {named[short]}: rename one",
                name,
            )
        named[short] = name


# --- Numbers.
def check_numbers(cfg: Config) -> Problems:
    """Bounds are the right way round, and what is to happen in a run can happen."""
    values = {name: getattr(cfg.train, name) for name in cfg.train.row.defaults}
    high = values.get("clip_high")
    if values.get("clip_low") == 0 and high == 0:
        yield at(
            "train.clip_high",
            "and train.clip_low are both 0, which clips every token that moves; raise one",
            "train.clip_low",
        )
    dual = values.get("clip_dual")
    if dual is not None and high is not None and dual < 1 + high:
        yield at(
            "train.clip_dual",
            f"must be at least 1 + train.clip_high = {1 + high:g}, where the other clip begins",
            "train.clip_high",
        )
    highest = values.get("cov_high")
    if highest is not None and values["cov_low"] >= highest:
        yield at(
            "train.cov_low",
            f"must be below train.cov_high = {highest:g}, else no token is chosen",
            "train.cov_high",
        )
    buffer = values.get("overlong_buffer")
    longest = cfg.rollout.max_tokens
    if buffer is not None and buffer > longest:
        yield at(
            "train.overlong_buffer",
            f"must be at most rollout.max_tokens = {longest}, within which the penalty grows",
            "rollout.max_tokens",
        )
