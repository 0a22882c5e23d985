"""MuJoCo's Reacher, moved by saying where its fingertip should go.

    id: pointing_reacher:PointingReacher-v0

An action is a point, (x, y) in metres, as robots are often given one; a controller beneath it turns
the joints there for a fraction of a second. The arm is Gymnasium's Reacher-v5, seen from above; its
target is drawn larger than there, where it is smaller than a pixel of a small image.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

# Metres: lengths of the two links, and half the side of the square of points.
UPPER = 0.1
LOWER = 0.11
REACH = 0.2
TARGET_RADIUS = 0.02
# Gains of the joints, and physics steps of one action.
STIFF = 0.6
DAMP = 0.04
STEPS = 25
CAMERA = {"lookat": [0.0, 0.0, 0.0], "distance": 0.6, "azimuth": 90.0, "elevation": -90.0}


class PointingReacher(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reacher-v5 whose actions are points.

    Args:
        render_mode: as of Reacher-v5.
        hidden: the target is there and is not drawn, which no policy can do without.
    """

    def __init__(self, render_mode: str | None = None, hidden: bool = False) -> None:
        made = gymnasium.make(
            "Reacher-v5",
            render_mode=render_mode,
            width=80,
            height=80,
            default_camera_config=CAMERA,
        )
        super().__init__(made)
        self.action_space = gymnasium.spaces.Box(-REACH, REACH, (2,), np.float32)
        target = self.unwrapped.model.geom("target")
        target.size[0] = TARGET_RADIUS
        target.rgba[3] = 0.0 if hidden else 1.0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Go towards a point; the reward is minus what is left to the target, in metres."""
        inner = self.unwrapped
        wanted = angles_of(np.asarray(action, np.float64), inner.data.qpos[:2].copy())
        found: Any = None
        for _ in range(STEPS):
            error = wrapped(wanted - inner.data.qpos[:2])
            torque = np.clip(STIFF * error - DAMP * inner.data.qvel[:2], -1.0, 1.0)
            inner.do_simulation(torque, 1)
        found = inner._get_obs()
        return found, -distance(inner), False, False, {}


def distance(inner: Any) -> float:
    """From the fingertip to the target, in metres."""
    return float(np.linalg.norm(inner.get_body_com("fingertip") - inner.get_body_com("target")))


def wrapped(angles: Any) -> Any:
    """The same angles between -pi and pi."""
    return (angles + np.pi) % (2 * np.pi) - np.pi


def angles_of(point: Any, now: Any) -> Any:
    """Angles of the joints that bring the fingertip to a point, or as near as the links reach."""
    length = float(np.clip(np.hypot(*point), UPPER * 0.2, UPPER + LOWER - 1e-6))
    cosine = (length**2 - UPPER**2 - LOWER**2) / (2 * UPPER * LOWER)
    bend = np.arccos(np.clip(cosine, -1.0, 1.0))
    towards = np.arctan2(point[1], point[0])
    # Of the two ways to bend, the one that the arm is closer to.
    ways: list[Any] = []
    for elbow in (bend, -bend):
        inside = np.arctan2(LOWER * np.sin(elbow), UPPER + LOWER * np.cos(elbow))
        ways.append(np.array([towards - inside, elbow]))
    errors = [float(np.abs(wrapped(way - now)).sum()) for way in ways]
    return ways[int(np.argmin(errors))]


gymnasium.register(
    "PointingReacher-v0", entry_point="pointing_reacher:PointingReacher", max_episode_steps=50
)
