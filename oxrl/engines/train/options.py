"""The options of a training engine, and the learning rate that follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from transformers import PreTrainedTokenizerBase

from oxrl.errors import EngineError
from oxrl.tables.engines import Masters, Optimizer

if TYPE_CHECKING:
    from oxrl.data.actions import ActionHead

Schedule = Literal["constant", "linear", "cosine", "wsd"]
Decay = Literal["all", "matrices"]


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The options of every training engine: all that it needs beside its model.

    Args:
        lr, lr_schedule, warmup_steps, total_steps: see `learning_rate`; only a constant rate goes
            without `total_steps`.
        optimizer: what steps the weights; see `rules_of` for which of them.
        master_weights: "float32": weights in bf16 and fp16 are stepped as float32 copies; "none":
            they are stepped themselves and rounded stochastically. Sums of gradients are float32
            in both.
        seed: of that rounding.
        weight_decay: of every optimizer. adam_betas, adam_eps: of AdamW.
        rates: weight -> its learning rate as a multiple of `lr`, where that is not 1.
        decay: which weights `weight_decay` shrinks: "all", or "matrices" (no norms, biases and
            embeddings).
        max_grad_norm: global norm the gradient is clipped to; `math.inf` turns clipping off.
        micro_batch_tokens: largest number of tokens, padding included, that go through the model
            at once; a unit (row, or all rows of a pair) longer than that goes alone.
        price: of a micro-batch beside its tokens, in tokens: where padding costs more, one process
            cuts more of them. None: each is filled.
        share_prefix: what rows have in common at their beginning goes through the model once.
        temperature: logprobs, entropy and the rest are those of logits / temperature.
        gradient_checkpointing: recompute each layer in backward instead of storing its
            activations.
        offload_activations: what is stored all the same waits in CPU memory.
        trained: False for a model that only answers `forward`; an engine may then go without an
            optimizer.
        stays: its weights stay as they are loaded, or are set to others of their type: no float32
            copies are held.
        tokenizer: saved beside the weights, so that the checkpoint is complete.
        image_processor: of transformers, saved there too, of a model that is shown images.
        actions: that turns are, saved there too.

    Raises:
        EngineError: a schedule that ends, without `total_steps`.
    """

    lr: float
    lr_schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    optimizer: Optimizer = "adamw"
    master_weights: Masters = "float32"
    seed: int = 0
    weight_decay: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    decay: Decay = "all"
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16384
    price: int | None = None
    share_prefix: bool = False
    temperature: float = 1.0
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    trained: bool = True
    stays: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    image_processor: Any = None
    actions: ActionHead | None = None

    def __post_init__(self) -> None:
        if self.lr_schedule != "constant" and self.total_steps is None:
            raise EngineError(f"lr_schedule {self.lr_schedule!r} needs total_steps")

    @property
    def masters(self) -> Masters:
        """The copies that are held of weights in low precision."""
        return "none" if self.stays else self.master_weights

    def learning_rate(self, step: int) -> float:
        """Compute the rate of optimizer step `step`: linear warm-up, then the schedule.

        A pure function of the step, so a resumed or skipped step cannot shift it. Step
        `warmup_steps - 1` already has the full rate; "linear" and "cosine" reach 0 only at step
        `total_steps`, which is never run.

        Args:
            step: counted from 0.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.total_steps is None:
            return self.lr
        done = step - self.warmup_steps
        progress = min(1.0, done / max(1, self.total_steps - self.warmup_steps))
        if self.lr_schedule == "linear":
            return self.lr * (1.0 - progress)
        if self.lr_schedule == "cosine":
            return self.lr * (0.5 * (1.0 + math.cos(math.pi * progress)))
        if self.lr_schedule == "wsd":  # warm-up, stable, decay: linear over the last fifth
            return self.lr * min(1.0, 5.0 * (1.0 - progress))
        return self.lr
