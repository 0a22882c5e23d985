"""The rows of a step behind another prompt, as the policy reads them when it teaches itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from oxrl.data.batching import to_token_batch
from oxrl.data.chat import ChatEncoder
from oxrl.engines.train import Scorer
from oxrl.errors import ConfigError, required
from oxrl.recipes.features.base import Hint
from oxrl.types import Output, Prompt, Rollout, RolloutBatch, Rollouts, TokenIds, Want

PEER = "peer"
FEEDBACK = "feedback"
# Stand in for what only a step knows, where a template is tried.
KNOWN_IN_STEPS = (PEER, FEEDBACK)
# Rows of the data on which a template is tried.
TRIED = 8


def template_of(hint: Hint) -> Template:
    """Compile a template; what it is not given is an error.

    Args:
        hint: of a teacher.
    """
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(hint.template)


def check_template(field: str, file: str, hint: Hint, prompts: Sequence[Prompt]) -> None:
    """Write a template for a few rows before a run.

    Args:
        field: that names it.
        file: it is in.
        hint: what is in it, and what it reads.
        prompts: of the data.

    Raises:
        ConfigError: it cannot be written, or says what stands there already: the policy would
            teach itself nothing.
    """
    changed = False
    tried = 0
    try:
        template = template_of(hint)
        for prompt in prompts:
            given = {
                name: "..." if name in KNOWN_IN_STEPS else named_in_row(name, prompt)
                for name in hint.reads
            }
            if tried == TRIED or any(value is None for value in given.values()):
                continue
            tried += 1
            question = prompt.question
            changed |= template.render(prompt=question, **given) != question
    except TemplateError as error:
        raise ConfigError(
            f"{field}: {file} cannot be written: {type(error).__name__}: {error}. It is given "
            f"{', '.join(('prompt', *hint.reads))}; name more in reads"
        ) from error
    if prompts and not tried:
        raise ConfigError(
            f"{field}: no row that was looked at has {', '.join(hint.reads)}, which {file} reads"
        )
    if tried and not changed:
        raise ConfigError(
            f"{field}: {file} writes the prompt as it stands there already, and the policy would "
            "teach itself nothing: its divergence from itself is 0"
        )


class HintedRows:
    """What was sampled, behind prompts that a template writes.

    Args:
        hint: the template, and what it reads.
        tokenizer: of the policy.
    """

    def __init__(self, hint: Hint, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template = template_of(hint)
        self._reads = hint.reads
        self._encoder = ChatEncoder(tokenizer)
        self._pad_id = int(tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        self._rollouts: Rollouts = []

    def take(self, rollouts: Rollouts) -> None:
        """Keep the samples of a step."""
        self._rollouts = rollouts

    def ask(self, scorer: Scorer, places: list[int], batch: RolloutBatch, want: Want) -> Output:
        """Show rows behind their other prompts, and move what is said to where their tokens are.

        Args:
            scorer: who teaches.
            places: of N rows, among the samples of the step.
            batch: the rows themselves.
            want: what is asked.

        Returns:
            [N, T], [N, T, K]: NaN and id -1 in rows that lack what the template reads.
        """
        prompts = [self.prompt_of(self._rollouts[place]) for place in places]
        rows = [row for row, prompt in enumerate(prompts) if prompt is not None]
        if not rows:
            return _moved(Output(), batch, rows, want, None)
        shown = [self._laid(required(prompts[row], "prompt"), places[row]) for row in rows]
        tokens = [tokens for tokens, _ in shown]
        hinted = to_token_batch(tokens, [trained for _, trained in shown], self._pad_id)
        said = hinted.said_by(scorer.forward, want)
        return _moved(said, batch, rows, want, hinted.response_mask)

    def prompt_of(self, rollout: Rollout) -> TokenIds | None:
        """Write the other prompt of a sample; None where it lacks what the template reads."""
        given = {name: self._value(name, rollout) for name in self._reads}
        if any(value is None for value in given.values()):
            return None
        *before, last = rollout.prompt.messages
        text = self._template.render(prompt=last["content"], **given)
        return tuple(self._encoder.encode_prompt((*before, {**last, "content": text})))

    def _value(self, name: str, rollout: Rollout) -> Any:
        if name == PEER:
            return self._peer(rollout)
        if name == FEEDBACK:
            return rollout.completion.reason or rollout.score.reason or None
        return named_in_row(name, rollout.prompt)

    def _peer(self, rollout: Rollout) -> str | None:
        """The first other response to the prompt that got full marks."""
        for other in self._rollouts:
            value = other.score.value
            same = other.group_id == rollout.group_id and other.sample != rollout.sample
            if same and value is not None and value >= 1:
                return other.completion.text
        return None

    def _laid(self, prompt: TokenIds, place: int) -> tuple[list[int], list[bool]]:
        response = self._rollouts[place].completion.token_ids
        return [*prompt, *response], [False] * len(prompt) + [True] * len(response)


def named_in_row(name: str, prompt: Prompt) -> Any:
    """Return a field of a row; None where it has none.

    Args:
        name: of the field.
        prompt: of the row.
    """
    if name == "answer":
        return prompt.answer or None
    return prompt.metadata.get(name)


def _moved(
    said: Output, batch: RolloutBatch, rows: list[int], want: Want, there: Tensor | None
) -> Output:
    """Put what was said of rows behind other prompts where their tokens are in the batch."""
    mask = torch.zeros_like(batch.inputs.response_mask)
    if rows:
        mask[rows] = batch.inputs.response_mask[rows]
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
