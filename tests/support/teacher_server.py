"""A teacher's server to test with: it answers as vLLM's does, with a model of the test's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from support.judge_server import Answer, Json, JudgeServer, judge_server

# Of one place: what the server says of each token that it names, by its id in a text.
Entry = dict[str, Json] | None
Entries = list[Entry]
# From an answer and the request, what is answered instead.
Twist = Callable[[Entries, Json], Any]


def entries_of(model: PreTrainedModel, request: Json) -> Entries:
    """What vLLM says of a prompt: at each place the token itself, then the K most likely ones."""
    row = torch.tensor([request["prompt"]])
    assert request["temperature"] == 1.0 and request["max_tokens"] == 1
    with torch.no_grad():
        logprobs = model(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1)
    found: Entries = [None]
    for place, own in enumerate(row[0, 1:].tolist()):
        here = logprobs[place]
        named = [own, *here.topk(request["prompt_logprobs"]).indices.tolist()]
        rank = int((here > here[own]).sum()) + 1
        ranks = [rank, *range(1, len(named))]
        told = {
            str(token): {"logprob": float(here[token]), "rank": rank, "decoded_token": "?"}
            for token, rank in zip(named, ranks, strict=True)
        }
        found.append(told)
    return found


def completion(entries: Any) -> Answer:
    """A completion as the API has it."""
    choice = {"index": 0, "text": "", "finish_reason": "length", "prompt_logprobs": entries}
    body = {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": 1}}
    return 200, {}, json.dumps(body).encode()


def twisted(model: PreTrainedModel, twist: Twist) -> Callable[[Json], Answer]:
    """Answer each request by something else than the truth."""
    return lambda request: completion(twist(entries_of(model, request), request))


@contextmanager
def teacher_server(model: PreTrainedModel) -> Iterator[JudgeServer]:
    """A server of a model on loopback, until the block ends."""
    with judge_server() as server:
        server.answer = twisted(model, lambda entries, request: entries)
        yield server
