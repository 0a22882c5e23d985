"""Policy-gradient training, one loop for every row of the table: rollouts -> rewards -> advantages -> update.

Read `train` from top to bottom: every arrow of the data flow is one call there. Rows differ only in the functions that
`resolve` looks up by name. `step` counts optimizer steps and is the weight version; `rollout_step` counts iterations;
`draw` is the next position in the data order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oxrl.algorithms import PARAMETERS
from oxrl.config import Config
from oxrl.data.batching import split_by_group
from oxrl.errors import InvariantError
from oxrl.functional.advantages import ADVANTAGES, AdvantageInputs
from oxrl.functional.corrections import CORRECTIONS
from oxrl.functional.kl import KLS, add_kl_to_rewards
from oxrl.functional.masks import masked_mean, weighted_sum
from oxrl.functional.metrics import (
    advantage_metrics,
    data_metrics,
    mismatch_metrics,
    policy_metrics,
    staleness_metrics,
    value_metrics,
)
from oxrl.functional.policy_losses import GATES
from oxrl.functional.ratios import RATIOS
from oxrl.functional.value_losses import value_loss
from oxrl.functional.weights import WEIGHTS, token_mean
from oxrl.recipes.build import Team, build_team
from oxrl.recipes.collect import account, collect, harvest_metrics, penalize_overlong, training_rows
from oxrl.recipes.evaluate import evaluate_held_out
from oxrl.recipes.rollouts import sample_record
from oxrl.recipes.session import Progress, Session, all_finite
from oxrl.seeds import stable_seed
from oxrl.types import LossFn, Metrics, Output, PolicyBatch, Rollout, RolloutBatch, ValueBatch

WANT = frozenset({"logprobs", "entropy"})

# Old log-probabilities come from the same weights by the same code; only padding widths differ between the two passes.
FIRST_RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A row of the table as functions, its numbers bound."""

    advantage: Callable[[AdvantageInputs], tuple[Tensor, Tensor | None]]
    policy_loss: LossFn
    value_loss: LossFn
    weights: Callable[[Tensor, Tensor], Tensor]
    correction: Callable[[Tensor, Tensor, Tensor], Tensor] | None
    old_logprobs: str  # recompute | current | bypass
    shape: Callable[[RolloutBatch], RolloutBatch] | None  # of rewards, before advantages


def resolve(cfg: Config) -> Algorithm:
    """Look up the row's cells, once."""
    row = cfg.train.row

    def numbers(kind: str, name: str) -> dict[str, Any]:
        return {field: getattr(cfg.train, field) for field in PARAMETERS[(kind, name)]}

    weights = numbers("weights", row.weights)
    if weights.get("weights_length", 0) is None:
        weights["weights_length"] = cfg.rollout.max_tokens
    correction = CORRECTIONS.get(row.correction)
    if correction is not None:
        correction = partial(correction, **numbers("correction", row.correction))
    mode = cfg.train.old_logprobs
    if mode == "auto":
        mode = "current" if cfg.train.epochs * cfg.train.minibatches == 1 else "recompute"
    return Algorithm(
        advantage=partial(ADVANTAGES[row.advantage], **numbers("advantage", row.advantage)),
        policy_loss=partial(
            policy_loss,
            ratio=RATIOS[row.ratio],
            to_rollout=row.denominator == "rollout",
            gate=partial(GATES[row.gate], **numbers("gate", row.gate)),
            correction=correction,
            kl=KLS[row.kl] if row.kl.startswith("loss_") else None,
            kl_coeff=cfg.train.kl_coeff,
            entropy_coeff=cfg.train.entropy_coeff,
        ),
        value_loss=partial(critic_loss, value_clip=cfg.train.value_clip),
        weights=partial(WEIGHTS[row.weights], **weights),
        correction=correction,
        old_logprobs=mode,
        shape=shape_of_rewards(cfg),
    )


