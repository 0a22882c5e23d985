"""Simulators of others: started, seeded, restored and replayed exactly, in processes of their own."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxrl.types import Prompt
from oxrl_robots.simulator import SimulatorEnvironment

EXPERTS = Path(__file__).resolve().parents[2] / "experiments" / "simulators" / "experts.py"
PROMPT = Prompt(uid="p", messages=(), token_ids=())
needs_minigrid = pytest.mark.skipif(
    find_spec("minigrid") is None, reason="minigrid is no part here"
)
needs_mujoco = pytest.mark.skipif(find_spec("mujoco") is None, reason="mujoco is no part here")
GRID: dict[str, Any] = {
    "id": "minigrid:MiniGrid-Empty-Random-5x5-v0",
    "settings": {"tile_size": 8, "highlight": False},
    "outcome_at": 0.001,
    "expert": f"{EXPERTS}:minigrid",
}
ARM: dict[str, Any] = {
    "id": "Reacher-v5",
    "settings": {"width": 64, "height": 64},
    "size": 40,
    "expert": f"{EXPERTS}:reacher",
}


def played(made: SimulatorEnvironment, actions: list[list[Any]]) -> list[Any]:
    """Image and reward of every turn."""
    found: list[Any] = []
    for chunk in actions:
        step = made.act(chunk)
        [message] = step.messages
        found.append((np.asarray(message["content"][0]["image"]), step.reward, step.terminated))
    return found


def by_expert(options: dict[str, Any], count: int, seed: int) -> list[list[Any]]:
    made = SimulatorEnvironment(**options)
    made.reset(PROMPT, seed)
    actions: list[list[Any]] = []
    for _ in range(count):
        actions.append([made.expert()])
        if made.act(actions[-1]).terminated:
            break
    made.close()
    return actions


CASES = [
    pytest.param(GRID, 3, marks=needs_minigrid, id="minigrid"),
    pytest.param(ARM, 6, marks=needs_mujoco, id="reacher"),
]


def begun(options: dict[str, Any], seed: int, actions: list[list[Any]]) -> list[Any]:
    """What is seen of an episode in an instance of its own, which then is gone.

    One at a time: two renderers of one process are in each other's way, and every episode of a run
    has a process to itself.
    """
    made = SimulatorEnvironment(**options)
    [first] = made.reset(PROMPT, seed)
    found = [np.asarray(first["content"][0]["image"]), *played(made, actions)]
    made.close()
    return found


@pytest.mark.parametrize(("options", "count"), CASES)
def test_the_same_seed_and_actions_give_the_same_frames_and_a_state_goes_on_alike(
    options: dict[str, Any], count: int
) -> None:
    seed = next(s for s in range(50) if len(by_expert(options, count, s)) == count)
    actions = by_expert(options, count, seed)
    expected = begun(options, seed, actions)
    np.testing.assert_equal(begun(options, seed, actions), expected)
    made = SimulatorEnvironment(**options)
    made.reset(PROMPT, seed)
    played(made, actions[:2])
    state = made.state()
    made.close()
    # Another instance, begun otherwise, goes on from the state: images, rewards and ends.
    other = SimulatorEnvironment(**options)
    other.reset(PROMPT, seed + 1)
    other.restore(state)
    np.testing.assert_equal(played(other, actions[2:]), expected[3:])
    other.close()


@pytest.mark.parametrize(("options", "count"), CASES)
def test_an_instance_that_is_used_again_begins_as_a_new_one_does(
    options: dict[str, Any], count: int
) -> None:
    actions = by_expert(options, count, 2)
    used = SimulatorEnvironment(**options)
    used.reset(PROMPT, 1)
    used.act(actions[0])
    [first] = used.reset(PROMPT, 2)
    found = [np.asarray(first["content"][0]["image"]), *played(used, actions)]
    used.close()
    np.testing.assert_equal(found, begun(options, 2, actions))


@needs_minigrid
def test_an_expert_of_minigrid_reaches_the_goal_and_ends_with_the_outcome() -> None:
    for seed in range(5):
        actions = by_expert(GRID, 30, seed)
        made = SimulatorEnvironment(**GRID)
        made.reset(PROMPT, seed)
        for chunk in actions[:-1]:
            assert made.act(chunk).reward == 0
        # Chunks end with the action that ends the episode.
        last = made.act(actions[-1] * 3)
        assert (last.reward, last.terminated, last.success, last.executed) == (1.0, True, True, 1)
        made.close()


@needs_mujoco
@pytest.mark.skipif(find_spec("OpenGL") is None, reason="PyOpenGL is no part here")
def test_an_arm_reaches_its_target_by_its_expert_and_numbers_are_clipped() -> None:
    options = ARM | {"outcome_at": -0.05}
    reached = 0
    for seed in range(4):
        actions = by_expert(options, 50, seed)
        reached += len(actions) < 50
    assert reached >= 3
    made = SimulatorEnvironment(**ARM)
    made.reset(PROMPT, 0)
    one = made.act([[99.0, -99.0]]).reward
    made.reset(PROMPT, 0)
    assert made.act([[1.0, -1.0]]).reward == one
    made.close()


@needs_minigrid
def test_wrong_options_and_actions_say_what_to_write() -> None:
    with pytest.raises(ValueError, match="options.id is missing"):
        SimulatorEnvironment()
    made = SimulatorEnvironment(**(GRID | {"expert": ""}))
    made.reset(PROMPT, 0)
    with pytest.raises(ValueError, match="'jump', but left, right, forward"):
        made.act(["jump"])
    with pytest.raises(ValueError, match="expert is missing"):
        made.expert()
    made.close()


def test_the_experts_are_functions_of_the_environment() -> None:
    assert {"minigrid", "reacher"} <= set(runpy.run_path(str(EXPERTS)))


@pytest.fixture
def chooser() -> Any:
    """An environment whose outer layer chooses its task before the seed gets beneath it."""
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is no part here")

    class Room(gymnasium.Env[Any, Any]):
        metadata = {"render_modes": ["rgb_array"]}

        def __init__(self, render_mode: str = "rgb_array", first: int = 0) -> None:
            self.render_mode = render_mode
            self.action_space = gymnasium.spaces.Discrete(2, start=first)
            self.observation_space = gymnasium.spaces.Discrete(1)
            self.task = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return 0, {}

        def step(self, action: int) -> Any:
            return 0, 0.25, False, False, {"success": action == 1}

        def render(self) -> Any:
            return np.full((8, 8, 3), self.task, np.uint8)

    class Tasks(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self, **settings: Any) -> None:
            super().__init__(Room(**settings))

        def reset(self, **given: Any) -> Any:
            self.unwrapped.task = int(self.np_random.integers(200))
            return self.env.reset(**given)

    gymnasium.register("Tasks-v0", entry_point=Tasks)
    yield "Tasks-v0"
    del gymnasium.registry["Tasks-v0"]


@pytest.mark.filterwarnings("ignore:.*render fps")
def test_a_task_that_a_layer_chooses_follows_from_the_seed_alone(chooser: str) -> None:
    def shown(made: SimulatorEnvironment, seed: int) -> int:
        [message] = made.reset(PROMPT, seed)
        return int(np.asarray(message["content"][0]["image"])[0, 0, 0])

    one = SimulatorEnvironment(id=chooser)
    tasks = [shown(one, seed) for seed in range(6)]
    assert len(set(tasks)) > 3
    other = SimulatorEnvironment(id=chooser)
    assert [shown(other, seed) for seed in reversed(range(6))] == tasks[::-1]


@pytest.mark.filterwarnings("ignore:.*render fps")
def test_an_outcome_is_what_the_environment_says_where_that_is_asked_for(chooser: str) -> None:
    made = SimulatorEnvironment(id=chooser, outcome_at="success")
    made.reset(PROMPT, 0)
    step = made.act(["0"])
    assert (step.reward, step.terminated, step.success) == (0.0, False, None)
    step = made.act(["0", "1", "0"])
    assert (step.reward, step.terminated, step.success, step.executed) == (1.0, True, True, 2)
    as_it_is = SimulatorEnvironment(id=chooser)
    as_it_is.reset(PROMPT, 0)
    assert as_it_is.act(["1"]).reward == 0.25
    with pytest.raises(ValueError, match="outcome_at is 'succes'; a number, or success"):
        SimulatorEnvironment(id=chooser, outcome_at="succes")


@pytest.mark.filterwarnings("ignore:.*render fps")
def test_an_action_without_a_name_is_the_one_of_its_number(chooser: str) -> None:
    made = SimulatorEnvironment(id=chooser, settings={"first": 1}, outcome_at="success")
    made.reset(PROMPT, 0)
    assert made.act(["2"]).success is None
    assert made.act(["1"]).success is True
