"""The batch equation: whole groups per minibatch, whole rollout steps per run."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, at
from oxrl.config.schema import Config


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
