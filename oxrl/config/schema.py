"""The configuration: one frozen class per YAML section, every field with its default, bound and
meaning; and one root class per recipe, which has only the fields that this recipe can read.

The numbers of an algorithm are declared in `oxrl.tables.numbers`, and become fields of `train`
here. Which of its recipe's fields a run reads depends on its row (`reads.py`); checks across
sections are in `checks.py`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypedDict, Unpack, cast

from annotated_types import Gt, Len
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.config import JsonDict
from pydantic.fields import FieldInfo

from oxrl.errors import known
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.cells import FEATURES, find_cell
from oxrl.tables.engines import SamplingEngineName, TrainingEngineName
from oxrl.tables.numbers import NUMBERS, AnyNumber, Level, Number, T, Value
from oxrl.tables.policy import ROWS, Row

Ratio = Literal["none", Level]
Denominator = Literal["old", "rollout"]
Magnitude = Annotated[float, AfterValidator(abs)]  # `load_config` warns where it drops a sign

# Type and default, or `Field`, of a field that is made here.
Definition = tuple[object, object]

# Recipes that read a field, where not all do.
RL = ("rl",)
SAMPLING = ("rl", "rejection")
OFFLINE = ("supervised", "rejection", "preference", "reward_model")
PREFERENCE = ("preference",)
ALL = ("rl", *OFFLINE)
# Sections that an evaluation may set whatever the training algorithm reads.
EVALUATED = ("run", "model", "data", "reward", "rollout", "inference_engine")
# Adapters learn best at about ten times the rate of full tuning (Schulman et al., "LoRA Without
# Regret", 2025).
ADAPTER_RATES = {"lr": 1e-5, "critic_lr": 1e-4}

# Why bounds are where they are.
TEMPERATURE = (
    "samples at more are noise; 0.01 and less but 0 leaves one token, which is what 0 says"
)
LEARNING_RATE = "AdamW moves every weight by about lr in a step"

# YAML field -> kind of cell in the table.
CELLS = {
    name: name for name in ("advantage", "ratio", "denominator", "correction", "kl", "weights")
} | {"loss": "gate"}


def cell_names(kind: str) -> tuple[str, ...]:
    """Names that a cell of this kind may hold."""
    return tuple(name for found, name in TABLE if found == kind)


class Bounds(TypedDict, total=False):
    """What a field's values are held to."""

    ge: float
    gt: float
    le: float
    lt: float
    min_length: int
    max_length: int


def _field(
    default: object,
    meaning: str,
    *,
    of: tuple[str, ...] = ALL,
    why: str = "",
    **bounds: Unpack[Bounds],
) -> Any:
    """A field that the recipes `of` read; `why` is what makes its bounds bounds."""
    extra: JsonDict = {}
    if of != ALL:
        extra["recipes"] = [*of]
    if why:
        extra["why"] = why
    return Field(default, description=meaning, json_schema_extra=extra or None, **bounds)


def _cell(kind: str, meaning: str) -> str | None:
    """Field of an optional cell override; its names come from the table."""
    extra: JsonDict = {"enum": [*cell_names(kind), None], "recipes": [*RL]}
    return Field(None, description=meaning, json_schema_extra=extra)


