"""The machine of a run of reinforcement learning: every object, and what stands around what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedModel

from oxrl.assembly.assembly import FIRST_RATIO_TOLERANCE, Assembly, Engines, Limits
from oxrl.assembly.reward_pools import start_rewards
from oxrl.checkpoint import Saved
from oxrl.config import Config
from oxrl.config.conditions import takes_kl
from oxrl.config.roles import roles_of
from oxrl.data.order import open_rows
from oxrl.data.prompts import PromptDataset
from oxrl.engines.delivery import Delivery, SharedWeights
from oxrl.engines.sample import Finished, RolloutEngine
from oxrl.engines.sample.rows import check_recorded
from oxrl.engines.sample.sampler import OnFinished, ignore
from oxrl.engines.train import Models, Scorer
from oxrl.engines.train.trainer import Adapted, AdapterOff
from oxrl.entry_points import is_ours
from oxrl.errors import InvariantError, required
from oxrl.modelfiles.dims import model_dims
from oxrl.recipes import rl
from oxrl.recipes.compute_accounting import (
    OPTIMIZER_BYTES,
    WITHOUT_MASTERS,
    ComputeAccounting,
    model_work,
)
from oxrl.recipes.machine import Machine
from oxrl.recipes.objective import Objective
from oxrl.rewards.pool_choice import REHEARSED, try_reward
from oxrl.rewards.pools import GroupScorer, ScoringPool
from oxrl.rollouts.batch import RowRules
from oxrl.rollouts.sync import (
    BareScorer,
    PromptRequests,
    RolloutParts,
    RolloutSource,
    SyncRollouts,
)
from oxrl.runs.clock import Clock
from oxrl.runs.directory import ROLLOUTS
from oxrl.runs.waiting import Patience
from oxrl.tables.cells import BINARY_REWARDS, GROUPS
from oxrl.tables.numbers import KL_COEFF
from oxrl.tables.roles import POLICY, REFERENCE
from oxrl.tables.user_code import REWARD
from oxrl.types import Group, Prompt, Score, Scores

if TYPE_CHECKING:
    from oxrl.recipes.features.base import AnswersAt, Feature
    from oxrl.recipes.scored_answers import Evaluation
    from oxrl.recipes.session import Session

# Needs of a row that are met by its configuration alone.
NOTHING_ADDED = {GROUPS.name, BINARY_REWARDS.name}


def train_rl(assembly: Assembly, session: Session) -> None:
    """Put a run of reinforcement learning together, and go through its loop.

    Args:
        assembly: has the parts.
        session: of the run.
    """
    if assembly.contract is not None:
        session.message(f"exact: {assembly.contract.line}")
    with ExitStack() as stack:
        machine = assemble(assembly, session.clock, stack, session.pool)
        if assembly.cfg.run.only is None:
            rl.train(machine, session)
        else:
            from oxrl.recipes import rollouts_only  # most runs train as well

            rollouts_only.train(machine, session)


def assemble(
    assembly: Assembly, clock: Clock, stack: ExitStack, pool: ScoringPool | None = None
) -> Machine:
    """Put a run together, which `stack` ends; `pool` is a reward that was tried already."""
    cfg = assembly.cfg
    # Before the models: a reward that cannot be loaded should not cost the time they take.
    rewards = start_rewards(assembly, stack, pool)
    engines = build_engines(assembly, stack)
    stack.callback(engines.sampler.close)
    limits = engines.limits
    features = build_features(assembly, engines, stack)
    objective = Objective(assembly.algorithm, features, max_tokens=cfg.longest_response)
    ledger = build_ledger(assembly, objective, clock, engines.delivery)
    held_out = None
    if cfg.data.eval is not None:
        held_out = assembly.prompts(cfg.data.eval, limits.longest, held_out=True)
    requests = build_requests(assembly, limits, features)
    first = try_on_data(assembly, requests, rewards if pool is None else None)

    # Around the reward: where its steps end, episodes, scores while others are sampled.
    scorer = placed_steps(assembly, rewards, limits)
    sampler, scorer = answering(assembly, engines.sampler, scorer, limits, first, stack)
    scorer, on_finished = overlapped(assembly, scorer, rewards, clock, stack)
    # Around the sampler: step after step, in rounds, ahead of training, or stored; kept whole.
    parts = RolloutParts(
        sampler=sampler,
        delivery=engines.delivery,
        scorer=scorer,
        requests=requests,
        clock=clock,
        prompts_per_step=cfg.data.prompts_per_step,
        stop=assembly.stop,
        deadline_s=cfg.run.waits.seconds["rollout"],
        max_error_rate=cfg.reward.max_error_rate,
        compared_parts=assembly.compared_parts,
        on_finished=heard_by(features, on_finished),
        choice=next((each.choice for each in features if each.choice is not None), None),
        columns=assembly.columns,
    )
    source = assembly.source(parts) if assembly.source else build_source(assembly, parts)
    stack.callback(source.close)
    evaluation = partial(build_evaluation, assembly, limits, parts, source)
    open_answers(features, partial(answers_to, assembly, limits, evaluation))
    return Machine(
        seed=cfg.run.seed,
        steps=cfg.run.steps,
        epochs=cfg.train.epochs,
        minibatches=cfg.train.minibatches,
        kl_coeff=cfg.train.value(KL_COEFF),
        models=models_of(cfg, engines),
        objective=objective,
        features=features,
        source=kept_source(cfg, source),
        row_rules=build_row_rules(assembly, limits),
        evaluation=None if held_out is None else evaluation(held_out),
        ledger=ledger,
        saved=what_is_saved(cfg, engines, features, source),
        ratio_tolerance=FIRST_RATIO_TOLERANCE[cfg.model.dtype],
        keeps_tokens=cfg.run.record == "tokens",
    )


def build_engines(assembly: Assembly, stack: ExitStack) -> Engines:
    """Trainers and sampler in this process, or in others where a config asks for them.

    Args:
        stack: closes the sampler, and what surrounds it.

    Raises:
        EngineError: the engine that samples cannot record what is asked for.
    """
    cfg = assembly.cfg
    check_recorded(cfg.inference_engine.name, assembly.recorded)
    if cfg.train.backend != "local" or cfg.inference_engine.actors:
        from oxrl.assembly.ray_engines import build_ray_engines  # Ray is an extra

        return build_ray_engines(assembly, stack)
    trainers = assembly.trainers()
    policy = trainers[POLICY]
    model = cast(PreTrainedModel, policy.model)
    limits = assembly.limits(model)
    if not cfg.samplers:
        sampler = assembly.local_sampler(model)
        return Engines(
            trainers, sampler, limits, SharedWeights(policy, sampler, assembly.part_sent)
        )
    from oxrl.assembly.sampler_processes import (  # who samples has weights of its own
        hosted_sampler,
        proved_delivery,
        sampler_here,
    )

    own: RolloutEngine
    if cfg.sampling_process:
        own = hosted_sampler(assembly, stack.callback)
    else:
        own = sampler_here(assembly)
    return Engines(trainers, own, limits, proved_delivery(assembly, policy, own, limits))


def models_of(cfg: Config, engines: Engines) -> Models[Scorer]:
    """The models of a run; a reference may be the policy with its adapter switched off."""
    models = Models[Scorer](engines.trainers)
    if takes_kl(cfg) and REFERENCE not in models:
        models[REFERENCE] = AdapterOff(cast("Adapted", models[POLICY]))
    return models


def build_features(assembly: Assembly, engines: Engines, stack: ExitStack) -> list[Feature]:
    """Build what row, user and configuration add to the loop beyond the row's cells.

    Args:
        stack: closes what they open.
    """
    cfg = assembly.cfg
    of_row = set(cfg.train.row.needs) - NOTHING_ADDED
    rescales = cfg.reward.bound is not None  # as where rewards are normalised
    looks = cfg.run.record == "tokens" or cfg.run.exact
    if not (of_row or cfg.train.features or rescales or looks or cfg.environment.name):
        return []
    from oxrl.assembly.features import features_of  # most runs have none

    return list(features_of(assembly, engines, stack))


def build_ledger(
    assembly: Assembly, objective: Objective, clock: Clock, delivery: Delivery
) -> ComputeAccounting:
    """The ledger of a run, which is told what a step took.

    Args:
        objective: what is asked before the update.
        clock: of the run.
        delivery: of the policy's weights to the sampler, which may use the same copy of them.
    """
    cfg = assembly.cfg
    train = cfg.train
    row = train.row
    shared = isinstance(delivery, SharedWeights)
    same = shared and cfg.model.dtype == "float32" and not cfg.rollout.max_staleness
    asks_more = bool(objective.want_before)
    ledger = ComputeAccounting(
        work=model_work(model_dims(cfg.model.name), dtype=cfg.model.dtype),
        speed=assembly.speed,
        optimizer_bytes=OPTIMIZER_BYTES[train.optimizer]
        + WITHOUT_MASTERS * (train.master_weights == "none"),
        budget=assembly.tokens_at_once,
        price=assembly.price_of_a_cut,
        ranks=1 if train.backend == "local" else cfg.run.training_gpus,
        share_prefix=train.share_prefix is True,
        asked_before=objective.old_logprobs == "recompute" or asks_more,
        old_known=same and not asks_more,
        all_learn=objective.kl is not None or train.entropy_coeff != 0 or not row.reads_advantage,
        samples=cfg.rollout.from_samples is None,
    )
    clock.derive(ledger.against_floor)
    return ledger


def build_requests(
    assembly: Assembly, limits: Limits, features: Sequence[Feature]
) -> PromptRequests:
    """Build the requests to the sampler, by position in the data order."""
    data = assembly.cfg.data
    load = partial(assembly.prompts, longest=limits.longest)
    return PromptRequests(
        open_rows(data.train, load, per_step=data.prompts_per_step),
        samples=assembly.cfg.rollout.n_samples,
        sampling=assembly.sampling(limits.stop_token_ids),
        run_seed=assembly.cfg.run.seed,
        baseline=any(feature.greedy_baseline for feature in features),
    )


def try_on_data(
    assembly: Assembly, requests: PromptRequests, rewards: ScoringPool | None
) -> Prompt:
    """The first prompt of a run, on which an environment is tried; a reward is on several.

    Args:
        rewards: None where there is none, or it was tried already.
    """
    asked = requests.at(range(REHEARSED))
    prompts = [request.prompt for request in asked if request.sample == 0]
    if rewards is not None:
        try_reward(rewards, prompts, Patience(assembly.stop))
    return prompts[0]


class NoScores:
    """The scorer of a run that scores nothing.

    Args:
        asked: True if there is no reward, and so nothing to say of any response; otherwise
            samples are stored with their rewards, and nobody asks.
    """

    def __init__(self, *, asked: bool) -> None:
        self._asked = asked

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> Scores:
        """See GroupScorer; says of every response that nothing was asked.

        Raises:
            InvariantError: stored samples are scored all the same.
        """
        if not self._asked:
            raise InvariantError("rollout.from_samples without data.eval has nothing scored")
        return [[Score(value=None, status="none")] * len(completions) for _, completions in groups]


def placed_steps(
    assembly: Assembly, scorer: GroupScorer | None, limits: Limits
) -> GroupScorer | None:
    """The scorer, and where in tokens the steps end that it rewards; most rewards have none.

    Columns of tokens are not sent to it.
    """
    if scorer is not None and assembly.recorded:
        scorer = BareScorer(scorer)
    if scorer is None or all(is_ours(REWARD, name) for name in assembly.cfg.reward.names):
        return scorer
    from oxrl.rewards.step_rewards import StepScorer  # where there may be some

    return StepScorer(scorer, assembly.tokenizer, limits.stop_token_ids)


def answering(
    assembly: Assembly,
    sampler: RolloutEngine,
    scorer: GroupScorer | None,
    limits: Limits,
    first: Prompt,
    stack: ExitStack,
) -> tuple[RolloutEngine, GroupScorer]:
    """Put an environment between prompts and sampler, where the config names one.

    Args:
        scorer: of the run's reward; None where an environment is all that rewards, or nothing is
            scored.
        limits: of the model.
        first: a prompt on which an environment is tried.
        stack: closes what is started here.
    """
    if assembly.cfg.scores_nothing:
        return sampler, NoScores(asked=assembly.cfg.has_no_reward)
    if not assembly.cfg.environment.name:
        return sampler, required(scorer, "a reward")
    from oxrl.assembly.episode_wiring import play_episodes  # single turns do without

    return play_episodes(assembly, sampler, scorer, limits, first, stack)


def overlapped(
    assembly: Assembly,
    scorer: GroupScorer,
    rewards: ScoringPool | None,
    clock: Clock,
    stack: ExitStack,
) -> tuple[GroupScorer, OnFinished]:
    """A scorer that begins while other responses are sampled, and what is told of each of them.

    Rewards of this process score when all are there.
    """
    if rewards is None or all(pool.inline for pool in rewards.pools):
        return scorer, ignore
    from oxrl.rollouts.overlapped_scoring import OverlappedScorer  # as said above

    cfg = assembly.cfg
    meanwhile = OverlappedScorer(
        scorer,
        rewards.counters,
        samples=cfg.rollout.n_samples,
        prompts=cfg.data.prompts_per_step,
        stop=assembly.stop,
        deadline_s=cfg.run.waits.seconds["rollout"],
    )
    stack.callback(meanwhile.close)
    clock.also(meanwhile.counters)
    return meanwhile, meanwhile.offer


def heard_by(features: Sequence[Feature], on_finished: OnFinished) -> OnFinished:
    """Join the scorer and the features that are told of every response when it is finished."""
    listeners = [feature.heard for feature in features if feature.heard is not None]
    if not listeners:
        return on_finished

    def tell(finished: Finished) -> None:
        for listener in (on_finished, *listeners):
            listener(finished)

    return tell


def build_source(assembly: Assembly, parts: RolloutParts) -> RolloutSource:
    """Build the source of rollouts: step by step, in rounds, while training goes on, or stored."""
    cfg = assembly.cfg
    if cfg.rollout.from_samples is not None:
        from oxrl.rollouts.whole_samples import StoredRollouts  # the rarer ones

        return StoredRollouts(Path(cfg.rollout.from_samples) / ROLLOUTS, parts)
    if cfg.rollout.max_staleness:
        from oxrl.assembly.continuous_wiring import sample_ahead  # as above

        return sample_ahead(cfg, parts, assembly.say)
    if parts.choice is not None:
        from oxrl.rollouts.rounds import RoundRollouts  # as above

        return RoundRollouts(parts)
    return SyncRollouts(parts)


def kept_source(cfg: Config, source: RolloutSource) -> RolloutSource:
    """A source whose samples are kept whole, where that is asked for."""
    if cfg.run.record != "tokens":
        return source
    from oxrl.rollouts.whole_samples import KeepingSource  # records of text do without

    return KeepingSource(source, cfg.run.directory / ROLLOUTS)


def build_row_rules(assembly: Assembly, limits: Limits) -> RowRules:
    """Build the rules that every row that is trained on has to satisfy."""
    rollout = assembly.cfg.rollout
    return RowRules(
        pad_id=assembly.pad_id,
        stop_token_ids=limits.stop_token_ids,
        max_tokens=None if assembly.cfg.environment.name else rollout.max_tokens,
        strict=rollout.force_strict_on_policy,
        max_staleness=rollout.max_staleness,
        groups_of_two=assembly.cfg.train.row.has(GROUPS),
        images=assembly.images,
        columns=assembly.columns,
        vocabulary=limits.vocabulary,
    )


def build_evaluation(
    assembly: Assembly,
    limits: Limits,
    parts: RolloutParts,
    source: RolloutSource,
    held_out: PromptDataset,
) -> Evaluation:
    """Who answers held-out prompts, as training does but for `rollout.eval_*`."""
    from oxrl.recipes.scored_answers import (  # of runs with data.eval
        Evaluation,
        ScoredSampler,
        evaluation_seed,
    )

    rollout = assembly.cfg.rollout
    answers = ScoredSampler(
        sampler=parts.sampler,
        scorer=parts.scorer,
        sampling=assembly.sampling(limits.stop_token_ids, rollout.eval_temperature),
        samples=rollout.eval_samples,
        seed=evaluation_seed(assembly.cfg.run.seed),
        deadline_s=parts.deadline_s,
        stop=parts.stop,
    )
    return Evaluation(held_out, answers, source)


def open_answers(features: Sequence[Feature], answers: Callable[[str], AnswersAt]) -> None:
    """Let features open the files of prompts that are to be answered for them.

    Args:
        answers: opens one.
    """
    for feature in features:
        feature.on_assembled(answers)


def answers_to(
    assembly: Assembly,
    limits: Limits,
    evaluation: Callable[[PromptDataset], Evaluation],
    path: str,
) -> AnswersAt:
    """Open a file of prompts, to be answered as those of `data.eval` are.

    Args:
        limits: of the model.
        evaluation: who answers prompts.
        path: of the file.
    """
    return evaluation(assembly.prompts(path, limits.longest, held_out=True)).answered


def what_is_saved(
    cfg: Config, engines: Engines, features: Sequence[Feature], source: RolloutSource
) -> dict[str, Saved]:
    """Subdirectory of a checkpoint -> what is stored there; the policy is the checkpoint itself."""
    trainers = engines.trainers
    saved: dict[str, Saved] = {
        role.saved: trainers[role.name] for role in roles_of(cfg) if role.saved is not None
    }
    if any(feature.moves_reference for feature in features) and REFERENCE in trainers:
        saved[REFERENCE] = trainers[REFERENCE]
    if not isinstance(source, SyncRollouts):
        saved["samples"] = cast(Saved, source)
    if not isinstance(engines.delivery, SharedWeights):
        saved["delivery"] = cast(Saved, engines.delivery)
    for feature in features:
        saved |= feature.saved()
    return saved
