"""The one checkpoint format of all training engines: weights, masters, moments and step counts.

Beside the weights, which Hugging Face reads, lie `optimizer_<kind>-*.safetensors` with what is kept
of each weight, whole and as it is held, under the names of the weights, and trainer_state.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from oxrl.models.stored import Source
from oxrl.models.weights import WeightType
from oxrl.tables.engines import Masters, Optimizer

STATE_FILE = "trainer_state.json"
STATE_FORMAT = 1
# The float32 copy of a weight that is stored in lower precision.
MASTER = "master"
# Kind -> shape and type of what is kept of a weight beside it.
KeptTypes = Mapping[str, WeightType]


class StoredWeight(NamedTuple):
    """The places of a weight and its optimizer state; without `moments` it was never stepped."""

    name: str
    weight: Source
    master: Source | None = None
    moments: Mapping[str, Source] = MappingProxyType({})
    steps: int = 0


class TrainerState(NamedTuple):
    """The content of trainer_state.json.

    step: optimizer steps begun. adam_steps: steps that AdamW took, by weight.
    fits: largest micro-batch, in tokens, where the one that was asked for did not fit into memory;
        None: it did.
    optimizer, master_weights: as of `TrainerOptions`; not written where they are the default.
    """

    step: int
    adam_steps: Mapping[str, int]
    fits: int | None = None
    optimizer: Optimizer = "adamw"
    master_weights: Masters = "float32"


def write_state(directory: Path, state: TrainerState) -> None:
    """Write trainer_state.json into the directory of a checkpoint."""
    content: dict[str, object] = {
        "format": STATE_FORMAT,
        "step": state.step,
        "adam_steps": state.adam_steps,
    }
    if state.fits is not None:
        content["micro_batch_tokens"] = state.fits
    if state.optimizer != "adamw":
        content["optimizer"] = state.optimizer
    if state.master_weights != "float32":
        content["master_weights"] = state.master_weights
    text = json.dumps(content, indent=1) + "\n"
    (directory / STATE_FILE).write_text(text, encoding="utf-8")
