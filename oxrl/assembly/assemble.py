"""Everything an RL run works with, built once from its config."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oxrl.assembly.answers import answering, episode_features, placed_steps, reward_scale
from oxrl.assembly.assembly import (
    Engines,
    build_images,
    build_sampler,
    build_tokenizer,
    build_trainers,
    hosted_sampler,
    limits_of,
    load_prompts,
    needs_reference,
    part_sent,
    start_rewards,
    training_sampling,
)
from oxrl.checkpoint.saved import Saved
from oxrl.config import Config
from oxrl.data.order import open_rows
from oxrl.engines.delivery.shared import Delivery, SharedWeights
from oxrl.engines.sample.base import Heard, unheard
from oxrl.engines.train.base import Scorer
from oxrl.engines.train.trainer import Adapted, AdapterOff, Trainer
from oxrl.plan.preflight import REHEARSED, try_reward
from oxrl.recipes.compute_accounting import ledger_of
from oxrl.recipes.features import FEATURES, build_features
from oxrl.recipes.objective import Models, Objective
from oxrl.rewards.base import GroupScorer
from oxrl.rewards.pools import ScoringPool
from oxrl.rollouts.batch import RowRules
from oxrl.rollouts.sync import PromptRequests, RolloutParts, RolloutSource, SyncRollouts
from oxrl.runs.clock import Clock
from oxrl.runs.directory import ROLLOUTS
from oxrl.runs.waiting import Patience, StopAsked, never
from oxrl.tables.cells import GROUPS, REWARD_PARTS
from oxrl.types import ENVIRONMENT, TokenIds

if TYPE_CHECKING:
    from oxrl.engines.delivery.sync import WeightSync
    from oxrl.recipes.features.base import Feature
    from oxrl.rollouts.overlapped_scoring import MeanwhileScorer

# Old log-probabilities come from the same weights by the same code; only padding widths differ
# between the two passes.
FIRST_RATIO_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


class RLSetup:
    """Engines, reward, prompts, features and objective of a run; every model is loaded once.

    `pool`: a reward that was tried already. `reference` is None where the algorithm has no use for
    one. `saved` is what a checkpoint holds:
    subdirectory -> what is stored there; the policy is the checkpoint itself.
    """

    def __init__(
        self,
        cfg: Config,
        clock: Clock,
        stop: StopAsked = never,
        pool: ScoringPool | None = None,
    ) -> None:
        tokenizer = build_tokenizer(cfg)
        with ExitStack() as stack:
            # Before the models: a reward that cannot be loaded should not cost the time they take.
            rewards = start_rewards(cfg, stack, stop, pool)
            engines = build_engines(engines_needed(cfg), stack)
            stack.callback(engines.sampler.close)
            self.policy = engines.trainers["policy"]
            self.reference = reference_of(cfg, engines)
            self.models = Models(self.policy, self.reference)
            self.delivery = build_delivery(cfg, engines, len(tokenizer))
            scale = reward_scale(cfg)
            self.features: list[Feature] = [*scale, *features_of_row(cfg, engines)]
            self.features += token_records(cfg)
            # Those of episodes come last: what they hand on is cut into rows.
            self.features += episode_features(cfg)
            self.objective = Objective(cfg.train, self.features, max_tokens=cfg.longest_response)
            self.ledger = ledger_of(cfg, self.objective, clock, shared=engines.shared)
            limits = engines.limits
            self.stop_token_ids = limits.stop_token_ids
            self.row_rules = build_row_rules(cfg, tokenizer, self.stop_token_ids)
            self.held_out = None
            self.eval_sampling = training_sampling(
                cfg, self.stop_token_ids, cfg.rollout.eval_temperature
            )
            if cfg.data.eval:
                self.held_out = load_prompts(cfg, tokenizer, limits.longest, True, cfg.data.eval)
            requests = self._requests(cfg, tokenizer, limits.longest)
            first = requests.at(range(REHEARSED))
            prompts = [request.prompt for request in first if request.sample == 0]
            if rewards is not None and pool is None:
                try_reward(rewards, prompts, Patience(stop))
            scorer = placed_steps(cfg, rewards, tokenizer)
            self.sampler, self.scorer = answering(
                cfg, engines.sampler, scorer, limits, prompts[0], stack, stop
            )
            heard = unheard
            if rewards is not None and not all(pool.inline for pool in rewards.pools):
                meanwhile = scored_meanwhile(cfg, self.scorer, rewards, stop)
                stack.callback(meanwhile.close)
                clock.also(meanwhile.counters)
                self.scorer = meanwhile
                heard = meanwhile.offer
            parts = self._rollout_parts(cfg, requests, clock, heard)
            self.source = build_source(cfg, parts, self.delivery)
            stack.callback(self.source.close)
            self.saved = what_is_saved(engines, self.features, self.source)
            self.source = kept_source(cfg, self.source)
            if not isinstance(self.delivery, SharedWeights):
                self.saved["delivery"] = self.delivery
            for feature in self.features:
                self.saved |= feature.saved()
            self.ratio_tolerance = FIRST_RATIO_TOLERANCE[cfg.model.dtype]
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Stop samplers, workers and actors."""
        self._resources.close()

    def _requests(
        self, cfg: Config, tokenizer: PreTrainedTokenizerBase, longest: int | None
    ) -> PromptRequests:
        load = partial(load_prompts, cfg, tokenizer, longest, False)
        return PromptRequests(
            open_rows(cfg.data.train, load, per_step=cfg.data.prompts_per_step),
            samples=cfg.rollout.n_samples,
            sampling=training_sampling(cfg, self.stop_token_ids),
            run_seed=cfg.run.seed,
            baseline=any(feature.greedy_baseline for feature in self.features),
        )

    def _rollout_parts(
        self, cfg: Config, requests: PromptRequests, clock: Clock, heard: Heard
    ) -> RolloutParts:
        parts = RolloutParts(
            sampler=self.sampler,
            scorer=self.scorer,
            requests=requests,
            clock=clock,
            prompts_per_step=cfg.data.prompts_per_step,
            deadline_s=cfg.run.waits.seconds["rollout"],
            max_error_rate=cfg.reward.max_error_rate,
            compared_parts=compared_parts(cfg),
            heard=heard,
        )
        return chosen_parts(parts, self.features)


