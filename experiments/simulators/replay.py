"""Do again what a dataset of demonstrations has recorded, and compare.

    oxrl prepare demonstrations --out data environment=ENV options='{...}' lerobot=true
    python experiments/simulators/replay.py data/lerobot ENV '{...}'

Every episode begins with its recorded seed in a new instance of the environment, and does its
recorded actions, whatever an expert would do now. Every frame has to be the recorded one, byte for
byte; so have the numbers of the robot's state, where the environment tells them, and the end has to
be a success. Exits with 1 where something is otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from oxrl.data.image_files import FORMATS
from oxrl.environments import Step
from oxrl.environments.find import find_environment
from oxrl.errors import DataError, OxrlError
from oxrl.types import Prompt
from oxrl.usercode.environment_answers import as_messages, as_step
from oxrl_robots.demonstrations import succeeded
from oxrl_robots.lerobot import RobotEpisode, read_episodes
from oxrl_robots.robot_episodes import shown_image


class Replayed(NamedTuple):
    """Of one episode: how many steps it has, how many were as recorded, and its end."""

    steps: int
    frames: int
    states: int
    success: bool

    @property
    def same(self) -> bool:
        return self.steps == self.frames == self.states and self.success


def replayed(
    episode: RobotEpisode, environment: str, options: Mapping[str, Any], columns: Mapping[str, Any]
) -> Replayed:
    """Play an episode by its actions, in an instance of its own.

    Args:
        episode: as recorded.
        environment, options: as `oxrl prepare demonstrations` was given them.
        columns: of the row that it began with.
    """
    if episode.seed is None:
        raise DataError("the dataset does not say by which seed its episodes began")
    made = find_environment(environment)(**options)
    prompt = Prompt(
        uid="demonstration",
        messages=({"role": "user", "content": "Begin."},),
        token_ids=(),
        metadata=dict(columns),
    )
    read = as_messages(made.reset(prompt, episode.seed), "reset")
    frames = 0
    states = 0
    step = Step()
    for recorded in episode.frames:
        [image] = recorded.images.values()
        frames += shown_image(read[-1]) == image
        told = made.robot_state() if hasattr(made, "robot_state") else None
        states += _as_kept(told) == _as_kept(recorded.state)
        step = as_step(made.act([recorded.action]))
        read = as_messages(step.messages, "act")
    if hasattr(made, "close"):
        made.close()
    success = succeeded(step) and (step.terminated or step.truncated)
    return Replayed(len(episode.frames), frames, states, success)


def _as_kept(state: Any) -> bytes:
    """Numbers in the precision of the dataset."""
    return b"" if state is None else np.asarray(state, np.float32).tobytes()


def strip(episode: RobotEpisode, count: int = 8) -> Image.Image:
    """So many frames of an episode beside each other, the first and the last among them."""
    places = np.linspace(0, len(episode.frames) - 1, count).round().astype(int)
    shown: list[Any] = []
    for place in places:
        [image] = episode.frames[place].images.values()
        shown.append(np.asarray(Image.open(BytesIO(image), formats=FORMATS).convert("RGB")))
    return Image.fromarray(np.concatenate(shown, axis=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("dataset", type=Path)
    parser.add_argument("environment")
    parser.add_argument("options", nargs="?", default="{}", type=json.loads)
    parser.add_argument("--columns", default="{}", type=json.loads)
    parser.add_argument("--strip", type=Path, help="image of frames of the first episode, to write")
    chosen = parser.parse_args()
    try:
        wrong = compare(chosen)
    except OxrlError as error:
        sys.exit(f"error: {error}")
    sys.exit(1 if wrong else 0)


def compare(chosen: argparse.Namespace) -> int:
    """Replay every episode, and say what came of it; how many were otherwise."""
    wrong = 0
    for number, episode in enumerate(read_episodes(chosen.dataset)):
        began = time.process_time()
        if chosen.strip and not number:
            strip(episode).save(chosen.strip)
        found = replayed(episode, chosen.environment, chosen.options, chosen.columns)
        wrong += not found.same
        took = time.process_time() - began
        told = f"{found.steps} steps, {found.frames} frames and {found.states} states as recorded"
        end = "success" if found.success else "no success"
        say = f"episode {number}, seed {episode.seed}: {told}, {end}, {took:.1f} processor seconds"
        sys.stdout.write(say + "\n")
        sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    main()