class Section(BaseModel):
    """Base of every section: unknown fields are refused, values cannot change, infinity and NaN are
    no settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_lookalikes(cls, value: object, info: ValidationInfo) -> object:
        """Stop `true` from becoming 1 and `no`, `on`, `1` from becoming a boolean."""
        boolean = cls.model_fields[cast(str, info.field_name)].annotation is bool
        if isinstance(value, bool) and not boolean:
            raise ValueError(
                "must not be true or false here; write a number, or quote the word if it is text"
            )
        if boolean and not isinstance(value, bool):
            raise ValueError(
                "must be true or false (yes, no, on, off, 0 and 1 are not booleans here)"
            )
        return value


def printable(text: str) -> str:
    """`text`, if it can be shown and written to a file system.

    Raises:
        ValueError: it holds control characters.
    """
    if not text.isprintable():
        raise ValueError("must not hold control characters (line breaks, escape codes, NUL)")
    return text


class RunConfig(Section):
    """What the run is called, how long it lasts, where it runs and what it keeps."""

    name: str = _field(
        ..., "Name of the run: directory and tracker label.", min_length=1, max_length=200
    )
    seed: int = _field(0, "Every random choice is a function of this integer.", ge=0, lt=2**63)
    dir: str | None = _field(None, "Run directory; null: runs/<run.name>.", min_length=1)
    steps: int = _field(
        ..., "Optimizer steps in total.", ge=1, le=10**9, why="more take years at any speed"
    )
    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto", "Where models live; auto: cuda if there is one."
    )
    training_gpus: int = _field(
        1,
        "Training ranks: processes, one device each; the local engine has one.",
        ge=1,
        le=65536,
        why="each is a process",
    )
    threads: int | None = _field(
        None,
        "CPU threads of PyTorch; null: PyTorch's choice.",
        ge=1,
        le=1024,
        why="PyTorch starts every one of them, and crashes where it cannot",
    )
    checkpoint_every: int = _field(
        50, "Optimizer steps between checkpoints; 0: only the first and the last.", ge=0
    )
    keep_checkpoints: int = _field(
        2, "Newest checkpoints kept on disk; older ones are deleted.", ge=1
    )
    eval_every: int = _field(
        0, "Optimizer steps between evaluations on data.eval; 0: only at the end.", ge=0
    )
    keep_best: bool = _field(
        False,
        "Keep the weights of the best evaluation in best/ (not in reinforcement learning).",
        of=OFFLINE,
    )
    record: Literal["text", "tokens"] = _field(
        "text", "text: samples.jsonl; tokens: also rollouts/*.safetensors.", of=RL
    )
    mlflow: bool = _field(True, "Mirror metrics to mlflow.db in the run directory.")
    deadline_s: float = _field(
        600.0,
        "Longest wait for any engine or reward, in seconds.",
        ge=0.01,
        le=604800,
        why="less is over before anything can answer, and more than a week is no deadline",
    )
    ray_address: str | None = _field(
        None, "Ray cluster to join, host:port or auto; null: its own.", min_length=1, of=RL
    )
    max_restarts: int = _field(
        0, "Times a run whose training actors are lost goes on from its checkpoint.", ge=0, of=RL
    )

    @field_validator("name")
    @classmethod
    def _one_folder(cls, value: str) -> str:
        """The name is a label in logs and the name of a folder."""
        if not value.strip() or value != value.strip() or value in (".", ".."):
            raise ValueError("must be a word or several, without blanks around them")
        if "/" in value:
            raise ValueError("must not lead to another folder; a place is given by run.dir")
        return printable(value)

    @field_validator("dir")
    @classmethod
    def _own_folder(cls, value: str | None) -> str | None:
        """A run fills its directory, so it cannot be the root of everything."""
        if value is None:
            return None
        if Path(value).resolve() == Path(value).resolve().parent:
            raise ValueError("must be a directory of the run's own, not the root of all others")
        return printable(value)

    @property
    def directory(self) -> Path:
        """Run directory, with the default filled in."""
        return Path(self.dir) if self.dir is not None else Path("runs") / self.name


class ModelConfig(Section):
    """The policy that is trained."""

    name: str = _field(..., 'Folder, hub name, or "builtin:<name>" (needs no files).', min_length=1)
    revision: str | None = _field(
        None,
        "Commit, tag or branch of a model on the hub; null: main. A run keeps the commit it began "
        "with.",
        min_length=1,
    )
    dtype: Literal["float32", "bfloat16"] = _field(
        "float32", "Type of the weights; masters and moments are float32."
    )
    gradient_checkpointing: bool = _field(
        False, "Recompute activations: less memory, a third more time."
    )
    chat_template: str | None = _field(
        None, "Jinja file of conversations; null: the tokenizer's own.", min_length=1
    )
    max_length: int | None = _field(
        None,
        "Longest row, prompt and response, in tokens; null: the model's.",
        ge=2,
        le=10**8,
        why="no model reads longer rows",
    )
    trust_remote_code: bool = _field(False, "Run Python code that ships with the model.")


class DataConfig(Section):
    """What is read from disk. Relative paths are relative to the current directory."""

    train: Annotated[str, Len(1)] | Annotated[dict[str, Annotated[float, Gt(0)]], Len(1)] = _field(
        ...,
        "Training rows, .jsonl or .parquet, a path or hf://datasets/OWNER/NAME/FILE; "
        "several: {path: share, ...}.",
    )
    eval: str | None = _field(
        None, "Held-out rows, as for train; null: no evaluation.", min_length=1
    )
    prompts_per_step: int = _field(
        16,
        "Prompts per rollout step (reinforcement learning).",
        ge=1,
        le=10**6,
        why="all of a step's responses are held in memory",
        of=SAMPLING,
    )
    rows_per_step: int = _field(
        64,
        "Rows per optimizer step (not in reinforcement learning).",
        ge=1,
        le=10**6,
        why="all rows of a step are held in memory",
        of=OFFLINE,
    )
    pack_tokens: int | None = _field(
        None,
        "Pack rows of a step to so many tokens (supervised); null: pad.",
        ge=16,
        le=10**8,
        why="a pack is to hold several rows, and to fit into memory",
        of=("supervised", "rejection"),
    )
    max_prompt_tokens: int | None = _field(
        None, "Longest prompt; null: what rollout.max_tokens leaves.", ge=1, of=SAMPLING
    )
    overlong: Literal["drop", "error"] = _field(
        "drop", "A row that is too long is dropped, or stops the run."
    )
    stream: bool = _field(
        False, "Leave .jsonl rows on disk until they are drawn: for more than fits in memory."
    )
    eval_rows: int | None = _field(None, "Evaluate on the first so many rows; null: all.", ge=1)

    @field_validator("train", mode="wrap")
    @classmethod
    def _one_or_several(
        cls, value: object, check: ValidatorFunctionWrapHandler
    ) -> str | dict[str, float]:
        try:
            return check(value)
        except ValidationError:
            raise ValueError(
                "must be a path, or a mapping of paths to positive shares "
                "such as {a.jsonl: 0.7, b.jsonl: 0.3}"
            ) from None

    @property
    def train_files(self) -> tuple[str, ...]:
        """Every file of `train`."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train)


