"""Parked episodes: polls that end at a round, episodes in flight as JSON and back, and environments
that have to answer again what they answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oxrl.data.image_files import ImageRules
from oxrl.data.image_store import ImageStore
from oxrl.engines.sample import Responses
from oxrl.engines.sample.cached import CachedSampler, VisionSampler
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.errors import DeadlineError, EngineError, EnvironmentDefinitionError
from oxrl.modelfiles.builtin_vision import vision_tokenizer
from oxrl.models.image_features import ImageReader
from oxrl.models.load import load_policy
from oxrl.types import Requests
from support.samplers import TOKENIZER
from support.scripted import END, Play, requests
from support.small_runs import model_that_stops
from support.toy_columns import TOYS

pytestmark = pytest.mark.filterwarnings("ignore")
OTHER = 1
# A model at random calls no tool, so what it writes is put into a call.
CALCULATES = """
import json
import random
from oxrl.environments.tool_environment import ToolEnvironment

class Made(ToolEnvironment):
    def __init__(self, **how):
        super().__init__(["calculator"])
        self.how = how
    def reset(self, prompt, seed):
        self.chance = random.Random(seed)
        self.most = self.chance.randint(1, 6)
        return [{"role": "system", "content": "compute"}, *prompt.messages]
    def step(self, text):
        if self.calls == self.most:
            return super().step("the answer")
        expression = f"{self.chance.randint(2, 99)} * {sum(map(ord, text))}"
        call = {"name": "calculator", "arguments": {"expression": expression}}
        return super().step(f"<tool_call>{json.dumps(call)}</tool_call>")
"""
SHOWS = """
import numpy as np
from oxrl.environments import Step

class Made:
    reusable = True
    def reset(self, prompt, seed):
        self.place, self.turn = seed % 200, 0
        return [{"role": "system", "content": "act"}, self.said("go")]
    def said(self, text):
        frame = np.full((16 + 16 * (self.turn % 2), 32, 3), self.place % 256, np.uint8)
        parts = [{"type": "image", "image": frame}, {"type": "text", "text": text}]
        return {"role": "user", "content": parts}
    def step(self, text):
        self.turn += 1
        self.place += len(text)
        return Step(self.said("now"), 0.25, terminated=self.turn == 4, success=self.turn > 1)
