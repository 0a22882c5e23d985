"""`environment.name: raster-world`: a cross of four coloured ends, seen in 40 x 40 pixels.

    environment:
      name: raster-world
      options: {control: steps}     # or velocity: two numbers, down and right, each from -1 to 1

The agent, a white square, begins in the middle and is told a colour. The four colours lie at the
four ends in an order that the seed decides. The first end that it reaches ends the episode, with
reward 1 where it has the colour. A quarter of the 96 layouts (24 orders of the colours, 4 goals),
always the same, is held out: rows with `{"split": "held_out"}` have those, all others the rest.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oxrl.data.rows import Json, JsonObject
from oxrl.environments import Message, Step
from oxrl.environments.adapting import seed_of, shown_with
from oxrl.types import Names, Prompt
from oxrl_datasets.visual import COLORS

SIDE = 5  # tiles
TILE = 8  # pixels
MIDDLE = 2.0
# Action -> the way there, down and right, in tiles; the ends lie in the same order.
MOVES = {"up": (-1.0, 0.0), "down": (1.0, 0.0), "left": (0.0, -1.0), "right": (0.0, 1.0)}
ENDS = [(MIDDLE + 2 * down, MIDDLE + 2 * right) for down, right in MOVES.values()]
CONTROLS = ("steps", "velocity")


class Layout(NamedTuple):
    """Colours of the ends, in the order of MOVES, and the number of the end that is asked for."""

    colors: Names
    goal: int


def _layouts() -> dict[str, list[Layout]]:
    """Every layout, in a fixed order of chance; the first quarter is held out."""
    orders = itertools.permutations(COLORS)
    found = [Layout(order, goal) for order in orders for goal in range(len(MOVES))]
    random.Random(0).shuffle(found)
    held_out = len(found) // 4
    return {"train": found[held_out:], "held_out": found[:held_out]}


LAYOUTS = _layouts()


class RasterWorld:
    """The world alone: where the agent is, and what it looks like.

    Args:
        layout: of the ends.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.place = (MIDDLE, MIDDLE)
        self._empty = np.zeros((SIDE * TILE, SIDE * TILE, 3), np.uint8)
        for color, end in zip(layout.colors, ENDS, strict=True):
            down, right = (int(at) * TILE for at in end)
            self._empty[down : down + TILE, right : right + TILE] = COLORS[color]

    def move(self, down: float, right: float) -> int | None:
        """Go somewhere, as far as the cross reaches; one tile each way at most.

        Args:
            down, right: how far, in tiles; below 0 up and left. Cut to -1 to 1 each.

        Returns:
            The number of the end that was reached; None: none.
        """
        there = (self.place[0] + _step(down), self.place[1] + _step(right))
        inside = all(-0.5 <= at <= SIDE - 0.5 for at in there)
        on_cross = any(abs(at - MIDDLE) < 0.5 for at in there)
        if inside and on_cross:
            self.place = there
        for number, end in enumerate(ENDS):
            if all(abs(at - there) < 0.5 for at, there in zip(self.place, end, strict=True)):
                return number
        return None

    def frame(self) -> NDArray[np.uint8]:
        """Draw the world as it looks now, [40, 40, 3]."""
        found = self._empty.copy()
        down = _pixel(self.place[0])
        right = _pixel(self.place[1])
        found[down : down + TILE // 2, right : right + TILE // 2] = 255
        return found


def _step(part: float) -> float:
    """One tile each way at most."""
    return min(1.0, max(-1.0, part))


def _pixel(at: float) -> int:
    """Return the pixel at which the square of the agent begins."""
    most = (SIDE - 1) * TILE
    return min(most, max(0, round(at * TILE))) + TILE // 4


class RasterEnvironment:
    """One episode in a RasterWorld.

    Args:
        control: "steps" takes the names of MOVES, "velocity" pairs of numbers.
        max_steps: after which the environment truncates the episode.
        instruction: what the agent is told beside every image; `{color}` becomes the colour.
        blind: show the same image at every time, whatever there is to be seen.

    Raises:
        ValueError: a wrong option; says what to write.
    """

    reusable = True

    def __init__(
        self,
        control: str = "steps",
        max_steps: int = 4,
        instruction: str = "go to {color}",
        blind: bool = False,
    ) -> None:
        if control not in CONTROLS:
            raise ValueError(f"environment.options.control must be one of {', '.join(CONTROLS)}")
        if "{color}" not in instruction:
            raise ValueError("environment.options.instruction must hold {color}")
        self._control = control
        self._max_steps = max_steps
        self._instruction = instruction
        self._blind = blind

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """The first image, and the colour.

        Args:
            prompt: the row; its columns `split` ("train" or "held_out") and `seed` count.
            seed: of the episode, where the row names none.

        Raises:
            ValueError: the column `split` holds something else.
        """
        split = str(prompt.metadata.get("split", "train"))
        if split not in LAYOUTS:
            raise ValueError(f"the column split is {split!r}, need {' or '.join(LAYOUTS)}")
        chosen = random.Random(seed_of(prompt, seed)).choice(LAYOUTS[split])
        self.restore({"layout": chosen, "place": (MIDDLE, MIDDLE), "steps": 0})
        return [self._said()]

    def act(self, actions: Sequence[Json]) -> Step:
        """Do the actions of a turn, until one of them reaches an end.

        Args:
            actions: names of MOVES, or pairs of numbers, down and right, from -1 to 1.

        Returns:
            The image after the last one that was done; reward 1.0 where the right end was reached.
        """
        layout = self.world.layout
        for count, action in enumerate(actions, start=1):
            down, right = MOVES[action] if self._control == "steps" else action
            self._steps += 1
            end = self.world.move(down, right)
            if end is not None:
                right_one = end == layout.goal
                return Step(
                    [self._said()],
                    float(right_one),
                    terminated=True,
                    reason=f"reached {layout.colors[end]}",
                    executed=count,
                    success=right_one,
                )
            if self._steps >= self._max_steps:
                return Step([self._said()], truncated=True, executed=count, success=False)
        return Step([self._said()])

    def expert(self) -> str | list[float]:
        """Return the action that leads to the goal."""
        name = list(MOVES)[self.world.layout.goal]
        return name if self._control == "steps" else list(MOVES[name])

    def state(self) -> JsonObject:
        """All that decides what comes next, for `restore`."""
        return {"layout": self.world.layout, "place": self.world.place, "steps": self._steps}

    def restore(self, state: JsonObject) -> None:
        """Go on from where `state` was taken.

        Args:
            state: of `state`, also of another instance.
        """
        self.world = RasterWorld(state["layout"])
        self.world.place = state["place"]
        self._shown = RasterWorld(LAYOUTS["train"][0]) if self._blind else self.world
        self._steps = state["steps"]

    def _said(self) -> Message:
        layout = self.world.layout
        text = self._instruction.format(color=layout.colors[layout.goal])
        return {"role": "user", "content": shown_with(self._shown.frame(), text)}