class RewardConfig(Section):
    """What scores a response."""

    name: str = _field(
        "", '"math", "exact" or "path.py:function" (required for reinforcement learning).'
    )
    timeout_s: float = _field(
        10.0,
        "Seconds one response may take before its worker is killed.",
        ge=0.01,
        le=86400,
        why="less is over before a worker can answer, and more than a day is no limit",
    )
    workers: int = _field(1, "Reward processes.", ge=1, le=1024, why="each is a process")
    max_error_rate: float = _field(
        0.5, "Share of unscored responses that stops the run; 1: never.", ge=0, le=1
    )


class RolloutConfig(Section):
    """What is sampled for training, and for evaluation where the name says so."""

    temperature: float = _field(
        1.0,
        "Sampling temperature; 0 is greedy (not for training).",
        ge=0,
        le=10,
        why=TEMPERATURE,
    )
    top_p: float = _field(1.0, "Nucleus mass; 1: off. Training needs 1.", gt=0, le=1)
    top_k: int = _field(0, "Keep the k most likely tokens; 0: off. Training needs 0.", ge=0)
    max_tokens: int = _field(
        512, "Longest response in tokens.", ge=1, le=10**8, why="no model reads longer rows"
    )
    n_samples: int = _field(
        8,
        "Responses per prompt: the group of group-relative advantages.",
        ge=1,
        le=65536,
        why="all of a step's responses are held in memory",
    )
    force_strict_on_policy: bool = _field(
        True, "Refuse any token not sampled by the current weights.", of=RL
    )
    max_staleness: int = _field(
        0,
        "Weight versions a sample may lag behind. 0: rollout, then train. Above: the next rollout "
        "batches are sampled while one trains (with inference_engine.actors at the same time), "
        "then they lag epochs x minibatches or more.",
        ge=0,
        le=1000,
        why="samples of so old weights say nothing of the present ones",
        of=RL,
    )
    eval_samples: int = _field(
        1,
        "Responses per held-out prompt.",
        ge=1,
        le=65536,
        why="all of a prompt's responses are held in memory",
        of=RL,
    )
    eval_temperature: float = _field(
        1.0, "Evaluation temperature; 0 is greedy.", ge=0, le=10, why=TEMPERATURE, of=RL
    )

    @field_validator("temperature", "eval_temperature", check_fields=False)
    @classmethod
    def _greedy_or_warm(cls, value: float) -> float:
        if 0 < value < 0.01:
            raise ValueError(f"must be 0 (greedy), or from 0.01 to 10, because {TEMPERATURE}")
        return value


