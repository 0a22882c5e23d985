"""A reward worker's whole life, started as `python -m oxrl.usercode.reward_host FD`.

Requests and replies are lines of JSON on a socket of their own, file descriptor FD; every reply
repeats the id of its request. What the reward prints goes elsewhere, and what it reads is empty.
"""

from __future__ import annotations

import sys

from oxrl.errors import RewardDefinitionError, RewardError
from oxrl.rewards.base import LoadedReward, find_reward
from oxrl.rewards.trial import dry_call, rehearse
from oxrl.rewards.watch import Watch
from oxrl.usercode.given import FIELD
from oxrl.usercode.messages import (
    Json,
    Replies,
    completion_of,
    decode,
    prompt_of,
)
from oxrl.usercode.packing import receive
from oxrl.usercode.user_code import raised_as


def score(reward: LoadedReward, watch: Watch, request: Json) -> Json:
    """The scores of one request, and whether scoring changed this process.

    Args:
        reward: loaded.
        watch: what this process was like before.
        request: `prompt`, `completions`, `first` (index of the first of them in its group).

    Returns:
        `scores`, one for each completion in order; `changed`, empty or what was changed.
    """
    prompt = prompt_of(request["prompt"])
    completions = [completion_of(fields) for fields in request["completions"]]
    scores = reward(prompt, completions, request["first"])
    return {"scores": scores, "changed": watch.changed()}


def take_given(request: Json) -> None:
    """Take a function that the parent was given itself, if the request brings one.

    Args:
        request: the first one: its `name`, and the function in bytes where there is one.

    Raises:
        RewardDefinitionError: it cannot be made again here.
    """
    if FIELD not in request:
        return
    try:
        receive(request["name"], request[FIELD])
    except Exception as error:  # any: loading it may import modules of the user's
        raised = raised_as(error, None)
        problem = f"a reward worker cannot load the function: {raised}"
        raise RewardDefinitionError(f"reward.name={request['name']}: {problem}") from error


def prepare(replies: Replies) -> LoadedReward:
    """Load the reward that the first request names, and call it once when the second one asks.

    Args:
        replies: where requests come from and replies go.

    Returns:
        The reward, ready to score. The parent has its two replies, or the reason for failing.

    Raises:
        RewardError: neither works; the parent was told.
    """
    request = decode(replies.requests.readline())
    try:
        take_given(request)
        reward = find_reward(request["name"], request["options"])
        replies.send({"id": request["id"], "per_sample": reward.per_sample})
        request = decode(replies.requests.readline())
        dry_call(reward)
    except RewardError as error:
        replies.send({"id": request["id"], "failed": str(error)})
        raise
    replies.send({"id": request["id"]})
    return reward


def serve(fd: int) -> None:
    """Load a reward, call it once, then score until nobody asks any more: a worker's whole life.

    Args:
        fd: descriptor of the socket to the parent.
    """
    replies = Replies(fd)
    try:
        reward = prepare(replies)
    except RewardError:
        return
    watch = Watch(reward.module)
    for line in replies.requests:
        request = decode(line)
        if "rehearse" in request:
            problem, changed = rehearse(reward, prompt_of(request["rehearse"]))
            replies.send({"id": request["id"], "problem": problem, "differs": changed})
        else:
            replies.send({"id": request["id"]} | score(reward, watch, request))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
