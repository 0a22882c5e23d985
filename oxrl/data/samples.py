"""Samples as lines of samples.jsonl, to be scored again, and how often they repeat themselves."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from oxrl.types import Metrics, Named, Prompt, Rollout, Rollouts, Values

SampleLine = dict[str, object]
# Bytes below which a text is too short to be called a loop.
SHORTEST_LOOP = 200
# Size that compression leaves of a loop; of prose and proofs it leaves a third or more.
# The same idea as the compression ratio of Whisper's decoding, arXiv:2212.04356, section 4.5.
LOOP_LEFT = 0.15


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
    if prompt.images:
        line["images"] = list(prompt.images)
    if score.parts or score.statuses:
        line["parts"] = dict(score.parts)
    if score.statuses:
        line["part_statuses"] = dict(score.statuses)
    if completion.end is not None:
        line |= {
            "reason": completion.reason or score.reason,
            "end": completion.end,
            "opening": list(completion.opening),
            "turns": [vars(turn) for turn in completion.turns],
        }
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
        "prompt": prompt.messages[-1]["content"] if prompt.messages else "",
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
    end = 0
    for version, run in groupby(versions):
        begin = end
        end += len(list(run))
        spans.append([version, begin, end])
    return spans


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


def repetition_metrics(rollouts: Rollouts) -> Metrics:
    """Measure how often responses of a rollout step repeat themselves, and those of their group.

    Args:
        rollouts: of a step, in any order.

    Returns:
        `data/looping_frac`, the share of responses that say one thing again and again, and
        `data/duplicate_frac`, over all pairs of a group the share with equal texts, where there are
        pairs. Empty for no rollouts.
    """
    if not rollouts:
        return {}
    texts = [rollout.completion.text for rollout in rollouts]
    looping = sum(map(is_loop, texts))
    metrics = {"data/looping_frac": looping / len(texts)}
    sizes = Counter(rollout.group_id for rollout in rollouts)
    same = Counter((rollout.group_id, rollout.completion.text) for rollout in rollouts)
    pairs = _pairs(sizes)
    if pairs:
        metrics["data/duplicate_frac"] = _pairs(same) / pairs
    return metrics


def is_loop(text: str) -> bool:
    """True if a text is mostly one passage, repeated.

    Args:
        text: of a response; one below SHORTEST_LOOP bytes is none.
    """
    data = text.encode("utf-8", "surrogatepass")
    if len(data) < SHORTEST_LOOP:
        return False
    return len(zlib.compress(data, 1)) < LOOP_LEFT * len(data)


def _pairs(counts: Counter[int] | Counter[tuple[int, str]]) -> int:
    """Unordered pairs of things that are counted together."""
    return sum(count * (count - 1) // 2 for count in counts.values())
