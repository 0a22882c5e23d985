"""Solutions step by step, each step judged: what a process reward model learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oxrl.data.batching import pad_rows, to_inputs
from oxrl.data.chat import ChatEncoder, TemplateError
from oxrl.data.dataset import Dataset, Dropped, Measured, ReadOptions
from oxrl.data.messages import Messages, MessageSequence, images_of, read_messages
from oxrl.data.rows import Record, content_uid
from oxrl.types import Example, Images, StepBatch, TokenIds

EXPECTED = (
    '{"prompt": text or messages, "completions": [a text per step], '
    '"labels": [true, false or 0 to 1 per step]}'
)
# Between the steps of one reply; a reply that is to be scored is cut there.
SEPARATOR = "\n"


@dataclass(frozen=True, kw_only=True)
class Steps(Example):
    """A reply of several steps; `ends[i]` is the position of the token after step i.

    What is known of a step, its label, is known there, and `trained` there alone.
    """

    ends: TokenIds
    labels: tuple[float, ...]


class StepDataset(Dataset[Steps]):
    """Judged steps, from rows of the form `EXPECTED`; `report` counts steps and right ones too."""

    noun = "solution"
    counts = ("steps", "right")

    @classmethod
    def encode(cls, record: Record, encoder: ChatEncoder, options: ReadOptions) -> list[Steps]:
        """Encode the judged solution of a row, its steps joined by line ends."""
        texts = record.fields.get("completions")
        labels = record.fields.get("labels")
        if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
            record.fail("no 'completions' and 'labels' of equal length", EXPECTED)
        if not all(isinstance(label, int | float) and 0 <= label <= 1 for label in labels):
            problem = "a label that is neither true nor false nor between 0 and 1"
            record.fail(problem, EXPECTED)
        prompt = read_messages(record, record.fields.get("prompt"), what="prompt")
        role = "assistant"
        replies: Messages = ()
        for text in texts:
            replies += read_messages(record, text, what="completions", role=role)
        if [reply["role"] for reply in replies] != [role] * len(texts):
            record.fail("a step that is not one text of the assistant", EXPECTED)
        steps = [reply["content"] for reply in replies]
        if not steps or not all(map(str.strip, steps)):
            raise Dropped("empty")
        token_ids, ends = encode_steps(prompt, steps, encoder)
        uid = record.fields.get("uid") or content_uid([*prompt, *replies])
        labels = tuple(map(float, labels))
        unit = Steps(
            uid=str(uid),
            token_ids=token_ids,
            trained=tuple(position in ends for position in range(len(token_ids))),
            images=images_of(prompt),
            ends=ends,
            labels=labels,
        )
        return [unit]

    @classmethod
    def measure(cls, units: Sequence[Steps]) -> Measured:
        """Measure the solution with its prompt, and count its steps and those that are right."""
        (unit,) = units
        right = sum(label > 0.5 for label in unit.labels)
        return len(unit.token_ids), {"steps": len(unit.ends), "right": right}


def encode_steps(
    prompt: MessageSequence, steps: Sequence[str], encoder: ChatEncoder
) -> tuple[TokenIds, TokenIds]:
    """Encode a prompt and a reply of several steps, each step apart from the others.

    Args:
        prompt: messages, in one form.
        steps: texts, at least one; between two of them stands SEPARATOR.
        encoder: of the tokenizer that the model reads.

    Returns:
        The token ids; and for each step the position right after its last token.

    Raises:
        TemplateError: the template does not keep the reply as it is, or ends it with no token.
    """
    replies = [{"role": "assistant", "content": step} for step in steps]
    shown, hidden = encoder.hide([*prompt, *replies])
    context = shown[: len(prompt)]
    pieces = [message["content"] + SEPARATOR for message in shown[len(prompt) :]]
    pieces[-1] = pieces[-1].removesuffix(SEPARATOR)
    reply = "".join(pieces)
    before = encoder.render(context, generation_prompt=True)
    spoken = {"role": "assistant", "content": reply}
    after = encoder.render([*context, spoken], generation_prompt=False)
    start = after.find(reply, len(before)) if after.startswith(before) else -1
    tail = encoder.encode(after[start + len(reply) :], hidden)
    if start < 0 or not tail:
        raise TemplateError(
            "the chat template changes a reply, or ends it with no token; set model.chat_template"
        )
    ids = encoder.encode(after[:start], hidden)
    ends: list[int] = []
    for piece in pieces:
        ids += encoder.encode(piece, hidden)
        ends.append(len(ids))
    return (*ids, *tail), tuple(ends)


def to_step_batch(units: Sequence[Steps], pad_id: int, *, images: Images = None) -> StepBatch:
    """Lay solutions out as padded rows, each position after a step weighing 1 / steps of the batch.

    Args:
        units: B solutions.
        pad_id: the token that fills rows on the right.
        images: those of the prompts; None: they have none.

    Returns:
        Rows [B, T]; the response mask holds the positions after steps, `labels` what is known of
            them.
    """
    labels: list[list[float]] = []
    for unit in units:
        known = dict(zip(unit.ends, unit.labels, strict=True))
        labels.append([known.get(position, 0.0) for position in range(len(unit.token_ids))])
    inputs = to_inputs(units, pad_id, images)
    mask = inputs.response_mask
    return StepBatch(
        inputs=inputs,
        labels=pad_rows(labels, 0.0, torch.float32),
        loss_weights=mask / mask.sum().clamp(min=1),
    )
