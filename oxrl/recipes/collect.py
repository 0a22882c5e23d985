"""The first half of a policy-gradient step: sample, score, and choose what to train on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oxrl.config import Config
from oxrl.data.batching import check_rollout_batch, to_rollout_batch
from oxrl.functional.metrics import reward_metrics
from oxrl.functional.shaping import informative_groups, overlong_penalty
from oxrl.recipes.build import Team, training_sampling
from oxrl.recipes.replay import ReplayBuffer
from oxrl.recipes.rollouts import check_error_rate, make_requests, score_groups
from oxrl.recipes.session import Progress, Session
from oxrl.types import Metrics, Request, Rollout, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class Harvest:
    """Everything one rollout step sampled, in draw order; `groups` are trained on, the next step
    draws from `end`.

    `greedy` holds one greedy response per prompt, for rows whose baseline is its reward.
    """

    rollouts: list[Rollout]
    greedy: list[Rollout]
    groups: tuple[int, ...]
    end: int
    rounds: int


def replay_buffer(cfg: Config, team: Team) -> ReplayBuffer:
    """An empty buffer for as many samples as `rollout.max_staleness` lets be in flight."""
    samples = cfg.rollout.n_samples
    sampling = training_sampling(cfg, team.stop_token_ids)
    greedy = "greedy_rollout" in cfg.train.row.needs
    rounds = cfg.train.sampling_rounds if "dynamic_sampling" in cfg.train.row.needs else 1

    def ask(draws: Sequence[int]) -> list[Request]:
        drawn = [(draw, team.prompts.at(draw, seed=cfg.run.seed)) for draw in draws]
        requests = make_requests(drawn, samples=samples, sampling=sampling, run_seed=cfg.run.seed)
        most_likely = dataclasses.replace(sampling, temperature=0.0)
        asked = drawn if greedy else []
        return requests + make_requests(
            asked, samples=1, first=samples, sampling=most_likely, run_seed=cfg.run.seed
        )

    return ReplayBuffer(
        team.sampler,
        ask,
        capacity=(2 * cfg.wave or 1) * rounds * cfg.data.prompts_per_step * (samples + greedy),
        deadline_s=cfg.run.deadline_s,
        background=cfg.inference_engine.actors > 0,
    )


def collect(
    cfg: Config, team: Team, session: Session, progress: Progress, buffer: ReplayBuffer
) -> Harvest | None:
    """Scored rollouts of the next `data.prompts_per_step` prompts, G in a row per prompt; None when
    asked to stop.

    At the start of a wave, with the sampler idle, it gets the newest weights and the next wave to
    sample.
    """
    step, rollout_step = int(progress["step"]), int(progress["rollout_step"])
    total = cfg.run.steps // cfg.train.updates
    first, due = not buffer.batches, cfg.wave > 0 and rollout_step % cfg.wave == 0

    def dispatch(batches: int, start: int) -> None:
        for _ in range(batches):
            buffer.dispatch(start, cfg.data.prompts_per_step)
            start += cfg.data.prompts_per_step
        if cfg.wave:
            buffer.work()

    with session.phase("time/rollout_s"):
        if first:  # sampling and training take turns, or the run begins
            team.sync.deliver(step)
            dispatch(max(1, min(cfg.wave, total - rollout_step)), int(progress["draw"]))
    harvest = finish_batch(cfg, team, session, buffer, version=step)
    with session.phase("time/rollout_s"):
        if harvest is None or (due and not buffer.settle(lambda: session.stop)):
            if not cfg.wave:
                buffer.forget()
            return None
        buffer.take()
        if due:
            waiting = buffer.batches
            if not first:
                team.sync.deliver(step)
            start = waiting[-1].end if waiting else harvest.end
            dispatch(min(cfg.wave, total - rollout_step - 1 - len(waiting)), start)
    return harvest


def finish_batch(
    cfg: Config, team: Team, session: Session, buffer: ReplayBuffer, *, version: int
) -> Harvest | None:
    """The buffer's oldest batch, sampled and scored; None when asked to stop.

    With dynamic sampling, a group whose rewards are all equal does not count: prompts are drawn, in
    at most `train.sampling_rounds` rounds, until enough groups differ. Groups past the last one
    needed are not trained on: their prompts are drawn again in the next step. The choice depends on
    the data order, never on who finished first.
    """
    dynamic, wanted = "dynamic_sampling" in cfg.train.row.needs, cfg.data.prompts_per_step
    batch, samples = buffer.batches[0], cfg.rollout.n_samples
    rollouts, greedy = list[Rollout](), list[Rollout]()
    groups: list[int] = []
    seen = batch.start
    while seen < batch.end:
        with session.phase("time/rollout_s"):
            while (found := buffer.sampled(seen, batch.end)) is None:
                if not buffer.settle(lambda: session.stop):
                    return None
        with session.phase("time/reward_s"):
            more = score_groups(
                team.pool, [pair for pair in found if pair[0].sample < samples], samples=samples
            )
            baselines = score_groups(
                team.pool, [pair for pair in found if pair[0].sample >= samples], samples=1
            )
        check_error_rate(
            [rollout.score for rollout in (*more, *baselines)], cfg.reward.max_error_rate
        )
        rollouts, greedy, seen = rollouts + more, greedy + baselines, batch.end
        groups = teaching_groups(rollouts) if dynamic else list(range(batch.start, batch.end))
        if len(groups) < wanted and batch.rounds < cfg.train.sampling_rounds:
            # As many more as should do, at the share of groups that taught something so far.
            count = min(
                wanted,
                math.ceil((wanted - len(groups)) * (seen - batch.start) / max(len(groups), 1)),
            )
            if (
                team.sampler.version != version
            ):  # an evaluation may have been in between, and must not matter
                team.sync.deliver(version)
            buffer.dispatch(batch.end, count, batch=batch)
    # Where no group differs, the first ones are trained on with advantage 0, as without dynamic
    # sampling.
    chosen = tuple(groups[:wanted] or range(batch.start, batch.start + wanted))
    used = chosen[-1] + 1 if len(chosen) == wanted else batch.end
    return Harvest(rollouts=rollouts, greedy=greedy, groups=chosen, end=used, rounds=batch.rounds)


def teaching_groups(rollouts: Sequence[Rollout]) -> list[int]:
    """Groups, in draw order, whose scored rollouts have rewards that differ. Before any shaping of
    rewards.
    """
    rewards, groups = scored(rollouts)
    return groups[informative_groups(rewards, groups)].unique().tolist()


def scored(rollouts: Sequence[Rollout]) -> tuple[torch.Tensor, torch.Tensor]:
    """(rewards float64, group ids int64) of the rollouts that have a score."""
    pairs = [(r.score.value, r.group_id) for r in rollouts if r.score.value is not None]
    return torch.tensor([p[0] for p in pairs], dtype=torch.float64), torch.tensor(
        [p[1] for p in pairs]
    ).long()


def training_rows(
    cfg: Config, team: Team, harvest: Harvest, *, version: int
) -> tuple[RolloutBatch, list[int], dict[str, int]]:
    """The rows that can be learned from, checked; their indices in `harvest.rollouts`; how many
    others, by reason.

    A row without a score is removed before any statistic or denominator sees it; so is a row left
    alone in its group where advantages compare rows of a group.
    """
    batch = to_rollout_batch(harvest.rollouts, pad_id=team.pad_id)
    check_rollout_batch(
        batch,
        stop_token_ids=team.stop_token_ids,
        max_tokens=cfg.rollout.max_tokens,
        strict_version=version if cfg.rollout.force_strict_on_policy else None,
    )
    keep, dropped = torch.ones(len(batch), dtype=torch.bool), dict[str, int]()

    def drop(reason: str, rows: torch.Tensor) -> None:
        dropped[reason] = int((keep & rows).sum())
        keep.logical_and_(~rows)

    drop("surplus", batch.group_ids >= harvest.end)
    drop("uninformative", ~torch.isin(batch.group_ids, torch.tensor(harvest.groups)))
    drop("unscored", ~batch.valid)
    lags = (version - batch.versions).masked_fill(~batch.inputs.response_mask, 0)
    drop("stale", (lags > cfg.rollout.max_staleness).any(1))
    if harvest.greedy:
        dropped["baseline"] = len(harvest.greedy)
        rewards = {r.group_id: r.score.value for r in harvest.greedy if r.score.value is not None}
        baselines = [rewards.get(group, float("nan")) for group in batch.group_ids.tolist()]
        batch = dataclasses.replace(
            batch, greedy_rewards=torch.tensor(baselines, dtype=torch.float64)
        )
        drop("without_baseline", torch.tensor(baselines).isnan())
    if "groups" in cfg.train.row.needs:
        same_group = batch.group_ids[:, None] == batch.group_ids[None, :]
        drop("alone", (same_group & keep[None, :]).sum(1) < 2)
    rows = keep.nonzero()[:, 0]
    return batch.select(rows), rows.tolist(), dropped


def penalize_overlong(batch: RolloutBatch, *, max_tokens: int, buffer_tokens: int) -> RolloutBatch:
    """The batch with the soft length penalty added to each row's reward, on its last token."""
    mask = batch.inputs.response_mask
    penalty = overlong_penalty(mask.sum(1), max_tokens=max_tokens, buffer_tokens=buffer_tokens)
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    placed = batch.token_rewards + torch.where(last, penalty[:, None], 0.0)
    return dataclasses.replace(batch, rewards=batch.rewards + penalty, token_rewards=placed)


def harvest_metrics(harvest: Harvest) -> Metrics:
    """What was sampled, whether or not it is trained on."""
    rollouts = harvest.rollouts
    failed = [rollout.score.status for rollout in rollouts]
    sources = sorted({rollout.prompt.source for rollout in rollouts if rollout.prompt.source})
    by_source: Metrics = {}
    for source in sources if len(sources) > 1 else []:
        values = [
            r.score.value
            for r in rollouts
            if r.prompt.source == source and r.score.value is not None
        ]
        by_source[f"reward/mean/{source}"] = sum(values) / len(values) if values else math.nan
    return (
        reward_metrics(*scored(rollouts))
        | by_source
        | {
            f"reward/{status}": float(failed.count(status))
            for status in ("timeout", "error", "invalid")
        }
        | {
            "sampling/rounds": float(harvest.rounds),
            "sampling/groups": float(len({r.group_id for r in rollouts})),
        }
    )
