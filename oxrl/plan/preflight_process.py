"""The checks before a run, made in a process of their own: what a template or a tokenizer does
there can be stopped, and `oxrl plan` itself imports nothing heavy.

The process is started as `python -m oxrl.plan.preflight_process FD`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial

from oxrl.config import Config
from oxrl.config.reads import read_values, sections_of
from oxrl.config.sections.reward import asked_rewards
from oxrl.errors import OxrlError
from oxrl.models.lazy_transformers import import_model_classes
from oxrl.runs.waiting import Patience
from oxrl.usercode.messages import Json, Replies
from oxrl.usercode.worker import LAST_WORDS_S, LateReply, LostWorker, Printed, SuspectWorker, Worker

# Of one check, in seconds: a template that never ends shall not hold up the others for long.
LIMIT_S = 60.0
# A reward has deadlines of its own, which add up to less than so many of `reward.timeout_s`.
CALLS = 40


def examine_apart(cfg: Config) -> Iterator[tuple[str, str, str]]:
    """Make every check of `oxrl.plan.preflight` in another process.

    Yields:
        (subject, "ok", "unknown", "warning" or "wrong", text), as each is made, of what the run
        has.

    Raises:
        OxrlError: something is wrong that is no mistake in the input.
    """
    values = sections_of(read_values(cfg))
    printed = Printed("a check")
    worker = Worker(__name__, printed)
    try:
        for subject in LATE:
            limit_s = LIMIT_S
            if subject == "reward":
                limit_s += LIMIT_S
                limit_s += CALLS * sum(asked.timeout_s for asked in asked_rewards(cfg.reward))
            request: Json = {"config": values, "subject": subject}
            try:
                reply = worker.channel.ask(request, limit_s, Patience(), f"the {subject}")
            except LateReply:
                worker.end()
                yield subject, "wrong", f"{subject}: {LATE[subject]} within {limit_s:g} s"
                worker = Worker(__name__, printed)
                continue
            except (LostWorker, SuspectWorker):
                ended = worker.end(LAST_WORDS_S)
                raise OxrlError(
                    f"the check of the {subject} died with its process: {ended}"
                ) from None
            if reply["state"] == "failed":
                raise OxrlError(reply["text"])
            if reply["text"]:
                yield subject, reply["state"], reply["text"]
    finally:
        worker.end()


# What did not come to an end.
LATE = {
    "model": "its files were not read",
    "device": "it was not found",
    "prompts": "share_prefix was not tried on a tiny copy of the model",
    "exact": "run.exact was not tried on a tiny copy of the model",
    "tokenizer": "it was not loaded",
    "data": "the first rows were not rendered by the chat template",
    "reward": "it did not score prompts of the data",
    "environment": "it began no episode",
    "loss": "it was not tried",
    "teachers": "no tokenizer or template of a teacher was read",
    "features": "they were not loaded",
    "trackers": "their packages were not found",
    "sampler": "its package was not looked for",
    "optimizer": "its package was not looked for",
    "memory": "it was not estimated",
    "limit": "memory was not estimated",
    "disk": "it did not answer",
}


def serve(fd: int) -> None:
    """Make the check of every request until nobody asks any more."""
    replies = Replies(fd)
    import_model_classes()  # before anything below imports them
    from oxrl.plan.preflight import Prepared, reply  # torch, which whoever asks does without

    with closing(Prepared()) as prepared:
        replies.answer_all(partial(reply, prepared))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
