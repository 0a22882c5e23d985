"""Rows to imitate from a LeRobot dataset, and a LeRobot dataset from demonstrations."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from oxrl.data.demonstrations import chunk_at, padded_in
from oxrl.data.fast import SCALE
from oxrl.data.messages import text_of
from oxrl.data.rows import Json, JsonObject, Rows
from oxrl.environments import Message
from oxrl.errors import DataError
from oxrl_robots.demonstrations import Demonstration, Made, pieces_of, succeeded
from oxrl_robots.lerobot import Frame, RobotEpisode, read_episodes, statistics

CAMERA = "image"


@dataclass(frozen=True, kw_only=True)
class LeRobotRows:
    """Rows of one turn each: the camera's image and the task, and the actions from there on.

    Args:
        camera: what follows observation.images. in the dataset; empty: the only one.
        chunk: actions of a row; what is missing at an episode's end repeats the last one, is
            counted as `padded`, and, but for FAST's tokens, not learned.
        instruction: beside every image; `{task}` becomes the episode's.
        fast: at most so many pieces of FAST's code of the chunks, in fast.json; 0: none.
        fast_scale: what FAST's coefficients are multiplied by before they are rounded.
        successful: leave out episodes that the dataset does not mark as successful.
    """

    camera: str = ""
    chunk: int = 1
    instruction: str = "{task}"
    fast: int = 0
    fast_scale: float = SCALE
    successful: bool = False

    def make(self, source: Path, limit: int | None) -> Made:
        """Read the episodes, at most `limit` of them.

        Args:
            source: folder of the dataset.
            limit: at most so many episodes; None: all.

        Returns:
            Rows of sft, and statistics of the actions.

        Raises:
            DataError: no dataset, no such camera, or no episode that may be learned from.
        """
        rows: Rows = []
        actions: list[Sequence[float]] = []
        count = 0
        wanted = (one for one in read_episodes(source) if one.success or not self.successful)
        for episode in islice(wanted, limit):
            rows += self._rows(episode, source)
            actions += [frame.action for frame in episode.frames]
            count += 1
        if not rows:
            raise DataError(f"{source}: no episode that may be learned from")
        facts = {"episodes": count, "frames": len(actions), "padded_actions": padded_in(rows)}
        told: JsonObject = {"action": statistics(actions)}
        code = pieces_of(rows, told, pieces=self.fast, scale=self.fast_scale)
        return Made({"sft": rows}, facts, told, code=code)

    def _rows(self, episode: RobotEpisode, source: Path) -> Rows:
        done = [list(map(float, frame.action)) for frame in episode.frames]
        rows: Rows = []
        for at, frame in enumerate(episode.frames):
            shown = base64.b64encode(self._image(frame, source)).decode()
            text = self.instruction.format(task=episode.task)
            parts = [{"type": "image", "base64": shown}, {"type": "text", "text": text}]
            said = {"role": "user", "content": parts}
            rows.append({"messages": [said], **chunk_at(done, at, self.chunk)})
        return rows

    def _image(self, frame: Frame, source: Path) -> bytes:
        there = [*frame.images]
        camera = self.camera or (there[0] if len(there) == 1 else "")
        if camera not in frame.images:
            told = ", ".join(there) or "none"
            raise DataError(f"{source}: option camera={self.camera!r}, there are {told}")
        return frame.images[camera]


def as_robot_episode(done: Demonstration) -> RobotEpisode:
    """A demonstration as LeRobot keeps it.

    Args:
        done: with one image in every step, and actions that are numbers.

    Raises:
        DataError: it has no images, or its actions are names.
    """
    frames: list[Frame] = []
    for seen in done.steps:
        if isinstance(seen.action, str):
            raise DataError("LeRobot's actions are numbers, and these are names: leave out lerobot")
        last = seen.messages[-1]
        images = {CAMERA: shown_image(last)}
        frames.append(
            Frame(images=images, action=seen.action, state=seen.state, reward=seen.reward)
        )
    task = text_of(done.steps[-1].messages[-1])
    return RobotEpisode(task=task, frames=frames, success=succeeded(done.last), seed=done.seed)


def shown_image(message: Message) -> bytes:
    """The one image of a message, as the bytes of a file.

    Args:
        message: with parts; its image is base64 text.

    Raises:
        DataError: it has none, or several.
    """
    content: Json = message["content"]
    images = [] if isinstance(content, str) else [p for p in content if p["type"] == "image"]
    if len(images) != 1:
        raise DataError(f"LeRobot's frames are images, and a step shows {len(images)} of them")
    return base64.b64decode(images[0]["base64"])
