"""Who dies in the middle of an episode costs nobody else anything: an environment, the process that
starts environments, a rollout actor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from oxrl.data.chat import ChatEncoder
from oxrl.engines.sample import Finished
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.sample.sampler import generate
from oxrl.models.load import LoadOptions, load_policy, load_tokenizer
from oxrl.tables.watch import Deadlines
from oxrl.types import Completion, Request
from support.scripted import END, HOSTILE, Play, ScriptedSampler, requests
from support.small_cluster import process_of, small_cluster

# Kills a process in the middle of a step of one episode, once.
DEADLY = HOSTILE.replace(
    "    def step(self, text):",
    """    def step(self, text):
        if self.uid == "3" and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(WHO, 9)
            time.sleep(60)""",
).replace(
    "self.chance = random.Random(seed)", "self.chance = random.Random(seed); self.uid = prompt.uid"
)
DEADLY = "import os, time\n" + DEADLY


def play_twice(play: Play, source: str, **given: Any) -> tuple[list[Completion], list[Completion]]:
    """Twelve episodes that nobody disturbs, and the same with `source`."""
    asked = requests(12)
    quiet = generate(play(HOSTILE, ScriptedSampler(), **given), asked, deadline_s=60)
    return quiet, generate(play(source, ScriptedSampler(), **given), asked, deadline_s=60)


@pytest.mark.parametrize("reads", ["whole", "last"])
def test_an_environment_killed_in_a_step_costs_its_own_episode_alone(
    play: Play, reads: str
) -> None:
    source = DEADLY.replace("WHO", "os.getpid()")
    quiet, found = play_twice(play, source, reads=reads)
    ended = [completion.end for completion in found]
    assert ended[3] == "environment_error"
    assert "killed by signal 9" in found[3].reason
    assert [*found[:3], *found[4:]] == [*quiet[:3], *quiet[4:]]


def test_the_process_that_starts_environments_killed_in_a_step_hangs_nobody(play: Play) -> None:
    source = DEADLY.replace("WHO", "os.getppid()")
    quiet, found = play_twice(play, source, alive=4)
    lost = [n for n, completion in enumerate(found) if completion.end == "environment_error"]
    assert 3 in lost and len(lost) <= 4  # those that were alive
    for number, completion in enumerate(found):
        assert number in lost or completion == quiet[number]


# Of one episode of four, something that no template or tokenizer can write; the others are good.
UNWRITABLE = """
from oxrl.environments import Step

class Made:
    def reset(self, prompt, seed):
        self.bad = prompt.uid == "2"
        self.tools = BAD_TOOLS if self.bad else GOOD_TOOLS
        return OPENING if self.bad else "hello"
    def step(self, text):
        return Step(ANSWER if self.bad else "more", 1.0)
"""
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t.function.name.upper() + t['function']['name'] }}{% endfor %}"
    "{% for m in messages %}{{ '<|user|>' + m['content'] + '<|end|>' }}{% endfor %}<|assistant|>"
)
GOOD_TOOLS = [{"type": "function", "function": {"name": "f"}}]
UNWRITTEN = {
    "tools are numbers": {"BAD_TOOLS": "[1, 2]"},
    "tools without a function": {"BAD_TOOLS": "[{'type': 'function'}]"},
    "a tool's name is a number": {"BAD_TOOLS": "[{'function': {'name': 5}}]"},
    "half of a pair": {"BAD_TOOLS": "[{'function': {'name': '\\ud800'}}]"},
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_no_template_can_write_ends_its_own_episode_alone(play: Play, name: str) -> None:
    values = {"BAD_TOOLS": "[]", "GOOD_TOOLS": repr(GOOD_TOOLS), "OPENING": "'x'", "ANSWER": "'y'"}
    source = UNWRITABLE
    for word, value in (values | UNWRITTEN[name]).items():
        source = source.replace(word, value)
    engine = play(source, ScriptedSampler(), template=WITH_TOOLS)
    found = generate(engine, requests(4), deadline_s=60)
    assert [completion.end for completion in found][2] == "environment_error"
    assert "refuses" in found[2].reason
    assert [len(completion.turns) for completion in found] == [5, 5, 0, 5]


@pytest.mark.parametrize("what", ["opening", "answer", "tools"])
def test_what_cannot_fit_is_measured_before_it_is_encoded(
    play: Play, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = ChatEncoder.encode

    def watched(self: ChatEncoder, text: str, hidden: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, hidden)

    monkeypatch.setattr(ChatEncoder, "encode", watched)
    values = {"BAD_TOOLS": "[]", "GOOD_TOOLS": "[]", "OPENING": "'x'", "ANSWER": "'y'"}
    word = {"opening": "OPENING", "answer": "ANSWER", "tools": "BAD_TOOLS"}[what]
    huge = "'word ' * 3_000_000"
    values[word] = f"[{{'function': {{'name': {huge}}}}}]" if what == "tools" else huge
    source = UNWRITABLE
    for name, value in values.items():
        source = source.replace(name, value)
    found = generate(play(source, ScriptedSampler()), requests(4), deadline_s=60)
    ended = "context" if what == "answer" else "environment_error"
    assert found[2].end == ended
    assert [len(completion.turns) for completion in found] == [5, 5, int(what == "answer"), 5]
    assert encoded and max(encoded) < 10_000


class Killing:
    """A RolloutEngine around RayRollouts that kills an actor once some turns are over."""

    def __init__(self, engine: Any, after: int) -> None:
        self._engine = engine
        self._left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, asked: Sequence[Request]) -> None:
        self._engine.submit(asked)
        self._left -= 1
        if not self._left:
            os.kill(process_of(self._engine.workers[0].actor), signal.SIGKILL)

    def poll(self, deadline_s: float) -> list[Finished]:
        return self._engine.poll(deadline_s)


def sampler() -> LocalSampler:
    import torch

    torch.set_num_threads(1)
    model = load_policy("builtin:tiny", LoadOptions(seed=0))
    hidden: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda *call: hidden.append(call[2]))
    with torch.no_grad():  # so that every twelfth token or so ends a turn
        model(torch.arange(4, 260).view(4, 64))
        direction = hidden[0].reshape(-1, hidden[0].shape[-1]).mean(0)
        model.lm_head.weight[END] = direction * (3.0 / direction.norm() ** 2)
    hook.remove()
    return LocalSampler(model, load_tokenizer("builtin:tiny"), max_rows=8)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_rollout_actor_killed_in_the_middle_of_episodes_changes_no_token(play: Play) -> None:
    pytest.importorskip(
        "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
    )
    from oxrl.engines.ray.cluster import Cluster, layout
    from oxrl.engines.ray.rollouts import RayRollouts

    asked = requests(10, samples=2, max_tokens=12)
    quiet = generate(play(HOSTILE, sampler()), asked, deadline_s=60)
    bundles, _, places = layout(0, 2, trainer_gpus=0, sampler_gpus=0, colocated=False)
    # The actors build `sampler`, so they import this file and what it imports.
    with small_cluster(num_cpus=4):
        cluster = Cluster(2)
        cluster.reserve(bundles)
        try:
            engine = RayRollouts(cluster, places, sampler, Deadlines.alike(60))
            found = generate(play(HOSTILE, Killing(engine, after=26)), asked, deadline_s=120)
            assert engine.metrics()["rollout/replaced_actors"] == 1
        finally:
            cluster.close()
    for ours, theirs in zip(quiet, found, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.turns == theirs.turns
        for one, other in zip(ours.segments, theirs.segments, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert max(len(completion.turns) for completion in found) > 1
