"""Section `train`: the algorithm, its optimizer, and cells that differ from its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, cast

from annotated_types import Ge, Gt
from pydantic import Field, ValidationInfo, field_validator

from oxrl.config.field import (
    CELLS,
    COMPARING,
    PREFERENCE,
    RL,
    Section,
    cell_names,
    cell_setting,
    setting,
)
from oxrl.errors import known
from oxrl.tables.engines import (
    TRAINING_ENGINES,
    Masters,
    Optimizer,
    TrainingEngine,
    TrainingEngineName,
)
from oxrl.tables.numbers import Level, Number, T, Value
from oxrl.tables.policy import ROWS, Row
from oxrl.tables.user_code import GATE

Ratio = Literal["none", Level]
Denominator = Literal["old", "rollout"]

LEARNING_RATE = "AdamW moves every weight by about lr in a step"


class TrainConfig(Section):
    """The algorithm, its optimizer, its parameters, and cells that differ from its row of the
    table.
    """

    alg_name: str = Field(
        description="Row of the table: see `oxrl algorithms`.",
        json_schema_extra={"enum": [*sorted(ROWS)]},
    )
    backend: TrainingEngineName = setting(
        "local",
        "What trains: this process, or ranks (Ray actors in RL, else torchrun's) with DeepSpeed "
        "or FSDP2.",
    )
    optimizer: Optimizer = setting(
        "adamw",
        "What steps the weights: adamw; muon, which orthogonalises the step of each matrix between "
        "hidden layers and leaves all else to AdamW; or adamw_8bit, whose moments take two bytes "
        "per weight instead of eight.",
    )
    master_weights: Masters = setting(
        "float32",
        "What is stepped of weights in bfloat16: float32 copies, or none: the weights themselves, "
        "rounded stochastically, four bytes per weight less.",
    )
    lr: float = setting(
        1e-6,
        "Peak learning rate; with adapters 1e-5 by default.",
        ge=0,
        le=1,
        why=LEARNING_RATE,
    )
    tower_lr: float | None = setting(
        None,
        "Peak learning rate of the vision tower of a model that reads images; null: as lr.",
        ge=0,
        le=1,
        why=LEARNING_RATE,
    )
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = setting(
        "constant",
        "After the warm-up: constant, or down to 0 at run.steps (wsd: over the last fifth).",
    )
    warmup_steps: int = setting(0, "Optimizer steps of linear warm-up; 0: none.", ge=0)
    weight_decay: float = setting(
        0.0,
        "Decoupled weight decay; 0: none.",
        ge=0,
        le=100,
        why="a step takes the share lr x weight_decay off every weight",
    )
    decay: Literal["matrices", "all"] = setting(
        "matrices",
        "What weight_decay shrinks: matrices (not norms, biases and embeddings), or all weights.",
    )
    adam_beta1: float = setting(0.9, "Decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "Decay of the second moment.", ge=0, lt=1)
    adam_eps: float = setting(
        1e-8,
        "Added to the root of the second moment.",
        gt=0,
        le=1,
        why="gradients of a clipped norm disappear beside a larger one",
    )
    max_grad_norm: float = setting(
        1.0,
        "Global gradient norm is clipped to this.",
        ge=1e-6,
        too_low="smaller gradients disappear beside adam_eps; a large number clips nothing",
    )
    epochs: int = setting(
        1,
        "Passes over each rollout batch.",
        ge=1,
        le=1000,
        why="the samples say nothing of weights that have moved so far",
        of=RL,
    )
    minibatches: int = setting(
        1,
        "Optimizer steps per pass; divides data.prompts_per_step.",
        ge=1,
        le=10**6,
        why="there are no more prompts in a step",
        of=RL,
    )
    micro_batch_tokens: Annotated[int, Ge(1)] | Literal["auto"] = setting(
        "auto",
        "Padded tokens per pass, at most: memory, never the gradient but for rounding. auto: what "
        "keeps a layer's widest tensor at 16 MiB on a CPU (1,024 to 8,192), else 16,384, and rows "
        "are cut where that saves more padding than a pass costs; decided when a run begins, noted "
        "in choices.json.",
    )
    share_prefix: bool | Literal["auto"] = setting(
        "auto",
        "The prompt of a group, or of a pair, goes through the model once for all of its "
        "responses, and padding not at all, in the update and wherever log-probabilities are "
        "computed: the same gradient but for rounding. auto: where a small model of the same kind "
        "shows that; decided when a run begins, noted in choices.json.",
        of=COMPARING,
    )
    old_logprobs: Literal["auto", "recompute", "current", "bypass"] = setting(
        "auto",
        "Anchor of the ratio: the trainer's before the update (recompute), the current ones "
        "(current, one optimizer step per rollout batch), the sampler's (bypass). "
        "auto: current for one step, else recompute.",
        of=RL,
    )
    max_skipped_steps: int = setting(3, "Non-finite steps in a row that are tolerated.", ge=0)
    entropy_coeff: float = setting(
        0.0,
        "Weight of the entropy bonus; 0: none.",
        ge=0,
        le=100,
        why="nothing of the policy's loss is left beside more",
        of=RL,
    )
    mix: dict[str, Annotated[float, Gt(0)]] = setting(
        {},
        "Preference losses added to the algorithm's, each with a weight and its row's own numbers: "
        "{nll: 0.2}.",
        of=PREFERENCE,
    )
    mask_truncated: bool = setting(
        False,
        "Responses cut at rollout.max_tokens are not trained on; their rewards stay in the group's "
        "statistics.",
        of=RL,
    )

    advantage: str | None = cell_setting("advantage", "Advantage estimator; null: the algorithm's.")
    ratio: Ratio | None = setting(
        None, "Level of the importance ratio; null: the algorithm's.", of=RL
    )
    denominator: Denominator | None = setting(
        None, "Policy under the ratio; null: the algorithm's.", of=RL
    )
    loss: str | None = cell_setting("gate", "Policy loss; null: the algorithm's.")
    correction: str | None = cell_setting(
        "correction", "Rollout correction; null: the algorithm's."
    )
    kl: str | None = cell_setting("kl", "KL term against the reference; null: the algorithm's.")
    weights: str | None = cell_setting(
        "weights", "Normalisation of the loss; null: the algorithm's."
    )

    loss_numbers: dict[str, Value] = setting(
        {}, "Numbers of a policy loss of your own, train.loss: path.py:function.", of=RL
    )
    features: dict[str, dict[str, Value]] = setting(
        {},
        "Features of your own, classes that change the loop at its hooks, each with its numbers: "
        "{my_feature.py:MyFeature: {coeff: 0.1}}.",
        of=RL,
    )

    @field_validator(
        "alg_name", "advantage", "loss", "correction", "kl", "weights", check_fields=False
    )
    @classmethod
    def _named(cls, value: str | None, info: ValidationInfo) -> str | None:
        name = cast(str, info.field_name)
        if value is None or (name == "loss" and ":" in value):
            return value
        if name == "alg_name":
            return known(value, ROWS)
        if name == "loss" and is_own(value):
            from oxrl.usercode.installed import entries  # for names that nobody else knows

            if value in entries(GATE).names:
                return value
        return known(value, cell_names(CELLS[name]))

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout step."""
        return self.epochs * self.minibatches

    @property
    def row(self) -> Row:
        """Row of `alg_name` with the overridden cells put in."""
        return compose_row(ROWS[self.alg_name], dict(self))

    @property
    def engine(self) -> TrainingEngine:
        """Row of `backend` in the table of engines."""
        return TRAINING_ENGINES[self.backend]

    def value(self, number: Number[T]) -> T:
        """What a number of the tables is in this run; the recipe's rows can read it."""
        return getattr(self, number.key)


def is_own(loss: str) -> bool:
    """Whether `train.loss` is a user's, and none of the table."""
    return loss not in cell_names("gate")


def compose_row(row: Row, train: Mapping[str, object]) -> Row:
    """Put the cells that fields of `train` name into `row`."""
    if row.recipe != "rl":
        return row
    chosen = {kind: train.get(name) for name, kind in CELLS.items()}
    named = {kind: name for kind, name in chosen.items() if isinstance(name, str)}
    return dataclasses.replace(row, **named)  # pyright: ignore[reportArgumentType]
