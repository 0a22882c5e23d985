"""A teacher of which there are texts alone: a discriminator learns to tell the policy's responses
from them, and the policy earns what it takes for the teacher's.

    discriminator:  minimise  -log sigmoid(D(y_T) - D(y_S))
    policy:         reward    D(y_S)

y_T: the teacher's text, y_S: a response to the same prompt, D: the value after the last token.

Source: GAD, arXiv:2511.10643.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oxrl.data.batching import to_token_batch
from oxrl.data.chat import ChatEncoder
from oxrl.data.conversations import encode_conversation
from oxrl.errors import DataError, required
from oxrl.functional.masks import LossAndMetrics
from oxrl.functional.reward_model_losses import bradley_terry
from oxrl.recipes.features.base import Feature, FeatureInputs
from oxrl.recipes.session import RolloutProgress
from oxrl.recipes.step import gradients
from oxrl.tables.numbers import DISCRIMINATOR_WARMUP_STEPS
from oxrl.tables.roles import DISCRIMINATOR
from oxrl.types import (
    Metrics,
    Output,
    PolicyBatch,
    PreferenceBatch,
    Prompt,
    RolloutBatch,
    Rollouts,
    TokenIds,
)

# Field of the rows of the data.
FIELD = "teacher_answer"
WANT = frozenset({"values"})


class Discriminator(Feature):
    """See the module; reads train.discriminator_warmup_steps.

    Args:
        given: what the run is made of.
    """

    def __init__(self, given: FeatureInputs) -> None:
        self._engine = given.models[DISCRIMINATOR]
        self._warmup_steps = given.train.value(DISCRIMINATOR_WARMUP_STEPS)
        tokenizer = required(given.tokenizer, "a tokenizer")
        self._encoder = ChatEncoder(tokenizer)
        self._pad_id = int(tokenizer.pad_token_id)  # pyright: ignore[reportArgumentType]
        # Of a step: its samples, the place of each row among them, and what it earned.
        self._rollouts: Rollouts = []
        self._places: list[int] = []
        self._rewards = torch.zeros(0)

    def on_sampled(self, rollouts: Rollouts) -> None:
        """Keep what the rows of the step were made of."""
        self._rollouts = rollouts

    def on_rollouts(self, batch: RolloutBatch) -> RolloutBatch:
        """Replace rewards by what the discriminator says of the responses."""
        self._places = required(batch.places, "places").tolist()
        said = batch.inputs.said_by(self._engine.forward, WANT)
        self._rewards = required(said.bootstrap, "a value").double()
        mask = batch.inputs.response_mask
        last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
        token_rewards = torch.where(last, self._rewards[:, None], 0.0)
        return replace(batch, rewards=self._rewards, token_rewards=token_rewards)

    def steer(self, batch: PolicyBatch, progress: RolloutProgress) -> Metrics:
        """Tell what responses earned."""
        if not len(self._rewards):
            return {}
        return {
            "discriminator/reward_mean": float(self._rewards.mean()),
            "discriminator/reward_std": float(self._rewards.std(correction=0)),
        }

    def add_gradients(self, rows: Tensor, batch: PolicyBatch) -> Metrics | None:
        """Add the discriminator's gradient on the same rows as the policy's."""
        chosen = [self._rollouts[self._places[row]] for row in rows.tolist()]
        prompts: list[TokenIds] = []
        texts: list[TokenIds] = []
        for rollout in chosen:
            prompts += [rollout.prompt.token_ids] * 2
            texts += [self._text_of(rollout.prompt), rollout.completion.token_ids]
        pairs = pairs_of(prompts, texts, self._pad_id)
        found = gradients(self._engine, pairs, discriminator_loss, WANT)
        return as_discriminators(found.metrics) if found.finite else None

    def holds_policy(self, step: int) -> bool:
        """The first steps train the discriminator alone."""
        return step <= self._warmup_steps

    def optim_step(self, *, skip: bool) -> Metrics:
        """See Feature."""
        stepped = self._engine.skip_step() if skip else self._engine.optim_step()
        return as_discriminators(stepped)

    def _text_of(self, prompt: Prompt) -> TokenIds:
        """Encode the teacher's text as a response: up to the token that ends one.

        What the template writes behind that would tell the two apart.
        """
        reply = {"role": "assistant", "content": text_of_teacher(prompt)}
        messages = (*prompt.messages, reply)
        whole = encode_conversation(messages, self._encoder, context=len(prompt.messages))
        written = zip(whole.token_ids, whole.trained, strict=True)
        return tuple(token for token, trained in written if trained)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to training ranks with the policy's loss, in which it has no part."""
        return {}


def check_texts(prompts: Sequence[Prompt]) -> None:
    """Look for the teacher's texts before a run.

    Args:
        prompts: of the data, some or all.

    Raises:
        DataError: one has none.
    """
    for prompt in prompts:
        text_of_teacher(prompt)


def text_of_teacher(prompt: Prompt) -> str:
    """Return what the teacher answered to a prompt.

    Args:
        prompt: of a row of the data.

    Raises:
        DataError: its row does not have it.
    """
    text = prompt.metadata.get(FIELD)
    if isinstance(text, str) and text.strip():
        return text
    raise DataError(
        f"data.train: row {prompt.uid} has no {FIELD}, the text of the teacher that gad learns "
        f"from (found: {text!r}). Write it into each row, or name its column: data.columns: "
        f"{{{FIELD}: COLUMN}}"
    )


def pairs_of(
    prompts: Sequence[TokenIds], texts: Sequence[TokenIds], pad_id: int
) -> PreferenceBatch:
    """Lay pairs out, each weighing the same.

    Args:
        prompts: of 2 N rows: those of a pair side by side, the better one first.
        texts: what stands behind each of them.
        pad_id: the token that fills rows on the right.
    """
    rows: list[TokenIds] = []
    trained: list[list[bool]] = []
    for prompt, text in zip(prompts, texts, strict=True):
        rows.append((*prompt, *text))
        trained.append([False] * len(prompt) + [True] * len(text))
    count = len(rows) // 2
    return PreferenceBatch(
        inputs=to_token_batch(rows, trained, pad_id),
        ref_logprobs=None,
        loss_weights=torch.full((count,), 1 / count),
    )


def discriminator_loss(output: Output, batch: PreferenceBatch) -> LossAndMetrics:
    """The mean of -log sigmoid(D(y_T) - D(y_S)) over pairs; a LossFn.

    Args:
        output: what the discriminator said, of both rows of each pair.
        batch: the pairs.
    """
    scores = required(output.bootstrap, "a value after the last token")
    return bradley_terry(scores[0::2], scores[1::2], batch.loss_weights)


def as_discriminators(metrics: Metrics) -> Metrics:
    """Return the same metrics as the discriminator's.

    Args:
        metrics: of a loss of rewards, or of a step.
    """
    return {f"discriminator/{name.partition('/')[2]}": value for name, value in metrics.items()}
