"""The process that runs one reward: reads tasks as JSON lines from standard input, writes scores as JSON lines.

Started by `workers.py` as `python -m oxrl.rewards.worker NAME`. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from oxrl.errors import RewardError
from oxrl.rewards.base import load_reward
from oxrl.types import Completion, Prompt, Score, Segment


def encode_task(
    prompt: Prompt, completions: list[Completion], first: int, *, limit_s: float, texts_only: bool
) -> bytes:
    """One task as a line of JSON; a reward of single texts is not sent the tokens."""
    if texts_only:
        completions = [dataclasses.replace(completion, segments=()) for completion in completions]
    return _line({"prompt": prompt, "completions": completions, "first": first, "limit_s": limit_s})


def decode_scores(line: bytes) -> list[Score]:
    """The scores in a worker's reply; none if it died before the end of the line."""
    try:
        return [Score(**fields) for fields in json.loads(line)["scores"]]
    except (ValueError, TypeError, KeyError):
        return []


def _line(message: Mapping[str, Any]) -> bytes:
    def plain(value: Any) -> dict[str, Any]:
        return dict(value) if isinstance(value, Mapping) else vars(value)

    return json.dumps(message, default=plain).encode() + b"\n"


def _tuples(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: tuple(value) if name in names else value for name, value in fields.items()}


def _completion(fields: Mapping[str, Any]) -> Completion:
    segments = [Segment(**_tuples(s, "token_ids", "logprobs", "versions", "images")) for s in fields["segments"]]
    return Completion(segments=tuple(segments), text=fields["text"], finish_reason=fields["finish_reason"])


def main(name: str) -> None:
    # User code may print and may read standard input: give it neither of our pipes.
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(_line(message))
        replies.flush()

    try:
        reward = load_reward(name)
    except RewardError as error:
        reply({"failed": str(error)})
        return
    reply({"per_sample": reward.per_sample})
    for line in tasks:
        task = json.loads(line)
        # The parent kills a late worker. Should the parent be dead, the kernel's alarm ends even a hang inside C code.
        signal.setitimer(signal.ITIMER_REAL, 2 * task["limit_s"] + 5)
        prompt = Prompt(**_tuples(task["prompt"], "messages", "token_ids", "images"))
        scores = reward(prompt, [_completion(fields) for fields in task["completions"]], task["first"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply({"scores": scores})


if __name__ == "__main__":
    main(sys.argv[1])
