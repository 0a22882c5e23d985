"""Demonstrations of an environment's own expert, as rows to imitate: `oxrl prepare demonstrations`.

An environment that can show how it is done has a method `expert()`, which gives the action to take
now. One of a robot may have a method `robot_state()`, numbers that LeRobot keeps beside the images.
Episodes that do not succeed are counted and left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from oxrl.data.actions import ActionHead
from oxrl.data.contexts import system_part
from oxrl.data.demonstrations import chunk_at, padded_in
from oxrl.data.fast import SCALE, FastCode, fit
from oxrl.data.rows import Fields, Json, JsonArray, JsonObject, Rows
from oxrl.environments import Message, Step
from oxrl.environments.find import find_environment
from oxrl.errors import DataError
from oxrl.seeds import stable_seed
from oxrl.types import Prompt
from oxrl.usercode.environment_answers import as_messages, as_step
from oxrl_datasets.generated import Files
from oxrl_robots.lerobot import statistics

ROWS = ("turns", "episodes")


class ExpertStep(NamedTuple):
    """One step of an expert: what it read, in messages, what it did, and what came of it.

    state: numbers of the robot before the action, where the environment tells them.
    """

    messages: Sequence[Message]
    action: Json
    reward: float = 0.0
    state: Sequence[float] | None = None


@dataclass(frozen=True)
class Demonstration:
    """An episode of an expert. `last` is what came of its last step."""

    seed: int
    steps: list[ExpertStep]
    last: Step


class Made(NamedTuple):
    """Files of rows, facts for the report, and of actions that are numbers their statistics.

    played: the episodes, where they were played here.
    code: the pieces of FAST, where they are asked for.
    """

    files: Files
    facts: JsonObject
    statistics: JsonObject | None
    played: Sequence[Demonstration] = ()
    code: FastCode | None = None


@dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """Rows of sft (actions of the expert), rl and eval (where episodes begin).

    Args:
        environment: as `environment.name`.
        options: as `environment.options`, in JSON.
        prompt: the one message of a row, as the environment is given it.
        episodes: of the expert.
        eval_rows: episodes to evaluate on, each with a seed of its own that no other file has.
        columns, eval_columns: further columns of rows of sft and rl, and of eval, in JSON.
        rows: "turns", what a policy with `rollout.context: last` reads, a row each; or "episodes".
        chunk: actions of a row; what is missing at an episode's end repeats the last one, is
            counted as `padded`, and, but for FAST's tokens, not learned.
        most_steps: of an episode.
        fast: at most so many pieces of FAST's code of the chunks, in fast.json; 0: none.
        fast_scale: what FAST's coefficients are multiplied by before they are rounded.
        lerobot: write the episodes as a LeRobot dataset as well, in a folder lerobot.
    """

    environment: str = "raster-world"
    options: str = "{}"
    prompt: str = "Begin."
    episodes: int = 1000
    eval_rows: int = 200
    columns: str = "{}"
    eval_columns: str = "{}"
    rows: str = "turns"
    chunk: int = 1
    most_steps: int = 1000
    fast: int = 0
    fast_scale: float = SCALE
    lerobot: bool = False

    def make(self, seed: int, limit: int | None) -> Made:
        """Play the episodes.

        Args:
            seed: of where every episode begins.
            limit: at most so many episodes, and rows of eval; None: as the fields say.

        Returns:
            Rows of sft, rl and eval, the episodes, and statistics of their actions where these are
            numbers.

        Raises:
            DataError: a wrong option, an environment without an expert, or one that never succeeds.
        """
        if self.rows not in ROWS or self.chunk < 1 or self.episodes < 1:
            found = f"rows={self.rows}, chunk={self.chunk}, episodes={self.episodes}"
            rule = f"rows is {' or '.join(ROWS)}, chunk and episodes are at least 1"
            raise DataError(f"demonstrations: {rule}, got {found}")
        count = self.episodes if limit is None else min(limit, self.episodes)
        held_out = self.eval_rows if limit is None else min(limit, self.eval_rows)
        kept: list[Demonstration] = []
        made: Json = None
        for number in range(count):
            made = self._ready(made)
            done = self.play(made, stable_seed("demonstration", seed, number) % 2**31)
            if succeeded(done.last):
                kept.append(done)
        _close(made)
        if not kept:
            raise DataError(f"{self.environment}: none of {count} episodes of its expert succeeded")
        rows = [row for done in kept for row in self._rows(done)]
        own = self._json("columns")
        evaluated: Rows = []
        for number in range(held_out):
            begins = stable_seed("demonstration eval", seed, number) % 2**31
            evaluated.append({"prompt": self.prompt, "seed": begins, **self._json("eval_columns")})
        files = {"sft": rows, "rl": [{"prompt": self.prompt, **own}], "eval": evaluated}
        actions = [seen.action for done in kept for seen in done.steps]
        facts: JsonObject = {
            "expert_episodes": count,
            "expert_failed": count - len(kept),
            "expert_steps": len(actions),
            "padded_actions": padded_in(rows),
        }
        told = None if isinstance(actions[0], str) else {"action": statistics(actions)}
        code = pieces_of(rows, told, pieces=self.fast, scale=self.fast_scale)
        return Made(files, facts, told, kept, code)

    def play(self, made: Json, seed: int) -> Demonstration:
        """One episode of the expert.

        Args:
            made: an instance of the environment.
            seed: of the episode.
        """
        messages = ({"role": "user", "content": self.prompt},)
        prompt = Prompt(
            uid="demonstration", messages=messages, token_ids=(), metadata=self._json("columns")
        )
        opening = as_messages(made.reset(prompt, seed), "reset")
        read: Sequence[Message] = opening
        steps: list[ExpertStep] = []
        while True:
            state = made.robot_state() if hasattr(made, "robot_state") else None
            action = made.expert()
            if not isinstance(action, str):
                action = [float(number) for number in action]
            step = as_step(made.act([action]))
            steps.append(ExpertStep(read, action, step.reward, state))
            if step.terminated or step.truncated or len(steps) >= self.most_steps:
                return Demonstration(seed, steps, step)
            answer: Json = step.messages
            read = [*system_part(opening), *answer] if self.rows == "turns" else answer

    def _ready(self, used: Json) -> Json:
        """An instance for the next episode: the one of the last, if it may be used again.

        Raises:
            DataError: the environment has no expert.
        """
        if getattr(used, "reusable", False):
            return used
        # Two simulators of one process may be in each other's way.
        _close(used)
        make = find_environment(self.environment)
        if not hasattr(make, "expert"):
            raise DataError(f"{self.environment} has no method expert() that says what to do")
        return make(**self._json("options"))

    def _rows(self, done: Demonstration) -> Rows:
        actions = [seen.action for seen in done.steps]
        if self.rows == "turns":
            return [
                {"messages": list(seen.messages), **chunk_at(actions, at, self.chunk)}
                for at, seen in enumerate(done.steps)
            ]
        messages: JsonArray = []
        for at in range(0, len(actions), self.chunk):
            messages += done.steps[at].messages
            messages.append({"role": "assistant", **chunk_at(actions, at, self.chunk)})
        return [{"messages": messages}]

    def _json(self, name: str) -> JsonObject:
        text = getattr(self, name)
        try:
            found = json.loads(text)
        except ValueError as error:
            raise DataError(f"option {name}={text!r} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f"option {name}={text!r} must be a JSON object")
        return found


def _close(made: Json) -> None:
    if hasattr(made, "close"):
        made.close()


def succeeded(last: Step) -> bool:
    """True if an episode reached its goal.

    Args:
        last: the last step of the episode; without `success`, a reward above 0 counts as one.
    """
    return last.reward > 0 if last.success is None else last.success


def pieces_of(
    rows: Sequence[Fields], told: Fields | None, *, pieces: int, scale: float
) -> FastCode | None:
    """The pieces of FAST of the chunks of rows to imitate.

    Args:
        rows: with `messages`; they, or the row itself, have `actions`.
        told: statistics of the actions; None: they are names.
        pieces: at most so many; 0: none are made.
        scale: of the coefficients.

    Returns:
        The code; None where none is asked for.

    Raises:
        DataError: actions are names, or there are too few pieces.
    """
    if not pieces:
        return None
    if told is None or scale <= 0:
        found = "these are names" if told is None else f"fast_scale is {scale:g}"
        raise DataError(f"fast: pieces are of actions that are numbers, scaled above 0; {found}")
    import numpy as np

    own = told["action"]
    head = ActionHead(token_ids=(), low=tuple(own["q01"]), high=tuple(own["q99"]))
    chunks: JsonArray = []
    for row in rows:
        parts = (row, *row["messages"])
        chunks += [part["actions"] for part in parts if "actions" in part]
    tables = [2.0 * np.asarray([head.shares(one) for one in chunk]) - 1.0 for chunk in chunks]
    return fit(tables, pieces=pieces, scale=scale)
