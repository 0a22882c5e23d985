"""What a reward is, and how one is found by name and checked before a run depends on it.

A reward is `reward(prompt, completions) -> list[Score]`, sync or async, over the completions of one
prompt. Users need not write that: `reward.name: my_reward.py:score` may also name a function of one
sample,

    def score(prompt: Prompt, completion: str) -> float:      # prompt.answer is the ground truth
        return 1.0 if completion.strip() == prompt.answer else 0.0

Which of the two it is, is told by the name of the second parameter: `completions` gets the group,
anything else one text. A float, an int, a bool, a scalar tensor or a `Score` may be returned. A
failure is never the number 0: an exception becomes status "error", a value that is no finite number
status "invalid", each with a reason.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, SupportsFloat

from oxrl.errors import RewardError, did_you_mean, why_no_file
from oxrl.rewards.builtin import BUILTINS
from oxrl.types import Completion, Prompt, Score, ScoreStatus, Segment

# What a user writes: a function of the prompt and of one text or of a group's completions.
RewardFunction = Callable[[Prompt, Any], object]


class Reward(Protocol):
    """What every reward is to the rest of oxRL: scores for the completions of one prompt."""

    def __call__(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> Sequence[Score] | Awaitable[Sequence[Score]]: ...


_DRY_PROMPT = Prompt(
    uid="dry-call", messages=({"role": "user", "content": "1 + 1?"},), token_ids=(1, 2), answer="2"
)
_DRY_SEGMENT = Segment(token_ids=(3,), logprobs=(0.0,), versions=(0,))
_DRY_COMPLETION = Completion(segments=(_DRY_SEGMENT,), text="#### 2", finish_reason="stop")


@dataclasses.dataclass(frozen=True)
class LoadedReward:
    """A reward function behind the Reward interface: a list of scores, never an exception."""

    name: str
    function: RewardFunction
    per_sample: bool

    def __call__(
        self, prompt: Prompt, completions: Sequence[Completion], first: int = 0
    ) -> list[Score]:
        """Score completions of one prompt.

        Args:
            prompt: what was asked, with the ground truth.
            completions: a group, or a part of one.
            first: index in its group of the first of `completions`, for the reasons.

        Returns:
            One score per completion, in order.
        """
        if not self.per_sample:
            return self._scores(prompt, completions, first, len(completions))
        scores: list[Score] = []
        for index, completion in enumerate(completions, start=first):
            scores += self._scores(prompt, completion.text, index, 1)
        return scores

    def call(self, prompt: Prompt, given: str | Sequence[Completion]) -> object:
        """Call the user's function as it is written, with one text or with the group.

        Returns:
            What it returns, awaited if it is async.
        """
        value = self.function(prompt, given)
        if not inspect.isawaitable(value):
            return value
        import asyncio  # a third of this module's import time

        async def wait() -> object:
            return await value

        return asyncio.run(wait())

    def problem(self, value: object, count: int) -> str:
        """Say why `value` is not what the function must return for `count` completions.

        Returns:
            A reason that goes on after "the function ..."; empty if the value is fine.
        """
        if self.per_sample:
            fine = isinstance(value, Score | SupportsFloat)
            return "" if fine else f"returned {_show(value)}, need a number"
        if isinstance(value, str) or not isinstance(value, Sequence):
            needed = f"a list of {count} Score or numbers, one per completion"
            return f"returned {_show(value)}, need {needed}"
        if len(value) != count:
            return f"returned {len(value)} scores for {count} completions"
        return ""

    def _scores(
        self, prompt: Prompt, given: str | Sequence[Completion], first: int, count: int
    ) -> list[Score]:
        def failed(status: ScoreStatus, samples: str, problem: str) -> Score:
            reason = f"{self.name}, {samples} of prompt {prompt.uid}: {problem}"
            return Score(value=None, status=status, reason=reason)

        samples = sample_range(first, count)
        try:
            values: Any = self.call(prompt, given)
        except Exception as error:  # noqa: BLE001 - whatever user code raises is the result
            raised = f"raised {type(error).__name__}: {error}"
            return [failed("error", samples, raised)] * count
        problem = self.problem(values, count)
        if problem:
            return [failed("invalid", samples, problem)] * count
        if self.per_sample:
            values = [values]
        scores: list[Score] = []
        for index, value in enumerate(values, start=first):
            try:
                scores.append(_to_score(value))
            except ValueError as error:
                scores.append(failed("invalid", sample_range(index, 1), f"returned {error}"))
        return scores


def sample_range(first: int, count: int) -> str:
    """Name samples of a group, as reasons do.

    Args:
        first: index in the group of the first of them.
        count: how many.

    Returns:
        "sample 3" or "samples 3 to 5".
    """
    return f"sample {first}" if count == 1 else f"samples {first} to {first + count - 1}"


def _to_score(value: object) -> Score:
    score = value if isinstance(value, Score) else Score(value=0.0)
    given = score.value if score is value else value
    if score.value is None:
        return score
    if not isinstance(given, SupportsFloat):
        raise ValueError(f"{_show(given)}, need a number")
    try:
        number = float(given)
        parts = {name: float(part) for name, part in score.parts.items()}
    except Exception as error:  # any: `__float__` and `parts` are the user's, or a library's
        raise ValueError(f"{_show(value)}, which is no single number: {error}") from error
    if not math.isfinite(number):
        raise ValueError(f"{number}, need a finite number")
    return dataclasses.replace(score, value=number, parts=parts)


def load_reward(name: str) -> LoadedReward:
    """Find a reward and call it once on a made-up sample.

    That dry call fails on what can never work (a wrong signature or return type, an unknown name, a
    missing module or attribute of `Prompt`); other exceptions may be due to the made-up answer "2"
    and are left to the run.

    Args:
        name: a key of BUILTINS, "path.py:function" or a reward model's folder.

    Returns:
        The reward, ready to score.

    Raises:
        RewardError: nothing loadable under that name, or the dry call failed; says what to change.
    """
    if name in BUILTINS:
        return _dry_called(LoadedReward(name, BUILTINS[name], per_sample=True))
    path, function_name = locate(name)
    if path.is_dir():
        from oxrl.rewards.reward_model import scorer  # torch, which other rewards do without

        return _dry_called(LoadedReward(name, scorer(path), per_sample=False))
    function: Any = getattr(_run_module(path, name), function_name, None)
    return _dry_called(LoadedReward(name, function, per_sample=_takes_one_sample(name, function)))


def locate(name: str) -> tuple[Path, str]:
    """Say where a reward is, without running anything.

    Args:
        name: as of `load_reward`.

    Returns:
        The file or folder, and the function's name: empty of a built-in and of a reward model.

    Raises:
        RewardError: neither a built-in name nor of that form, or the file is not there, no Python,
            or surely without such a function.
    """
    if name in BUILTINS or (Path(name) / "value_head.safetensors").is_file():
        return Path(name).resolve(), ""
    file, separator, function = name.rpartition(":")
    path = Path(file)
    if not separator or path.suffix != ".py" or not function.isidentifier():
        forms = "path.py:function (such as my_reward.py:score) or a reward model's folder"
        problem = f"must be {', '.join(BUILTINS)}, {forms}{did_you_mean(name, BUILTINS)}"
    elif not path.is_file():
        problem = f"{file}: {why_no_file(path)}"
    else:
        problem = _why_no_function(path, function)
    if problem:
        raise RewardError(f"reward.name={name}: {problem}")
    return path.resolve(), function


def _why_no_function(path: Path, function: str) -> str:
    """Why the file at `path` does not define `function`; empty where it may."""
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else path
        return f"{where} is not Python: {error.args[0]}"
    # Names that are imported or assigned count too: only a name found nowhere is surely wrong.
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name)
            case _:
                pass
    if function in names or "*" in names:
        return ""
    hint = did_you_mean(function, names) or f"; it has {', '.join(sorted(names)) or 'nothing'}"
    return f"{path} defines no '{function}'{hint}"


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
        raised = f"running {path} raised {type(error).__name__}: {error}"
        raise RewardError(f"reward.name={name}: {raised}") from error
    return module


def _takes_one_sample(name: str, function: RewardFunction | None) -> bool:
    wanted = "need (prompt, completion) -> float, or (prompt, completions) -> list of Score"
    if inspect.isclass(function) or not callable(function):
        kind = type(function).__name__
        raise RewardError(f"reward.name={name}: {kind} is not a function; {wanted}")
    signature = inspect.signature(function)
    try:
        signature.bind(_DRY_PROMPT, _DRY_COMPLETION.text)
    except TypeError as error:
        problem = f"has the signature {signature}: {error}; {wanted}"
        raise RewardError(f"reward.name={name} {problem}") from error
    names = list(signature.parameters)
    return names[1:2] != ["completions"]  # there is no second one in (*arguments)


def _dry_called(reward: LoadedReward) -> LoadedReward:
    text = _DRY_COMPLETION.text
    called = f"reward.name={reward.name}: a dry call with prompt.answer='2' and completion {text!r}"
    try:
        value = reward.call(_DRY_PROMPT, text if reward.per_sample else [_DRY_COMPLETION])
    except Exception as error:  # any: it is the user's code
        if not _is_sure(error, text):
            return reward
        raise RewardError(f"{called} raised {type(error).__name__}: {error}") from error
    problem = reward.problem(value, 1)
    if problem:
        raise RewardError(f"{called} {problem}")
    return reward


def _is_sure(error: Exception, text: str) -> bool:
    """Whether a function that raised `error` in the dry call would raise it on every sample."""
    # A missing attribute counts only if it is missing from what oxRL always passes: the real
    # answers may be mappings, so `prompt.answer.get` may be right.
    if isinstance(error, AttributeError):
        return error.obj is text or isinstance(error.obj, Prompt | Completion)
    return isinstance(error, NameError | ImportError)


def _show(value: object) -> str:
    return f"{repr(value)[:80]} ({type(value).__name__})"
