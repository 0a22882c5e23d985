"""Environments in processes: hung, crashed and misbehaving episodes cost nothing but themselves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.environments.pool import EnvironmentPool, EpisodeProcess, LostEpisode
from oxrl.errors import EnvironmentDefinitionError, Stopped
from oxrl.runs.waiting import Patience
from oxrl.tables.user_code import ENVIRONMENT
from oxrl.types import Prompt
from oxrl.usercode.environment_answers import as_step
from oxrl.usercode.locate import locate

Open = Callable[..., EnvironmentPool]
PROMPT = Prompt(
    uid="p", messages=({"role": "user", "content": "q"},), token_ids=(1, 2), metadata={"k": [1]}
)
COUNTER = """
class Made:
    def __init__(self, start=0):
        self.count = start
    def reset(self, prompt, seed):
        self.drawn = random.Random(seed).random()
        return f"{prompt.messages[0]['content']} {self.drawn} {random.random()}"
    def step(self, text):
        self.count += 1
        if text == "hang":
            time.sleep(60)
        if text == "exit":
            os._exit(3)
        if text == "raise":
            raise RuntimeError("as asked")
        if text == "print":
            print("loud " * 200_000)
        if text == "some":
            self.some = bytearray(64 << 20)
        if text == "eat":
            self.eaten = bytearray(8 << 30)
        return {"messages": f"{self.count} {text}", "reward": 0.5}
