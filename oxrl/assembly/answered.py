"""The prompts of a file answered by a model that is not trained, and scored."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from oxrl.assembly.assemble import answering
from oxrl.assembly.assembly import Assembly
from oxrl.assembly.reward_pools import build_rewards, start_rewards
from oxrl.assembly.sampler_processes import hosted_sampler, proved_delivery, proved_sampler
from oxrl.data.conversations import AnsweredPrompts
from oxrl.data.prompts import PromptDataset
from oxrl.engines.train.trainer import Trainer
from oxrl.recipes.rejection import KEPT_FILE, sample_and_keep
from oxrl.recipes.scored_answers import ScoredSampler, evaluation_metrics, evaluation_seed
from oxrl.recipes.session import Session
from oxrl.rewards.pool_choice import REHEARSED, try_reward
from oxrl.runs.waiting import Patience
from oxrl.tables.numbers import KEEP_PER_PROMPT, KEEP_REWARD
from oxrl.types import Metrics


@contextmanager
def sampling_from(
    assembly: Assembly,
    path: str,
    *,
    held_out: bool,
    samples: int,
    temperature: float,
    seed: int,
) -> Generator[tuple[PromptDataset, ScoredSampler]]:
    """The prompts of a file, and who answers them: the config's model, scored by its reward.

    Args:
        held_out: whether the file is read as `data.eval`.
        samples, temperature, seed: of the responses.
    """
    model = assembly.model()
    limits = assembly.limits(model)
    prompts = assembly.prompts(path, limits.longest, held_out=held_out)
    with ExitStack() as stack:
        if assembly.cfg.sampling_process:
            sampler = proved_sampler(assembly, model, limits, stack)
        else:
            sampler = assembly.local_sampler(model)
        del model  # a process of its own has another copy
        stack.callback(sampler.close)
        first = next(prompts.batches(REHEARSED), [])
        rewards = start_rewards(assembly, stack)
        if rewards is not None:
            try_reward(rewards, first, Patience(assembly.stop))
        answers, scorer = answering(assembly, sampler, rewards, limits, first[0], stack)
        yield (
            prompts,
            ScoredSampler(
                sampler=answers,
                scorer=scorer,
                sampling=assembly.sampling(limits.stop_token_ids, temperature),
                samples=samples,
                seed=seed,
                deadline_s=assembly.cfg.run.waits.seconds["rollout"],
                stop=assembly.stop,
            ),
        )


def kept_samples(assembly: Assembly, session: Session) -> Path:
    """The file of the responses that rejection keeps; sampled where it is not there yet."""
    cfg = assembly.cfg
    kept = session.run.path / KEPT_FILE
    if kept.is_file():
        return kept
    with sampling_from(
        assembly,
        cfg.data.train_files[0],
        held_out=False,
        samples=cfg.rollout.n_samples,
        temperature=cfg.rollout.temperature,
        seed=cfg.run.seed,
    ) as (prompts, answers):
        sample_and_keep(
            prompts,
            answers,
            session,
            prompts_per_step=cfg.data.prompts_per_step,
            max_error_rate=cfg.reward.max_error_rate,
            keep_reward=cfg.train.value(KEEP_REWARD),
            keep_per_prompt=cfg.train.value(KEEP_PER_PROMPT),
        )
    return kept


def build_generated(assembly: Assembly, session: Session, engine: Trainer) -> Callable[[], Metrics]:
    """Evaluations in which the model that is trained answers, and a reward scores.

    Args:
        session: of the run; its end is that of the reward's workers.
        engine: what trains, in this process.
    """
    cfg = assembly.cfg
    model = cast(PreTrainedModel, engine.model)
    pool = build_rewards(assembly)
    session.closing(pool.close)
    deadline_s = cfg.run.waits.seconds["rollout"]
    patience = Patience(assembly.stop, deadline_s)
    pool.start(patience)
    limits = assembly.limits(model)
    options = assembly.row_options(held_out=True, max_tokens=limits.longest)
    prompts = AnsweredPrompts.load(cfg.data.eval or "", assembly.tokenizer, options)
    try_reward(pool, next(prompts.batches(REHEARSED), []), patience)
    delivery = None
    if cfg.sampling_process:
        hosted = hosted_sampler(assembly, session.closing)
        delivery = proved_delivery(assembly, engine, hosted, limits)

    def evaluate() -> Metrics:
        """Answer the prompts with the weights as they are now, with the same seeds each time."""
        with ExitStack() as stack:
            if delivery is None:
                # A sampler of its own each time: it holds nothing of earlier weights.
                sampler = stack.enter_context(closing(assembly.local_sampler(model)))
            else:
                sampler = delivery.sampler
                delivery.deliver(sampler.version + 1)
            scored = ScoredSampler(
                sampler=sampler,
                scorer=pool,
                sampling=assembly.sampling(limits.stop_token_ids, cfg.rollout.eval_temperature),
                samples=cfg.rollout.eval_samples,
                seed=evaluation_seed(cfg.run.seed),
                deadline_s=deadline_s,
                stop=assembly.stop,
            )
            rollouts = scored.answer(list(enumerate(prompts.in_order())))
        return evaluation_metrics(rollouts, samples=scored.samples)

    return evaluate
