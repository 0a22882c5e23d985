"""Evaluations of supervised runs that answer the held-out prompts and have the answers scored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from oxrl.assembly import assembly
from oxrl.config import Config
from oxrl.data.prompts import AnsweredPrompts
from oxrl.engines.sample.base import RolloutEngine
from oxrl.engines.train.trainer import Trainer
from oxrl.plan.preflight import REHEARSED, try_reward
from oxrl.recipes.scored_answers import ScoredSampler, evaluation_metrics, evaluation_seed
from oxrl.recipes.session import Session
from oxrl.runs.waiting import Patience
from oxrl.types import Metrics

if TYPE_CHECKING:
    from oxrl.engines.delivery.sync import WeightSync


class GeneratedEvaluation:
    """Answers the prompts of data.eval with the weights being trained, the same seeds each time.

    Args:
        engine: what trains, in this process.
        session: of the run; its end is that of the reward's workers.
    """

    def __init__(
        self, cfg: Config, session: Session, engine: Trainer, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._cfg = cfg
        self._session = session
        self._model = cast(PreTrainedModel, engine.model)
        self._tokenizer = tokenizer
        self._pool = assembly.build_rewards(cfg)
        session.closing(self._pool.close)
        patience = Patience(session.stopping, cfg.run.waits.seconds["rollout"])
        self._pool.start(patience)
        limits = assembly.prompt_limits(cfg, self._model, tokenizer)
        self._stops = limits.stop_token_ids
        options = assembly.row_options(cfg, True, limits.longest)
        self._prompts = AnsweredPrompts.load(cfg.data.eval or "", tokenizer, options)
        try_reward(self._pool, next(self._prompts.batches(REHEARSED), []), patience)
        self._delivery: WeightSync | None = None
        if cfg.sampling_process:
            from oxrl.assembly.delivery import proved_delivery  # this process can do it as well

            hosted = assembly.hosted_sampler(cfg, session.closing)
            self._delivery = proved_delivery(cfg, engine, hosted, limits, len(tokenizer))

    def metrics(self) -> Metrics:
        """Mean reward and its like, as evaluations of reinforcement learning have them.

        Raises:
            DeadlineError: nothing was answered, or scored, for too long.
            Stopped: a signal asked to stop.
        """
        rollout = self._cfg.rollout
        sampling = assembly.training_sampling(self._cfg, self._stops, rollout.eval_temperature)
        with self._with_these_weights() as sampler:
            scored = ScoredSampler(
                sampler=sampler,
                scorer=self._pool,
                sampling=sampling,
                samples=rollout.eval_samples,
                seed=evaluation_seed(self._cfg),
                deadline_s=self._cfg.run.waits.seconds["rollout"],
                stop=self._session.stopping,
            )
            rollouts = scored.answer(list(enumerate(self._prompts.in_order())))
        return evaluation_metrics(rollouts, samples=rollout.eval_samples)

    @contextmanager
    def _with_these_weights(self) -> Iterator[RolloutEngine]:
        """What samples with the weights as they are now."""
        if self._delivery is not None:
            sampler = self._delivery.sampler
            self._delivery.deliver(sampler.version + 1)
            yield sampler
            return
        # A sampler of its own each time: it holds nothing of earlier weights.
        with closing(assembly.local_sampler(self._cfg, self._model, self._tokenizer)) as sampler:
            yield sampler