def shape_of_rewards(cfg: Config) -> Callable[[RolloutBatch], RolloutBatch] | None:
    """What changes the rewards before they become advantages, or None."""
    if "overlong_penalty" not in cfg.train.row.needs:
        return None
    limit = cfg.rollout.max_tokens
    buffer = cfg.train.overlong_buffer or max(1, limit // 5)
    return partial(penalize_overlong, max_tokens=limit, buffer_tokens=buffer)


def policy_loss(
    output: Output,
    batch: PolicyBatch,
    *,
    ratio: Callable[[Tensor, Tensor, Tensor], Tensor],
    to_rollout: bool,
    gate: Callable[..., tuple[Tensor, dict[str, Tensor]]],
    correction: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    kl: Callable[[Tensor, Tensor, Tensor], Tensor] | None,
    kl_coeff: float,
    entropy_coeff: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """loss = gate(ratio, advantages) * correction + kl_coeff * KL - entropy_coeff * H, all weighted by loss_weights."""
    logprobs, mask = _required(output.logprobs), batch.inputs.response_mask
    old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    anchor = ratio(logprobs, batch.rollout_logprobs if to_rollout else old, mask)
    rollout_correction = None if correction is None else correction(old, batch.rollout_logprobs, mask)
    loss, metrics = gate(logprobs, anchor, batch.advantages, mask, batch.loss_weights, correction=rollout_correction)
    if kl is not None and batch.ref_logprobs is not None:
        loss = loss + kl_coeff * weighted_sum(kl(logprobs, batch.ref_logprobs, mask), mask, batch.loss_weights)
    if entropy_coeff:
        loss = loss - entropy_coeff * weighted_sum(_required(output.entropy), mask, batch.loss_weights)
    return loss, metrics


def critic_loss(output: Output, batch: ValueBatch, *, value_clip: float | None) -> tuple[Tensor, dict[str, Tensor]]:
    mask = batch.inputs.response_mask
    values = _required(output.values)
    return value_loss(values, batch.old_values, batch.returns, mask, batch.loss_weights, value_clip=value_clip)


def _required(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise InvariantError("the engine did not return what the loss asked for")
    return tensor


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is one."""
    algorithm = resolve(cfg)
    team = build_team(cfg)
    session.closing(team.close)
    progress = session.restore(team.engines(), {"step": 0, "rollout_step": 0, "draw": 0, "samples": {}})
    while progress["step"] < cfg.run.steps:
        # Sample G completions per prompt from the weights just trained, and score each group.
        start = int(progress["step"])
        harvest = collect(cfg, team, session, progress)
        if harvest is None:  # a signal: the weights are still those of the last boundary
            session.boundary(team.engines(), progress)
            return
        batch, kept, dropped = training_rows(cfg, team, harvest, version=start)
        shaped = batch if algorithm.shape is None else algorithm.shape(batch)

        # What every model says of the samples before the update; reward relative to the group or the critic.
        with session.phase("time/logprobs_s"):
            policy_batch, value_batch = prepare(team, algorithm, shaped, kl_in_reward=kl_in_reward(cfg))
        shared = harvest_metrics(harvest) | rollout_metrics(batch, shaped, policy_batch, progress)
        session.record_samples(sample_lines(harvest.rollouts, kept, policy_batch, step=start))
        if cfg.run.record == "tokens":
            session.record_rollouts(start, recorded_tensors(policy_batch))

        # One optimizer step per minibatch; loss weights are normalised over each minibatch.
        steps = minibatches(cfg, policy_batch, rollout_step=int(progress["rollout_step"]))
        shared |= account(progress, harvest, dropped, trained=len(torch.cat(steps).unique()))
        shared |= team.sampler.metrics() | team.sync.metrics()
        progress["rollout_step"] += 1
        progress["draw"] = harvest.end
        for index, rows in enumerate(steps):
            with session.phase("time/update_s"):
                metrics = update(cfg, team, algorithm, session, progress, rows, policy_batch, value_batch, index == 0)
            progress["step"] += 1
            if index == len(steps) - 1 and team.held_out and session.eval_due(start, progress["step"]):
                with session.phase("time/eval_s"):
                    team.sync.deliver(int(progress["step"]))
                    metrics |= evaluate_held_out(cfg, team)
            session.record(progress["step"], shared | metrics, tokens=shared["data/tokens"] / len(steps))
        session.boundary(team.engines(), progress)
    session.finish(progress["step"])


def kl_in_reward(cfg: Config) -> float | None:
    """The coefficient when the row subtracts a KL from the reward, else None."""
    return cfg.train.kl_coeff if cfg.train.row.kl.startswith("reward_") and cfg.train.kl_coeff > 0 else None


def prepare(
    team: Team, algorithm: Algorithm, batch: RolloutBatch, *, kl_in_reward: float | None
) -> tuple[PolicyBatch, ValueBatch | None]:
    """Everything the updates of this rollout batch read, from one forward pass per model involved."""
    inputs, mask = batch.inputs, batch.inputs.response_mask
    logprobs_only = frozenset({"logprobs"})
    old = ref = values = bootstrap = None
    if algorithm.old_logprobs == "recompute":
        old = _required(team.policy.forward(inputs, logprobs_only).logprobs)
    elif algorithm.old_logprobs == "bypass":
        old = batch.rollout_logprobs
    if team.reference is not None:
        ref = _required(team.reference.forward(inputs, logprobs_only).logprobs)
    if team.critic is not None:
        judged = team.critic.forward(inputs, frozenset({"values"}))
        values, bootstrap = _required(judged.values), judged.bootstrap

    rewards, token_rewards = batch.rewards, batch.token_rewards
    if kl_in_reward is not None:
        sampled = batch.rollout_logprobs if old is None else old
        rewards, token_rewards = add_kl_to_rewards(
            rewards, token_rewards, sampled, _required(ref), mask, kl_coeff=kl_in_reward
        )
    advantages, returns = algorithm.advantage(
        AdvantageInputs(
            rewards=rewards,
            token_rewards=token_rewards,
            response_mask=mask,
            group_ids=batch.group_ids,
            values=values,
            bootstrap=bootstrap,
            truncated=batch.truncated,
        )
    )
    policy_batch = PolicyBatch(
        inputs=inputs,
        old_logprobs=old,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=ref,
        advantages=advantages,
        loss_weights=algorithm.weights(mask, batch.group_ids),
        versions=batch.versions,
        group_ids=batch.group_ids,
    )
    if values is None:
        return policy_batch, None
    weights = token_mean(mask)
    return policy_batch, ValueBatch(inputs=inputs, old_values=values, returns=_required(returns), loss_weights=weights)


def minibatches(cfg: Config, batch: PolicyBatch, *, rollout_step: int) -> list[Tensor]:
    """Row indices of every optimizer step on this rollout batch: `epochs` passes of `minibatches` each."""
    return [
        rows
        for epoch in range(cfg.train.epochs)
        for rows in split_by_group(
            batch.group_ids, cfg.train.minibatches, seed=stable_seed(cfg.run.seed, rollout_step, epoch)
        )
    ]


def update(
    cfg: Config,
    team: Team,
    algorithm: Algorithm,
    session: Session,
    progress: Progress,
    rows: Tensor,
    policy_batch: PolicyBatch,
    value_batch: ValueBatch | None,
    first: bool,
) -> Metrics:
    """One optimizer step of the policy, and of the critic when there is one, on `rows` of the rollout batch.

    A step with anything non-finite in it is refused on every engine and its batch is kept for inspection. A step with
    no trained token is not taken either: a zero gradient would still move Adam's momentum.
    """
    step = int(progress["step"]) + 1
    mask = policy_batch.inputs.response_mask[rows]
    weights = algorithm.weights(mask, policy_batch.group_ids[rows])
    batch = dataclasses.replace(policy_batch.select(rows), loss_weights=weights)
    if not mask.any():
        skipped = skip(team)
        return skipped | {"data/empty_steps": 1.0}

    # Gradients of every engine first, then all of them step or none does.
    tolerance = FIRST_RATIO_TOLERANCE[cfg.model.dtype] if first and algorithm.old_logprobs == "recompute" else None
    metrics = policy_gradients(team, algorithm, batch, tolerance)
    if metrics is not None and value_batch is not None:
        judged = dataclasses.replace(value_batch.select(rows), loss_weights=token_mean(mask))
        critic = critic_gradients(team, algorithm, judged)
        metrics = None if critic is None else metrics | critic
    if metrics is None:
        session.dump(step, recorded_tensors(batch))
        return skip(team) | {"data/empty_steps": 0.0}
    warming_up = value_batch is not None and step <= cfg.train.critic_warmup_steps
    stepped = team.policy.skip_step() | {"update/skipped": 0.0} if warming_up else team.policy.optim_step()
    if team.critic is not None:
        critic_step = team.critic.skip_step() if stepped["update/skipped"] else team.critic.optim_step()
        stepped |= {"value/" + name.removeprefix("update/"): value for name, value in critic_step.items()}
    if stepped["update/skipped"]:
        session.dump(step, recorded_tensors(batch))
    return metrics | stepped | {"data/empty_steps": 0.0}


def skip(team: Team) -> Metrics:
    """Refuse this step everywhere."""
    metrics = team.policy.skip_step()
    if team.critic is not None:
        team.critic.skip_step()
    return metrics


def policy_gradients(
    team: Team, algorithm: Algorithm, batch: PolicyBatch, first_ratio_tolerance: float | None
) -> Metrics | None:
    """Add the policy's gradient; metrics over the whole minibatch, or None when something is not finite."""
    mask = batch.inputs.response_mask
    if not all_finite(batch.advantages, batch.rollout_logprobs, batch.old_logprobs, batch.ref_logprobs, mask=mask):
        return None
    output = team.policy.forward_backward(batch, algorithm.policy_loss, WANT)
    logprobs = _required(output.logprobs)
    with torch.no_grad():
        loss, metrics = algorithm.policy_loss(output, batch)
    if not all_finite(logprobs, output.entropy, mask=mask) or not loss.isfinite():
        return None
    old = logprobs if batch.old_logprobs is None else batch.old_logprobs
    correct = algorithm.correction
    corrected = None if correct is None else correct(old, batch.rollout_logprobs, mask)
    if first_ratio_tolerance is not None:
        check_first_ratio(logprobs, old, mask, first_ratio_tolerance)
    return (
        {"update/loss": float(loss)}
        | {name: float(value) for name, value in metrics.items()}
        | policy_metrics(logprobs, old, mask, ref_logprobs=batch.ref_logprobs, entropy=output.entropy)
        | mismatch_metrics(old, batch.rollout_logprobs, mask, corrected)
    )


def critic_gradients(team: Team, algorithm: Algorithm, batch: ValueBatch) -> Metrics | None:
    """Add the critic's gradient; metrics over the whole minibatch, or None when something is not finite."""
    mask = batch.inputs.response_mask
    if team.critic is None or not all_finite(batch.old_values, batch.returns, mask=mask):
        return None
    output = team.critic.forward_backward(batch, algorithm.value_loss, frozenset({"values"}))
    with torch.no_grad():
        loss, metrics = algorithm.value_loss(output, batch)
    if not all_finite(output.values, mask=mask) or not loss.isfinite():
        return None
    return (
        {"value/loss": float(loss)}
        | {name: float(value) for name, value in metrics.items()}
        | value_metrics(batch.old_values, batch.returns, mask)
    )


def check_first_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, tolerance: float) -> None:
    """Before the first update the policy is its own old policy, so every ratio must be 1.

    Raises:
        InvariantError: it is not: the two passes saw other weights, another temperature, or dropout.
    """
    worst = float((logprobs - old_logprobs)[mask].abs().max())
    if worst > tolerance:
        raise InvariantError(
            f"the first minibatch's log-ratio to the old log-probabilities is {worst:.3g}, above {tolerance}: the "
            "recompute pass and the update pass disagree about the same weights"
        )


def rollout_metrics(
    batch: RolloutBatch, shaped: RolloutBatch, policy_batch: PolicyBatch, progress: Progress
) -> Metrics:
    """What the rows trained on say, shared by the lines of their optimizer steps."""
    mask = batch.inputs.response_mask
    return (
        data_metrics(mask, batch.truncated, batch.rewards)
        | staleness_metrics(batch.versions, mask, version=int(progress["step"]))
        | advantage_metrics(policy_batch.advantages, mask)
        | {"reward/shaping": float((shaped.rewards - batch.rewards).sum() / max(len(batch), 1))}
        | {"data/rollout_step": float(progress["rollout_step"])}
    )


def sample_lines(
    rollouts: Sequence[Rollout], kept: Sequence[int], batch: PolicyBatch, *, step: int
) -> list[dict[str, object]]:
    """Lines of samples.jsonl; `advantage` is the mean over the response, None for a row that is not trained on."""
    means = masked_mean(batch.advantages, batch.inputs.response_mask, dim=1).tolist()
    advantage = dict(zip(kept, means, strict=True))
    return [sample_record(rollout, step=step, advantage=advantage.get(i)) for i, rollout in enumerate(rollouts)]


def recorded_tensors(batch: PolicyBatch) -> dict[str, Tensor]:
    """A policy batch as named tensors, for rollouts/*.safetensors and dumps of refused steps."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    inputs = {name: getattr(batch.inputs, name) for name in ("tokens", "attention_mask", "response_mask")}
    return {name: value for name, value in (fields | inputs).items() if isinstance(value, Tensor)}
