"""Whose reward a function is, told by the names of its parameters alone, and how it is called.

Names are all there is to go by, and every library has its own order: `(prompt, completion)` here,
`(completions, prompts)` there. So nothing is ever passed by position to a parameter whose name does
not say what it takes. These are taken:

    (prompt, completion)             oxRL's, of one sample; in any order
    (prompt, completions)            oxRL's, of all completions of a prompt; in any order
    (data_source, solution_str,      verl's, of one sample; any of them
     ground_truth, extra_info)
    (data_sources, solution_strs,    verl's, of a batch: here the completions of one prompt
     ground_truths, extra_infos)
    (completions, prompts,           TRL's; columns of the dataset by name, a list each
     completion_ids, ...columns)

Source: verl, verl/workers/reward_manager/naive.py and batch.py and docs/preparation
(verl-project/verl); TRL, docs/source/grpo_trainer.md and trl/trainer/grpo_trainer.py
(huggingface/trl): every argument is passed by keyword there too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from oxrl.errors import RewardDefinitionError
from oxrl.types import Completions, Names, Prompt, Score, Values
from oxrl.usercode.signature import Signature, signature_of
from oxrl.usercode.user_code import awaited

# What a user writes, and what oxRL calls: with a prompt and one text, or a group's completions.
RewardFunction = Callable[..., Any]

OWN = ("completion", "completions")
VERL: Names = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_BATCH: Names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL = ("completions", "completion_ids", "completions_ids")
RESERVED = ("prompt", "completion", *TRL)
# What TRL's trainer passes, and no other trainer has.
TRL_ONLY = ("trainer_state", "log_extra", "log_metric", "environments")
WANTED = (
    "write def score(prompt, completion) -> float (prompt.answer is the ground truth), or "
    "def score(prompt, completions) -> list of floats for all completions of a prompt; verl's "
    "(data_source, solution_str, ground_truth, extra_info=None) and TRL's "
    "(completions, prompts=None, **kwargs) are taken as they are"
)


@dataclass(frozen=True)
class Form:
    """The way in which oxRL calls a user's function.

    call: takes the prompt, then one text (`per_sample`) or the completions of a group.
    columns: fields of the data that the function cannot do without.
    """

    call: RewardFunction
    per_sample: bool
    columns: Names = ()


def scores_of_verl(value: object) -> object:
    """Turn what a function written for verl returned into what oxRL reads.

    Args:
        value: a number, a mapping with the number under "score" and others that are only recorded,
            or a list of either.

    Returns:
        A `Score` in place of every such mapping; anything else as it is, to be judged by who asked.
    """
    if isinstance(value, Mapping) and "score" in value:
        numbers = {
            str(name): float(part)
            for name, part in value.items()
            if name != "score" and isinstance(part, int | float)
        }
        return Score(value=value["score"], parts=numbers)
    if isinstance(value, list):
        return [scores_of_verl(item) for item in value]
    return value


def form_of(name: str, function: object) -> Form:
    """Tell what a function's parameters mean.

    Args:
        name: `reward.name`, for messages.
        function: the user's.

    Returns:
        How to call it.

    Raises:
        RewardDefinitionError: it is no function, or its parameters have names that say nothing
            certain; says what to write instead.
    """
    if inspect.isclass(function) or not callable(function):
        kind = type(function).__name__
        raise RewardDefinitionError(f"reward.name={name}: {kind} is not a function; {WANTED}")
    try:
        taken = signature_of(function)
    except ValueError as error:
        raise RewardDefinitionError(f"reward.name={name}: {error}; {WANTED}") from error
    form = _known_form(function, taken)
    # Oddly written, and never needed: what cannot be passed by its name.
    if form is None or taken.place_only:
        code = getattr(inspect.unwrap(function), "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        signature = inspect.signature(function)
        problem = f"has the signature {signature}; parameters are bound by their names"
        missing = taken.needs_beside(("prompt", *OWN))
        if taken.has("prompt") and any(taken.has(own) for own in OWN) and missing:
            problem = (
                f"has the signature {signature}; oxRL passes no {', '.join(missing)}: the ground "
                "truth is prompt.answer, other fields of the row are in prompt.metadata"
            )
        raise RewardDefinitionError(f"reward.name={name}{where} {problem}; {WANTED}")
    return form


def _known_form(function: RewardFunction, taken: Signature) -> Form | None:
    if taken.has("prompt"):
        return _own(function, taken)
    if taken.has("solution_str") and not taken.needs_beside(VERL):
        return _verl(function, taken, per_sample=True)
    if taken.has("solution_strs") and not taken.needs_beside(VERL_BATCH):
        return _verl(function, taken, per_sample=False)
    if any(taken.has(name) for name in TRL) and not any(
        name in TRL_ONLY for name in taken.needs_beside(())
    ):
        return _trl(function, taken)
    return None


def _own(function: RewardFunction, taken: Signature) -> Form | None:
    found = [name for name in OWN if taken.has(name)]
    if len(found) != 1 or taken.needs_beside(("prompt", *found)):
        return None

    def call(prompt: Prompt, given: str | Completions) -> object:
        return function(**taken.taken_of({"prompt": prompt, found[0]: given}))

    return Form(call, per_sample=found == ["completion"])


def _verl(function: RewardFunction, taken: Signature, *, per_sample: bool) -> Form:
    """The form of a function written for verl: of one sample, or of a batch, here of a group."""

    def call(prompt: Prompt, given: Any) -> object:
        fields = prompt.metadata
        source = prompt.source or fields.get("data_source", "")
        extra = fields.get("extra_info", dict(fields))
        texts = [given] if per_sample else [completion.text for completion in given]
        rows = [(source, text, prompt.answer, extra) for text in texts]
        values: Values = dict(zip(VERL, rows[0], strict=True))
        if not per_sample:
            values = dict(zip(VERL_BATCH, map(list, zip(*rows, strict=True)), strict=True))
        return scores_of_verl(awaited(function(**taken.taken_of(values))))

    return Form(call, per_sample=per_sample)


def _trl(function: RewardFunction, taken: Signature) -> Form:
    def call(prompt: Prompt, completions: Completions) -> object:
        count = len(completions)
        texts = [completion.text for completion in completions]
        ids = [list(completion.token_ids) for completion in completions]
        # Columns: a field of the data goes before what is known of the row, and none before what
        # completions are passed by.
        known = {"answer": prompt.answer, "source": prompt.source, "uid": prompt.uid}
        fields = known | dict(prompt.metadata)
        values: Values = {name: [fields[name]] * count for name in fields if name not in RESERVED}
        if prompt.plain:
            values["prompts"] = [prompt.question] * count
            values["completions"] = texts
        else:
            values["prompts"] = [[dict(message) for message in prompt.messages]] * count
            values["completions"] = [[{"role": "assistant", "content": text}] for text in texts]
        values["completion_ids"] = ids
        values["completions_ids"] = ids
        return function(**taken.taken_of(values))

    columns = taken.needs_beside(("prompts", *TRL))
    return Form(call, per_sample=False, columns=columns)
