"""Requests that are parked: kinds of samplers, what they are asked for, and runs of them by rounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oxrl.config import Config
from oxrl.data.image_store import ImageStore
from oxrl.engines.sample import Responses
from oxrl.engines.sample.cached import CachedSampler, VisionSampler
from oxrl.engines.sample.hosted import ThisMachine
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import ModuleSampler
from oxrl.engines.sample.workers import RolloutWorkers
from oxrl.models.load import load_policy
from oxrl.models.vision_network import freeze
from oxrl.tables.watch import Deadlines
from oxrl.types import Request, Requests, TokenRun
from support.samplers import END, TOKENIZER, lively, make_requests
from support.toy_columns import TOYS, expected_columns
from support.vision_runs import asked, config, parts_of

TINY = "builtin:tiny"
TINY_VISION = "builtin:tiny-vl"
# The delivery of other weights, before which a run is cut.
OTHER = 1
Weights = Mapping[str, Tensor]


@dataclass
class Kind:
    """A sampler: how a new one is built, also in another process, what it is asked for, the weights
    of each version, and the images of the requests.
    """

    build: Callable[[], Any]
    requests: Requests
    weights: Callable[[int], Weights]
    images: ImageStore | None = None

    @property
    def named(self) -> dict[str, Request]:
        return {request.id: request for request in self.requests}

    def deliver(self, engine: Any, version: int) -> None:
        engine.update_weights([list(self.weights(version).items())], version)


@cache
def tiny() -> PreTrainedModel:
    return lively(TINY)


@cache
def tiny_weights(version: int) -> Weights:
    return {name: p.detach() for name, p in lively(TINY, version).named_parameters()}


def mixed_requests(*, columns: bool) -> list[Request]:
    """Prompts of several lengths: rows that stop, that are greedy or restricted, and that continue
    what was begun before.
    """
    stops = (END, *range(20, 60))
    made = [
        *make_requests(2, 2, prefix="stops ", max_tokens=9, temperature=1.5, stop_token_ids=stops),
        *make_requests(2, 1, prefix="greedy ", words=2, max_tokens=4, temperature=0.0),
        *make_requests(1, 2, prefix="limited ", words=2, max_tokens=7, top_k=9, top_p=0.9),
        *make_requests(2, 2, prefix="long ", max_tokens=11, stop_token_ids=()),
    ]
    return [
        begun(request, 3, columns=columns) if n % 3 == 0 else request
        for n, request in enumerate(made)
    ]


def begun(request: Request, count: int, *, columns: bool) -> Request:
    """A request of which some tokens were sampled by weights before all others."""
    first = len(request.prompt.token_ids)
    prefix = TokenRun(
        token_ids=tuple(range(200, 200 + count)),
        logprobs=tuple(-0.1 * at for at in range(count)),
        versions=(-3,) * count,
        columns=expected_columns(request, first, count) if columns else {},
    )
    return replace(request, prefix=prefix)


def text(sampler: str, *, columns: bool) -> Kind:
    """A sampler of texts, which may record columns."""
    chosen: Any = LocalSampler if sampler == "local" else CachedSampler
    recorded = TOYS if columns else {}
    build = partial(text_sampler, chosen, recorded)
    return Kind(build, mixed_requests(columns=columns), tiny_weights)


def text_sampler(chosen: Any, recorded: Any) -> ModuleSampler:
    return chosen(deepcopy(tiny()), TOKENIZER, max_rows=5, recorded=recorded)


def vision(folder: Path, name: str, *, still: bool) -> Kind:
    """A model that reads images; whether its tower is never trained."""
    cfg = config(folder, name)
    requests = [
        *asked(cfg, samples=2, max_tokens=7, temperature=1.3),
        *(replace(one, id=f"{one.id} greedy") for one in asked(cfg, samples=1, temperature=0.0)),
    ]
    requests[2] = begun(requests[2], 2, columns=False)
    policy: Any = load_policy(name)
    if still:
        freeze(policy, "vision+projector")

    @cache
    def weights(version: int) -> Weights:
        generator = torch.Generator().manual_seed(version)
        return {
            name: p.detach() + 0.02 * torch.randn(p.shape, generator=generator)
            for name, p in policy.named_parameters()
        }

    return Kind(partial(vision_sampler, cfg, policy), requests, weights, parts_of(cfg).images)


def vision_sampler(cfg: Config, policy: Any) -> ModuleSampler:
    return VisionSampler(deepcopy(policy), TOKENIZER, max_rows=4, images=parts_of(cfg).images)


@contextmanager
def in_processes(kind: Kind, count: int) -> Iterator[RolloutWorkers]:
    """So many of it in processes of this machine, with the first weights."""
    machine = ThisMachine(threads=1)
    try:
        engine = RolloutWorkers(
            machine, [None] * count, kind.build, Deadlines.alike(60), images=kind.images
        )
        kind.deliver(engine, 0)
        yield engine
    finally:
        machine.close()


def new_engine(kind: Kind) -> Any:
    engine = kind.build()
    kind.deliver(engine, 0)
    return engine


def run_to(engine: Any, round: int) -> Responses:
    """Sample up to a round; what finished on the way."""
    found: Responses = []
    while some := engine.poll(60, round):
        found += some
    return found


def rest(engine: Any) -> Responses:
    """Sample until nothing is left, in the order in which it finishes."""
    found: Responses = []
    while some := engine.poll(60):
        found += some
    return found


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def in_flight_of(state: Any) -> int:
    """Requests that a state has, be it of one sampler or of several."""
    parts = state.get("workers", [state])
    return sum(sum(map(len, one["rows"])) + len(one["waiting"]) for one in parts)


def go_on(engine: Any) -> list[Any]:
    """All that a sampler does to its end: what finishes at which round, and what is in flight."""
    found: list[Any] = []
    while True:
        round = engine.round + 1
        finished = run_to(engine, round)
        engine.round = round
        found.append((round, by_id(finished), engine.state()))
        if not in_flight_of(found[-1][2]):
            return found


def by_id(done: Responses) -> dict[str, Any]:
    """Completions by the ids of their requests: several samplers finish in any order."""
    return {item.request.id: item.completion for item in done}