"""


@cache
def stopping(folder: Path) -> Any:
    """A model that ends every sixth turn or so at any token."""
    return load_policy(str(model_that_stops(folder / "model")))


def weights_of(policy: Any) -> Callable[[int], Mapping[str, Tensor]]:
    @cache
    def weights(version: int) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(version)
        return {
            name: p.detach() + 0.01 * version * torch.randn(p.shape, generator=generator)
            for name, p in policy.named_parameters()
        }

    return weights


class Kind:
    """Two engines of episodes alike, what they are asked for, and the weights of each version."""

    def __init__(self, play: Play, name: str, folder: Path) -> None:
        sampler, _, reads = name.partition(", ")
        self.requests: Requests = requests(4, samples=2, max_tokens=14)
        if sampler == "vision":
            policy: Any = load_policy("builtin:tiny-vl")
            sampling = replace(self.requests[0].sampling, stop_token_ids=(END, *range(20, 90)))
            self.requests = [replace(one, sampling=sampling) for one in self.requests]
        else:
            policy = stopping(folder)
        self._weights = weights_of(policy)

        def build() -> Any:
            if sampler == "vision":
                reader = ImageReader("builtin:tiny-vl", vision_tokenizer())
                images = ImageStore(lambda: reader, ImageRules())
                inside = VisionSampler(deepcopy(policy), TOKENIZER, max_rows=3, images=images)
                return play(SHOWS, inside, parks=True, reads=reads, images=images, alive=5)
            columns = TOYS if sampler == "cached" else {}
            chosen = CachedSampler if sampler == "cached" else LocalSampler
            inside = chosen(deepcopy(policy), TOKENIZER, max_rows=3, recorded=columns)
            return play(CALCULATES, inside, parks=True, reads=reads, alive=5, max_turns=5)

        self.engines = build(), build()
        self.named = {request.id: request for request in self.requests}

    def deliver(self, engine: Any, version: int) -> None:
        engine.update_weights([list(self._weights(version).items())], version)

    def begin(self, engine: Any, asked: Requests) -> None:
        engine.round = 0
        self.deliver(engine, 0)
        engine.submit(asked)


@pytest.fixture
def kind(play: Play, request: pytest.FixtureRequest, tmp_path: Path) -> Kind:
    return Kind(play, request.param, tmp_path)


def run_to(engine: Any, round: int) -> Responses:
    """Sample up to a round; what finished on the way."""
    found: Responses = []
    while engine.round < round and (some := engine.poll(60, round)):
        found += some
    return found


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def left(state: Any) -> int:
    return len(state["episodes"]) + len(state["waiting"])


def go_on(engine: Any) -> list[Any]:
    """All that an engine does to its end: what finishes at which round, and what is in flight."""
    found: list[Any] = []
    while True:
        finished = engine.poll(60, engine.round + 1)
        found.append((engine.round, finished, engine.state()))
        if not finished and not left(found[-1][2]):
            return found


KINDS = ("local, whole", "local, window: 2", "cached, last", "vision, last", "vision, whole")
OFTEN = ("local, whole", "cached, last", "vision, last")


def cuts(engine: Any, kind: Kind, every: int) -> range:
    """The rounds of a run that is not cut, or some of them."""
    kind.begin(engine, kind.requests)
    return range(0, go_on(engine)[-1][0] + 1, every)


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *((name, 5) for name in OFTEN),
        *(pytest.param(name, 1, marks=pytest.mark.full) for name in KINDS),
    ],
    indirect=["kind"],
)
@pytest.mark.timeout(300)
def test_a_new_engine_goes_on_from_every_round_to_the_same_bytes(kind: Kind, every: int) -> None:
    engine, other = kind.engines
    seen = {"working": 0, "waiting": 0, "turns": 0, "images": 0}
    for cut in cuts(engine, kind, every):
        kind.begin(engine, kind.requests)
        before = run_to(engine, cut)
        state = engine.state()
        assert engine.round == cut
        assert left(state) == len(kind.requests) - len(before)
        assert engine.state() == state
        # At every second round one that has other episodes in flight.
        if cut % 2:
            asked = [replace(one, id=f"gone {one.id}") for one in kind.requests]
            kind.begin(other, asked)
            run_to(other, 3)
        other.restore(through_json(state), kind.named)
        assert other.state() == state
        for one in (engine, other):
            kind.deliver(one, OTHER)
        ours, theirs = go_on(engine), go_on(other)
        assert ours == theirs
        assert len(before) + sum(len(finished) for _, finished, _ in ours) == len(kind.requests)
        seen["working"] += len(state["working"])
        seen["waiting"] += len(state["waiting"])
        turns = [turn for episode in state["episodes"] for turn in episode["turns"]]
        seen["turns"] = max(seen["turns"], *(len(e["turns"]) for e in state["episodes"]), 0)
        seen["images"] += "image" in json.dumps(turns)
        assert not any(turn["step"] is None for turn in turns) or state["working"]
    assert seen["working"] and seen["waiting"] and seen["turns"] > 1


@pytest.mark.parametrize("kind", ["local, whole"], indirect=True)
def test_a_poll_stops_at_its_round_whatever_the_environment_does(kind: Kind) -> None:
    engine, _ = kind.engines
    kind.begin(engine, kind.requests[:2])
    assert engine.poll(60, 2) == [] and engine.round == 2
    assert engine.poll(60, 1) == [] and engine.round == 2
    # A round that is reached late is reached; one that is not is a missed deadline.
    while engine.state()["working"]:
        assert engine.poll(60, engine.round + 1) == []
    late = engine.round + 1
    assert engine.poll(0.0, late) == [] and engine.round == late
    while engine.state()["working"]:
        assert engine.poll(60, engine.round + 1) == []
    with pytest.raises(DeadlineError):
        engine.poll(0.0, engine.round + 3)
    assert sum(len(finished) for _, finished, _ in go_on(engine)) == 2


@pytest.mark.parametrize("kind", OFTEN, indirect=True)
def test_episodes_that_are_parked_for_others_go_on_as_if_nothing_had_been(kind: Kind) -> None:
    engine, other = kind.engines
    for one in kind.engines:
        kind.begin(one, kind.requests)
        run_to(one, 11)
    state = other.state()
    alive = [episode.process for episode in other._alive.values()]
    stopped = other.abort([*kind.named])
    assert {item.request.id for item in stopped} == {*ids_of(state)}
    asked = [replace(request, id=f"asked {request.id}") for request in kind.requests]
    assert len(generate(other, asked, deadline_s=60)) == len(asked)
    # Their processes are gone.
    assert not any(process in other._pool._alive for process in alive if process is not None)
    engine.metrics()
    other.metrics()
    other.restore(state, kind.named)
    for one in kind.engines:
        kind.deliver(one, OTHER)
    assert go_on(engine) == go_on(other)
    ours, theirs = engine.metrics(), other.metrics()
    for name in [name for name in ours if name.startswith("episode/")]:
        assert ours[name] == theirs[name]


def ids_of(state: Any) -> list[str]:
    return [*(episode["id"] for episode in state["episodes"]), *state["waiting"]]


# Whatever is asked in a turn takes its time, and none the same.
SLOW = CALCULATES.replace(
    "    def step(self, text):",
    "    def step(self, text):\n        import os, time; time.sleep(os.getpid() % 5 / 50)",
)


def test_how_long_environments_take_changes_nothing(play: Play, tmp_path: Path) -> None:
    policy = stopping(tmp_path)
    found: list[Any] = []
    for source in (CALCULATES, SLOW):
        inside = LocalSampler(deepcopy(policy), TOKENIZER, max_rows=3)
        engine: Any = play(source, inside, parks=True, alive=5)
        engine.submit(requests(4, samples=2, max_tokens=14))
        found.append(go_on(engine))
    assert found[0] == found[1]


# Counts how often it has begun, which nobody who begins anew can know.
REMEMBERS = """
from pathlib import Path
from oxrl.environments import Step

