"""Classes written for TRL's `environment_factory`, from its documentation, run as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.environments.pool import EnvironmentPool, LostEpisode
from oxrl.runs.waiting import Patience
from oxrl.types import Prompt

# The documented examples, written anew: a counter that draws its own task and scores itself, one
# whose task is in the data, and an echo whose reward a reward function reads from `env.reward`.
CLASSES = '''
import asyncio
import random

BASE_URL = "http://example.invalid"


class Increments:
    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        self.target = random.randint(1, 6)
        return f"Bring the counter to {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Add to the counter.

        Args:
            step: How much to add,
                which may be negative.

        Returns:
            Where the counter is.
        """
        self.counter += step
        return self.counter


class FromRow:
    def reset(self, target, **kwargs) -> None:
        self.counter = 0
        self.target = target
        self.columns = sorted(kwargs)

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return float(self.counter == self.target)

    async def increment(self, step: int = 1) -> int:
        """Add to the counter.

        Args:
            step (int, optional): How much: a number.
        """
        await asyncio.sleep(0)
        self.counter += step
        return self.counter

    def seen(self) -> list:
        """The columns that came."""
        return self.columns

    @staticmethod
    def helper():
        return BASE_URL

    def _private(self): ...


class Echo:
    def __init__(self):
        self.reward = 0.0
        self.done = False

    def reset(self, **kwargs) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo a message.

        Args:
            message: What to say.

        Returns:
            The same.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = True
        self.reward = 0.1 * len(message)
        return message
'''


def tagged(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def row(text: str, **columns: Any) -> Prompt:
    message = {"role": "user", "content": text}
    return Prompt(uid="p", messages=(message,), token_ids=(1,), metadata=columns)


class Play:
    """One episode: what it opens with, and the texts and rewards of its turns."""

    def __init__(self, folder: Path, name: str, prompt: Prompt, seed: int = 7) -> None:
        file = folder / "theirs.py"
        file.write_text(CLASSES)
        self.pool = EnvironmentPool(f"{file}:{name}", options={}, timeout_s=20.0, memory_mb=4096)
        self.episode = self.pool.open(Patience())
        self.opening = self.episode.reset(prompt, seed, Patience())
        self.rewards: list[float] = []

    def turn(self, text: str, *, last: bool = False) -> list[str]:
        step = self.episode.step(text, Patience(), last=last)
        self.rewards.append(step.reward)
        self.over = step.terminated
        return [message["content"] for message in step.messages]

    def __enter__(self) -> Play:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def test_an_environment_that_owns_its_data_opens_and_scores_the_episode(tmp_path: Path) -> None:
    with Play(tmp_path, "Increments", row("")) as play:
        (message,) = play.opening.messages
        assert message["content"].startswith("Bring the counter to ")
        target = int(message["content"].rstrip(".").split()[-1])
        (schema,) = play.opening.tools
        described: Any = schema["function"]
        assert described["name"] == "increment"
        assert described["description"] == "Add to the counter."
        step = described["parameters"]["properties"]["step"]
        assert step["type"] == "integer"
        assert step["description"] == "How much to add, which may be negative."
        assert play.turn(tagged("increment", step=target)) == [str(target)]
        assert play.turn("Done.") == []
        assert play.over
        # Scored once, at the end.
        assert play.rewards == [0.0, 1.0]


def test_an_episode_that_a_limit_cuts_is_scored_too(tmp_path: Path) -> None:
    for text in (tagged("increment", step=2), "An answer."):
        with Play(tmp_path, "FromRow", row("Bring it to 4.", target=4)) as play:
            play.turn(tagged("increment", step=4 if text == "An answer." else 2))
            play.turn(text, last=True)
            assert play.rewards == [0.0, 1.0]
    with Play(tmp_path, "Echo", row("Say hello.")) as play:
        play.turn(tagged("echo", message="hello"), last=True)
        assert play.rewards == [pytest.approx(0.5)]


def test_members_of_a_group_get_the_same_task_although_it_is_drawn_from_the_global_generator(
    tmp_path: Path,
) -> None:
    texts: list[str] = []
    for seed in (1, 1, 2, 3, 4):
        with Play(tmp_path, "Increments", row(""), seed) as play:
            texts.append(play.opening.messages[0]["content"])
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_columns_of_the_row_reach_reset_and_async_methods_are_waited_for(tmp_path: Path) -> None:
    with Play(tmp_path, "FromRow", row("Bring it to 2.", target=2, level="easy")) as play:
        assert play.opening.messages == [{"role": "user", "content": "Bring it to 2."}]
        names = [made["function"]["name"] for made in play.opening.tools]  # pyright: ignore
        assert names == ["increment", "seen"]
        described: Any = play.opening.tools[0]["function"]
        assert described["parameters"]["properties"]["step"]["description"] == "How much: a number."
        assert play.turn(tagged("increment") + tagged("increment", step=1)) == ["1", "2"]
        assert json.loads(play.turn(tagged("seen"))[0]) == ["answer", "level", "prompt", "seed"]
        play.turn("Done.")
        assert play.rewards == [0.0, 0.0, 1.0]


def test_a_reward_kept_in_an_attribute_counts_and_an_exception_is_told(tmp_path: Path) -> None:
    with Play(tmp_path, "Echo", row("Say hello.")) as play:
        assert play.turn(tagged("echo", message="hello")) == ["hello"]
        assert "Game over." in play.turn(tagged("echo", message="hello again"))[0]
        play.turn("Well.")
        assert sum(play.rewards) == pytest.approx(0.5)


def test_a_reset_that_gives_something_else_than_text_is_refused(tmp_path: Path) -> None:
    changed = CLASSES.replace('return f"Bring the counter to {self.target}."', "return [1]")
    file = tmp_path / "other.py"
    file.write_text(changed)
    pool = EnvironmentPool(f"{file}:Increments", options={}, timeout_s=20.0, memory_mb=4096)
    episode = pool.open(Patience())
    with pytest.raises(LostEpisode, match="reset gave list, need a text or None"):
        episode.reset(row("x"), 0, Patience())
    pool.close()
