"""Policy-gradient training, one loop for every row of the table: rollouts -> rewards -> advantages
-> update.

Read `train` from top to bottom: every arrow of the data flow is one call there. Rows differ only in
the functions that `Algorithm` looks up by name. `step` counts optimizer steps and is the weight
version; `rollout_step` counts iterations; `draw` is the next position in the data order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from oxrl.config import Config
from oxrl.data.batching import split_by_group
from oxrl.errors import InvariantError
from oxrl.functional.advantages import AdvantageInputs
from oxrl.functional.kl import add_kl_to_rewards
from oxrl.functional.masks import masked_mean, masked_sum
from oxrl.functional.metrics import (
    PASS_REWARD,
    advantage_metrics,
    data_metrics,
    mismatch_metrics,
    policy_metrics,
    staleness_metrics,
    value_metrics,
)
from oxrl.functional.shaping import adapt_kl_coeff
from oxrl.functional.weights import token_mean
from oxrl.recipes.build import Team
from oxrl.recipes.collect import collect, harvest_metrics, replay_buffer, training_rows
from oxrl.recipes.evaluate import evaluate_held_out
from oxrl.recipes.objective import Algorithm, old_logprobs, required
from oxrl.recipes.offline import gradients
from oxrl.recipes.rollouts import sample_record
from oxrl.recipes.session import Progress, Session, crossed
from oxrl.seeds import stable_seed
from oxrl.types import Metrics, Output, PolicyBatch, Rollout, RolloutBatch, ValueBatch

# Old log-probabilities come from the same weights by the same code; only padding widths differ
# between the two passes.
FIRST_RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


def train(cfg: Config, session: Session) -> None:
    """Run until `run.steps` optimizer steps are done, from the newest checkpoint if there is
    one.
    """
    algorithm = Algorithm(cfg)
    team = Team(cfg)
    session.closing(team.close)
    buffer = replay_buffer(cfg, team)
    session.closing(buffer.close)
    saved = team.engines() | ({"samples": buffer} if cfg.wave else {})
    fresh = {"step": 0, "rollout_step": 0, "draw": 0, "samples": {}, "kl_coeff": cfg.train.kl_coeff}
    progress = session.restore(saved, fresh)
    buffer.books = progress["samples"]
    while progress["step"] < cfg.run.steps:
        # Sample G completions per prompt from the weights just trained, and score each group.
        start = int(progress["step"])
        harvest = collect(cfg, team, session, progress, buffer)
        if harvest is None:  # a signal: the weights are still those of the last boundary
            session.boundary(saved, progress)
            return
        batch, kept, dropped = training_rows(cfg, team, harvest, version=start)
        shaped = batch if algorithm.shape is None else algorithm.shape(batch)

        # What every model says of the samples before the update; reward relative to the group or
        # the critic.
        with session.phase("time/logprobs_s"):
            seed = stable_seed("selection", cfg.run.seed, int(progress["rollout_step"]))
            penalty = kl_in_reward(cfg, progress)
            policy_batch, value_batch = prepare(
                team,
                algorithm,
                shaped,
                kl_in_reward=penalty,
                seed=seed,
                mask_truncated=cfg.train.mask_truncated,
            )
        shared = harvest_metrics(harvest) | rollout_metrics(batch, shaped, policy_batch, progress)
        shared |= steer_kl(cfg, policy_batch, progress)
        lines = sample_lines([*harvest.rollouts, *harvest.greedy], kept, policy_batch, step=start)
        session.recorder.record_samples(lines)
        if cfg.run.record == "tokens":
            session.recorder.record_rollouts(start, recorded_tensors(policy_batch))

        # One optimizer step per minibatch; loss weights are normalised over each minibatch.
        steps = minibatches(cfg, policy_batch, rollout_step=int(progress["rollout_step"]))
        shared |= (
            buffer.account(trained=len(torch.cat(steps).unique()), dropped=dropped)
            | team.sync.metrics()
        )
        shared["data/dropped_rows"] = float(sum(dropped.values()))
        progress["rollout_step"] += 1
        progress["draw"] = harvest.end
        for index, rows in enumerate(steps):
            with session.phase("time/update_s"):
                metrics = update(
                    cfg,
                    team,
                    algorithm,
                    session,
                    progress,
                    rows,
                    policy_batch,
                    value_batch,
                    index == 0,
                )
            progress["step"] += 1
            if (
                index == len(steps) - 1
                and team.held_out
                and session.eval_due(start, progress["step"])
            ):
                with session.phase("time/eval_s"):
                    buffer.settle()
                    team.sync.deliver(int(progress["step"]))
                    metrics |= evaluate_held_out(cfg, team)
            session.record(
                progress["step"], shared | metrics, tokens=shared["data/tokens"] / len(steps)
            )
        reset_reference(cfg, team, start, int(progress["step"]))
        session.boundary(saved, progress)
    session.finish(progress["step"])


def kl_in_reward(cfg: Config, progress: Progress) -> float | None:
    """The coefficient when the row subtracts a KL from the reward, else None."""
    if not cfg.train.row.kl.startswith("reward_") or cfg.train.kl_coeff == 0:
        return None
    return progress["kl_coeff"] if "adaptive_kl" in cfg.train.row.needs else cfg.train.kl_coeff


def steer_kl(cfg: Config, batch: PolicyBatch, progress: Progress) -> Metrics:
    """Move the KL coefficient of the next rollout step by how far this one's KL to the reference is
    off its target.
    """
    if "adaptive_kl" not in cfg.train.row.needs:
        return {}
    sampled = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
    per_row = masked_sum(sampled - required(batch.ref_logprobs), batch.inputs.response_mask, dim=1)
    kl, used, rows = float(per_row.mean()), float(progress["kl_coeff"]), len(batch)
    target, horizon = cfg.train.kl_target, cfg.train.kl_horizon
    progress["kl_coeff"] = adapt_kl_coeff(used, kl, kl_target=target, kl_horizon=horizon, rows=rows)
    return {"kl/coeff": used, "kl/steered": kl}


def reset_reference(cfg: Config, team: Team, before: int, step: int) -> None:
    """Let the reference be the policy, and the optimizer start afresh, where the schedule says
    so.
    """
    if team.moving_reference is not None and crossed(cfg.train.reference_sync_steps, before, step):
        for engine in (team.moving_reference, team.policy):
            engine.set_weights(named for bucket in team.policy.weights() for named in bucket)


def prepare(
    team: Team,
    algorithm: Algorithm,
    batch: RolloutBatch,
    *,
    kl_in_reward: float | None,
    seed: int,
    mask_truncated: bool,
) -> tuple[PolicyBatch, ValueBatch | None]:
    """Everything the updates of this rollout batch read, from one forward pass per model
    involved.
    """
    inputs, mask = batch.inputs, batch.inputs.response_mask
    logprobs_only = frozenset({"logprobs"})
    old = ref = values = bootstrap = looked = None
    if algorithm.old_logprobs == "recompute" or algorithm.looks:
        looked = team.policy.forward(inputs, logprobs_only | algorithm.looks)
    if algorithm.old_logprobs == "recompute" and looked is not None:
        old = required(looked.logprobs)
    elif algorithm.old_logprobs == "bypass":
        old = batch.rollout_logprobs
    if team.reference is not None:
        ref = required(team.reference.forward(inputs, logprobs_only).logprobs)
    if team.critic is not None:
        judged = team.critic.forward(inputs, frozenset({"values"}))
        values, bootstrap = required(judged.values), judged.bootstrap

    rewards, token_rewards = batch.rewards, batch.token_rewards
    if kl_in_reward is not None:
        sampled = batch.rollout_logprobs if old is None else old
        rewards, token_rewards = add_kl_to_rewards(
            rewards, token_rewards, sampled, required(ref), mask, kl_coeff=kl_in_reward
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
            greedy_rewards=batch.greedy_rewards,
        )
    )
    if (
        mask_truncated
    ):  # overlong filtering, arXiv:2503.14476: cut rows were part of the baseline and are no more
        mask = mask & ~batch.truncated[:, None]
        inputs = dataclasses.replace(inputs, response_mask=mask)
    right = mask & (batch.rewards > PASS_REWARD)[:, None]
    policy_batch = PolicyBatch(
        inputs=inputs,
        old_logprobs=old,
        rollout_logprobs=batch.rollout_logprobs,
        ref_logprobs=ref,
        advantages=advantages,
        loss_weights=algorithm.weights(mask, batch.group_ids),
        versions=batch.versions,
        group_ids=batch.group_ids,
        likelihood_weights=token_mean(right) if algorithm.likelihood else None,
    )
    if algorithm.looks and looked is not None:
        policy_batch = look_ahead(algorithm, policy_batch, looked, seed=seed)
    if values is None:
        return policy_batch, None
    weights = token_mean(mask)
    return policy_batch, ValueBatch(
        inputs=inputs, old_values=values, returns=required(returns), loss_weights=weights
    )


def look_ahead(
    algorithm: Algorithm, batch: PolicyBatch, looked: Output, *, seed: int
) -> PolicyBatch:
    """The batch with what is decided about its tokens before the update, over all of them
    together.
    """
    inputs, logprobs = batch.inputs, required(looked.logprobs)
    if algorithm.step_correction is not None:
        weights = algorithm.step_correction(logprobs, batch.rollout_logprobs, inputs.response_mask)
        batch = dataclasses.replace(batch, correction=weights)
    if algorithm.select is None:
        return batch
    noise = torch.rand(
        inputs.tokens.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    given = {
        "tokens": inputs.tokens,
        "mask": inputs.response_mask,
        "advantages": batch.advantages,
        "noise": noise,
    }
    signals = algorithm.select(
        given | {name: value for name, value in vars(looked).items() if value is not None}
    )
    # The update asks for the logprobs of the same candidates, whatever is most likely by then.
    return dataclasses.replace(
        batch, signals=signals, inputs=dataclasses.replace(inputs, candidates=looked.top_ids)
    )


def minibatches(cfg: Config, batch: PolicyBatch, *, rollout_step: int) -> list[Tensor]:
    """Row indices of every optimizer step on this rollout batch: `epochs` passes of `minibatches`
    each.
    """
    return [
        rows
        for epoch in range(cfg.train.epochs)
        for rows in split_by_group(
            batch.group_ids,
            cfg.train.minibatches,
            seed=stable_seed(cfg.run.seed, rollout_step, epoch),
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
    """One optimizer step of the policy, and of the critic when there is one, on `rows` of the
    rollout batch.

    A step with anything non-finite in it is refused on every engine and its batch is kept for
    inspection. A step with
    no trained token is not taken either: a zero gradient would still move Adam's momentum.
    """
    step = int(progress["step"]) + 1
    batch = minibatch(algorithm, policy_batch, rows, version=step - 1)
    mask = batch.inputs.response_mask
    if not mask.any():
        skipped = skip(team)
        return skipped | {"data/empty_steps": 1.0}

    # Gradients of every engine first, then all of them step or none does.
    tolerance = (
        FIRST_RATIO_TOLERANCE[cfg.model.dtype]
        if first and algorithm.old_logprobs == "recompute"
        else None
    )
    metrics = policy_gradients(team, algorithm, batch, tolerance)
    if metrics is not None and value_batch is not None and team.critic is not None:
        judged = dataclasses.replace(value_batch.select(rows), loss_weights=token_mean(mask))
        _, found, finite = gradients(
            team.critic, judged, algorithm.value_loss, frozenset({"values"})
        )
        about = value_metrics(judged.old_values, judged.returns, mask)
        metrics = metrics | critics(found) | about if finite else None
    if metrics is None:
        session.dump(step, recorded_tensors(batch))
        return skip(team) | {"data/empty_steps": 0.0}
    warming_up = value_batch is not None and step <= cfg.train.critic_warmup_steps
    stepped = (
        team.policy.skip_step() | {"update/skipped": 0.0}
        if warming_up
        else team.policy.optim_step()
    )
    if team.critic is not None:
        critic_step = (
            team.critic.skip_step() if stepped["update/skipped"] else team.critic.optim_step()
        )
        stepped |= critics(critic_step)
    if stepped["update/skipped"]:
        session.dump(step, recorded_tensors(batch))
    return metrics | stepped | {"data/empty_steps": 0.0}


def minibatch(
    algorithm: Algorithm, batch: PolicyBatch, rows: Tensor, *, version: int
) -> PolicyBatch:
    """`rows` of the rollout batch, their weights normalised over themselves, as weights of
    `version` will read them.
    """
    part = batch.select(rows)
    mask, right = part.inputs.response_mask, part.likelihood_weights
    return dataclasses.replace(
        part,
        loss_weights=algorithm.weights(mask, part.group_ids),
        likelihood_weights=None if right is None else token_mean(mask & (right > 0)),
        lags=version - part.versions if algorithm.old_logprobs == "interpolated" else None,
    )


def critics(metrics: Metrics) -> Metrics:
    """The same metrics as the critic's."""
    return {name.replace("update/", "value/"): value for name, value in metrics.items()}


