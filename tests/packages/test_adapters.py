"""Adapters of TextArena, reasoning-gym and OpenEnv, each on the real package where that is here."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oxrl.environments.pool import EnvironmentPool, LostEpisode
from oxrl.errors import EnvironmentDefinitionError
from oxrl.runs.waiting import Patience
from oxrl.types import Prompt
from oxrl_envs import openenv_adapter, textarena_adapter


def row(text: str = "Play.", **columns: Any) -> Prompt:
    message = {"role": "user", "content": text}
    return Prompt(uid="p", messages=(message,), token_ids=(1,), metadata=columns)


def pool_of(name: str, **options: Any) -> EnvironmentPool:
    return EnvironmentPool(name, options=options, timeout_s=30.0, memory_mb=4096)


def refusal(name: str, **options: Any) -> str:
    pool = pool_of(name, **options)
    with pytest.raises(EnvironmentDefinitionError) as caught:
        pool.start(row(), Patience())
    pool.close()
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "extra", "options"),
    [
        ("gymnasium", "gymnasium", "gymnasium", {"id": "FrozenLake-v1"}),
        ("textarena", "textarena", "textarena", {"id": "GuessTheNumber-v0"}),
        ("reasoning-gym", "reasoning_gym", "tasks", {"task": "chain_sum"}),
        ("openenv", "websockets", "openenv", {"url": "http://127.0.0.1:9"}),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_installs_it(
    name: str,
    module: str,
    extra: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A package of that name which says that it is not there.
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError(name={module!r})\n")
    monkeypatch.syspath_prepend(tmp_path)  # the environment's process searches as this one does
    told = refusal(name, **options)
    assert f'is not installed: pip install -e ".[{extra}]"' in told
    assert told.startswith(f"environment.name={name}: {module}")
    assert told.count(f" {module}") == 1


class TestTextArena:
    """Games alone and against an opponent."""

    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("textarena", reason='pip install -e ".[textarena]"')

    def test_a_number_is_guessed(self) -> None:
        pool = pool_of("textarena", id="GuessTheNumber-v0")
        episode = pool.open(Patience())
        text = episode.reset(row(), 3, Patience()).messages[0]["content"]
        assert text.startswith("Play.\n")
        low, high = 1, 20
        for _ in range(10):
            guess = (low + high) // 2
            step = episode.step(f"[{guess}]", Patience())
            if step.terminated:
                break
            (message,) = step.messages
            assert "You are playing" not in message["content"]  # only what is new
            if "lower" in message["content"]:
                high = guess - 1
            else:
                low = guess + 1
        assert (step.terminated, step.reward) == (True, 1.0)
        pool.close()

    def test_an_opponent_answers_and_an_invalid_move_loses(self, tmp_path: Path) -> None:
        file = tmp_path / "other.py"
        file.write_text(
            "def move(text):\n    import re\n    return re.findall(r'\\[\\d\\]', text)[-1]\n"
        )
        options = {"id": "TicTacToe-v0", "players": 2, "opponent": f"{file}:move"}
        pool = pool_of("textarena", **options)
        episode = pool.open(Patience())
        episode.reset(row(), 3, Patience())
        text = episode.step("[0]", Patience()).messages[0]["content"]
        assert "Player 1" in text
        for _ in range(3):
            step = episode.step("[0]", Patience())  # taken
            if step.terminated:
                break
        assert step.terminated
        assert step.reward < 0
        assert "invalid move" in step.reason
        pool.close()

    def test_wrong_options_are_told(self) -> None:
        assert "options.id is missing" in refusal("textarena")
        assert "NoSuchGame" in refusal("textarena", id="NoSuchGame-v0")
        told = refusal("textarena", id="TicTacToe-v0", players=2)
        assert "needs environment.options.opponent" in told
        assert "no such file" in refusal(
            "textarena", id="TicTacToe-v0", players=2, opponent="none.py:move"
        )
        assert "is none of 1 players" in refusal("textarena", id="TicTacToe-v0", player=1)


def test_an_error_of_the_opponents_file_is_its_own_and_no_wrong_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(textarena_adapter, "need", lambda *_: None)
    file = tmp_path / "other.py"
    file.write_text("def move(text):\n    return text\n\n\nint('a dozen')\n")
    options: dict[str, Any] = {"id": "TicTacToe-v0", "players": 2}
    with pytest.raises(ValueError, match="^invalid literal for int.*'a dozen'"):
        textarena_adapter.TextArenaEnvironment(**options, opponent=f"{file}:move")
    with pytest.raises(ValueError, match="environment.options.opponent=.* defines no 'mov'"):
        textarena_adapter.TextArenaEnvironment(**options, opponent=f"{file}:mov")
    with pytest.raises(ValueError, match="needs environment.options.opponent: .*, got 'move'"):
        textarena_adapter.TextArenaEnvironment(**options, opponent="move")


class TestReasoningGym:
    """Tasks made from the seed, judged by their own verifier."""

    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("reasoning_gym", reason='pip install -e ".[tasks]"')

    def test_attempts_are_judged_and_only_what_is_gained_counts(self) -> None:
        options = {"task": "chain_sum", "parameters": {"max_terms": 2}, "attempts": 3}
        pool = pool_of("reasoning-gym", **options)
        episode = pool.open(Patience())
        question = episode.reset(row("Solve it."), 5, Patience()).messages[0]["content"]
        assert question.startswith("Solve it.\n")
        again = pool.open(Patience())
        assert again.reset(row("Solve it."), 5, Patience()).messages[0]["content"] == question
        sums = question.splitlines()[1].rpartition(":")[2].strip().rstrip("=. ").strip()
        right = eval(sums)  # digits, + and -
        wrong = episode.step(f"<answer>{right + 1}</answer>", Patience())
        assert not wrong.terminated
        assert "not right yet" in wrong.messages[0]["content"]
        done = episode.step(f"I think <answer>{right}</answer>", Patience())
        assert done.terminated
        assert wrong.reward + done.reward == pytest.approx(1.0)
        pool.close()

    def test_wrong_options_are_told(self) -> None:
        assert "did you mean 'chain_sum'" in refusal("reasoning-gym", task="chain_sun")
        assert "refuses task=chain_sum" in refusal(
            "reasoning-gym", task="chain_sum", parameters={"nothing": 1}
        )
        assert "must be 1 or more" in refusal("reasoning-gym", task="chain_sum", attempts=0)


SERVER = """
import sys
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
import uvicorn


