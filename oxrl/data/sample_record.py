"""A sample as a line of samples.jsonl, and its prompt back: enough to score it again."""

from __future__ import annotations

from collections.abc import Sequence

from oxrl.types import Named, Prompt, Rollout, Score, Values

SampleLine = dict[str, object]


def sample_line(rollout: Rollout, *, step: int, advantage: float | None) -> SampleLine:
    """Make one line of samples.jsonl.

    Args:
        rollout: the scored sample.
        step: optimizer steps done before it was trained on; -1 in an evaluation.
        advantage: mean over its tokens; None for a sample that is not trained on.

    Returns:
        JSON values by name; `step` is the first optimizer step that learns from it, counted from 1
        as in metrics.jsonl.
    """
    prompt = rollout.prompt
    completion = rollout.completion
    score = rollout.score
    versions = [version for segment in completion.segments for version in segment.versions]
    line: SampleLine = {
        "uid": prompt.uid,
        "draw": rollout.group_id,
        "sample": rollout.sample,
        "step": step + 1,
        **prompt_fields(prompt),
        "response": completion.text,
        "reward": score.value,
        "status": score.status,
        "reason": score.reason,
        "advantage": advantage,
        "versions": _version_spans(versions),
        "seed": rollout.seed,
        "finish_reason": completion.finish_reason,
        "answer": prompt.answer,
    }
    line |= prompt.shown
    if score.parts or score.statuses:
        line |= _part_fields(score)
    if completion.end is not None:
        line |= _episode_fields(rollout)
    return line


def prompt_fields(prompt: Prompt) -> Values:
    """Return a line's fields about a prompt: its last message, and the rest where there is more.

    `messages` are left out where the row gave a text, which is the one message (`plain`).

    Args:
        prompt: of a rollout.

    Returns:
        JSON values; token ids, answer, uid and images are not among them.
    """
    fields: Values = {
        "prompt": prompt.question,
        "plain": prompt.plain,
    }
    if not prompt.plain:
        fields["messages"] = [dict(message) for message in prompt.messages]
    if prompt.source:
        fields["source"] = prompt.source
    if prompt.metadata:
        fields["metadata"] = dict(prompt.metadata)
    return fields


def _version_spans(versions: Sequence[int]) -> list[list[int]]:
    """List runs of equal weight versions as [version, first token, token after the last]."""
    spans: list[list[int]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1][0] == version:
            spans[-1][2] = position + 1
        else:
            spans.append([version, position, position + 1])
    return spans


def _part_fields(score: Score) -> Values:
    """Return the fields of a line of samples.jsonl about the parts of a score."""
    fields: Values = {"parts": dict(score.parts)}
    if score.statuses:
        fields["part_statuses"] = dict(score.statuses)
    return fields


def _episode_fields(episode: Rollout) -> Values:
    """Return the fields of a line of samples.jsonl that only episodes have."""
    completion = episode.completion
    return {
        "reason": completion.reason or episode.score.reason,
        "end": completion.end,
        "opening": list(completion.opening),
        "turns": [vars(turn) for turn in completion.turns],
    }


def recorded_prompt(line: Named) -> Prompt:
    """Read the prompt of a line of samples.jsonl, without its token ids.

    Args:
        line: with `uid` and `prompt`; all else may be missing.

    Raises:
        KeyError, TypeError: the line holds none.
    """
    alone = {"role": "user", "content": line["prompt"]}
    messages = [dict(message) for message in line.get("messages", [alone])]
    return Prompt(
        uid=str(line["uid"]),
        messages=tuple(messages),
        token_ids=(),
        answer=line.get("answer"),
        images=tuple(line.get("images", ())),
        source=str(line.get("source", "")),
        metadata=dict(line.get("metadata", {})),
        plain=bool(line.get("plain", True)),
    )