"""


@pytest.fixture
def open_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """`open_pool(source, ...)` is a pool on the class `Made` of a file with that source."""
    monkeypatch.chdir(tmp_path)
    pools: list[EnvironmentPool] = []

    def open_(source: str = COUNTER, **settings: Any) -> EnvironmentPool:
        (tmp_path / "mine.py").write_text("import os, random, time\n" + source)
        given = {"options": {}, "timeout_s": 20.0, "memory_mb": 4096} | settings
        pools.append(EnvironmentPool("mine.py:Made", **given))
        return pools[-1]

    yield open_
    for pool in pools:
        pool.close()


def began(pool: EnvironmentPool, seed: int = 7) -> tuple[EpisodeProcess, str]:
    episode = pool.open(Patience())
    (message,) = episode.reset(PROMPT, seed, Patience()).messages
    return episode, message["content"]


def answer(episode: EpisodeProcess, text: str = "go") -> str:
    (message,) = episode.step(text, Patience()).messages
    return message["content"]


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_a_plain_class_answers_and_every_episode_has_an_instance_of_its_own(
    open_pool: Open,
) -> None:
    pool = open_pool(options={"start": 10})
    first, _ = began(pool)
    second, _ = began(pool)
    assert answer(first) == "11 go"
    assert answer(first) == "12 go"
    assert answer(second) == "11 go"


def test_episodes_of_one_seed_begin_alike_also_where_they_draw_from_the_global_generator(
    open_pool: Open,
) -> None:
    pool = open_pool()
    texts = [began(pool, seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("text", "end", "reason"),
    [
        ("hang", "timeout", r"step did not return within environment.timeout_s=1"),
        ("exit", "environment_error", r"the process ended in step \(exit code 3\)"),
        ("raise", "environment_error", r"step raised RuntimeError: as asked \(.*mine.py:16\)"),
        ("eat", "environment_error", r"step raised MemoryError"),
    ],
)
def test_what_goes_wrong_in_an_episode_is_named_and_costs_no_other(
    open_pool: Open, text: str, end: str, reason: str
) -> None:
    pool = open_pool(timeout_s=1.0)
    bad, _ = began(pool)
    good, _ = began(pool)
    with pytest.raises(LostEpisode, match=reason) as caught:
        bad.step(text, Patience())
    assert caught.value.end == end
    bad.end()
    assert answer(good) == "1 go"
    assert gone(bad.pid)


def test_what_no_line_of_json_holds_is_no_answer(open_pool: Open) -> None:
    said = '{"role": "user", "content": "look", "picture": b"abc"}'
    pool = open_pool(COUNTER.replace('f"{self.count} {text}"', said))
    episode, _ = began(pool)
    with pytest.raises(LostEpisode) as caught:
        episode.step("go", Patience())
    assert caught.value.end == "environment_error"


def test_what_loading_took_does_not_count_against_the_memory_of_an_episode(open_pool: Open) -> None:
    loaded = "import mmap\nlibrary = mmap.mmap(-1, 3 << 30)  # as large libraries map themselves\n"
    pool = open_pool(loaded + COUNTER, memory_mb=256)
    episode, _ = began(pool)
    assert answer(episode, "some") == "1 some"
    with pytest.raises(LostEpisode, match="MemoryError"):
        episode.step("eat", Patience())


def test_killing_an_episode_in_the_middle_of_a_step_costs_no_other(open_pool: Open) -> None:
    pool = open_pool()
    bad, _ = began(pool)
    good, _ = began(pool)
    threading.Timer(0.3, os.kill, (bad.pid, signal.SIGKILL)).start()
    with pytest.raises(LostEpisode, match="killed by signal 9"):
        bad.step("hang", Patience())
    assert answer(good) == "1 go"


def test_when_the_process_that_starts_episodes_dies_the_next_one_starts_another(
    open_pool: Open,
) -> None:
    pool = open_pool()
    old, _ = began(pool)
    assert pool._worker is not None
    os.kill(pool._worker.process.pid, signal.SIGKILL)
    with pytest.raises(LostEpisode, match="the process ended"):
        old.step("hang", Patience())
    new, _ = began(pool)
    assert answer(new) == "1 go"


def test_after_a_stop_while_it_is_loaded_the_next_one_loads_it_anew(open_pool: Open) -> None:
    pool = open_pool("time.sleep(1.0)\n" + COUNTER)
    with pytest.raises(Stopped):
        pool.open(Patience(lambda: True))
    new, _ = began(pool)
    assert answer(new) == "1 go"


def test_an_episode_that_prints_much_is_not_held_up(open_pool: Open) -> None:
    pool = open_pool(timeout_s=10.0)
    episode, _ = began(pool)
    assert answer(episode, "print") == "1 print"


def test_nothing_is_left_when_the_pool_is_closed(open_pool: Open) -> None:
    pool = open_pool()
    episodes = [began(pool)[0] for _ in range(3)]
    pool.close()
    assert all(gone(episode.pid) for episode in episodes)


def test_a_method_close_is_called_at_the_end(open_pool: Open, tmp_path: Path) -> None:
    pool = open_pool(COUNTER + "    def close(self):\n        open('closed', 'w').close()\n")
    episode, _ = began(pool)
    assert episode.closes
    episode.finish()
    assert (tmp_path / "closed").exists()
    assert gone(episode.pid)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("None", "step gave NoneType, need a Step"),
        ("0.5", "step gave float, need a Step"),
        ("Step('x', float('nan'))", "the reward nan, need a finite number"),
        ("Step('x', 'much')", "the reward 'much', need a number"),
        ("Step([{'role': 'assistant', 'content': 'x'}])", "a message of the assistant"),
        ("Step([{'role': 'robot', 'content': 'x'}])", "a message of role 'robot'"),
        ("Step([{'role': 'user', 'content': 3}])", "content is int"),
        ("Step(['x'])", "a message of type str, need a mapping"),
        ("Step(3)", "step gave int, need a text or a list"),
        ("Step('\\ud800')", "cannot be written as UTF-8"),
        ("{'text': 'x'}", "step gave 'text', a Step has messages"),
    ],
)
def test_what_is_no_step_is_refused_with_what_it_is(
    open_pool: Open, returned: str, problem: str
) -> None:
    pool = open_pool(
        "from oxrl.environments import Step\nclass Made:\n"
        "    def reset(self, prompt, seed):\n        return 'x'\n"
        f"    def step(self, text):\n        return {returned}\n"
    )
    episode, _ = began(pool)
    with pytest.raises(LostEpisode, match=problem):
        episode.step("x", Patience())


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("class Made: ...\n1/0", r"raised ZeroDivisionError"),
        ("def Made(): ...", "Made is no class"),
        (
            "class Made:\n    def reset(self, prompt, seed): ...",
            "no method step, and no typed method",
        ),
        ("class Made:\n    def step(self, text): ...", "no method reset"),
        ("import os\nclass Made: ...\nos._exit(4)", r"ended while loading it \(exit code 4\)"),
        (
            "import time\nclass Made: ...\nprint('hello', flush=True)\nfor fd in range(3, 1024):\n"
            "    try: os.write(fd, b'junk\\n')\n    except OSError: pass\ntime.sleep(9)",
            r"while loading it its process sent .*junk.*\(.*; it printed last: hello",
        ),
        (
            "class Made:\n    def __init__(self, need): ...\n"
            "    def reset(self, prompt, seed): ...\n    def step(self, text): ...",
            "TypeError.*need",
        ),
        (
            "class Made:\n    def reset(self, prompt): ...\n    def step(self, text): ...",
            "reset raised TypeError",
        ),
    ],
)
def test_an_environment_that_cannot_work_is_found_before_anything_is_sampled(
    open_pool: Open, source: str, problem: str
) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=problem):
        open_pool(source).start(PROMPT, Patience())


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tool", "did you mean 'tools'"),
        ("missing.py:Made", "no such file"),
        ("here.py:Mode", "did you mean 'Made'"),
        ("here.py", "textarena, tools or path.py:Class"),
        ("broken.py:Made", "is not Python"),
    ],
)
def test_a_wrong_name_says_what_to_write(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.py").write_text("class Made: ...")
    Path("broken.py").write_text("class Made:")
    with pytest.raises(EnvironmentDefinitionError, match=problem):
        locate(ENVIRONMENT, name)


def test_a_step_has_defaults_and_any_object_with_its_fields_is_one() -> None:
    step = as_step({"messages": "well"})
    assert step.messages == [{"role": "user", "content": "well"}]
    assert (step.reward, step.terminated, step.truncated, step.reason) == (0.0, False, False, "")
