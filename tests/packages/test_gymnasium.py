"""Gymnasium's environments as conversations, on the real package."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from oxrl.environments.pool import EnvironmentPool
from oxrl.errors import EnvironmentDefinitionError
from oxrl.runs.waiting import Patience
from oxrl.types import Prompt

pytest.importorskip("gymnasium", reason='gymnasium is not installed: pip install -e ".[gymnasium]"')

from oxrl_envs.gymnasium_adapter import GymnasiumEnvironment, uncolored

LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "settings": {"is_slippery": False}}


def row(text: str = "Cross the lake.", **columns: Any) -> Prompt:
    message = {"role": "user", "content": text}
    return Prompt(uid="p", messages=(message,), token_ids=(1,), metadata=columns)


def opened(seed: int = 3, prompt: Prompt | None = None, **options: Any) -> tuple[Any, str]:
    made = GymnasiumEnvironment(**options)
    messages = made.reset(prompt or row(), seed)
    return made, messages[-1]["content"]


def test_a_frozen_lake_is_crossed_by_the_names_of_its_actions() -> None:
    lake, text = opened(**LAKE)
    assert text == "Cross the lake.\n[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up"
    step = lake.step("I go right.")
    assert step.messages == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert (step.reward, step.terminated) == (0.0, False)
    for move in ("left", "1", "Down", "not left but right", "down", "<think>up?</think> right"):
        assert not step.terminated
        step = lake.step(move)
    step = lake.step("right") if not step.terminated else step
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)


def test_a_hole_ends_the_episode_without_a_reward_and_a_limit_truncates() -> None:
    lake, _ = opened(**LAKE)
    lake.step("right")
    step = lake.step("down")
    assert (step.reward, step.terminated) == (0.0, True)
    short = {**LAKE, "settings": {"is_slippery": False, "max_episode_steps": 2}}
    lake, _ = opened(**short)
    assert not lake.step("left").truncated
    step = lake.step("left")
    assert (step.terminated, step.truncated) == (False, True)


def test_a_turn_without_an_action_is_told_so_or_ends_the_episode() -> None:
    lake, _ = opened(**LAKE)
    step = lake.step("I wait, upright. 7")
    assert step.messages == (
        "There is no action in that. Answer with one of: left, down, right, up"
    )
    assert (step.terminated, step.reward) == (False, 0.0)
    lake, _ = opened(**LAKE, end_on_no_action=True, no_action_reward=-0.5)
    step = lake.step("")
    assert (step.terminated, step.reward, step.reason) == (True, -0.5, "parse_error")


def test_the_seed_or_a_row_decides_how_an_episode_begins() -> None:
    def cards(seed: int, prompt: Prompt | None = None) -> str:
        return opened(seed, prompt, id="Blackjack-v1")[1]

    assert cards(1) == cards(1)
    assert len({cards(seed) for seed in range(8)}) > 1
    assert cards(2, row(seed=1)) == cards(1)
    assert cards(1).endswith("\nActions: stick, hit")


def test_slippery_ice_follows_from_the_seed_too() -> None:
    def walk(seed: int) -> list[Any]:
        lake, _ = opened(seed, id="FrozenLake-v1", settings={"map_name": "8x8"})
        return [lake.step("down").messages for _ in range(6)]

    assert walk(1) == walk(1)
    assert len({str(walk(seed)) for seed in range(6)}) > 1


def test_colors_of_a_terminal_become_brackets() -> None:
    assert uncolored("|\x1b[35mR\x1b[0m:\x1b[43m \x1b[0m:\x1b[34;1mB\x1b[0m") == "|(R):[ ]:(B)"


def test_a_grid_is_shown_as_text_and_its_actions_have_their_names() -> None:
    pytest.importorskip("minigrid", reason="minigrid is not installed")
    grid, text = opened(
        prompt=row("You are the arrow."), id="minigrid:MiniGrid-Empty-5x5-v0", show_actions=True
    )
    assert "get to the green goal square" in text
    assert ">>" in text
    assert text.endswith("Actions: left, right, forward, pickup, drop, toggle, done")
    for move in ("forward", "forward", "right", "forward"):
        step = grid.step(move)
        assert not step.terminated
    step = grid.step("forward")
    assert step.terminated
    assert step.reward > 0.9


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "options.id is missing, such as id: FrozenLake-v1"),
        ({"id": "FrozenLak-v1"}, r"gymnasium.make\('FrozenLak-v1'\) raised .*doesn't exist"),
        ({"id": "nowhere_x:Lake-v1"}, r"raised .*nowhere_x"),
        ({"id": "Pendulum-v1"}, "only Discrete and Text can be written as text"),
        ({**LAKE, "settings": {"slippery": 1}}, "slippery"),
        ({**LAKE, "actions": ["a", "b"]}, "has 2 names, and there are 4 actions"),
        ({**LAKE, "view": "picture"}, "view must be one of auto, ansi"),
        ({**LAKE, "acts": 1}, "acts"),
    ],
)
def test_wrong_options_are_found_before_any_episode(options: dict[str, Any], problem: str) -> None:
    pool = EnvironmentPool("gymnasium", options=options, timeout_s=20.0, memory_mb=4096)
    with pytest.raises(EnvironmentDefinitionError, match=problem) as caught:
        pool.start(row(), Patience())
    assert caught.value.exit_code == 2
    pool.close()


def test_episodes_live_in_processes_of_their_own() -> None:
    pool = EnvironmentPool("gymnasium", options=LAKE, timeout_s=20.0, memory_mb=1024)
    first = pool.open(Patience())
    second = pool.open(Patience())
    for episode in (first, second):
        episode.reset(row(), 3, Patience())
    assert "S[F]FF" in first.step("right", Patience()).messages[0]["content"]
    assert "[S]FFF" in second.step("left", Patience()).messages[0]["content"]
    first.finish()
    pool.close()


def test_a_registered_wrapper_is_played_like_what_it_wraps() -> None:
    import gymnasium

    class Shorter(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self, **settings: Any) -> None:
            super().__init__(gymnasium.make("FrozenLake-v1", is_slippery=False, **settings))

    gymnasium.register("ShorterLake-v0", entry_point=Shorter)
    try:
        lake, _ = opened(id="ShorterLake-v0", settings={"render_mode": "ansi"})
        assert lake.step("2").messages == "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    finally:
        del gymnasium.registry["ShorterLake-v0"]


def test_an_observation_of_any_mapping_is_shown_with_its_keys_as_text() -> None:
    import gymnasium

    class Shelves(gymnasium.Env[Any, Any]):
        action_space = observation_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            inner = MappingProxyType({True: np.int64(7), None: [b"x", (np.float32(0.5), None)]})
            return {np.int64(0): np.arange(2), (1, 2): inner}, {}

    gymnasium.register("Shelves-v0", entry_point=Shelves)
    try:
        _, text = opened(id="Shelves-v0", settings={"disable_env_checker": True})
    finally:
        del gymnasium.registry["Shelves-v0"]
    shown = json.loads(text.splitlines()[1])
    assert shown == {"0": [0, 1], "(1, 2)": {"True": 7, "None": ["b'x'", [0.5, None]]}}
