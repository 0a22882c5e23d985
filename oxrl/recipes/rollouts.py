"""From prompts to scored rollouts: what training, evaluation and rejection sampling have in
common.
"""

from __future__ import annotations

from collections.abc import Sequence

from oxrl.errors import RewardError
from oxrl.rewards.workers import RewardPool
from oxrl.seeds import sample_seed
from oxrl.types import Completion, Prompt, Request, Rollout, Sampling, Score


def make_requests(
    draws: Sequence[tuple[int, Prompt]],
    *,
    samples: int,
    sampling: Sampling,
    run_seed: int,
    first: int = 0,
) -> list[Request]:
    """`samples` requests for every (draw, prompt), numbered from `first`, with seeds that depend on
    nothing else.
    """
    return [
        Request(
            id=f"{draw}/{sample}",
            prompt=prompt,
            draw=draw,
            sample=sample,
            sampling=sampling,
            seed=sample_seed(run_seed, draw, sample),
        )
        for draw, prompt in draws
        for sample in range(first, first + samples)
    ]


def score_groups(
    pool: RewardPool, sampled: Sequence[tuple[Request, Completion]], *, samples: int
) -> list[Rollout]:
    """Score the `samples` completions of each prompt together; rollouts come back in the order
    given.
    """
    groups = [
        (
            sampled[start][0].prompt,
            [completion for _, completion in sampled[start : start + samples]],
        )
        for start in range(0, len(sampled), samples)
    ]
    scores = [score for group in pool.score(groups) for score in group]
    return [
        Rollout(
            prompt=request.prompt,
            completion=completion,
            score=score,
            group_id=request.draw,
            sample=request.sample,
            seed=request.seed,
        )
        for (request, completion), score in zip(sampled, scores, strict=True)
    ]


def check_error_rate(scores: Sequence[Score], max_error_rate: float) -> None:
    """Stop the run when most rewards fail: what is left is not the data the user meant to train on.

    Raises:
        RewardError: more than `max_error_rate` of the scores are not ok; shows the first reason.
    """
    failed = [score for score in scores if score.status != "ok"]
    if len(failed) > max_error_rate * len(scores):
        raise RewardError(
            f"the reward failed on {len(failed)} of {len(scores)} samples, more than reward.max_error_rate="
            f"{max_error_rate}; the first says: {failed[0].status}: {failed[0].reason}"
        )


def sample_record(rollout: Rollout, *, step: int, advantage: float | None) -> dict[str, object]:
    """One line of samples.jsonl."""
    completion = rollout.completion
    versions = [version for segment in completion.segments for version in segment.versions]
    spans: list[list[int]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1][0] == version:
            spans[-1][2] = position + 1
        else:
            spans.append([version, position, position + 1])
    return {
        "uid": rollout.prompt.uid,
        "draw": rollout.group_id,
        "sample": rollout.sample,
        "step": step,
        "prompt": rollout.prompt.messages[-1]["content"] if rollout.prompt.messages else "",
        "response": completion.text,
        "reward": rollout.score.value,
        "status": rollout.score.status,
        "reason": rollout.score.reason,
        "advantage": advantage,
        "versions": spans,
        "seed": rollout.seed,
        "finish_reason": completion.finish_reason,
        "answer": rollout.prompt.answer,
    }