class Made:
    def __init__(self, what, at):
        self.what, self.at, self.turn = what, at, 0
    def reset(self, prompt, seed):
        self.name = prompt.uid
        with open(f"begun_{self.name}", "a") as file:
            file.write("x")
        self.times = Path(f"begun_{self.name}").stat().st_size
        return f"begin {self.times if self.what == 'opening' else 0}"
    def step(self, text):
        self.turn += 1
        times = self.times if self.turn == self.at and self.name == "1" else 1
        if self.what == "fails" and times > 1:
            raise ValueError("as asked")
        if self.what == "hangs" and times > 1:
            import time; time.sleep(60)
        said = f"{'long ' * 200}go on {times if self.what == 'text' else 1}"
        reward = 0.25 * times if self.what == "reward" else 0.25
        return Step(said, reward, terminated=self.what == "ends" and times > 1)
"""


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("opening", EnvironmentDefinitionError, "began otherwise: messages was .*begin 1.* and is .*begin 2"),
        ("text", EnvironmentDefinitionError, "turn 2 otherwise: messages was .*go on 1.* and is .*go on 2"),
        ("reward", EnvironmentDefinitionError, "turn 2 otherwise: reward was 0.25 and is 0.5"),
        ("ends", EnvironmentDefinitionError, "turn 2 otherwise: terminated was false and is true"),
        ("fails", EngineError, r"At its turn 2, which it had answered, it failed: step raised ValueError: as asked"),
        ("hangs", EngineError, "it failed: step did not return within environment.timeout_s=2"),
    ],
    ids=["opening", "text", "reward", "ends", "fails", "hangs"],
)  # fmt: skip
def test_an_environment_that_answers_otherwise_is_named_with_both_answers(
    play: Play, tmp_path: Path, what: str, error: type[Exception], says: str
) -> None:
    inside = LocalSampler(deepcopy(stopping(tmp_path)), TOKENIZER, max_rows=4)
    engine: Any = play(
        REMEMBERS, inside, parks=True, reads="last", what=what, at=2, timeout_s=2.0, max_turns=50
    )
    asked = requests(3, max_tokens=100)
    named = {request.id: request for request in asked}
    engine.submit(asked)
    while turns_of(engine, "1/0") < 3:
        assert engine.poll(60, engine.round + 1) == []
    state = engine.state()
    processes = len(engine._pool._alive)
    with pytest.raises(error, match=f"(?s){says}") as raised:
        engine.restore(through_json(state), named)
    if what != "opening":
        assert "episode '1/0' (draw 1, sample 0)" in str(raised.value)
    assert "environment.name=mine.py:Made" in str(raised.value)
    assert len(str(raised.value)) < 2000
    if error is EnvironmentDefinitionError:
        assert "rollout.max_staleness=0" in str(raised.value)
        assert raised.value.exit_code == 2  # pyright: ignore
    # Nothing has changed, and no process is left over.
    assert engine.state() == state
    assert len(engine._pool._alive) == processes


def turns_of(engine: Any, id: str) -> int:
    """Turns of an episode in flight."""
    return max([len(e["turns"]) for e in engine.state()["episodes"] if e["id"] == id], default=0)


@pytest.mark.parametrize("kind", ["local, whole"], indirect=True)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(kind: Kind) -> None:
    engine, other = kind.engines
    kind.begin(engine, kind.requests)
    run_to(engine, 9)
    state = through_json(engine.state())
    first = ids_of(state)[0]
    fewer = {id: request for id, request in kind.named.items() if id != first}
    damaged = through_json(state)
    turn = next(turn for episode in damaged["episodes"] for turn in episode["turns"])
    turn["segments"][0]["versions"] = []
    for given, named, says in (
        (state, fewer, f"1 requests that it is not restored with, such as '{first}'"),
        (damaged, kind.named, "the state of episode '.*': every token needs an entry"),
    ):
        for one in (engine, other):
            before = one.state()
            with pytest.raises(EngineError, match=says):
                one.restore(given, named)
            assert one.state() == before
    shorter: Any = replace(other._limits, max_turns=1)
    other._limits = shorter
    with pytest.raises(EngineError, match="it is over .max_turns.: set them to what they were"):
        other.restore(state, kind.named)
    assert left(other.state()) == 0