class Say(Action):
    message: str


class Heard(Observation):
    echoed: str = ""
    count: int = 0


class Echo(Environment[Say, Heard, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, level=0, **others):
        self.said = 0
        return Heard(echoed=f"seed {seed} level {level}", done=False)

    def step(self, action, timeout_s=None, **others):
        if action.message == "break":
            raise RuntimeError("broken as asked")
        self.said += 1
        over = self.said == 2
        return Heard(echoed=action.message, count=self.said, done=over, reward=0.25 * self.said)

    @property
    def state(self):
        return self._state


app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=2)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An OpenEnv server on loopback; OpenEnv may live in an environment of its own."""
    pytest.importorskip("websockets", reason='pip install -e ".[openenv]"')
    python = os.environ.get("OXRL_OPENENV_PYTHON", "")
    if not python and importlib.util.find_spec("openenv") is None:
        pytest.skip("openenv is not installed; OXRL_OPENENV_PYTHON may name a Python that has it")
    file = tmp_path_factory.mktemp("openenv") / "server.py"
    file.write_text(SERVER)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    process = subprocess.Popen([python or sys.executable, str(file), str(port)])
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


class TestOpenEnv:
    """Sessions with a server."""

    def test_sessions_are_apart_and_rewards_and_ends_come_through(self, server: str) -> None:
        pool = pool_of("openenv", url=server, observation="echoed", reset={"level": 1})
        first, second = pool.open(Patience()), pool.open(Patience())
        texts = [
            episode.reset(prompt, 7, Patience()).messages[0]["content"]
            for episode, prompt in ((first, row()), (second, row(level=5, seed=9)))
        ]
        assert texts == ["Play.\nseed 7 level 1", "Play.\nseed 9 level 5"]
        step = first.step("hello", Patience())
        assert (step.messages[0]["content"], step.reward, step.terminated) == ("hello", 0.25, False)
        assert second.step("you", Patience()).reward == 0.25
        step = first.step("again", Patience())
        assert (step.reward, step.terminated) == (0.5, True)
        first.finish()
        second.finish()
        pool.close()

    def test_an_action_may_be_json_and_an_observation_whole(self, server: str) -> None:
        pool = pool_of("openenv", url=server)
        episode = pool.open(Patience())
        episode.reset(row(), 7, Patience())
        shown = json.loads(episode.step("hello", Patience()).messages[0]["content"])
        assert shown == {"echoed": "hello", "count": 1}
        episode.finish()
        pool.close()

    def test_what_fails_on_the_server_is_no_zero(self, server: str) -> None:
        pool = pool_of("openenv", url=server)
        episode = pool.open(Patience())
        episode.reset(row(), 7, Patience())
        with pytest.raises(LostEpisode, match="broken as asked|answered step with") as caught:
            episode.step("break", Patience())
        assert caught.value.end == "environment_error"
        pool.close()

    def test_wrong_options_are_told(self, server: str) -> None:
        assert "an action has" in refusal("openenv", url=server, action="massage")
        assert "write the server's" in refusal("openenv", url="127.0.0.1:8000")
        told = refusal("openenv", url=server, observation="text")
        assert "observation=text: an observation has " in told
        assert "echoed" in told


def test_a_server_that_is_not_there_is_told_before_any_episode() -> None:
    pytest.importorskip("websockets", reason='pip install -e ".[openenv]"')
    assert "no OpenEnv server answers at http://127.0.0.1:9" in refusal(
        "openenv", url="http://127.0.0.1:9"
    )


def test_a_server_that_breaks_is_no_fault_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    socket_ = SimpleNamespace(send=said.append, recv=lambda: "<html>502</html>")
    monkeypatch.setattr(openenv_adapter, "need", lambda *_: None)
    for action, turn in (("message", "hello"), ("", '{"message": "hello"}')):
        environment = openenv_adapter.OpenEnvEnvironment("http://127.0.0.1:9", action)
        environment._socket = socket_
        with pytest.raises(ValueError, match="Expecting value"):
            environment.step(turn)
    assert len(said) == 2
    # A turn that is no JSON is the policy's, and nothing is sent.
    for turn in ("hello", "[" * 100_000):
        step = environment.step(turn)
        assert step.reason == "no action" and "That is no action" in str(step.messages)
    assert len(said) == 2


def test_an_observation_that_is_no_object_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = json.dumps({"type": "observation", "data": {"observation": ["you won"]}})
    monkeypatch.setattr(openenv_adapter, "need", lambda *_: None)
    environment = openenv_adapter.OpenEnvEnvironment("http://127.0.0.1:9", "message")
    environment._socket = SimpleNamespace(send=lambda _: None, recv=lambda: reply)
    with pytest.raises(ValueError, match=r"sent no object as its observation, but \['you won'\]"):
        environment.step("hello")
