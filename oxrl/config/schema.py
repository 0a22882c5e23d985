"""The configuration: one frozen class per YAML section, every field with its default, bound and
meaning.

Which fields a run reads depends on the algorithm (`reads.py`); checks across sections are in
`checks.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from annotated_types import Gt, Len
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from oxrl.errors import known
from oxrl.tables.policy import PARAMETERS, ROWS, Row

Level = Literal["token", "sequence", "geometric"]
Ratio = Literal["none", Level]
Denominator = Literal["old", "rollout"]
Magnitude = Annotated[float, AfterValidator(abs)]  # `load_config` warns where it drops a sign

# YAML field -> kind of cell in the table.
CELLS = {
    name: name for name in ("advantage", "ratio", "denominator", "correction", "kl", "weights")
} | {"loss": "gate"}


def cell_names(kind: str) -> tuple[str, ...]:
    """Names that a cell of this kind may hold."""
    return tuple(name for found, name in PARAMETERS if found == kind)


def _field(default: Any, meaning: str, **bounds: Any) -> Any:
    return Field(default, description=meaning, **bounds)


def _cell(kind: str, meaning: str) -> Any:
    """Field of an optional cell override; its names come from the table."""
    return _field(None, meaning, json_schema_extra={"enum": [*cell_names(kind), None]})


class Section(BaseModel):
    """Base of every section: unknown fields are refused, values cannot change, infinity and NaN are
    no settings.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_lookalikes(cls, value: Any, info: ValidationInfo) -> Any:
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


class RunConfig(Section):
    """What the run is called, how long it lasts, where it runs and what it keeps."""

    name: str = _field(..., "Name of the run: directory and tracker label.", min_length=1)
    seed: int = _field(0, "Every random choice is a function of this integer.", ge=0, lt=2**63)
    dir: str | None = _field(None, "Run directory; null: runs/<run.name>.", min_length=1)
    steps: int = _field(..., "Optimizer steps in total.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = _field(
        "auto", "Where models live; auto: cuda if there is one."
    )
    training_gpus: int = _field(
        1, "Training ranks: processes, one device each; the local engine has one.", ge=1
    )
    threads: int | None = _field(None, "CPU threads of PyTorch; null: PyTorch's choice.", ge=1)
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
        False, "Keep the weights of the best evaluation in best/ (not in reinforcement learning)."
    )
    record: Literal["text", "tokens"] = _field(
        "text", "text: samples.jsonl; tokens: also rollouts/*.safetensors."
    )
    mlflow: bool = _field(True, "Mirror metrics to mlflow.db in the run directory.")
    deadline_s: float = _field(600.0, "Longest wait for any engine or reward, in seconds.", gt=0)
    ray_address: str | None = _field(
        None, "Ray cluster to join, host:port or auto; null: its own.", min_length=1
    )
    max_restarts: int = _field(
        0, "Times a run whose training actors are lost goes on from its checkpoint.", ge=0
    )

    @property
    def directory(self) -> Path:
        """Run directory, with the default filled in."""
        return Path(self.dir) if self.dir is not None else Path("runs") / self.name


class ModelConfig(Section):
    """The policy that is trained."""

    name: str = _field(..., 'Folder, hub name, or "builtin:<name>" (needs no files).', min_length=1)
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
        None, "Longest row, prompt and response, in tokens; null: the model's.", ge=2
    )
    trust_remote_code: bool = _field(False, "Run Python code that ships with the model.")


