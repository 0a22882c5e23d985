"""The configuration: one frozen class per YAML section, every field with its default, bound and meaning.

Which fields a run reads depends on the algorithm (`reads.py`); checks across sections are in `checks.py`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from oxrl.algorithms import NEEDS, PARAMETERS, ROWS, Row

Ratio = Literal["none", "token", "sequence", "geometric"]
Denominator = Literal["old", "rollout"]

# YAML field -> kind of cell in the table, where the two words differ.
CELLS = {
    "advantage": "advantage",
    "ratio": "ratio",
    "denominator": "denominator",
    "loss": "gate",
    "correction": "correction",
    "kl": "kl",
    "weights": "weights",
}
# Advantages that read the values of a critic.
CRITIC_ADVANTAGES = ("gae", "gae_length_adaptive")


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest option, or nothing when none is close."""
    close = get_close_matches(name, list(options), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def cell_names(kind: str) -> tuple[str, ...]:
    """Names that a cell of this kind may hold."""
    return tuple(name for found, name in PARAMETERS if found == kind)


def known(value: str, options: Iterable[str]) -> str:
    """Return `value` if it is one of `options`; raise ValueError that lists them and names the closest."""
    options = sorted(options)
    if value not in options:
        listed = ", ".join(options) if len(options) <= 30 else f"{len(options)} names, see `oxrl algorithms`"
        raise ValueError(f"must be one of {listed}{did_you_mean(value, options)}")
    return value


def _cell(kind: str, description: str) -> Any:
    """Field of an optional cell override; its names come from the table."""
    return Field(None, description=description, json_schema_extra={"enum": [*cell_names(kind), None]})


class Section(BaseModel):
    """Base of every section: unknown fields are refused, values cannot change, infinity and NaN are no settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_lookalikes(cls, value: Any, info: ValidationInfo) -> Any:
        """Stop `true` from becoming 1 and `no`, `on`, `1` from becoming a boolean."""
        kinds = _kinds(cls.model_fields[cast(str, info.field_name)].annotation)
        if isinstance(value, bool) and bool not in kinds:
            raise ValueError("must not be true or false here; write a number, or quote the word if it is text")
        if bool in kinds and not isinstance(value, bool):
            raise ValueError("must be true or false (yes, no, on, off, 0 and 1 are not booleans here)")
        return value


def as_number(value: Any) -> float | None:
    """Read `value` as a float, quoted or not; None when it is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _kinds(annotation: Any) -> set[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {kind for part in typing.get_args(annotation) for kind in _kinds(part)}
    return {annotation}


class RunConfig(Section):
    """What the run is called, how long it lasts, where it runs and what it keeps."""

    name: str = Field(min_length=1, description="Name of the run: directory and tracker label.")
    seed: int = Field(0, ge=0, lt=2**63, description="Every random choice is a function of this integer.")
    dir: str | None = Field(None, min_length=1, description="Run directory; null: runs/<run.name>.")
    steps: int = Field(ge=1, description="Optimizer steps in total.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where models live; auto: cuda if there is one.")
    training_gpus: int = Field(1, ge=1, description="Training ranks. The local engine has exactly one.")
    threads: int | None = Field(None, ge=1, description="CPU threads of PyTorch; null: PyTorch's choice.")
    checkpoint_every: int = Field(
        50,
        ge=0,
        description="Optimizer steps between checkpoints, written at the next rollout boundary; "
        "0: only before the first step and after the last.",
    )
    keep_checkpoints: int = Field(2, ge=1, description="Newest checkpoints kept on disk; older ones are deleted.")
    eval_every: int = Field(
        0,
        ge=0,
        description="Optimizer steps between evaluations on data.eval, at the next rollout boundary; 0: at the end.",
    )
    keep_best: bool = Field(
        False, description="Keep the weights of the best evaluation in best/ (not in reinforcement learning)."
    )
    record: Literal["text", "tokens"] = Field(
        "text", description="text: samples.jsonl; tokens: also rollouts/*.safetensors with ids and logprobs."
    )
    mlflow: bool = Field(True, description="Mirror metrics to mlflow.db in the run directory.")
    deadline_s: float = Field(600.0, gt=0, description="Longest wait for any engine or reward, in seconds.")

    @property
    def directory(self) -> Path:
        """Run directory, with the default filled in."""
        return Path(self.dir) if self.dir is not None else Path("runs") / self.name


class ModelConfig(Section):
    """The policy that is trained."""

    name: str = Field(min_length=1, description='Folder, hub name, or "builtin:<name>" (needs no files).')
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Compute type of the weights; master weights and moments stay float32."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
    chat_template: str | None = Field(
        None, min_length=1, description="Jinja file that renders conversations; null: the tokenizer's own."
    )
    max_length: int | None = Field(
        None, ge=2, description="Longest row (prompt + response) in tokens; null: the model's context length."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that ships with the model.")


class DataConfig(Section):
    """What is read from disk. Relative paths are relative to the current directory."""

    train: str | dict[str, float] = Field(
        description="Training rows, .jsonl or .parquet; several files: {path: share, path: share}."
    )
    eval: str | None = Field(None, min_length=1, description="Held-out rows; null: no evaluation.")
    prompts_per_step: int = Field(16, ge=1, description="Prompts per rollout step (reinforcement learning).")
    rows_per_step: int = Field(64, ge=1, description="Rows per optimizer step (not in reinforcement learning).")
    pack_tokens: int | None = Field(
        None, ge=2, description="Pack whole rows of a step into rows of so many tokens (supervised); null: pad each."
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Longest prompt in tokens; null: what rollout.max_tokens leaves of the context."
    )
    overlong: Literal["drop", "error"] = Field(
        "drop", description="A row that is too long is dropped and counted, or stops the run."
    )
    eval_rows: int | None = Field(None, ge=1, description="Evaluate on the first so many rows; null: all.")

    @field_validator("train", mode="plain", json_schema_input_type=str | dict[str, float])
    @classmethod
    def _one_or_several(cls, value: Any) -> str | dict[str, float]:
        if isinstance(value, str) and value:
            return value
        if isinstance(value, dict) and value and all((as_number(share) or 0) > 0 for share in value.values()):
            return {str(path): float(share) for path, share in value.items()}
        raise ValueError(
            "must be a path, or a mapping of paths to positive shares such as {a.jsonl: 0.7, b.jsonl: 0.3}"
        )

    @property
    def train_files(self) -> tuple[str, ...]:
        """Every file of `train`."""
        return (self.train,) if isinstance(self.train, str) else tuple(self.train)


class RewardConfig(Section):
    """What scores a response."""

    name: str = Field("", description='"math", "exact" or "path.py:function" (required for reinforcement learning).')
    timeout_s: float = Field(10.0, gt=0, description="Seconds one response may take before its worker is killed.")
    workers: int = Field(1, ge=1, description="Reward processes.")
    max_error_rate: float = Field(
        0.5, ge=0, le=1, description="Share of unscored responses in a step above which the run stops; 1: never."
    )


class RolloutConfig(Section):
    """What is sampled for training, and for evaluation where the name says so."""

    temperature: float = Field(1.0, ge=0, le=100, description="Sampling temperature; 0 is greedy (not for training).")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus mass; 1: off. Training needs 1.")
    top_k: int = Field(0, ge=0, description="Keep the k most likely tokens; 0: off. Training needs 0.")
    max_tokens: int = Field(512, ge=1, description="Longest response in tokens.")
    n_samples: int = Field(8, ge=1, description="Responses per prompt: the group of group-relative advantages.")
    force_strict_on_policy: bool = Field(
        True, description="Refuse a batch with any token that was not sampled by the weights at its start."
    )
    max_staleness: int = Field(0, ge=0, description="Weight versions a sample may lag behind; 0: rollout, then train.")
    eval_samples: int = Field(1, ge=1, description="Responses per held-out prompt.")
    eval_temperature: float = Field(1.0, ge=0, le=100, description="Evaluation temperature; 0 is greedy.")


class TrainConfig(Section):
    """The algorithm, its optimizer, its parameters, and cells that differ from its row of the table."""

    alg_name: str = Field(
        description="Row of the table: see `oxrl algorithms`.", json_schema_extra={"enum": [*sorted(ROWS)]}
    )
    lr: float = Field(1e-6, ge=0, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="After the warm-up: constant, or down to 0 at run.steps."
    )
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up; 0: none.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay; 0: none.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to this.")
    epochs: int = Field(1, ge=1, description="Passes over each rollout batch.")
    minibatches: int = Field(
        1, ge=1, description="Optimizer steps per pass; divides data.prompts_per_step, so that groups stay whole."
    )
    micro_batch_tokens: int = Field(
        16384, ge=1, description="Padded tokens per forward and backward pass: memory, never the gradient."
    )
    old_logprobs: Literal["auto", "recompute", "current", "bypass"] = Field(
        "auto",
        description="Anchor of the ratio: the trainer's before the update (recompute), the current ones (current, one "
        "optimizer step per rollout batch), the sampler's (bypass). auto: current for one step, else recompute.",
    )
    max_skipped_steps: int = Field(
        3, ge=0, description="Refused (non-finite) steps in a row that are tolerated; one more ends the run."
    )
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus; 0: none.")

    advantage: str | None = _cell("advantage", "Advantage estimator; null: the algorithm's.")
    ratio: Ratio | None = Field(None, description="Level of the importance ratio; null: the algorithm's.")
    denominator: Denominator | None = Field(None, description="Policy under the ratio; null: the algorithm's.")
    loss: str | None = _cell("gate", "Policy loss; null: the algorithm's.")
    correction: str | None = _cell("correction", "Rollout correction; null: the algorithm's.")
    kl: str | None = _cell("kl", "KL term against the reference; null: the algorithm's.")
    weights: str | None = _cell("weights", "Normalisation of the loss; null: the algorithm's.")

    clip_low: float = Field(0.2, ge=0, lt=1, description="Clip below 1 - clip_low. A sign is dropped with a warning.")
    clip_high: float = Field(0.2, ge=0, description="Clip above 1 + clip_high. A sign is dropped with a warning.")
    clip_dual: float | None = Field(
        None, gt=1, description="Ratio above which a negative advantage stops pulling; null: none."
    )
    weight_min: float = Field(0.0, ge=0, description="Lower bound of the detached importance weight; 0: none.")
    weight_max: float = Field(5.0, gt=0, description="Upper bound of the detached importance weight.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token; 1: none.")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="GAE: 0 trusts the critic, 1 the return.")
    whiten: bool = Field(True, description="Scale advantages to mean 0 and variance 1 over the tokens of the step.")
    bootstrap_on_truncation: bool = Field(
        False, description="A response cut by max_tokens continues with the critic's value instead of ending at 0."
    )
    kl_coeff: float = Field(0.0, ge=0, description="Weight of the KL term; 0: no reference model is loaded.")
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="What the correction compares: each token, the product or the geometric mean of a row."
    )
    correction_max: float = Field(2.0, gt=0, description="Upper bound of the correction weight.")
    correction_min: float = Field(0.5, ge=0, description="Below it the correction drops what it judges.")
    correction_k3_max: float = Field(0.01, ge=0, description="Rows with a larger mean k3 mismatch are dropped.")
    correction_veto: float = Field(1e-4, ge=0, description="A row with a token below this ratio is dropped.")
    pass_k: int = Field(2, ge=1, description="Tries that count as one: k of pass@k, at most rollout.n_samples.")
    length_alpha: float = Field(0.05, gt=0, description="GAE with lambda = 1 - 1 / (length_alpha x length).")
    sapo_positive: float = Field(1.0, gt=0, description="Sharpness of the soft gate where the advantage is positive.")
    sapo_negative: float = Field(1.05, gt=0, description="Sharpness of the soft gate where it is negative.")
    gate_sharpness: float = Field(1.0, gt=0, description="Sharpness of the sigmoid acceptance.")
    dppo_low: float = Field(0.2, ge=0, description="Largest divergence of a token that is pushed down.")
    dppo_high: float = Field(0.2, ge=0, description="Largest divergence of a token that is pushed up.")
    proximal_coeff: float = Field(1e-3, ge=0, description="Weight of half the squared log-ratio; 0: none.")
    length_power: float = Field(1.0, description="Preference for long (positive) or short rows of a group; 0: none.")
    weights_length: int | None = Field(
        None, ge=1, description="Constant length that divides every row's sum; null: rollout.max_tokens."
    )
    critic_lr: float = Field(1e-5, ge=0, description="Peak learning rate of the critic.")
    value_clip: float | None = Field(0.2, gt=0, description="Values move at most this far per batch; null: no clip.")
    critic_warmup_steps: int = Field(0, ge=0, description="First optimizer steps that train the critic alone.")

    beta: float = Field(0.1, gt=0, description="Preference losses: scale of the log-ratios, or of the margin.")
    label_noise: float = Field(0.1, ge=0, lt=0.5, description="Share of pairs assumed to be labeled the wrong way.")
    preference_alpha: float = Field(0.5, gt=0, description="alpha of f-DPO, H-DPO, AlphaPO and alpha-DPO.")
    preference_gamma: float = Field(0.5, ge=0, description="gamma: SimPO's target margin, FocalPO's focus.")
    preference_tau: float = Field(0.05, gt=0, description="tau of DiscoPOP's blend.")
    calibration_coeff: float = Field(1.0, ge=0, description="cal-DPO: weight of the calibration term.")
    length_coeff: float = Field(0.01, ge=0, description="R-DPO: price of a token by which the chosen one is longer.")
    penalty_coeff: float = Field(5.0, ge=0, description="DPOP: price of a chosen log-ratio below zero.")
    rejected_scale: float = Field(0.95, gt=0, le=1, description="DPO-Shift: scale of the rejected log-ratio; 1 is DPO.")
    balance: float = Field(1.0, gt=0, description="BPO: scale of the rejected side.")
    mass_coeff: float = Field(1e-3, ge=0, description="C2-DPO: weight of the squared sum of both log-ratios.")
    nll_coeff: float = Field(1.0, ge=0, description="Weight of the likelihood of the chosen completion.")
    robustness: float = Field(1.0, gt=0, description="Dr.DPO: temperature of the log-mean-exp over pairs.")
    odds_coeff: float = Field(0.1, ge=0, description="ORPO: weight of the odds ratio.")
    desirable_coeff: float = Field(1.0, ge=0, description="KTO: weight of desirable rows.")
    undesirable_coeff: float = Field(1.0, ge=0, description="KTO: weight of undesirable rows.")
    beta_scale: float = Field(0.6, ge=0, description="beta-DPO: how far beta follows the batch's margins.")
    drop_frac: float = Field(0.2, ge=0, lt=1, description="beta-DPO: share of pairs with odd margins that is left out.")
    tail_coeff: float = Field(0.5, ge=0, le=1, description="LD-DPO: weight of tokens past the shorter completion.")
    reference_sync_steps: int = Field(512, ge=1, description="TR-DPO: steps between updates of the reference.")
    reference_sync_rate: float = Field(0.6, gt=0, le=1, description="TR-DPO: share of the policy in the new reference.")
    center_coeff: float = Field(0.0, ge=0, description="Reward model: weight of the squared sum of a pair's scores.")

    @field_validator("alg_name")
    @classmethod
    def _known_algorithm(cls, value: str) -> str:
        return known(value, ROWS)

    @field_validator("advantage", "loss", "correction", "kl", "weights")
    @classmethod
    def _known_cell(cls, value: str | None, info: ValidationInfo) -> str | None:
        return value if value is None else known(value, cell_names(CELLS[cast(str, info.field_name)]))

    @field_validator("clip_low", "clip_high", mode="before")
    @classmethod
    def _drop_sign(cls, value: Any) -> Any:
        """Magnitudes are stored; `load_config` warns, once."""
        number = as_number(value)
        return value if number is None else abs(number)

    @property
    def row(self) -> Row:
        """Row of `alg_name` with the overridden cells put in."""
        return compose_row(ROWS[self.alg_name], {cell: getattr(self, name) for name, cell in CELLS.items()})


def compose_row(row: Row, cells: dict[str, Any]) -> Row:
    """Replace cells of `row` by those that are not None; a critic comes and goes with the advantage that needs it."""
    given = {cell: value for cell, value in cells.items() if value is not None}
    extras = row.extras
    if "advantage" in given:
        extras = tuple(extra for extra in extras if extra != "critic")
        extras += ("critic",) if "critic" in NEEDS.get(("advantage", given["advantage"]), ()) else ()
    return dataclasses.replace(row, extras=extras, **given)


class EngineConfig(Section):
    """What samples."""

    name: Literal["local", "vllm"] = Field("local", description="local: in this process. vllm: a later extra.")
    max_rows: int = Field(128, ge=1, description="Rows the local sampler decodes at once.")


class Config(Section):
    """A whole run. Build it with `load_config`, which also checks across sections."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()  # pyright: ignore[reportCallIssue]
    rollout: RolloutConfig = RolloutConfig()  # pyright: ignore[reportCallIssue]
    train: TrainConfig
    inference_engine: EngineConfig = EngineConfig()  # pyright: ignore[reportCallIssue]
    deepspeed: dict[str, Any] | None = Field(None, description="Later extra; refused while training runs locally.")
    deepspeed_ref: dict[str, Any] | None = Field(None, description="Later extra; refused while training runs locally.")


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation
    for name, info in Config.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
}
FIELDS = tuple(f"{section}.{name}" for section, model in SECTIONS.items() for name in model.model_fields)