class TrainConfig(Section):
    """The algorithm, its optimizer, its parameters, and cells that differ from its row of the
    table.
    """

    alg_name: str = Field(
        description="Row of the table: see `oxrl algorithms`.",
        json_schema_extra={"enum": [*sorted(ROWS)]},
    )
    backend: TrainingEngineName = _field(
        "local",
        "What trains: this process, or ranks (Ray actors in RL, else torchrun's) with DeepSpeed "
        "or FSDP2.",
    )
    lr: float = _field(
        1e-6,
        "Peak learning rate of AdamW; with adapters 1e-5 by default.",
        ge=0,
        le=1,
        why=LEARNING_RATE,
    )
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = _field(
        "constant",
        "After the warm-up: constant, or down to 0 at run.steps (wsd: over the last fifth).",
    )
    warmup_steps: int = _field(0, "Optimizer steps of linear warm-up; 0: none.", ge=0)
    weight_decay: float = _field(
        0.0,
        "Decoupled weight decay; 0: none.",
        ge=0,
        le=100,
        why="a step takes the share lr x weight_decay off every weight",
    )
    decay: Literal["matrices", "all"] = _field(
        "matrices",
        "What weight_decay shrinks: matrices (not norms, biases and embeddings), or all weights.",
    )
    adam_beta1: float = _field(0.9, "Decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = _field(0.999, "Decay of the second moment.", ge=0, lt=1)
    adam_eps: float = _field(
        1e-8,
        "Added to the root of the second moment.",
        gt=0,
        le=1,
        why="gradients of a clipped norm disappear beside a larger one",
    )
    max_grad_norm: float = _field(
        1.0,
        "Global gradient norm is clipped to this.",
        ge=1e-6,
        why="smaller gradients disappear beside adam_eps; a large number clips nothing",
    )
    epochs: int = _field(
        1,
        "Passes over each rollout batch.",
        ge=1,
        le=1000,
        why="the samples say nothing of weights that have moved so far",
        of=RL,
    )
    minibatches: int = _field(
        1,
        "Optimizer steps per pass; divides data.prompts_per_step.",
        ge=1,
        le=10**6,
        why="there are no more prompts in a step",
        of=RL,
    )
    micro_batch_tokens: int = _field(
        16384, "Padded tokens per pass: memory, never the gradient.", ge=1
    )
    old_logprobs: Literal["auto", "recompute", "current", "bypass"] = _field(
        "auto",
        "Anchor of the ratio: the trainer's before the update (recompute), the current ones "
        "(current, one optimizer step per rollout batch), the sampler's (bypass). "
        "auto: current for one step, else recompute.",
        of=RL,
    )
    max_skipped_steps: int = _field(3, "Non-finite steps in a row that are tolerated.", ge=0)
    entropy_coeff: float = _field(
        0.0,
        "Weight of the entropy bonus; 0: none.",
        ge=0,
        le=100,
        why="nothing of the policy's loss is left beside more",
        of=RL,
    )
    mix: dict[str, Annotated[float, Gt(0)]] = _field(
        {},
        "Preference losses added to the algorithm's, each with a weight and its row's own numbers: "
        "{nll: 0.2}.",
        of=PREFERENCE,
    )
    mask_truncated: bool = _field(
        False,
        "Responses cut at rollout.max_tokens are not trained on; their rewards stay in the group's "
        "statistics.",
        of=RL,
    )

    advantage: str | None = _cell("advantage", "Advantage estimator; null: the algorithm's.")
    ratio: Ratio | None = _field(
        None, "Level of the importance ratio; null: the algorithm's.", of=RL
    )
    denominator: Denominator | None = _field(
        None, "Policy under the ratio; null: the algorithm's.", of=RL
    )
    loss: str | None = _cell("gate", "Policy loss; null: the algorithm's.")
    correction: str | None = _cell("correction", "Rollout correction; null: the algorithm's.")
    kl: str | None = _cell("kl", "KL term against the reference; null: the algorithm's.")
    weights: str | None = _cell("weights", "Normalisation of the loss; null: the algorithm's.")

    loss_numbers: dict[str, float | int | str | bool | None] = _field(
        {}, "Numbers of a policy loss of your own, train.loss: path.py:function.", of=RL
    )

    @field_validator(
        "alg_name", "advantage", "loss", "correction", "kl", "weights", check_fields=False
    )
    @classmethod
    def _named(cls, value: str | None, info: ValidationInfo) -> str | None:
        name = cast(str, info.field_name)
        if value is None or (name == "loss" and is_own(value)):
            return value
        if name == "alg_name":
            return known(value, ROWS)
        return known(value, cell_names(CELLS[name]))

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout step."""
        return self.epochs * self.minibatches

    @property
    def row(self) -> Row:
        """Row of `alg_name` with the overridden cells put in."""
        return compose_row(ROWS[self.alg_name], dict(self))

    def value(self, number: Number[T]) -> T:
        """What a number of the tables is in this run; the recipe's rows can read it."""
        return getattr(self, number.key)

    def numbers(self, kind: str, name: str) -> dict[str, Value]:
        """Return the numbers that a cell reads, by the names its function knows them by.

        Args:
            kind: advantage, ratio, gate, selection, correction, kl or weights.
            name: of the cell.
        """
        if kind == "gate" and is_own(name):
            return dict(self.loss_numbers)
        return {number.name: self.value(number) for number in find_cell(kind, name).numbers}


def is_own(loss: str) -> bool:
    """Whether `train.loss` is a user's `path.py:function`."""
    return ":" in loss


def compose_row(row: Row, train: Mapping[str, object]) -> Row:
    """Put the cells that fields of `train` name into `row`."""
    if row.recipe != "rl":
        return row
    chosen = {kind: train.get(name) for name, kind in CELLS.items()}
    named = {kind: name for kind, name in chosen.items() if isinstance(name, str)}
    return dataclasses.replace(row, **named)  # pyright: ignore[reportArgumentType]


class EngineConfig(Section):
    """What samples."""

    name: SamplingEngineName = _field(
        "local",
        "local: oxRL's sampler. vllm: an extra, in Ray actors; makes train.correction truncate by "
        "default.",
    )
    max_rows: int = _field(
        128,
        "Rows decoded at once, per actor.",
        ge=1,
        le=65536,
        why="each has keys and values in memory",
    )
    actors: int = _field(
        0,
        "Ray actors that sample, each with a model of its own; 0: this process samples.",
        ge=0,
        le=65536,
        why="each is a process",
        of=RL,
    )
    placement: Literal["separate", "colocated"] = _field(
        "separate",
        "Rollout actors have devices of their own, or each shares one with a training actor.",
        of=RL,
    )
    probe_every: int = _field(
        50,
        "Weight deliveries to actors between two proofs with a perturbed copy; "
        "0: only the first has one.",
        ge=0,
        of=RL,
    )
    probe_tokens: int = _field(
        512,
        "Tokens, of the newest samples, that trainer and actors both score after a delivery.",
        ge=64,
        le=65536,
        why="fewer say little about rounding, and more cost more than the delivery",
        of=RL,
    )
    probe_limit: float = _field(
        4.0,
        "How many times the rounding that is measured with the real weights the two may differ by.",
        gt=0,
        le=1000,
        why="two right implementations differ by one or two, and no proof is left at a thousand",
        of=RL,
    )
    tensor_parallel: int = _field(
        1,
        "vllm: devices that share one copy of the model, per actor.",
        ge=1,
        le=1024,
        why="each is a process",
        of=RL,
    )
    gpu_memory_fraction: float = _field(
        0.5, "vllm: share of a GPU's memory for weights and cache.", gt=0, lt=1, of=RL
    )
    kv_cache_gb: float | None = _field(
        None,
        "vllm: cache in GB, instead of that share (CPU: null is 0.25).",
        gt=0,
        le=10**5,
        why="no device has more memory",
        of=RL,
    )


class LoraConfig(Section):
    """Low-rank adapters (peft) on a frozen model; no dropout, with which ratios of equal weights
    would not be 1.
    """

    rank: int = _field(
        0,
        "Rank of the adapters; 0: no adapters, every weight is trained.",
        ge=0,
        le=65536,
        why="no layer is so wide",
    )
    alpha: float = _field(
        32.0,
        "Adapters are scaled by alpha / rank.",
        gt=0,
        le=10**6,
        why="adapters of such a scale leave nothing of the model",
    )
    targets: str = _field(
        "all-linear", "Layers that get one: all-linear, or names with commas: q_proj,v_proj."
    )


class DeepSpeedConfig(Section):
    """How DeepSpeed divides the memory of training (`train.backend: deepspeed`)."""

    zero_stage: int = _field(
        3,
        "Cut up over ranks: 0 nothing, 1 AdamW's state, 2 and gradients, 3 and weights.",
        ge=0,
        le=3,
    )
    offload_optimizer: bool = _field(
        False, "Keep AdamW's state in CPU memory and step there; needs stage 1 or more."
    )
    offload_param: bool = _field(
        False, "Keep weights in CPU memory until a layer needs them; needs stage 3."
    )


class ReferenceConfig(Section):
    """How DeepSpeed divides the memory of a reference model, which only answers (`train.backend:
    deepspeed`).
    """

    zero_stage: Literal[0, 3] = _field(
        3, "3: weights are cut up over ranks; 0: every rank holds all of them."
    )
    offload_param: bool = _field(
        False, "Keep weights in CPU memory until a layer needs them; needs stage 3."
    )


class Config(Section):
    """A whole run. Build it with `load_config`, which also checks across sections.

    Validating gives an instance of a subclass: the root class of the recipe of `train.alg_name`,
    which has only the fields that this recipe can read. Fields of other recipes cannot be set, are
    not dumped, and have their default where code that recipes share looks at them.
    """

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = _field(RewardConfig(), "", of=SAMPLING)
    rollout: RolloutConfig = _field(RolloutConfig(), "", of=SAMPLING)
    lora: LoraConfig = LoraConfig()
    train: TrainConfig
    inference_engine: EngineConfig = _field(EngineConfig(), "", of=SAMPLING)
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    deepspeed_ref: ReferenceConfig = _field(ReferenceConfig(), "", of=("rl", "preference"))

    @model_validator(mode="wrap")
    @classmethod
    def _of_recipe(cls, values: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Choose the root class, and fill in what the algorithm sets."""
        if not isinstance(values, dict):
            return validate(values)
        given = cast(dict[str, object], values)
        if cls is Config:
            return cast(Self, root_class(recipe_of(given)).model_validate(given))
        return validate(with_defaults(given))

    @property
    def sampling_block(self) -> int:
        """Rollout batches sampled by the same weights while earlier ones train; 0: none."""
        return (self.rollout.max_staleness // self.train.updates + 1) // 2


def recipe_of(values: Mapping[str, object]) -> str:
    """Recipe of the algorithm that `values` name; where it is in doubt, reinforcement learning."""
    row = ROWS.get(str(_fields(values, "train").get("alg_name")))
    return "rl" if row is None else row.recipe


def with_defaults(values: Mapping[str, object]) -> dict[str, object]:
    """Fill in the fields of `train` that the algorithm and what surrounds it set.

    Numbers come from the cells that were chosen by hand, then from the row, then from its cells;
    what is written down stays.
    """
    train = _fields(values, "train")
    row = ROWS.get(str(train.get("alg_name")))
    if row is None:
        return dict(values)
    found: dict[str, object] = {}
    composed = compose_row(row, train)
    # Samples of other kernels or earlier weights: a row whose ratio does not know the sampler gets
    # capped weights.
    stale = _fields(values, "rollout").get("max_staleness", 0) not in (0, "0")
    elsewhere = stale or _fields(values, "inference_engine").get("name") == "vllm"
    corrected = composed.knows_sampler or train.get("old_logprobs") == "bypass"
    if row.recipe == "rl" and elsewhere and not corrected:
        found["correction"] = "truncate"
        composed = compose_row(composed, found)
    found |= composed.defaults
    if _fields(values, "lora").get("rank"):
        rates = {name: rate for name, rate in ADAPTER_RATES.items() if name in {*found, "lr"}}
        found |= rates
    return {**values, "train": {**found, **train}}


def _fields(values: Mapping[str, object], section: str) -> Mapping[str, object]:
    """What `values` say of a section; nothing where that is no mapping."""
    found = values.get(section)
    return cast(Mapping[str, object], found) if isinstance(found, Mapping) else {}


def readers(field: FieldInfo) -> tuple[str, ...]:
    """Recipes that can read a field or section."""
    extra = field.json_schema_extra
    named = extra.get("recipes") if isinstance(extra, dict) else None
    return ALL if named is None else tuple(cast(list[str], named))


def why_bounded(field: FieldInfo) -> str:
    """Why a field's bounds are where they are, as the end of a sentence; empty where plain."""
    extra = field.json_schema_extra
    why = extra.get("why") if isinstance(extra, dict) else None
    return f", because {why}" if why else ""


def _number_field(number: AnyNumber) -> Definition:
    """Type and field of a number of the tables."""
    kind = Magnitude if number.magnitude else number.type
    field = Field(
        number.default,
        description=number.meaning,
        ge=number.ge,
        gt=number.gt,
        le=number.le,
        lt=number.lt,
    )
    return kind, field


def _subclass(parent: type[Section], name: str, fields: Mapping[str, Definition]) -> type[Section]:
    """A class like `parent` with other or further fields; of type ClassVar, a field is none."""
    namespace: dict[str, object] = {
        field: default for field, (_, default) in fields.items() if default is not ...
    }
    namespace["__annotations__"] = {field: kind for field, (kind, _) in fields.items()}
    namespace |= {"__module__": __name__, "__doc__": parent.__doc__}
    return types.new_class(name, (parent,), exec_body=lambda body: body.update(namespace))


def _numbers_of(recipe: str) -> dict[str, Definition]:
    """Fields of the numbers that a recipe can read."""
    read = {name for row in ROWS.values() if row.recipe == recipe for name in row.defaults}
    if recipe == "rl":
        parts = (*TABLE.values(), *FEATURES.values())
        read |= {number.key for part in parts for number in part.numbers}
    return {name: _number_field(number) for name, number in NUMBERS.items() if name in read}


@cache
def _section_class(section: type[Section], recipe: str) -> type[Section]:
    """The section as `recipe` reads it."""
    fields: dict[str, Definition] = {}
    for name, field in section.model_fields.items():
        if recipe not in readers(field):
            fields[name] = (ClassVar[object], field.default)
    if section is TrainConfig:
        fields |= _numbers_of(recipe)
    if not fields:
        return section
    return _publish(_subclass(section, _title(recipe) + section.__name__, fields))


def root_class(recipe: str, *, evaluates: bool = False) -> type[Config]:
    """The root class of a recipe, the same one whenever it is asked for.

    Args:
        recipe: of the algorithm.
        evaluates: with everything that an evaluation may set, whatever the recipe reads.
    """
    return _root_class(recipe, evaluates)


# The cache tells calls with and without a keyword apart, and would make two classes of one name.
@cache
def _root_class(recipe: str, evaluates: bool) -> type[Config]:
    fields: dict[str, Definition] = {}
    for name, field in Config.model_fields.items():
        section = cast(type[Section], field.annotation)
        whole = evaluates and name in EVALUATED
        if not whole and recipe not in readers(field):
            fields[name] = (ClassVar[object], field.default)
            continue
        kind = section if whole else _section_class(section, recipe)
        fields[name] = (kind, ... if field.is_required() else kind())
    name = f"{_title(recipe)}{'Evaluation' if evaluates else ''}Config"
    return cast(type[Config], _publish(_subclass(Config, name, fields)))


def _title(recipe: str) -> str:
    """What the names of a recipe's classes begin with."""
    return recipe.title().replace("_", "")


def _publish(made: type[Section]) -> type[Section]:
    """Put a class of a recipe under its name into this module, where pickles look for it."""
    globals()[made.__name__] = made
    return made


def _made_class(name: str) -> type[Section]:
    """Module attributes that do not exist yet: a recipe's classes, which are made when first used.

    A process that unpickles a configuration asks for them by name before anything here has.
    """
    for recipe in ALL:
        if name.startswith(_title(recipe)) and name.endswith("Config"):
            root_class(recipe)
            root_class(recipe, evaluates=True)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


if not TYPE_CHECKING:
    __getattr__ = _made_class


@cache
def fields_of(recipe: str, *, evaluates: bool = False) -> tuple[str, ...]:
    """Dotted paths of every field of a recipe's root class."""
    root = root_class(recipe, evaluates=evaluates)
    found: list[str] = []
    for section, field in root.model_fields.items():
        model = cast(type[Section], field.annotation)
        found.extend(f"{section}.{name}" for name in model.model_fields)
    return tuple(found)


# Every section with the fields of all recipes.
SECTIONS: dict[str, type[Section]] = {
    name: cast(type[Section], field.annotation) for name, field in Config.model_fields.items()
}
SECTIONS["train"] = _subclass(
    TrainConfig,
    "TrainConfig",
    {name: _number_field(number) for name, number in NUMBERS.items()},
)
FIELDS = tuple(
    f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields
)


def config_schema() -> dict[str, object]:
    """JSON schema of the YAML file, with the fields of all recipes, for editors."""
    fields: dict[str, Definition] = {}
    for name, field in Config.model_fields.items():
        section = SECTIONS[name]
        fields[name] = (section, ... if field.is_required() else section())
    whole = _subclass(Section, "Config", fields)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole.model_json_schema()}