class DataConfig(Section):
    """What is read from disk. Relative paths are relative to the current directory."""

    train: Annotated[str, Len(1)] | Annotated[dict[str, Annotated[float, Gt(0)]], Len(1)] = _field(
        ...,
        "Training rows, .jsonl or .parquet, a path or hf://datasets/OWNER/NAME/FILE; several: {path: share, ...}.",
    )
    eval: str | None = _field(
        None, "Held-out rows, as for train; null: no evaluation.", min_length=1
    )
    prompts_per_step: int = _field(16, "Prompts per rollout step (reinforcement learning).", ge=1)
    rows_per_step: int = _field(
        64, "Rows per optimizer step (not in reinforcement learning).", ge=1
    )
    pack_tokens: int | None = _field(
        None, "Pack rows of a step to so many tokens (supervised); null: pad.", ge=2
    )
    max_prompt_tokens: int | None = _field(
        None, "Longest prompt; null: what rollout.max_tokens leaves.", ge=1
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
    def _one_or_several(cls, value: Any, check: Callable[[Any], Any]) -> str | dict[str, float]:
        try:
            return check(value)
        except ValidationError:
            rule = "must be a path, or a mapping of paths to positive shares such as {a.jsonl: 0.7, b.jsonl: 0.3}"
            raise ValueError(rule) from None

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
        10.0, "Seconds one response may take before its worker is killed.", gt=0
    )
    workers: int = _field(1, "Reward processes.", ge=1)
    max_error_rate: float = _field(
        0.5, "Share of unscored responses that stops the run; 1: never.", ge=0, le=1
    )


class RolloutConfig(Section):
    """What is sampled for training, and for evaluation where the name says so."""

    temperature: float = _field(
        1.0, "Sampling temperature; 0 is greedy (not for training).", ge=0, le=100
    )
    top_p: float = _field(1.0, "Nucleus mass; 1: off. Training needs 1.", gt=0, le=1)
    top_k: int = _field(0, "Keep the k most likely tokens; 0: off. Training needs 0.", ge=0)
    max_tokens: int = _field(512, "Longest response in tokens.", ge=1)
    n_samples: int = _field(
        8, "Responses per prompt: the group of group-relative advantages.", ge=1
    )
    force_strict_on_policy: bool = _field(
        True, "Refuse any token not sampled by the current weights."
    )
    max_staleness: int = _field(
        0,
        "Weight versions a sample may lag behind. 0: rollout, then train. Above: the next rollout batches are sampled "
        "while one trains (with inference_engine.actors at the same time), then they lag epochs x minibatches or more.",
        ge=0,
    )
    eval_samples: int = _field(1, "Responses per held-out prompt.", ge=1)
    eval_temperature: float = _field(1.0, "Evaluation temperature; 0 is greedy.", ge=0, le=100)


