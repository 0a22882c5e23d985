"""`environment.name: gymnasium`: environments with discrete actions or text, as conversations.

    environment:
      name: gymnasium
      options: {id: FrozenLake-v1, settings: {is_slippery: false}}

The policy reads what the environment shows and answers with an action: its name or its number, of
which the last one in a turn counts.

Source: Gymnasium's documentation of `Env`, of its spaces and of the toy text environments.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import EnumMeta
from typing import Any

from oxrl.environments import Message, Step
from oxrl.environments.adapting import MOST_OBSERVATION, need, seed_of, with_text
from oxrl.types import Named, Names, Prompt
from oxrl.usercode.user_code import capped

# What numbers mean, where environments do not say it themselves.
ACTIONS: Mapping[str, Names] = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
VIEWS = ("auto", "ansi", "grid", "values")
# Colors of a terminal: a background marks where the player is.
_MARKED = re.compile(r"\x1b\[4\d(?:;\d+)*m(.*?)\x1b\[0m")
_COLORED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m")


class GymnasiumEnvironment:
    """One episode of a registered environment.

    Args:
        id: as `gymnasium.make` takes it; "module:id" imports a module first.
        settings: further arguments of `gymnasium.make`.
        actions: names of the actions 0, 1, ...; None: those that the environment has.
        view: "ansi", what it renders; "grid", MiniGrid's whole grid; "values", the observation;
            "auto": the first of these that there is, text observations as they are.
        show_actions: say in the opening which actions there are.
        end_on_no_action: end the episode at a turn without an action, rather than ask again.
        no_action_reward: of such a turn.

    Raises:
        ValueError: a wrong option, or actions that are no text; says what to write.
    """

    def __init__(
        self,
        id: str = "",
        settings: Named | None = None,
        actions: Sequence[str] | None = None,
        view: str = "auto",
        show_actions: bool = True,
        end_on_no_action: bool = False,
        no_action_reward: float = 0.0,
    ) -> None:
        if not id:
            raise ValueError("environment.options.id is missing, such as id: FrozenLake-v1")
        if view not in VIEWS:
            raise ValueError(f"environment.options.view must be one of {', '.join(VIEWS)}: {view}")
        self._made = make(id, settings or {})
        self._view = view
        self._ends = end_on_no_action
        self._no_action_reward = no_action_reward
        space = self._made.action_space
        kind = type(space).__name__
        if kind not in ("Discrete", "Text"):
            raise ValueError(
                f"the actions of {id} are {space}; only Discrete and Text can be written as text"
            )
        self._free = kind == "Text"
        self._numbers = range(0) if self._free else numbers_of(space)
        self._names = self._named(actions)
        choices = ", ".join(self._names or map(str, self._numbers))
        self._choices = "a text that it allows" if self._free else choices
        self._show_actions = show_actions and not self._free

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Import the library and make the environment once.

        Args:
            options: of the class.

        Raises:
            MissingExtraError: gymnasium is not installed.
            ValueError: a wrong option.
        """
        cls(**options).close()

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """The row's messages, and behind them what the environment shows.

        Args:
            prompt: the row; its column `seed` goes before `seed`.
            seed: of the episode.
        """
        observation, _ = self._made.reset(seed=seed_of(prompt, seed))
        text = self._shown(observation)
        if self._show_actions:
            text = f"{text}\nActions: {self._choices}"
        return with_text(prompt.messages, text, between="\n")

    def step(self, text: str) -> Step:
        """Do what the turn says, and show what came of it.

        Args:
            text: of the turn; the last name or number of an action in it counts.

        Returns:
            What the environment shows, and its reward; where there is no action in the turn, a word
            about that, and the game is as it was.
        """
        action = text.strip() if self._free else self._chosen(text)
        if action is None or not self._made.action_space.contains(action):
            problem = f"There is no action in that. Answer with one of: {self._choices}"
            reason = "parse_error" if self._ends else "no action"
            return Step(problem, self._no_action_reward, terminated=self._ends, reason=reason)
        observation, reward, terminated, truncated, _ = self._made.step(action)
        return Step(self._shown(observation), float(reward), bool(terminated), bool(truncated))

    def close(self) -> None:
        """End the environment."""
        self._made.close()

    def _named(self, given: Sequence[str] | None) -> Names:
        """Names of the actions; empty where they have none."""
        count = len(self._numbers)
        names = tuple(given or ()) or action_names(self._made)
        if len(names) == count:
            return tuple(name.lower() for name in names)
        if given:
            raise ValueError(
                f"environment.options.actions has {len(names)} names, and there are {count} actions"
            )
        return ()

    def _chosen(self, text: str) -> int | None:
        """The last action that a text names."""
        known = dict(zip(self._names, self._numbers, strict=False))
        known |= {str(number): number for number in self._numbers}
        longest_first = sorted(known, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first))
        found = re.findall(rf"(?<![\w-])(?:{pattern})(?!\w)", text.lower())
        return known[found[-1]] if found else None

    def _shown(self, observation: object) -> str:
        inner = self._made.unwrapped
        auto = self._view == "auto"
        if isinstance(observation, str):
            text = observation
        elif self._view == "ansi" or (auto and self._made.render_mode == "ansi"):
            text = uncolored(str(self._made.render())).strip("\n")
        elif self._view == "grid" or (auto and hasattr(inner, "pprint_grid")):
            text = f"{inner.mission}\n{inner.pprint_grid()}"
        else:
            text = json.dumps(plain(observation), default=str)
        return capped(text, MOST_OBSERVATION)


