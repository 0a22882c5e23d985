"""The interface of environments: messages in, text out, reward, done.

    class Guess:
        def reset(self, prompt, seed):                # prompt: oxrl.types.Prompt, one row of data
            self.secret = random.Random(seed).randint(1, 9)
            return "Guess my number."                 # a text is one message of the user's

        def step(self, text):                         # what the policy wrote in this turn
            if text.strip() == str(self.secret):
                return Step("Right.", reward=1.0, terminated=True)
            return Step("Wrong, guess again.")

A plain class with these two methods is enough. Every episode has an instance of its own, in a
process of its own. `seed` is the same for all samples of a prompt, so that a group starts alike;
whatever else an environment draws from has to follow from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from oxrl.types import Prompt

Message = Mapping[str, Any]
# A text stands for one message of the user's.
Messages = str | Sequence[Message]
Function = TypeVar("Function", bound=Callable[..., object])
MARK = "_oxrl_tool"
# Public methods that are for the run, not for the policy.
NO_TOOLS = ("reset", "close", "get_reward")


class ToolUnavailable(Exception):
    """A tool lacks something that it needs, by no fault of the policy's: the episode has no score.

    Other exceptions of a tool are told to the policy as text.
    """


@dataclass(frozen=True)
class Step:
    """The answer of an environment to a turn.

    messages: what the policy reads next; of the last step it reads nothing any more. Where the
        model reads images, contents may be lists of parts: `oxrl.usercode.environment_answers`.
    reward: of this turn; the rewards of an episode are added up.
    terminated: the task is over, well or badly.
    truncated: the environment stops although the task goes on, for example after too many moves.
    reason: why it ended, for samples.jsonl.
    after: the turn, from 0, that the messages answer: None is the last one, an earlier one has all
        after it forgotten, and -1 is none: then they are a whole conversation.
    executed: of a turn of several actions, how many were done: None is all, and what comes behind
        them is not trained on.
    success: whether the task is done, where that is something else than its end; counted in
        `episode/success`.
    """

    messages: Messages = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    reason: str = ""
    after: int | None = None
    executed: int | None = None
    success: bool | None = None


class Environment:
    """A base to inherit from, for who likes one.

    A method `close` is called at the end, if there is one. A method `worth_when_cut` is asked for a
    number where a limit of the run ends the episode with this turn, to be added to its reward. A
    class method `prepare`, which takes the options, is called once before the first episode, in the
    process that every episode is a copy of: the place for imports, an index or a model that all of
    them read, and for a word about what is missing. A class attribute `reusable = True` promises
    that `reset` forgets all that was before: then processes and instances serve one episode after
    the other, which saves what beginning them costs.
    """

    reusable = False

    def reset(self, prompt: Prompt, seed: int) -> Messages:
        """Begin an episode.

        Args:
            prompt: the row of data, with its answer and metadata.
            seed: of everything random, the same for all samples of the prompt.

        Returns:
            The conversation that the policy answers.
        """
        return list(prompt.messages)

    def step(self, text: str) -> Step:
        """Answer what the policy wrote in this turn.

        Where turns are actions (section `action` of a config), a method `act` is called instead, if
        there is one, with the actions of the turn: names, or lists of numbers. Without it, `text`
        is the names, or JSON.

        Args:
            text: of the turn, without the token that ended it.

        Returns:
            What the policy reads next, the reward of this turn, and whether that was the end.

        Raises:
            Exception: anything; the episode then has no score, and the run says so.
        """
        raise NotImplementedError


def tool(function: Function) -> Function:
    """Mark a method of a `ToolEnvironment` as a tool that the policy may call.

    Args:
        function: with types at its parameters; its docstring is what the policy reads of it.

    Returns:
        The same function.
    """
    setattr(function, MARK, True)
    return function


def is_tool(function: object) -> bool:
    """True if `tool` marked it.

    Args:
        function: a method, or anything else.
    """
    return bool(getattr(function, MARK, False))


def tool_names(made: type) -> list[str]:
    """Public methods that could be tools of an object without `step`.

    Args:
        made: the class.

    Returns:
        Names in alphabetical order; static methods are none.
    """
    found: list[str] = []
    for name, _ in inspect.getmembers(made, inspect.isroutine):
        if name.startswith("_") or name in NO_TOOLS:
            continue
        # What is called without the object is a helper rather than a tool.
        if not isinstance(inspect.getattr_static(made, name), staticmethod):
            found.append(name)
    return found
