"""The process that runs one reward: reads tasks as JSON lines from standard input, writes scores as JSON lines.

Started by `workers.py` as `python -m oxrl.rewards.worker NAME`. Imports no torch.
"""

from __future__ import annotations

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
    prompt: Prompt, completions: list[Completion], *, first: int, limit_s: float, texts_only: bool
) -> bytes:
    """One task as a line of JSON; a reward of single texts is not sent the tokens."""
    task = {
        "prompt": {
            "uid": prompt.uid,
            "messages": [dict(message) for message in prompt.messages],
            "token_ids": prompt.token_ids,
            "answer": prompt.answer,
            "images": prompt.images,
            "source": prompt.source,
            "metadata": dict(prompt.metadata),
        },
        "completions": [
            {
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "segments": [] if texts_only else [vars(segment) for segment in completion.segments],
            }
            for completion in completions
        ],
        "first": first,
        "limit_s": limit_s,
    }
    return json.dumps(task).encode() + b"\n"


def decode_scores(line: bytes) -> list[Score]:
    """The scores in a worker's reply.

    Raises:
        ValueError, TypeError, KeyError: the line is no reply.
    """
    return [Score(**fields) for fields in json.loads(line)["scores"]]


def _prompt(fields: Mapping[str, Any]) -> Prompt:
    tuples = {key: tuple(fields[key]) for key in ("messages", "token_ids", "images")}
    return Prompt(**{**fields, **tuples})


def _completion(fields: Mapping[str, Any]) -> Completion:
    lists = ("token_ids", "logprobs", "versions", "images")
    segments = tuple(Segment(**{**s, **{key: tuple(s[key]) for key in lists}}) for s in fields["segments"])
    return Completion(segments=segments, text=fields["text"], finish_reason=fields["finish_reason"])


def main(name: str) -> None:
    # User code may print and may read standard input: give it neither of our pipes.
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)

    def reply(message: Mapping[str, Any]) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
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
        scores = reward(_prompt(task["prompt"]), [_completion(c) for c in task["completions"]], task["first"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply({"scores": [{**vars(score), "parts": dict(score.parts)} for score in scores]})


if __name__ == "__main__":
    main(sys.argv[1])
