"""Solutions step by step, each step judged: what a process reward model learns from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from oxrl.data.batching import pad_rows, to_token_batch
from oxrl.data.chat import ChatEncoder, Message, TemplateError, read_messages
from oxrl.data.dataset import Dataset
from oxrl.data.rows import Row, content_uid
from oxrl.types import StepBatch

EXPECTED = '{"prompt": text or messages, "completions": [a text per step], "labels": [true, false or 0 to 1 per step]}'
# Between the steps of one reply; a reply that is to be scored is cut there.
SEPARATOR = "\n"


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A reply of several steps. `ends[i]` is the position of the token after step i: what is known
    of it there.
    """

    uid: str
    token_ids: tuple[int, ...]
    ends: tuple[int, ...]
    labels: tuple[float, ...] = ()


class StepDataset(Dataset[Steps]):
    """Judged steps, from rows of the form `EXPECTED`; `report` counts steps and right ones too."""

    noun = "solution"
    counts = ("steps", "right")

    @classmethod
    def encode(cls, row: Row, encoder: ChatEncoder) -> list[Steps] | str:
        texts, labels = row.fields.get("completions"), row.fields.get("labels")
        if not isinstance(texts, list) or not isinstance(labels, list) or len(texts) != len(labels):
            row.fail("no 'completions' and 'labels' of equal length", EXPECTED)
        if not all(isinstance(label, bool | int | float) and 0 <= label <= 1 for label in labels):
            row.fail("a label that is neither true nor false nor between 0 and 1", EXPECTED)
        prompt = read_messages(row, row.fields.get("prompt"), what="prompt")
        replies = [
            read_messages(row, text, what="completions", role="assistant")[0] for text in texts
        ]
        if not replies or not all(reply["content"].strip() for reply in replies):
            return "empty"
        token_ids, ends = encode_steps(prompt, [reply["content"] for reply in replies], encoder)
        uid = str(
            row.fields.get("uid") or content_uid([dict(message) for message in (*prompt, *replies)])
        )
        return [Steps(uid=uid, token_ids=token_ids, ends=ends, labels=tuple(map(float, labels)))]

    @classmethod
    def measure(cls, units: Sequence[Steps]) -> tuple[int, Mapping[str, int]]:
        (unit,) = units
        return len(unit.token_ids), {
            "steps": len(unit.ends),
            "right": sum(label > 0.5 for label in unit.labels),
        }


def encode_steps(
    prompt: Sequence[Message], steps: Sequence[str], encoder: ChatEncoder
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of the prompt and a reply of `steps`, each step encoded apart, and the position
    after each step.

    Raises:
        TemplateError: the template does not keep the reply as it is, or ends it with no token.
    """
    shown, hidden = encoder.hide(
        [*prompt, *({"role": "assistant", "content": step} for step in steps)]
    )
    pieces = [message["content"] + SEPARATOR for message in shown[len(prompt) :]]
    pieces[-1] = pieces[-1].removesuffix(SEPARATOR)
    reply = {"role": "assistant", "content": "".join(pieces)}
    before = encoder.render(shown[: len(prompt)], generation_prompt=True)
    after = encoder.render([*shown[: len(prompt)], reply], generation_prompt=False)
    start = after.find(reply["content"], len(before)) if after.startswith(before) else -1
    tail = encoder.encode(after[start + len(reply["content"]) :], hidden)
    if start < 0 or not tail:
        raise TemplateError(
            "the chat template changes a reply, or ends it with no token; set model.chat_template"
        )
    ids, ends = encoder.encode(after[:start], hidden), list[int]()
    for piece in pieces:
        ids += encoder.encode(piece, hidden)
        ends.append(len(ids))
    return (*ids, *tail), tuple(ends)


def to_step_batch(units: Sequence[Steps], pad_id: int) -> StepBatch:
    """Rows [B, T] whose response mask holds the positions after steps, each weighing 1 / steps of
    the batch.
    """
    rows = [unit.token_ids for unit in units]
    known = [
        dict(zip(unit.ends, unit.labels or [0.0] * len(unit.ends), strict=True)) for unit in units
    ]
    inputs = to_token_batch(
        rows,
        [[t in at for t in range(len(row))] for row, at in zip(rows, known, strict=True)],
        pad_id,
    )
    labels = [
        [at.get(t, 0.0) for t in range(len(row))] for row, at in zip(rows, known, strict=True)
    ]
    weights = inputs.response_mask / inputs.response_mask.sum().clamp(min=1)
    return StepBatch(
        inputs=inputs, labels=pad_rows(labels, 0.0, torch.float32), loss_weights=weights
    )
