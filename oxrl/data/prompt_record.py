"""A prompt as a line of samples.jsonl has it, and back: enough to score its responses again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oxrl.types import Prompt


def prompt_fields(prompt: Prompt) -> dict[str, object]:
    """What a line says of a prompt: its last message, and the rest where there is more.

    `messages` are left out where the row gave a text, which is the one message (`plain`).

    Args:
        prompt: of a rollout.

    Returns:
        JSON values; token ids, answer, uid and images are not among them.
    """
    fields: dict[str, object] = {
        "prompt": prompt.question,
        "plain": prompt.plain,
    }
    if not prompt.plain:
        fields["messages"] = [dict(message) for message in prompt.messages]
    if prompt.source:
        fields["source"] = prompt.source
    if prompt.metadata:
        fields["metadata"] = dict(prompt.metadata)
    return fields


def recorded_prompt(line: Mapping[str, Any]) -> Prompt:
    """The prompt of a line of samples.jsonl, without its token ids.

    Args:
        line: with `uid` and `prompt`; all else may be missing.

    Raises:
        KeyError, TypeError: the line holds none.
    """
    alone = {"role": "user", "content": line["prompt"]}
    messages = [dict(message) for message in line.get("messages", [alone])]
    return Prompt(
        uid=str(line["uid"]),
        messages=tuple(messages),
        token_ids=(),
        answer=line.get("answer"),
        images=tuple(line.get("images", ())),
        source=str(line.get("source", "")),
        metadata=dict(line.get("metadata", {})),
        plain=bool(line.get("plain", True)),
    )
