"""Prompts answered by a model and scored by a reward, and what the scores say of the model: while
reinforcement learning goes on, and after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from oxrl.data.batching import how_it_ended
from oxrl.data.prompts import PromptDataset
from oxrl.engines.sample import RolloutEngine
from oxrl.engines.sample.sampler import OnFinished, generate, ignore
from oxrl.entry_points import STATISTICS, own_function
from oxrl.functional.shaping import best_at_k, pass_at_k
from oxrl.recipes.session import Session
from oxrl.rewards.pools import GroupScorer
from oxrl.rollouts.sync import RolloutSource, make_requests, score_groups
from oxrl.runs.bars import Count
from oxrl.runs.waiting import Patience, StopAsked
from oxrl.seeds import stable_seed
from oxrl.types import Metrics, Prompt, Rollout, Rollouts, Sampling

Item = TypeVar("Item")
# Between two looks at how far an evaluation of a run is, in seconds: short ones say nothing.
TOLD_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ScoredSampler:
    """Answers prompts, and scores the answers.

    Args:
        sampler, scorer: who answers, who scores.
        sampling: temperature and limits.
        samples: responses per prompt.
        seed: of all of them.
        deadline_s: longest wait for the next answer, and for the next score.
        stop: whether the run was asked to stop.
        on_finished: is told of every response when it is finished.
    """

    sampler: RolloutEngine
    scorer: GroupScorer
    sampling: Sampling
    samples: int
    seed: int
    deadline_s: float
    stop: StopAsked
    on_finished: OnFinished = ignore

    def answer(self, draws: Sequence[tuple[int, Prompt]]) -> list[Rollout]:
        """`samples` scored responses in a row for every (position, prompt).

        Raises:
            DeadlineError: nothing was answered, or scored, for too long.
            Stopped: a signal asked to stop.
        """
        requests = make_requests(
            draws, samples=self.samples, sampling=self.sampling, run_seed=self.seed
        )
        completions = generate(
            self.sampler,
            requests,
            deadline_s=self.deadline_s,
            stop=self.stop,
            on_finished=self.on_finished,
        )
        sampled = list(zip(requests, completions, strict=True))
        patience = Patience(self.stop, self.deadline_s)
        return score_groups(self.scorer, sampled, patience, samples=self.samples)


def evaluation_seed(run_seed: int) -> int:
    """The seed of every evaluation of a run."""
    return stable_seed("evaluation", run_seed)


def evaluation_metrics(rollouts: Rollouts, *, samples: int) -> Metrics:
    """Mean reward with its interval, pass@k and best@k for k = 1, 2, 4 ... of the prompts whose
    responses all have a score.

    `eval/errors` are responses without a score; the mean is NaN where every prompt has one of them.

    Args:
        rollouts: `samples` in a row per prompt.
    """
    values = [rollout.score.value for rollout in rollouts]
    scored = [group for group in in_groups(values, samples) if None not in group]
    rewards = torch.tensor(scored, dtype=torch.float64)
    lengths = [rollout.completion.sampled for rollout in rollouts]
    truncated = [how_it_ended(rollout.completion) == "truncated" for rollout in rollouts]
    count = max(len(rollouts), 1)
    metrics = {
        "eval/reward": float(rewards.mean()),
        **reward_bounds(rewards),
        "eval/responses": float(len(rollouts)),
        "eval/errors": float(values.count(None)),
        "eval/length_mean": sum(lengths) / count,
        "eval/truncated_frac": sum(truncated) / count,
    }
    if not scored:
        return metrics
    total = torch.full((len(scored),), samples)
    correct = (rewards > 0.5).sum(1)
    k = 1
    while k <= samples:
        metrics[f"eval/pass@{k}"] = float(pass_at_k(total, correct, k=k).mean())
        metrics[f"eval/best@{k}"] = float(best_at_k(rewards, k=k).mean())
        k *= 2
    return metrics


def reward_bounds(rewards: Tensor) -> Metrics:
    """Between which two numbers the mean reward likely is, at 95 %.

    Args:
        rewards: [prompts, samples] float64.

    Returns:
        `eval/reward_low`, `eval/reward_high`; nothing on a node without the package that says it.
    """
    bounds = own_function(STATISTICS, "reward_bounds")
    return {} if bounds is None or not rewards.numel() else bounds(rewards.numpy())


class Evaluation(NamedTuple):
    """The held-out prompts of a run, and who answers them.

    source: of rollouts, which has the sampler otherwise and lends it.
    """

    prompts: PromptDataset
    answers: ScoredSampler
    source: RolloutSource

    def measure(self, session: Session, step: int) -> Metrics:
        """Answer the prompts with the weights of `step`, with the same seeds each time.

        Raises:
            Stopped: a signal asked to stop.
        """
        draws = list(enumerate(self.prompts.in_order()))
        samples = self.answers.samples
        tell = partial(_forward, session)
        count = Count(tell, "evaluation", len(draws) * samples, every_s=TOLD_EVERY_S)
        answers = replace(self.answers, on_finished=count.one)
        with session.clock.phase("time/eval_s"):
            return evaluation_metrics(self._answered(step, draws, answers), samples=samples)

    def answered(self, step: int) -> list[Rollout]:
        """The scored answers to all prompts, with the weights of `step`.

        Raises:
            Stopped: a signal asked to stop.
        """
        return self._answered(step, list(enumerate(self.prompts.in_order())), self.answers)

    def _answered(
        self, step: int, draws: Sequence[tuple[int, Prompt]], answers: ScoredSampler
    ) -> list[Rollout]:
        self.source.lend(step)
        try:
            return answers.answer(draws)
        finally:
            answers.sampler.metrics()  # what it counted is no part of the next step


def _forward(session: Session, what: str, done: int, total: int) -> None:
    if done < total:  # its metrics tell of the end
        session.work(what, done, total, unit="responses", rate=0.0)


def in_groups(items: Sequence[Item], samples: int) -> list[Sequence[Item]]:
    """`items`, `samples` at a time."""
    return [items[start : start + samples] for start in range(0, len(items), samples)]


def mean(values: Sequence[float]) -> float:
    """The mean, NaN of nothing."""
    return sum(values) / len(values) if values else math.nan
