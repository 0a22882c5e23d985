"""A reward worker's whole life, started as `python -m oxrl.rewards.host FD`.

Requests and replies are lines of JSON on a socket of their own, file descriptor FD; every reply
repeats the id of its request. What the reward prints goes elsewhere, and what it reads is empty.
"""

from __future__ import annotations

import sys
from functools import partial

from oxrl.errors import RewardError
from oxrl.rewards.dry_call import dry_call, rehearse
from oxrl.rewards.loaded import LoadedReward, find_reward
from oxrl.rewards.watch import Watch
from oxrl.tables.user_code import REWARD
from oxrl.usercode.given import take_given
from oxrl.usercode.messages import (
    Json,
    Replies,
    completion_of,
    decode,
    prompt_of,
)


def answer(reward: LoadedReward, watch: Watch, request: Json) -> Json:
    """Score what a request brings, or try the reward on a prompt of the data.

    Args:
        reward: loaded.
        watch: what this process was like before.
        request: `rehearse`, a prompt; or `prompt`, `completions` and `first` (index of the first
            of them in its group).

    Returns:
        `problem` and `differs`, as of `dry_call.rehearse`; or `scores`, one for each completion in
        order, and `changed`, empty or what scoring changed in this process.
    """
    if "rehearse" in request:
        problem, differs = rehearse(reward, prompt_of(request["rehearse"]))
        return {"problem": problem, "differs": differs}
    prompt = prompt_of(request["prompt"])
    completions = [completion_of(fields) for fields in request["completions"]]
    scores = reward(prompt, completions, request["first"])
    return {"scores": scores, "changed": watch.changed()}


def serve(fd: int) -> None:
    """Load a reward, call it once, then score until nobody asks any more: a worker's whole life.

    The first request names the reward, the second one asks for the call. Where either fails the
    reply says why, and that was all.

    Args:
        fd: descriptor of the socket to the parent.
    """
    replies = Replies(fd)
    request = decode(replies.requests.readline())
    try:
        take_given(REWARD, request, "a reward worker cannot load the function")
        reward = find_reward(request["name"], request["options"])
        replies.send({"id": request["id"], "per_sample": reward.per_sample})
        request = decode(replies.requests.readline())
        dry_call(reward)
    except RewardError as error:
        replies.send({"id": request["id"], "failed": str(error)})
        return
    replies.send({"id": request["id"]})
    replies.answer_all(partial(answer, reward, Watch(reward.module)))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