def numbers_of(space: Any) -> range:
    """The numbers of discrete actions.

    Args:
        space: of the actions, Discrete.
    """
    start = int(space.start)
    return range(start, start + int(space.n))


def action_names(made: Any) -> Names:
    """Names of an environment's own actions; empty where they have none.

    Args:
        made: the environment, made.

    Returns:
        In the order of their numbers.
    """
    own = getattr(made.unwrapped, "actions", None)
    if isinstance(own, EnumMeta):
        return tuple(own.__members__)
    short = re.split(r"[-\d]", made.spec.id.rpartition("/")[2])[0]
    return ACTIONS.get(short, ())


def make(id: str, settings: Named) -> Any:
    """An environment that renders text where it can.

    Args:
        id: as `gymnasium.make` takes it; "module:id" imports the module first.
        settings: further arguments of `gymnasium.make`; its `render_mode` is "ansi" where nothing
            else is said.

    Returns:
        The environment, wrapped as Gymnasium does.

    Raises:
        MissingExtraError: gymnasium is not installed.
        ValueError: it has no such environment; says what it says.
    """
    gymnasium = need("gymnasium", "gymnasium")
    module, _, name = id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)  # it registers what it has
        if "ansi" in _render_modes(gymnasium, name):
            settings = {"render_mode": "ansi", **settings}
        return gymnasium.make(name, **settings)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ValueError(f"gymnasium.make({id!r}) raised {error}") from error


def _render_modes(gymnasium: Any, name: str) -> Sequence[str]:
    """List the ways in which an environment can be rendered, without making it."""
    entry = gymnasium.spec(name).entry_point
    if isinstance(entry, str):
        entry = gymnasium.envs.registration.load_env_creator(entry)
    known = getattr(entry, "metadata", None)
    # Of a wrapper's class it is a property, which only an instance answers.
    return known.get("render_modes", ()) if isinstance(known, Mapping) else ()


def uncolored(text: str) -> str:
    """Text without a terminal's colors: a background becomes [x], another color (x).

    Args:
        text: as a terminal would be sent it.
    """
    return _COLORED.sub(r"(\1)", _MARKED.sub(r"[\1]", text))


def plain(value: Any) -> Any:
    """An observation as JSON can hold it.

    Args:
        value: an array, a mapping, a sequence, or a single value.

    Returns:
        Lists and numbers of arrays, and mappings whose keys are texts; a single value as it is.
    """
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
