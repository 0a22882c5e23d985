"""What a reward is, and how one is found by name and checked before a run depends on it.

A reward is `reward(prompt, completions) -> list[Score]`, sync or async, over the completions of one prompt. Users need
not write that: `reward.name: my_reward.py:score` may also name a function of one sample,

    def score(prompt: Prompt, completion: str) -> float:      # prompt.answer is the ground truth
        return 1.0 if completion.strip() == prompt.answer else 0.0

Which of the two it is, is told by the name of the second parameter: `completions` gets the group, anything else one
text. A float, an int, a bool, a scalar tensor or a `Score` may be returned. A failure is never the number 0: an
exception becomes status "error", a value that is no finite number status "invalid", each with a reason.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, SupportsFloat

from oxrl.errors import RewardError
from oxrl.rewards.exact import exact_reward
from oxrl.rewards.math import math_reward
from oxrl.rewards.procedural import reasoning_gym_reward
from oxrl.types import Completion, Prompt, Score, Segment


class Reward(Protocol):
    def __call__(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...


BUILTINS: dict[str, Callable[[Prompt, str], Score | float]] = {
    "math": lambda prompt, text: math_reward(text, prompt.answer),
    "exact": lambda prompt, text: exact_reward(text, prompt.answer),
    "reasoning-gym": reasoning_gym_reward,
}
# Linear-time comparisons that cannot hang: they run in the caller's process. Everything else gets a worker.
INLINE = frozenset({"exact"})

_DRY_PROMPT = Prompt(
    uid="dry-call", messages=({"role": "user", "content": "What is 1 + 1?"},), token_ids=(1, 2), answer="2"
)
_DRY_COMPLETION = Completion(
    segments=(Segment(token_ids=(3,), logprobs=(0.0,), versions=(0,)),), text="2", finish_reason="stop"
)


@dataclass(frozen=True)
class LoadedReward:
    """A reward function behind the Reward interface: always a list of scores, never an exception."""

    name: str
    function: Callable[[Prompt, Any], Any]
    per_sample: bool

    def __call__(self, prompt: Prompt, completions: Sequence[Completion], first: int = 0) -> list[Score]:
        """Score completions of one prompt; `first` is the group index of the first of them, for the reasons."""
        if self.per_sample:
            return [self._score_one(prompt, c, f"sample {first + i}") for i, c in enumerate(completions)]
        where = f"samples {first} to {first + len(completions) - 1}"
        try:
            values = self.call(prompt, completions)
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is this group's result
            return [self._failed(prompt, where, error)] * len(completions)
        if problem := _not_scores(values, len(completions)):
            return [self._invalid(prompt, where, problem)] * len(completions)
        return [self._to_score(prompt, value, f"sample {first + i}") for i, value in enumerate(values)]

    def call(self, prompt: Prompt, argument: Any) -> Any:
        """What the user's function returns, awaited if it is async."""
        value = self.function(prompt, argument)
        return asyncio.run(_wait(value)) if inspect.isawaitable(value) else value

    def _score_one(self, prompt: Prompt, completion: Completion, where: str) -> Score:
        try:
            value = self.call(prompt, completion.text)
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is this sample's result
            return self._failed(prompt, where, error)
        return self._to_score(prompt, value, where)

    def _to_score(self, prompt: Prompt, value: Any, where: str) -> Score:
        score = value if isinstance(value, Score) else None
        if score is not None and score.value is None:
            return score
        number = score.value if score is not None else value
        if not isinstance(number, SupportsFloat):
            return self._invalid(prompt, where, f"returned {_show(number)}, need a number")
        try:
            number = float(number)
            parts = {key: float(part) for key, part in score.parts.items()} if score is not None else {}
        except Exception as error:  # noqa: BLE001 - the value's own __float__
            return self._invalid(prompt, where, f"returned {_show(value)}, which is no single number: {error}")
        if not math.isfinite(number):
            return self._invalid(prompt, where, f"returned {number}, need a finite number")
        return Score(value=number, parts=parts, reason=score.reason if score is not None else "")

    def _invalid(self, prompt: Prompt, where: str, problem: str) -> Score:
        return Score(value=None, status="invalid", reason=f"{self.name}, {where} of prompt {prompt.uid}: {problem}")

    def _failed(self, prompt: Prompt, where: str, error: Exception) -> Score:
        reason = f"{self.name}, {where} of prompt {prompt.uid}: raised {type(error).__name__}: {error}"
        return Score(value=None, status="error", reason=reason)


