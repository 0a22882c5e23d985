"""What to do now, in MiniGrid, MuJoCo's Reacher and Meta-World, by those who see the state."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

TURNS = ("left", "right", "forward")
# Reacher: lengths of the two links, and gains of the joints.
UPPER = 0.1
LOWER = 0.11
STIFF = 0.15
DAMP = 0.02


def minigrid(made: Any) -> str:
    """The first action of a shortest way to the goal, by breadth-first search."""
    inner = made.unwrapped
    start = (tuple(int(part) for part in inner.agent_pos), int(inner.agent_dir))
    ways = deque([(start, "")])
    seen = {start}
    while ways:
        (place, facing), first = ways.popleft()
        cell = inner.grid.get(*place)
        if cell is not None and cell.type == "goal":
            return first
        for action in TURNS:
            there = _moved(inner, place, facing, action)
            if there not in seen:
                seen.add(there)
                ways.append((there, first or action))
    raise ValueError("there is no way to the goal")


def _moved(inner: Any, place: Any, facing: int, action: str) -> tuple[Any, int]:
    if action == "left":
        return place, (facing - 1) % 4
    if action == "right":
        return place, (facing + 1) % 4
    right, down = ((1, 0), (0, 1), (-1, 0), (0, -1))[facing]
    there = (place[0] + right, place[1] + down)
    cell = inner.grid.get(*there)
    free = cell is None or cell.can_overlap()
    return (there, facing) if free else (place, facing)


def reacher(made: Any) -> list[float]:
    """Torques that take the arm to the target, by the angles that reach it."""
    data = made.unwrapped.data
    target = data.qpos[2:4]
    angles = data.qpos[:2]
    distance = min(float(np.hypot(*target)), UPPER + LOWER - 1e-6)
    # A target too close to the middle is approached as far as the links allow.
    cosine = (distance**2 - UPPER**2 - LOWER**2) / (2 * UPPER * LOWER)
    bend = np.arccos(np.clip(cosine, -1.0, 1.0))
    towards = np.arctan2(target[1], target[0])
    # Of the two ways to bend, the one that the arm is closer to.
    wanted: list[np.ndarray[Any, Any]] = []
    for elbow in (bend, -bend):
        inside = np.arctan2(LOWER * np.sin(elbow), UPPER + LOWER * np.cos(elbow))
        wanted.append(np.array([towards - inside, elbow]))
    errors = [(goal - angles + np.pi) % (2 * np.pi) - np.pi for goal in wanted]
    error = min(errors, key=lambda found: float(np.abs(found).sum()))
    torque = STIFF * error - DAMP * data.qvel[:2]
    return [float(part) for part in np.clip(torque, -1.0, 1.0)]


def pointing_reacher(made: Any) -> list[float]:
    """The point where the target is, of `pointing_reacher.py`."""
    return [float(part) for part in made.unwrapped.data.qpos[2:4]]


def metaworld(made: Any) -> list[float]:
    """What Meta-World's own scripted policy of the task does: a move of the hand, and the grip."""
    from metaworld import policies

    inner = made.unwrapped
    # SawyerReachEnvV3 has SawyerReachV3Policy.
    name = type(inner).__name__.replace("EnvV3", "V3Policy")
    now = inner._get_curr_obs_combined_no_goal()
    # It is shown the observation before as well, which it does not look at.
    action = getattr(policies, name)().get_action(np.hstack([now, now, inner._target_pos]))
    return [float(part) for part in np.clip(action, -1.0, 1.0)]
