"""`environment.name: simulator`: Gymnasium environments that are seen, and moved by actions.

    environment:
      name: simulator
      options:
        id: minigrid:MiniGrid-Empty-Random-5x5-v0
        settings: {tile_size: 8, highlight: false}   # of gymnasium.make
        outcome_at: 0.001

What the policy reads is the image that the environment renders, and an instruction. Its turns are
actions: names of a discrete space, or the numbers of a continuous one (section `action`).

Source: Gymnasium's documentation of `Env` and of rendering; MuJoCo's of `mj_getState`.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from oxrl.data.rows import Fields, Json, JsonObject
from oxrl.environments import Message, Step
from oxrl.environments.adapting import need, seed_of, shown_with
from oxrl.types import Prompt
from oxrl.usercode.user_code import load_function
from oxrl_envs.gymnasium_adapter import action_names, make, numbers_of

# How MuJoCo renders without a display, where nothing else is asked for.
RENDERER = "egl"
# What Gymnasium makes, and what it is made of, have no types here.
Made = Any


class SimulatorEnvironment:
    """One episode of a registered environment that renders images.

    Args:
        id: as `gymnasium.make` takes it; "module:id" imports a module first.
        settings: further arguments of `gymnasium.make`.
        size: side of the square that images are made, in pixels; None: as they are rendered.
        instruction: beside every image; `{mission}` is what the environment itself asks for.
        outcome_at: a step whose own reward is at least this has done the task, which ends the
            episode with reward 1; all other rewards are 0. "success": a step of which the
            environment's info says `success` or `is_success`. None: rewards as they are, and
            success where the info says so.
        blind: show the first image at every time.
        expert: path.py:function, from the environment to the action to take now.

    Raises:
        ValueError: a wrong option, or actions that are neither discrete nor a box of numbers.
    """

    reusable = True

    def __init__(
        self,
        id: str = "",
        settings: Fields | None = None,
        size: int | None = None,
        instruction: str = "{mission}",
        outcome_at: float | Literal["success"] | None = None,
        blind: bool = False,
        expert: str = "",
    ) -> None:
        if not id:
            raise ValueError("environment.options.id is missing, such as id: Reacher-v5")
        # Before MuJoCo is imported, which looks at them once.
        os.environ.setdefault("MUJOCO_GL", RENDERER)
        os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
        self._made = make(id, {"render_mode": "rgb_array", **(settings or {})})
        self._size = size
        self._instruction = instruction
        if _is_mujoco(self._made.unwrapped):
            _fix_camera(self._made.unwrapped)
        if isinstance(outcome_at, str) and outcome_at != "success":
            raise ValueError(
                f"environment.options.outcome_at is {outcome_at!r}; a number, or success"
            )
        self._outcome_at = outcome_at
        self._blind = blind
        self._expert = load_function(expert, "environment") if expert else None
        self._frame: Json = None
        space = self._made.action_space
        kind = type(space).__name__
        if kind not in ("Discrete", "Box"):
            raise ValueError(f"the actions of {id} are {space}; need Discrete or Box")
        self._numbers = kind == "Box"
        self._names = [] if self._numbers else _names(self._made)

    @classmethod
    def prepare(cls, **options: Json) -> None:
        """Import the libraries, and say what renders; no image is drawn before the fork.

        Args:
            options: of the class.

        Raises:
            MissingExtraError: a library is not installed.
            ValueError: a wrong option.
        """
        cls(**options).close()
        if "mujoco" in sys.modules:
            sys.stdout.write(f"MuJoCo renders by {os.environ['MUJOCO_GL']}\n")

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """The first image, and the instruction.

        Args:
            prompt: the row; its column `seed` goes before `seed`.
            seed: of the episode.
        """
        number = seed_of(prompt, seed)
        # A layer may choose its task before the seed reaches what is beneath it: Meta-World does.
        self._made.unwrapped.np_random, _ = need("gymnasium", "simulators").utils.seeding.np_random(
            number
        )
        self._made.reset(seed=number)
        self._made.action_space.seed(number)
        self._frame = None
        return [self._said()]

    def act(self, actions: Sequence[Json]) -> Step:
        """Do the actions of a turn, until one of them ends the episode.

        Args:
            actions: names of a discrete space, or lists of numbers.

        Returns:
            The image after the last one that was done, and the sum of the rewards.
        """
        total = 0.0
        for count, action in enumerate(actions, start=1):
            _, reward, terminated, truncated, info = self._made.step(self._given(action))
            success = self._succeeded(float(reward), info)
            if self._outcome_at is not None:
                reward = bool(success)
                terminated = terminated or success
            total += float(reward)
            if terminated or truncated:
                return Step(
                    [self._said()],
                    total,
                    terminated=bool(terminated),
                    truncated=bool(truncated),
                    executed=count,
                    success=success,
                )
        return Step([self._said()], total)

    def expert(self) -> Json:
        """The action that the expert of the options would take now.

        Raises:
            ValueError: there is none.
        """
        if self._expert is None:
            raise ValueError("environment.options.expert is missing: path.py:function")
        return self._expert(self._made)

    def close(self) -> None:
        """End the environment."""
        self._made.close()

    def state(self) -> JsonObject:
        """All that decides what comes next, for `restore` into an environment that was reset."""
        inner = self._made.unwrapped
        return {
            "steps": [layer["_elapsed_steps"] for layer in _counting(self._made)],
            "random": copy.deepcopy(inner.np_random.bit_generator.state),
            "inner": _mujoco_state(inner) if _is_mujoco(inner) else _python_state(inner),
        }

    def restore(self, state: Fields) -> None:
        """Go on from where `state` was taken, with the same images, rewards and ends.

        Args:
            state: of `state`, also of another instance that was made and reset in the same way; not
                changed.
        """
        inner = self._made.unwrapped
        if _is_mujoco(inner):
            _set_mujoco_state(inner, state["inner"])
        else:
            vars(inner).update(copy.deepcopy(state["inner"]))
        inner.np_random.bit_generator.state = copy.deepcopy(state["random"])
        for layer, count in zip(_counting(self._made), state["steps"], strict=True):
            layer["_elapsed_steps"] = count

    def _said(self) -> Message:
        if self._frame is None or not self._blind:
            self._frame = self._rendered()
        mission = getattr(self._made.unwrapped, "mission", "")
        text = self._instruction.format(mission=mission)
        return {"role": "user", "content": shown_with(self._frame, text)}

    def _rendered(self) -> Json:
        frame = self._made.render()
        if self._size is None or frame.shape[:2] == (self._size, self._size):
            return frame
        # Most environments render at the size that they are asked for.
        from PIL import Image

        side = (self._size, self._size)
        return np.asarray(Image.fromarray(frame).resize(side, Image.Resampling.BOX))

    def _given(self, action: Json) -> Json:
        space = self._made.action_space
        if not self._numbers:
            if action not in self._names:
                raise ValueError(f"there is no action {action!r}, but {', '.join(self._names)}")
            return numbers_of(space)[self._names.index(action)]
        return np.clip(np.asarray(action, space.dtype), space.low, space.high)

    def _succeeded(self, reward: float, info: Fields) -> bool | None:
        if isinstance(self._outcome_at, (int, float)):
            return reward >= self._outcome_at
        said = info.get("is_success", info.get("success"))
        return None if said is None else bool(said)


def _names(made: Made) -> list[str]:
    """Names of discrete actions; their numbers where they have none."""
    return list(action_names(made)) or list(map(str, numbers_of(made.action_space)))


def _counting(made: Made) -> Iterator[JsonObject]:
    """The attributes of layers around an environment that count its steps."""
    while hasattr(made, "env"):
        if "_elapsed_steps" in vars(made):
            yield vars(made)
        made = made.env


def _python_state(inner: Made) -> JsonObject:
    """The attributes of an environment of Python objects, without its windows."""
    own = {name: value for name, value in vars(inner).items() if name not in ("window", "clock")}
    return copy.deepcopy(own)


def _is_mujoco(inner: Made) -> bool:
    return hasattr(inner, "model") and hasattr(inner, "data")


def _fix_camera(inner: Made) -> None:
    """Look at the middle of the model.

    Gymnasium's camera looks at where things are when the first image is drawn, so that images would
    follow from that and not from the state alone.
    """
    renderer = inner.mujoco_renderer
    size = inner.model.stat
    middle = {"lookat": size.center.copy(), "distance": size.extent}
    renderer.default_cam_config = {**middle, **(renderer.default_cam_config or {})}


def _mujoco_state(inner: Made) -> Json:
    mujoco, which = _mujoco()
    found = np.empty(mujoco.mj_stateSize(inner.model, which))
    mujoco.mj_getState(inner.model, inner.data, found, which)
    return found


def _set_mujoco_state(inner: Made, state: Json) -> None:
    mujoco, which = _mujoco()
    mujoco.mj_setState(inner.model, inner.data, state, which)
    # What follows from the state is computed anew, and overwrites a part of it.
    mujoco.mj_forward(inner.model, inner.data)
    mujoco.mj_setState(inner.model, inner.data, state, which)


def _mujoco() -> tuple[Made, Made]:
    mujoco = need("mujoco", "simulators")
    return mujoco, mujoco.mjtState.mjSTATE_INTEGRATION
