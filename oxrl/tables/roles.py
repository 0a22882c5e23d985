"""The roles that models have in a run: their names, and what is said of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

POLICY = "policy"
CRITIC = "critic"
REFERENCE = "reference"
DISCRIMINATOR = "discriminator"
# Of teachers, before their names.
TEACHER = "teacher."


@dataclass(frozen=True, kw_only=True)
class Role:
    """A model of a run that has weights of its own.

    model: its weights, as `model.name` has them. trained: it has an optimizer, and the adapter that
    `lora` asks for; else it only answers. head: what it says of a token, log-probabilities or a
    value. lr: its own, instead of `train.lr`. temperature: of its log-probabilities. saved: its
    folder in a checkpoint, None: it stays as it was loaded. revision: on the hub. dtype, device:
    None: the policy's. seed: names the draw of random weights, which built-in models have.
    """

    name: str
    model: str
    trained: bool = False
    head: Literal["tokens", "values"] = "tokens"
    lr: float | None = None
    temperature: float = 1.0
    saved: str | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    seed: str = "model"
