"""The rows of a step behind another prompt, as the policy reads them when it teaches itself."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from oxrl.data.batching import to_token_batch
from oxrl.data.chat import UNWRITABLE, ChatEncoder
from oxrl.data.messages import read_tools
from oxrl.data.rows import Record
from oxrl.engines.train import Scorer
from oxrl.errors import ConfigError, DataError
from oxrl.recipes.features.base import Hint
from oxrl.types import (
    Output,
    Prompt,
    Rollout,
    RolloutBatch,
    Rollouts,
    Tensors,
    TokenBatch,
    TokenIds,
    Want,
)
from oxrl_teachers.templates import compiled, try_apart

# Where run.log hears of it.
log = logging.getLogger("oxrl.teachers")

PEER = "peer"
FEEDBACK = "feedback"
# Stand in for what only a step knows, where a template is tried.
KNOWN_IN_STEPS = (PEER, FEEDBACK)
# Rows of the data on which a template is tried.
TRIED = 8
# Tokens of a row, and which of them the policy sampled.
Laid = tuple[list[int], list[bool]]


def check_template(field: str, file: str, hint: Hint, prompts: Sequence[Prompt]) -> None:
    """Write a template for a few rows before a run.

    Args:
        field: that names it.
        file: it is in.
        hint: what is in it, and what it reads.
        prompts: of the data that it is for, some or all.

    Raises:
        ConfigError: it cannot be written, reads what it is not given or not what it is, or says
            what stands there already: the policy would teach itself nothing.
    """
    why = _why_unfit(hint, prompts)
    if why:
        raise ConfigError(f"{field}: {file} {why}")
    rows = list(islice(_filled(hint, prompts), TRIED))
    found = try_apart(hint.template, rows)
    names = set(found.names) - {"prompt"}
    unknown = sorted(names - set(hint.reads))
    unread = sorted(set(hint.reads) - names)
    if unknown:
        told = ", ".join(("prompt", *hint.reads))
        why = f"reads {', '.join(unknown)}, and is given {told}: name more in reads"
    elif found.error:
        why = f"cannot be written: {found.error}"
    elif unread:
        why = (
            f"does not read {', '.join(unread)}, and rows without would be left out for nothing: "
            "remove it from reads"
        )
    elif rows and list(found.texts) == [row["prompt"] for row in rows]:
        why = (
            "writes the prompt as it stands there already, and the policy would teach itself "
            "nothing: its divergence from itself is 0"
        )
    if why:
        raise ConfigError(f"{field}: {file} {why}")


def _why_unfit(hint: Hint, prompts: Sequence[Prompt]) -> str:
    """Say why rows cannot be given to a template; empty if they can."""
    if "prompt" in hint.reads or len(set(hint.reads)) < len(hint.reads):
        told = ", ".join(hint.reads)
        return f"is given prompt as every template is, and nothing twice; reads names {told}"
    for name in hint.reads:
        if prompts and not any(has_field(name, prompt) for prompt in prompts):
            return (
                f"reads {name}, and no row that was looked at has such a field. Where only some "
                "rows have one, give the others null"
            )
    for prompt in prompts:
        if prompt.images:
            return f"is for prompts of text alone, and row {prompt.uid} shows images"
    return ""


def _filled(hint: Hint, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
    """Yield what the template is given for each row that lacks nothing."""
    for prompt in prompts:
        given = {
            name: "..." if name in KNOWN_IN_STEPS else named_in_row(name, prompt)
            for name in hint.reads
        }
        if not any(map(is_missing, given.values())):
            yield {"prompt": prompt.question, **given}


class HintedRows:
    """The samples of a step, behind prompts that a template writes.

    Args:
        name: of the teacher.
        hint: the template, and what it reads.
        tokenizer: of the policy.
    """

    def __init__(self, name: str, hint: Hint, tokenizer: PreTrainedTokenizerBase) -> None:
        self._field = f"model.teachers.{name}.prompt"
        self._template = compiled(hint.template)
        self._reads = hint.reads
        self._longest = hint.longest
        self._encoder = ChatEncoder(tokenizer)
        self._pad_id = int(tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        self._rollouts: Rollouts = []
        # By group, those that got full marks; what was encoded in this step already.
        self._right: Mapping[int, Rollouts] = {}
        self._written: dict[tuple[int, str], TokenIds] = {}
        self._told = False

    def take(self, rollouts: Rollouts) -> None:
        """Keep the samples of a step.

        Args:
            rollouts: all of them, scored where there is a reward.
        """
        self._rollouts = rollouts
        right: dict[int, list[Rollout]] = defaultdict(list)
        for rollout in rollouts:
            value = rollout.score.value
            if value is not None and value >= 1:
                right[rollout.group_id].append(rollout)
        self._right = right
        self._written = {}

    def ask(
        self, scorer: Scorer, places: list[int], batch: RolloutBatch, want: Want
    ) -> tuple[Output, Tensor]:
        """Show rows behind their other prompts, and move what is said to where their tokens are.

        Args:
            scorer: who teaches.
            places: of N rows, among the samples of the step.
            batch: the rows themselves.
            want: what is asked.

        Returns:
            [N, T], [N, T, K], NaN and id -1 in rows that have no other prompt; and which have one,
            [N] bool.

        Raises:
            DataError: a prompt cannot be written, or not as the policy read its own.
        """
        laid = [self.laid_behind(self._rollouts[place]) for place in places]
        shown = [row for row in laid if row is not None]
        has_one = torch.tensor([row is not None for row in laid])
        if not shown:
            return _moved(Output(), batch, has_one, want, None), has_one
        tokens = [row for row, _ in shown]
        hinted = to_token_batch(tokens, [trained for _, trained in shown], self._pad_id)
        hinted = _with_lists(hinted, batch.inputs.select(has_one.nonzero()[:, 0]))
        said = hinted.said_by(scorer.forward, want)
        return _moved(said, batch, has_one, want, hinted.response_mask), has_one

    def laid_behind(self, rollout: Rollout) -> Laid | None:
        """Lay what was sampled behind the other prompt; None where there is none, or no room.

        Args:
            rollout: of the step that was taken.
        """
        prompt = self.prompt_of(rollout)
        if prompt is None:
            return None
        tokens = list(prompt)
        trained = [False] * len(tokens)
        for segment in rollout.completion.segments:
            tokens += segment.token_ids
            trained += [segment.origin == "policy"] * len(segment.token_ids)
        if self._longest is None or len(tokens) <= self._longest:
            return tokens, trained
        if not self._told:
            self._told = True
            log.warning(
                "%s: with the hint a row of %s has %d tokens, and the model reads %d: such rows "
                "are left out, see teacher/left_out. Shorten the hint, or set "
                "data.max_prompt_tokens",
                self._field,
                rollout.prompt.uid,
                len(tokens),
                self._longest,
            )
        return None

    def prompt_of(self, rollout: Rollout) -> TokenIds | None:
        """Write the other prompt of a sample; None where it lacks what the template reads.

        Args:
            rollout: of the step that was taken.

        Raises:
            DataError: it cannot be written, or not as the policy read its own.
        """
        given = {name: self._value(name, rollout) for name in self._reads}
        if any(map(is_missing, given.values())):
            return None
        messages = rollout.completion.opening or rollout.prompt.messages
        *before, last = messages
        try:
            text = self._template.render(prompt=last["content"], **given)
        except UNWRITABLE as error:
            raise DataError(
                f"{self._field}: it cannot be written for row {rollout.prompt.uid}: "
                f"{type(error).__name__}: {error}"
            ) from error
        place = (rollout.group_id, text)
        if place not in self._written:
            tools = read_tools(Record(rollout.prompt.uid, rollout.prompt.metadata))
            if tuple(self._encoder.encode_prompt(messages, tools)) != _read_first(rollout):
                raise DataError(
                    f"{self._field}: row {rollout.prompt.uid} begins with other tokens than its "
                    "messages: images, tools of an environment, or what is written anew for every "
                    "turn. Such rows cannot be put behind another prompt"
                )
            changed = (*before, {**last, "content": text})
            self._written[place] = tuple(self._encoder.encode_prompt(changed, tools))
        return self._written[place]

    def _value(self, name: str, rollout: Rollout) -> Any:
        if name == PEER:
            return self._peer(rollout)
        if name == FEEDBACK:
            return rollout.completion.reason or rollout.score.reason
        return named_in_row(name, rollout.prompt)

    def _peer(self, rollout: Rollout) -> str | None:
        """The first other response to the prompt that got full marks."""
        for other in self._right.get(rollout.group_id, ()):
            if other.sample != rollout.sample:
                return other.completion.text
        return None


def _read_first(rollout: Rollout) -> TokenIds | None:
    """The tokens that the policy read before it wrote; None where it saw images, or read others
    later.
    """
    segments = rollout.completion.segments
    images = any(segment.images for segment in segments)
    if rollout.prompt.images or images or any(one.context is not None for one in segments[1:]):
        return None
    begins = segments[0].context if segments else None
    return rollout.prompt.token_ids if begins is None else begins


def named_in_row(name: str, prompt: Prompt) -> Any:
    """Return a field of a row; None where it has none.

    Args:
        name: of the field.
        prompt: of the row.
    """
    return prompt.answer if name == "answer" else prompt.metadata.get(name)


def has_field(name: str, prompt: Prompt) -> bool:
    """True if a row has a field, though nothing may stand in it; also of what a step gives.

    Args:
        name: of the field.
        prompt: of the row.
    """
    if name == "answer":
        return prompt.answer is not None
    return name in KNOWN_IN_STEPS or name in prompt.metadata


def is_missing(value: Any) -> bool:
    """True if nothing stands in a field; 0 and false are something.

    Args:
        value: of the field.
    """
    return value is None or value == ""


def _with_lists(hinted: TokenBatch, own: TokenBatch) -> TokenBatch:
    """Give sampled tokens behind other prompts the sets that they were sampled from.

    Args:
        hinted: rows with other prompts.
        own: the same rows as they were sampled.
    """
    moved: Tensors = {}
    for name in own.lists:
        counts = own.columns[name]
        moved[name] = counts.new_zeros(hinted.tokens.shape)
        moved[name][hinted.response_mask] = counts[own.response_mask]
    return replace(hinted, columns=moved, lists=own.lists)


def _moved(
    said: Output, batch: RolloutBatch, has_one: Tensor, want: Want, there: Tensor | None
) -> Output:
    """Put what was said of rows behind other prompts where their tokens are in the batch."""
    mask = batch.inputs.response_mask & has_one[:, None]
    shape = batch.inputs.tokens.shape
    asked = [int(field.partition("=")[2]) for field in want if field.startswith("top_k=")]

    def here(values: Tensor | None, nothing: float, *more: int) -> Tensor:
        kind = torch.int64 if nothing == -1 else torch.float32
        found = torch.full((*shape, *more), nothing, dtype=kind)
        if values is not None and there is not None:
            found[mask] = values[there].to(kind)
        return found

    top_ids = here(said.top_ids, -1, asked[0]) if asked else None
    top_logprobs = here(said.top_logprobs, float("nan"), asked[0]) if asked else None
    logprobs = here(said.logprobs, float("nan"))
    return Output(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs)
