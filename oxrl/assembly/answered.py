"""The prompts of a file answered by a model that is not trained, and scored."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from oxrl.assembly.assemble import answering
from oxrl.assembly.assembly import Assembly
from oxrl.assembly.delivery import proved_sampler
from oxrl.assembly.reward_pools import start_rewards
from oxrl.data.prompts import PromptDataset
from oxrl.recipes.scored_answers import ScoredSampler
from oxrl.rewards.pool_choice import REHEARSED, try_reward
from oxrl.runs.waiting import Patience, StopAsked, never


@contextmanager
def sampling_from(
    assembly: Assembly,
    path: str,
    *,
    held_out: bool,
    samples: int,
    temperature: float,
    seed: int,
    stop: StopAsked = never,
) -> Generator[tuple[PromptDataset, ScoredSampler]]:
    """The prompts of a file, and who answers them: the config's model, scored by its reward.

    Args:
        held_out: whether the file is read as `data.eval`.
        samples, temperature, seed: of the responses.
        stop: whether the run was asked to stop.
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
        rewards = start_rewards(assembly, stack, stop)
        if rewards is not None:
            try_reward(rewards, first, Patience(stop))
        answers, scorer = answering(assembly, sampler, rewards, limits, first[0], stack, stop)
        yield (
            prompts,
            ScoredSampler(
                sampler=answers,
                scorer=scorer,
                sampling=assembly.sampling(limits.stop_token_ids, temperature),
                samples=samples,
                seed=seed,
                deadline_s=assembly.cfg.run.waits.seconds["rollout"],
                stop=stop,
            ),
        )
