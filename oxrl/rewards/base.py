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
import dataclasses
import difflib
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, SupportsFloat

from oxrl.errors import RewardError
from oxrl.rewards.exact import exact_reward
from oxrl.rewards.math import math_reward
from oxrl.rewards.procedural import reasoning_gym_reward
from oxrl.types import Completion, Prompt, Score, ScoreStatus, Segment


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


@dataclasses.dataclass(frozen=True)
class LoadedReward:
    """A reward function behind the Reward interface: always a list of scores, never an exception."""

    name: str
    function: Callable[[Prompt, Any], Any]
    per_sample: bool

    def __call__(self, prompt: Prompt, completions: Sequence[Completion], first: int = 0) -> list[Score]:
        """Score completions of one prompt; `first` is the group index of the first of them, for the reasons."""
        if not self.per_sample:
            return self._scores(prompt, completions, first, len(completions))
        return [self._scores(prompt, c.text, first + i, 1)[0] for i, c in enumerate(completions)]

    def call(self, prompt: Prompt, argument: Any) -> Any:
        """What the user's function returns, awaited if it is async; a list if it is given the group."""
        value = self.function(prompt, argument)
        return asyncio.run(_wait(value)) if inspect.isawaitable(value) else value

    def problem(self, value: Any, count: int) -> str:
        """Why `value` is not what the function must return for `count` completions; empty if it is."""
        if self.per_sample:
            return "" if isinstance(value, Score | SupportsFloat) else f"returned {_show(value)}, need a number"
        if isinstance(value, str) or not isinstance(value, Sequence):
            return f"returned {_show(value)}, need a list of {count} Score or numbers, one per completion"
        return f"returned {len(value)} scores for {count} completions" if len(value) != count else ""

    def _scores(self, prompt: Prompt, argument: Any, first: int, count: int) -> list[Score]:
        def failed(status: ScoreStatus, where: str, problem: str) -> Score:
            return Score(value=None, status=status, reason=f"{self.name}, {where} of prompt {prompt.uid}: {problem}")

        try:
            values = self.call(prompt, argument)
        except Exception as error:  # noqa: BLE001 - user code: whatever it raises is the result of these samples
            return [failed("error", which(first, count), f"raised {type(error).__name__}: {error}")] * count
        if problem := self.problem(values, count):
            return [failed("invalid", which(first, count), problem)] * count
        scores: list[Score] = []
        for index, value in enumerate([values] if self.per_sample else values, start=first):
            try:
                scores.append(_to_score(value))
            except Exception as error:  # noqa: BLE001 - the value's own __float__ may raise anything
                scores.append(failed("invalid", which(index, 1), f"returned {error}"))
        return scores


def which(first: int, count: int) -> str:
    """How reasons name `count` samples of a group from `first` on."""
    return f"sample {first}" if count == 1 else f"samples {first} to {first + count - 1}"


def _to_score(value: Any) -> Score:
    score, given = (value, value.value) if isinstance(value, Score) else (Score(value=0.0), value)
    if score.value is None:
        return score
    if not isinstance(given, SupportsFloat):
        raise TypeError(f"{_show(given)}, need a number")
    try:
        number, parts = float(given), {key: float(part) for key, part in score.parts.items()}
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: tensors of several numbers
        raise TypeError(f"{_show(value)}, which is no single number: {error}") from error
    if not math.isfinite(number):
        raise ValueError(f"{number}, need a finite number")
    return dataclasses.replace(score, value=number, parts=parts)


def load_reward(name: str) -> LoadedReward:
    """A key of BUILTINS, "path.py:function" or a reward model's folder, after a dry call on a made-up sample.

    The dry call fails on what can never work (a wrong signature or return type, an unknown name, a missing module or
    attribute of `Prompt`); other exceptions may be due to the made-up answer "2" and are left to the run.

    Raises:
        RewardError: nothing loadable under that name, or the dry call failed; says what to change.
    """
    if name in BUILTINS:
        return _dry_called(LoadedReward(name, BUILTINS[name], per_sample=True))
    path, function_name = locate(name)
    if path.is_dir():
        from oxrl.rewards.reward_model import scorer  # torch, which other rewards do without

        return _dry_called(LoadedReward(name, scorer(path), per_sample=False))
    module = _run_module(path, name)
    function = getattr(module, function_name, None)
    if function is None:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(function_name, public, n=1)
        hint = f"; did you mean {close[0]!r}" if close else f"; it has {', '.join(public) or 'no function'}"
        raise RewardError(f"reward.name={name}: {path} has no {function_name!r}{hint}")
    return _dry_called(LoadedReward(name, function, per_sample=_takes_one_sample(name, function)))


def locate(name: str) -> tuple[Path, str]:
    """Split "path.py:function" without running anything; a reward model's folder comes back with no function.

    Raises:
        RewardError: not a built-in name nor of that form, or there is no such file.
    """
    if (Path(name) / "value_head.safetensors").is_file():
        return Path(name).resolve(), ""
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


def _dry_called(reward: LoadedReward) -> LoadedReward:
    called = f"reward.name={reward.name}: a dry call with prompt.answer='2' and completion '2'"
    try:
        value = reward.call(_DRY_PROMPT, _DRY_COMPLETION.text if reward.per_sample else [_DRY_COMPLETION])
    except Exception as error:
        # A missing attribute counts against the function only if it is missing from what oxRL passes.
        ours = isinstance(error, AttributeError) and isinstance(error.obj, Prompt | Completion | str)
        if ours or isinstance(error, NameError | ImportError):
            raise RewardError(f"{called} raised {type(error).__name__}: {error}") from error
        return reward
    if problem := reward.problem(value, 1):
        raise RewardError(f"{called} {problem}")
    return reward


def _show(value: Any) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"


async def _wait(value: Awaitable[Any]) -> Any:
    return await value