def load_reward(name: str) -> LoadedReward:
    """The reward called `name`, after a dry call on a made-up sample.

    The dry call fails on what can never work (a wrong signature or return type, an unknown name, a missing module or
    attribute of `Prompt`); other exceptions may be due to the made-up answer "2" and are left to the run.

    Args:
        name: a key of BUILTINS, or "path.py:function", the path relative to the working directory.

    Raises:
        RewardError: nothing loadable under that name, or the dry call failed; says what to change.
    """
    if name in BUILTINS:
        reward = LoadedReward(name, BUILTINS[name], per_sample=True)
        _dry_call(reward)
        return reward
    path, function_name = locate(name)
    module = _run_module(path, name)
    function = getattr(module, function_name, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(function_name, public, n=1)
        hint = f"; did you mean {close[0]!r}" if close else f"; it has {', '.join(public) or 'no function'}"
        raise RewardError(f"reward.name={name}: {path} has no {function_name!r}{hint}")
    reward = LoadedReward(name, function, per_sample=_takes_one_sample(name, function))
    _dry_call(reward)
    return reward


def locate(name: str) -> tuple[Path, str]:
    """Split "path.py:function" without running anything.

    Raises:
        RewardError: not a built-in name nor of that form, or there is no such file.
    """
    file, separator, function_name = name.rpartition(":")
    if not separator or not file.endswith(".py") or not function_name.isidentifier():
        close = difflib.get_close_matches(name, BUILTINS, n=1)
        hint = f"; did you mean {close[0]!r}" if close else ""
        raise RewardError(
            f"reward.name={name}: not a reward; use {', '.join(BUILTINS)} or path.py:function, such as "
            f"my_reward.py:score{hint}"
        )
    path = Path(file)
    if not path.is_file():
        raise RewardError(f"reward.name={name}: there is no file {str(path)!r} under {Path.cwd()}")
    return path.resolve(), function_name


def _run_module(path: Path, name: str) -> ModuleType:
    module_name = f"oxrl_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in user code look themselves up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: a file beside it must not replace a library
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"reward.name={name}: running {path} raised {type(error).__name__}: {error}") from error
    return module


def _takes_one_sample(name: str, function: Any) -> bool:
    wanted = "need (prompt, completion) -> float, or (prompt, completions) -> list of Score"
    if inspect.isclass(function) or not callable(function):
        raise RewardError(f"reward.name={name}: {type(function).__name__} is not a function; {wanted}")
    signature = inspect.signature(function)
    try:
        signature.bind(_DRY_PROMPT, _DRY_COMPLETION.text)
    except TypeError as error:
        raise RewardError(f"reward.name={name} has the signature {signature}: {error}; {wanted}") from error
    parameters = list(signature.parameters.values())
    return len(parameters) < 2 or parameters[1].name != "completions"


def _dry_call(reward: LoadedReward) -> None:
    argument = _DRY_COMPLETION.text if reward.per_sample else [_DRY_COMPLETION]
    try:
        value = reward.call(_DRY_PROMPT, argument)
    except (NameError, ImportError, AttributeError) as error:
        # A missing attribute counts against the function only if it is missing from what oxRL passes.
        if isinstance(error, AttributeError) and not isinstance(error.obj, Prompt | Completion | str):
            return
        raise RewardError(
            f"reward.name={reward.name}: a dry call with prompt.answer='2' and completion '2' raised "
            f"{type(error).__name__}: {error}"
        ) from error
    except Exception:  # noqa: BLE001 - due to the made-up data perhaps; real samples count their own errors
        return
    if reward.per_sample:
        problem = "" if isinstance(value, Score | SupportsFloat) else f"returned {_show(value)}, need a number"
    else:
        problem = _not_scores(value, 1)
    if problem:
        raise RewardError(f"reward.name={reward.name}: a dry call with prompt.answer='2' and completion '2' {problem}")


def _not_scores(values: Any, count: int) -> str:
    """Why `values` is no list of `count` scores; empty if it is one."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        return f"returned {_show(values)}, need a list of {count} Score or numbers, one per completion"
    if len(values) != count:
        return f"returned {len(values)} scores for {count} completions"
    return ""


def _show(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"


async def _wait(value: Awaitable[Any]) -> Any:
    return await value