class TrainConfig(Section):
    """The algorithm, its optimizer, its parameters, and cells that differ from its row of the
    table.
    """

    alg_name: str = _field(
        ..., "Row of the table: see `oxrl algorithms`.", json_schema_extra={"enum": [*sorted(ROWS)]}
    )
    backend: Literal["local", "deepspeed", "fsdp"] = _field(
        "local",
        "What trains: this process, or ranks (Ray actors in RL, else torchrun's) with DeepSpeed or FSDP2.",
    )
    lr: float = _field(1e-6, "Peak learning rate of AdamW; with adapters 1e-5 by default.", ge=0)
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = _field(
        "constant",
        "After the warm-up: constant, or down to 0 at run.steps (wsd: over the last fifth).",
    )
    warmup_steps: int = _field(0, "Optimizer steps of linear warm-up; 0: none.", ge=0)
    weight_decay: float = _field(0.0, "Decoupled weight decay; 0: none.", ge=0)
    decay: Literal["matrices", "all"] = _field(
        "matrices",
        "What weight_decay shrinks: matrices (not norms, biases and embeddings), or all weights.",
    )
    adam_beta1: float = _field(0.9, "Decay of the first moment.", ge=0, lt=1)
    adam_beta2: float = _field(0.999, "Decay of the second moment.", ge=0, lt=1)
    adam_eps: float = _field(1e-8, "Added to the root of the second moment.", gt=0)
    max_grad_norm: float = _field(1.0, "Global gradient norm is clipped to this.", gt=0)
    epochs: int = _field(1, "Passes over each rollout batch.", ge=1)
    minibatches: int = _field(1, "Optimizer steps per pass; divides data.prompts_per_step.", ge=1)
    micro_batch_tokens: int = _field(
        16384, "Padded tokens per pass: memory, never the gradient.", ge=1
    )
    old_logprobs: Literal["auto", "recompute", "current", "bypass"] = _field(
        "auto",
        "Anchor of the ratio: the trainer's before the update (recompute), the current ones (current, one optimizer "
        "step per rollout batch), the sampler's (bypass). auto: current for one step, else recompute.",
    )
    max_skipped_steps: int = _field(3, "Non-finite steps in a row that are tolerated.", ge=0)
    entropy_coeff: float = _field(0.0, "Weight of the entropy bonus; 0: none.", ge=0)
    mix: dict[str, Annotated[float, Gt(0)]] = _field(
        {},
        "Preference losses added to the algorithm's, each with a weight and its row's own numbers: {nll: 0.2}.",
    )
    mask_truncated: bool = _field(
        False,
        "Responses cut at rollout.max_tokens are not trained on; their rewards stay in the group's statistics.",
    )

    advantage: str | None = _cell("advantage", "Advantage estimator; null: the algorithm's.")
    ratio: Ratio | None = _field(None, "Level of the importance ratio; null: the algorithm's.")
    denominator: Denominator | None = _field(None, "Policy under the ratio; null: the algorithm's.")
    loss: str | None = _cell("gate", "Policy loss; null: the algorithm's.")
    correction: str | None = _cell("correction", "Rollout correction; null: the algorithm's.")
    kl: str | None = _cell("kl", "KL term against the reference; null: the algorithm's.")
    weights: str | None = _cell("weights", "Normalisation of the loss; null: the algorithm's.")

    clip_low: Magnitude = _field(
        0.2, "Clip below 1 - clip_low. A sign is dropped with a warning.", gt=-1, lt=1
    )
    clip_high: Magnitude = _field(
        0.2, "Clip above 1 + clip_high. A sign is dropped with a warning."
    )
    clip_dual: float | None = _field(
        None, "Ratio above which a negative advantage stops pulling; null: none.", gt=1
    )
    weight_min: float = _field(0.0, "Lower bound of the detached importance weight; 0: none.", ge=0)
    weight_max: float = _field(5.0, "Upper bound of the detached importance weight.", gt=0)
    gamma: float = _field(1.0, "Discount per token; 1: none.", ge=0, le=1)
    gae_lambda: float = _field(1.0, "GAE: 0 trusts the critic, 1 the return.", ge=0, le=1)
    whiten: bool = _field(
        True, "Scale advantages to mean 0 and variance 1 over the tokens of the step."
    )
    bootstrap_on_truncation: bool = _field(
        False, "A cut response goes on with the critic's value, not 0."
    )
    kl_coeff: float = _field(0.0, "Weight of the KL term; 0: no reference model is loaded.", ge=0)
    correction_level: Level = _field(
        "token", "What is compared: each token, a row's product or its geometric mean."
    )
    correction_max: float = _field(2.0, "Upper bound of the correction weight.", gt=0)
    correction_min: float = _field(0.5, "Below it the correction drops what it judges.", ge=0)
    correction_k3_max: float = _field(
        0.01, "Rows with a larger mean k3 mismatch are dropped.", ge=0
    )
    correction_veto: float = _field(1e-4, "A row with a token below this ratio is dropped.", ge=0)
    pass_k: int = _field(
        2, "Tries that count as one: k of pass@k, at most rollout.n_samples.", ge=1
    )
    length_alpha: float = _field(0.05, "GAE with lambda = 1 - 1 / (length_alpha x length).", gt=0)
    sapo_positive: float = _field(
        1.0, "Sharpness of the soft gate where the advantage is positive.", gt=0
    )
    sapo_negative: float = _field(1.05, "Sharpness of the soft gate where it is negative.", gt=0)
    gate_sharpness: float = _field(1.0, "Sharpness of the sigmoid acceptance.", gt=0)
    dppo_low: float = _field(0.2, "Largest divergence of a token that is pushed down.", ge=0)
    dppo_high: float = _field(0.2, "Largest divergence of a token that is pushed up.", ge=0)
    proximal_coeff: float = _field(1e-3, "Weight of half the squared log-ratio; 0: none.", ge=0)
    length_power: float = _field(
        1.0, "Preference for long (positive) or short rows of a group; 0: none."
    )
    weights_length: int | None = _field(
        None, "Length that divides every row's sum; null: rollout.max_tokens.", ge=1
    )
    drift_max: float = _field(
        0.5, "Bad rows that the policy has moved away from by more nats per token are dropped."
    )
    second_moment_max: float = _field(
        0.04, "Tokens are dropped until the mean squared log-ratio is below this.", gt=0
    )
    simko_alpha: float = _field(
        0.01, "Share of a right token's gradient that its likely alternatives get.", ge=0, le=1
    )
    simko_boost: float = _field(
        1.1, "Factor on the advantage of wrong tokens that were the most likely.", ge=1
    )
    top_candidates: int = _field(3, "Most likely tokens that are looked at: K.", ge=1)
    explore_quantile: float = _field(
        0.8, "Tokens above this quantile of their row's entropy are treated.", ge=0, lt=1
    )
    cov_fraction: float = _field(2e-4, "Share of tokens chosen by their covariance.", ge=0, le=1)
    cov_low: float = _field(1.0, "Smallest covariance of a chosen token.")
    cov_high: float = _field(5.0, "Largest covariance of a chosen token.")
    kl_cov_coeff: float = _field(1.0, "Weight of |log-ratio| on chosen tokens.", ge=0)
    kl_target: float = _field(
        6.0, "KL to the reference, in nats per response, that kl_coeff is steered to.", gt=0
    )
    kl_horizon: float = _field(
        10000.0, "Responses over which an error of 20 % changes kl_coeff by 20 %.", gt=0
    )
    sampling_rounds: int = _field(
        10, "Most rounds of sampling per step until enough groups differ in reward.", ge=1
    )
    overlong_buffer: int | None = _field(
        None, "Tokens before the limit in which the penalty grows; null: 20 %.", ge=1
    )
    critic_lr: float = _field(
        1e-5, "Peak learning rate of the critic; with adapters 1e-4 by default.", ge=0
    )
    value_clip: float | None = _field(
        0.2, "Values move at most this far per batch; null: no clip.", gt=0
    )
    critic_warmup_steps: int = _field(0, "First optimizer steps that train the critic alone.", ge=0)

    beta: float = _field(0.1, "Preference losses: scale of the log-ratios, or of the margin.", gt=0)
    label_noise: float = _field(
        0.1, "Share of pairs assumed to be labeled the wrong way.", ge=0, lt=0.5
    )
    preference_alpha: float = _field(0.5, "alpha of f-DPO, H-DPO, AlphaPO and alpha-DPO.", gt=0)
    preference_gamma: float = _field(0.5, "gamma: SimPO's target margin, FocalPO's focus.", ge=0)
    preference_tau: float = _field(0.05, "tau of DiscoPOP's blend.", gt=0)
    calibration_coeff: float = _field(1.0, "cal-DPO: weight of the calibration term.", ge=0)
    length_coeff: float = _field(
        0.01, "R-DPO: price of a token by which the chosen one is longer.", ge=0
    )
    penalty_coeff: float = _field(5.0, "DPOP: price of a chosen log-ratio below zero.", ge=0)
    rejected_scale: float = _field(
        0.95, "DPO-Shift: scale of the rejected log-ratio; 1 is DPO.", gt=0, le=1
    )
    balance: float = _field(1.0, "BPO: scale of the rejected side.", gt=0)
    mass_coeff: float = _field(1e-3, "C2-DPO: weight of the squared sum of both log-ratios.", ge=0)
    nll_coeff: float = _field(
        1.0, "Weight of the likelihood of chosen completions, or of right responses.", ge=0
    )
    robustness: float = _field(1.0, "Dr.DPO: temperature of the log-mean-exp over pairs.", gt=0)
    odds_coeff: float = _field(0.1, "ORPO: weight of the odds ratio.", ge=0)
    desirable_coeff: float = _field(1.0, "KTO: weight of desirable rows.", ge=0)
    undesirable_coeff: float = _field(1.0, "KTO: weight of undesirable rows.", ge=0)
    beta_scale: float = _field(0.6, "beta-DPO: how far beta follows the batch's margins.", ge=0)
    drop_frac: float = _field(
        0.2, "beta-DPO: share of pairs with odd margins that is left out.", ge=0, lt=1
    )
    tail_coeff: float = _field(
        0.5, "LD-DPO: weight of tokens past the shorter completion.", ge=0, le=1
    )
    reference_sync_steps: int = _field(
        512, "Steps between updates of the reference: TR-DPO, ProRL.", ge=1
    )
    reference_sync_rate: float = _field(
        0.6, "TR-DPO: share of the policy in the new reference.", gt=0, le=1
    )
    keep_reward: float = _field(1.0, "rft: a response is kept from this reward on.")
    keep_per_prompt: int | None = _field(
        None, "rft: only so many of a prompt's best; null: all that are good.", ge=1
    )
    center_coeff: float = _field(
        0.0, "Reward model: weight of the squared sum of a pair's scores.", ge=0
    )

    @field_validator("alg_name", "advantage", "loss", "correction", "kl", "weights")
    @classmethod
    def _named(cls, value: str | None, info: ValidationInfo) -> str | None:
        name = cast(str, info.field_name)
        return (
            value
            if value is None
            else known(value, ROWS if name == "alg_name" else cell_names(CELLS[name]))
        )

    def numbers(self, kind: str, name: str) -> dict[str, Any]:
        """The values of the numbers that a cell or feature reads."""
        return {field: getattr(self, field) for field in PARAMETERS.get((kind, name), ())}

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout step."""
        return self.epochs * self.minibatches

    @property
    def row(self) -> Row:
        """Row of `alg_name` with the overridden cells put in."""
        return compose_row(
            ROWS[self.alg_name], {cell: getattr(self, name) for name, cell in CELLS.items()}
        )


def compose_row(row: Row, cells: dict[str, Any]) -> Row:
    """Replace cells of `row` by those that are not None."""
    return dataclasses.replace(
        row, **{cell: value for cell, value in cells.items() if value is not None}
    )


class EngineConfig(Section):
    """What samples."""

    name: Literal["local", "vllm"] = _field(
        "local",
        "local: oxRL's sampler. vllm: an extra, in Ray actors; makes train.correction truncate by default.",
    )
    max_rows: int = _field(128, "Rows decoded at once, per actor.", ge=1)
    actors: int = _field(
        0, "Ray actors that sample, each with a model of its own; 0: this process samples.", ge=0
    )
    placement: Literal["separate", "colocated"] = _field(
        "separate",
        "Rollout actors have devices of their own, or each shares one with a training actor.",
    )
    probe_every: int = _field(
        50,
        "Weight deliveries to actors between two proofs with a perturbed copy; 0: only the first has one.",
        ge=0,
    )
    tensor_parallel: int = _field(
        1, "vllm: devices that share one copy of the model, per actor.", ge=1
    )
    gpu_memory_fraction: float = _field(
        0.5, "vllm: share of a GPU's memory for weights and cache.", gt=0, lt=1
    )
    kv_cache_gb: float | None = _field(
        None, "vllm: cache in GB, instead of that share (CPU: null is 0.25).", gt=0
    )


class LoraConfig(Section):
    """Low-rank adapters (peft) on a frozen model; no dropout, with which ratios of equal weights
    would not be 1.
    """

    rank: int = _field(0, "Rank of the adapters; 0: no adapters, every weight is trained.", ge=0)
    alpha: float = _field(32.0, "Adapters are scaled by alpha / rank.", gt=0)
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
    """A whole run. Build it with `load_config`, which also checks across sections."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainConfig
    inference_engine: EngineConfig = EngineConfig()
    deepspeed: DeepSpeedConfig = DeepSpeedConfig()
    deepspeed_ref: ReferenceConfig = ReferenceConfig()

    @property
    def wave(self) -> int:
        """Rollout batches sampled by the same weights while earlier ones train; 0: a batch trains,
        then the next.
        """
        return (self.rollout.max_staleness // self.train.updates + 1) // 2


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
FIELDS = tuple(
    f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields
)


def config_schema() -> dict[str, Any]:
    """JSON schema of the YAML file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