def scored_meanwhile(
    cfg: Config, scorer: GroupScorer, rewards: ScoringPool, stop: StopAsked
) -> MeanwhileScorer:
    """A scorer that begins while other responses are sampled."""
    from oxrl.rollouts.overlapped_scoring import (
        MeanwhileScorer,  # rewards of this process do without
    )

    return MeanwhileScorer(
        scorer,
        rewards.counters,
        samples=cfg.rollout.n_samples,
        prompts=cfg.data.prompts_per_step,
        stop=stop,
        deadline_s=cfg.run.waits.seconds["rollout"],
    )


def engines_needed(cfg: Config) -> Config:
    """A configuration without the actors that a run does without: of stored samples those that
    sample, of `run.only: rollouts` those that train.
    """
    if cfg.run.only is not None:
        here = cfg.train.model_copy(update={"backend": "local"})
        return cfg.model_copy(update={"train": here})
    if cfg.rollout.from_samples is None:
        return cfg
    in_process = {"name": "local", "actors": 0, "placement": "separate"}
    sampling = cfg.inference_engine.model_copy(update=in_process)
    return cfg.model_copy(update={"inference_engine": sampling})


def build_engines(cfg: Config, stack: ExitStack) -> Engines:
    """Trainers and sampler in this process, or in others where a config asks for them."""
    if cfg.train.backend != "local" or cfg.inference_engine.actors:
        from oxrl.assembly.ray_engines import build_ray_engines  # Ray is an extra

        return build_ray_engines(cfg, stack)
    trainers = build_trainers(cfg)
    policy = trainers["policy"]
    limits = limits_of(policy, cfg)
    if cfg.sampling_process:
        hosted = hosted_sampler(cfg, stack.callback)
        return Engines(trainers=trainers, sampler=hosted, limits=limits, shared=False)
    sampler = build_sampler(cfg, cast(PreTrainedModel, policy.model))
    return Engines(trainers=trainers, sampler=sampler, limits=limits, shared=True)


def reference_of(cfg: Config, engines: Engines) -> Scorer | None:
    """The frozen policy: a model of its own, or the policy with its adapter switched off."""
    if needs_reference(cfg) and cfg.lora.rank:
        return AdapterOff(cast("Trainer | Adapted", engines.trainers["policy"]))
    return engines.trainers.get("reference")


def build_delivery(cfg: Config, engines: Engines, vocabulary: int) -> SharedWeights | WeightSync:
    """How the policy's weights reach the sampler, and are proved to."""
    policy = engines.trainers["policy"]
    if engines.shared:
        return SharedWeights(policy, engines.sampler, part_sent(cfg))
    from oxrl.assembly.delivery import proved_delivery  # samplers with weights of their own

    return proved_delivery(
        cfg, policy, engines.sampler, engines.limits, vocabulary, engines.transport
    )