def skip(team: Team) -> Metrics:
    """Refuse this step everywhere."""
    metrics = team.policy.skip_step()
    if team.critic is not None:
        team.critic.skip_step()
    return metrics


def policy_gradients(
    team: Team, algorithm: Algorithm, batch: PolicyBatch, first_ratio_tolerance: float | None
) -> Metrics | None:
    """Add the policy's gradient; metrics over the whole minibatch, or None when something is not
    finite.
    """
    output, metrics, finite = gradients(team.policy, batch, algorithm.policy_loss, algorithm.want)
    if not finite:
        return None
    logprobs, mask = required(output.logprobs), batch.inputs.response_mask
    old = old_logprobs(logprobs, batch)
    corrected = (
        batch.correction if algorithm.correction is None else algorithm.correction(old, batch)
    )
    if first_ratio_tolerance is not None:
        check_first_ratio(logprobs, old, mask, first_ratio_tolerance)
    about = policy_metrics(
        logprobs, old, mask, ref_logprobs=batch.ref_logprobs, entropy=output.entropy
    )
    level = algorithm.correction_level
    return (
        metrics
        | about
        | mismatch_metrics(old, batch.rollout_logprobs, mask, corrected, correction_level=level)
    )


def check_first_ratio(
    logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, tolerance: float
) -> None:
    """Before the first update the policy is its own old policy, so every ratio must be 1.

    Raises:
        InvariantError: it is not: the two passes saw other weights, another temperature, or
            dropout.
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
    """Lines of samples.jsonl; `advantage` is the mean over the response, None for a row that is not
    trained on.
    """
    means = masked_mean(batch.advantages, batch.inputs.response_mask, dim=1).tolist()
    advantage = dict(zip(kept, means, strict=True))
    return [
        sample_record(rollout, step=step, advantage=advantage.get(i))
        for i, rollout in enumerate(rollouts)
    ]


def recorded_tensors(batch: PolicyBatch) -> dict[str, Tensor]:
    """A policy batch as named tensors, for rollouts/*.safetensors and dumps of refused steps."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    inputs = {
        name: getattr(batch.inputs, name) for name in ("tokens", "attention_mask", "response_mask")
    }
    return {name: value for name, value in (fields | inputs).items() if isinstance(value, Tensor)}
