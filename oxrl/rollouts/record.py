"""A rollout as a line of samples.jsonl."""

from __future__ import annotations

from collections.abc import Sequence

from oxrl.data.prompt_record import prompt_fields
from oxrl.types import Rollout

SampleLine = dict[str, object]


def sample_line(rollout: Rollout, *, step: int, advantage: float | None) -> SampleLine:
    """One line of samples.jsonl.

    Args:
        rollout: the scored sample.
        step: optimizer steps done when it was trained on; -1 in an evaluation.
        advantage: mean over its tokens; None for a sample that is not trained on.
    """
    prompt, completion, score = rollout.prompt, rollout.completion, rollout.score
    versions = [version for segment in completion.segments for version in segment.versions]
    line: SampleLine = {
        "uid": prompt.uid,
        "draw": rollout.group_id,
        "sample": rollout.sample,
        "step": step,
        **prompt_fields(prompt),
        "response": completion.text,
        "reward": score.value,
        "status": score.status,
        "reason": score.reason,
        "advantage": advantage,
        "versions": version_spans(versions),
        "seed": rollout.seed,
        "finish_reason": completion.finish_reason,
        "answer": prompt.answer,
    }
    line |= prompt.shown
    if score.parts or score.statuses:
        from oxrl.rollouts.parts import part_fields  # most rewards have none

        line |= part_fields(score)
    if completion.end is not None:
        from oxrl.rollouts.episode_scores import episode_fields  # single turns do without

        line |= episode_fields(rollout)
    return line


def version_spans(versions: Sequence[int]) -> list[list[int]]:
    """Runs of equal weight versions as [version, first token, token after the last]."""
    spans: list[list[int]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1][0] == version:
            spans[-1][2] = position + 1
        else:
            spans.append([version, position, position + 1])
    return spans