def features_of_row(cfg: Config, engines: Engines) -> list[Feature]:
    """What row and user add to the loop beyond the row's cells; many add nothing."""
    if FEATURES.keys().isdisjoint(cfg.train.row.needs) and not cfg.train.features:
        return []
    from oxrl.recipes.features.base import FeatureInputs

    given = FeatureInputs(
        row=cfg.train.row,
        train=cfg.train,
        max_tokens=cfg.longest_response,
        policy=engines.trainers["policy"],
        critic=engines.trainers.get("critic"),
        reference=engines.trainers.get("reference"),
        part_weights=part_weights(cfg),
        compared_parts=compared_parts(cfg),
    )
    return build_features(given)


def part_weights(cfg: Config) -> dict[str, float]:
    """Name -> weight of every part of the reward; in episodes their own rewards are one as well.

    Empty of a reward that is not asked for in parts.
    """
    weights = {name: part.weight for name, part in cfg.reward.parts.items()}
    if weights and cfg.environment.name:
        weights[ENVIRONMENT] = 1.0
    return weights


def compared_parts(cfg: Config) -> tuple[str, ...]:
    """Parts of the reward that the row compares one by one; empty: it compares their sum."""
    if not cfg.train.row.has(REWARD_PARTS):
        return ()
    return tuple(name for name, weight in part_weights(cfg).items() if weight)


def build_row_rules(
    cfg: Config, tokenizer: PreTrainedTokenizerBase, stop_token_ids: TokenIds
) -> RowRules:
    """What every row that is trained on has to satisfy."""
    return RowRules(
        pad_id=int(tokenizer.pad_token_id),  # pyright: ignore[reportArgumentType]
        stop_token_ids=stop_token_ids,
        max_tokens=None if cfg.environment.name else cfg.rollout.max_tokens,
        strict=cfg.rollout.force_strict_on_policy,
        max_staleness=cfg.rollout.max_staleness,
        groups_of_two=cfg.train.row.has(GROUPS),
        images=build_images(cfg),
    )


def kept_source(cfg: Config, source: RolloutSource) -> RolloutSource:
    """A source whose samples are kept whole, where that is asked for."""
    if cfg.run.record != "tokens":
        return source
    from oxrl.rollouts.whole_samples import KeepingSource  # records of text do without

    return KeepingSource(source, cfg.run.directory / ROLLOUTS)


def token_records(cfg: Config) -> list[Feature]:
    """What keeps the numbers of every token in the update, where that is asked for."""
    if cfg.run.record != "tokens":
        return []
    # Imported here: records of text do without.
    from oxrl.recipes.features.token_record import TokenRecord

    return [TokenRecord(cfg.run.directory / ROLLOUTS)]


def chosen_parts(parts: RolloutParts, features: list[Feature]) -> RolloutParts:
    """With a choice of the groups that are trained on, where a feature makes one."""
    for feature in features:
        if feature.choice is not None:
            from oxrl.rollouts.rounds import RoundParts  # where every group is, it is not needed

            return RoundParts(**vars(parts), choice=feature.choice)
    return parts


def build_source(cfg: Config, parts: RolloutParts, delivery: Delivery) -> RolloutSource:
    """Where rollouts come from: one step after the other, sampled ahead of training, or stored."""
    if cfg.rollout.from_samples is not None:
        from oxrl.rollouts.whole_samples import StoredRollouts

        return StoredRollouts(Path(cfg.rollout.from_samples) / ROLLOUTS, parts)
    if not cfg.sampling_block:
        if type(parts) is RolloutParts:  # every group is trained on
            return SyncRollouts(parts)
        from oxrl.rollouts.rounds import RoundRollouts

        return RoundRollouts(parts)
    from oxrl.rollouts.async_rollouts import AheadRollouts
    from oxrl.rollouts.rounds import most_rounds

    per_batch = parts.prompts_per_step * parts.requests.per_prompt * most_rounds(parts)
    return AheadRollouts(
        parts,
        delivery,
        block=cfg.sampling_block,
        capacity=2 * cfg.sampling_block * per_batch,
        rollout_steps=cfg.run.steps // cfg.train.updates,
        updates=cfg.train.updates,
        background=cfg.inference_engine.actors > 0,
    )


def what_is_saved(
    engines: Engines, features: list[Feature], source: RolloutSource
) -> dict[str, Saved]:
    """Subdirectory of a checkpoint -> what is stored there."""
    saved: dict[str, Saved] = {".": engines.trainers["policy"]}
    if "critic" in engines.trainers:
        saved["critic"] = engines.trainers["critic"]
    if any(feature.moves_reference for feature in features) and "reference" in engines.trainers:
        saved["reference"] = engines.trainers["reference"]
    if not isinstance(source, SyncRollouts):
        saved["samples"] = cast(Saved, source)
    return saved
