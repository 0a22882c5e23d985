"""Section `train`: the algorithm, its optimizer, and cells that differ from its row."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, cast

from annotated_types import Ge, Gt
from pydantic import AfterValidator, ValidationInfo, field_validator

from oxrl.config.conditions import has_environment, has_own_loss, reads_images
from oxrl.config.field import COMPARING, PREFERENCE, RL, Aka, Section, number, setting
from oxrl.errors import known
from oxrl.tables import numbers as declared
from oxrl.tables.cells import CELLS as TABLE
from oxrl.tables.engines import (
    TRAINING_ENGINES,
    Masters,
    Optimizer,
    TrainingEngine,
    TrainingEngineName,
)
from oxrl.tables.numbers import Level, Number, T, Value
from oxrl.tables.policy import ROWS, Denominator, Ratio, Row
from oxrl.tables.user_code import GATE

Magnitude = Annotated[float, AfterValidator(abs)]  # `load_config` warns where it drops a sign

# YAML field -> kind of cell in the table.
CELLS = {
    name: name
    for name in ("advantage", "ratio", "denominator", "correction", "centering", "kl", "weights")
} | {"loss": "gate"}


def cell_names(kind: str) -> tuple[str, ...]:
    """Names that a cell of this kind may hold."""
    return tuple(name for found, name in TABLE if found == kind)


BY_ROW = "by the name of a row, see `oxrl algorithms`"
CLIPS = Aka("epsilon", "eps_clip", "clip_ratio", "cliprange", "clip_range")
LEARNING_RATE = "AdamW moves every weight by about lr in a step"


class TrainConfig(Section):
    """The algorithm, its optimizer, its parameters, and cells that differ from its row of the
    table.
    """

    alg_name: str = setting(
        ...,
        "Row of the table: see `oxrl algorithms`.",
        aka=(
            Aka("algorithm", "algo"),
            Aka(
                "adv_estimator",
                note=BY_ROW,
                values={
                    "gae": "ppo",
                    "grpo": "grpo",
                    "rloo": "rloo",
                    "remax": "remax",
                    "opo": "opo",
                    "gpg": "gpg",
                    "reinforce_plus_plus": "reinforce_plus_plus",
                    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
                },
            ),
            Aka(
                "loss_type",
                note=BY_ROW,
                values={
                    "dft": "dft",
                    "sigmoid": "dpo",
                    "hinge": "hinge",
                    "ipo": "ipo",
                    "aot": "aot",
                    "aot_unpaired": "aot_unpaired",
                    "apo_zero": "apo_zero",
                    "apo_down": "apo_down",
                    "discopop": "discopop",
                    "sigmoid_norm": "sigmoid_norm",
                    "exo_pair": "exo",
                    "nca_pair": "nca",
                    "robust": "robust_dpo",
                    "bco_pair": "bco",
                    "sppo_hard": "sppo",
                },
            ),
        ),
    )
    backend: TrainingEngineName = setting(
        "local",
        "What trains: this process, or ranks (Ray actors in RL, else torchrun's) with DeepSpeed "
        "or FSDP2.",
        resume="reorders",
        aka=Aka("actor.strategy", values={"fsdp2": "fsdp"}),
    )
    optimizer: Optimizer = setting(
        "adamw",
        "What steps the weights: adamw; muon, which orthogonalises the step of each matrix between "
        "hidden layers and leaves all else to AdamW; or adamw_8bit, whose moments take two bytes "
        "per weight instead of eight.",
        aka=Aka(
            "optim",
            values={
                "adamw_torch": "adamw",
                "adamw_torch_fused": "adamw",
                "adamw_8bit": "adamw_8bit",
                "adamw_bnb_8bit": "adamw_8bit",
            },
        ),
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
        aka=Aka("learning_rate", "actor_learning_rate", "actor_lr", "actor.optim.lr"),
    )
    tower_lr: float | None = setting(
        None,
        "Peak learning rate of the vision tower of a model that reads images; null: as lr.",
        ge=0,
        le=1,
        why=LEARNING_RATE,
        when=reads_images,
    )
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = setting(
        "constant",
        "After the warm-up: constant, or down to 0 at run.steps (wsd: over the last fifth).",
        aka=Aka(
            "lr_scheduler",
            "lr_scheduler_type",
            values={"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"},
        ),
    )
    warmup_steps: int = setting(
        0,
        "Optimizer steps of linear warm-up; 0: none.",
        ge=0,
        aka=(
            Aka("num_warmup_steps", "lr_warmup_steps"),
            Aka(
                "warmup_ratio",
                "lr_warmup_ratio",
                "lr_warmup_steps_ratio",
                note="in steps: this share of run.steps",
            ),
        ),
    )
    weight_decay: float = setting(
        0.0,
        "Decoupled weight decay; 0: none.",
        ge=0,
        le=100,
        why="a step takes the share lr x weight_decay off every weight",
        aka=Aka("weight_decay_rate"),
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
        aka=Aka("grad_clip", "clip_grad", "max_norm"),
    )
    epochs: int = setting(
        1,
        "Passes over each rollout batch.",
        ge=1,
        le=1000,
        why="the samples say nothing of weights that have moved so far",
        of=RL,
        aka=Aka("num_iterations", "ppo_epochs", "num_ppo_epochs"),
    )
    minibatches: int = setting(
        1,
        "Optimizer steps per pass; divides data.prompts_per_step.",
        ge=1,
        le=1_000_000,
        why="there are no more prompts in a step",
        of=RL,
        aka=Aka(
            "ppo_mini_batch_size",
            "num_mini_batches",
            "mini_batch_size",
            "rl.train_batch_size",
            note="how many a rollout batch is cut into, not their size: train_batch_size / "
            "ppo_mini_batch_size of verl, rollout_batch_size x n_samples_per_prompt / "
            "train_batch_size of OpenRLHF",
        ),
    )
    micro_batch_tokens: Annotated[int, Ge(1)] | Literal["auto"] = setting(
        "auto",
        "Padded tokens per micro-batch, at most: affects memory, not the gradient but for "
        "rounding. auto: what keeps a layer's widest tensor at 16 MiB on a CPU (1,024 to 8,192), "
        "else 16,384, and rows are cut where that saves more padding than a micro-batch costs; "
        "decided when a run begins, noted in choices.json.",
        resume="settled",
        aka=Aka(
            "per_device_eval_batch_size",
            "micro_train_batch_size",
            "micro_batch_size",
            "micro_batch_size_per_gpu",
            "ppo_micro_batch_size_per_gpu",
            "log_prob_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "use_dynamic_bsz",
            note="batches are cut into micro-batches by tokens, which never changes the gradient",
        ),
    )
    share_prefix: bool | Literal["auto"] = setting(
        "auto",
        "The prompt of a group, or of a pair, goes through the model once for all of its "
        "responses, and padding not at all, in the update and wherever log-probabilities are "
        "computed: the same gradient but for rounding. auto: on where a tiny copy of the model "
        "shows that; decided when a run begins, noted in choices.json.",
        of=COMPARING,
        resume="settled",
    )
    old_logprobs: Literal["auto", "recompute", "current", "bypass"] = setting(
        "auto",
        "Anchor of the ratio: the trainer's before the update (recompute), the current ones "
        "(current, one optimizer step per rollout batch), the sampler's (bypass). "
        "auto: current for one step, else recompute.",
        of=RL,
    )
    max_skipped_steps: int = setting(
        3, "Non-finite steps in a row that are tolerated.", ge=0, resume="free"
    )
    entropy_coeff: float = setting(
        0.0,
        "Weight of the entropy bonus; 0: none.",
        ge=0,
        le=100,
        why="nothing of the policy's loss is left beside more",
        of=RL,
        aka=Aka("entropy_coef", "ent_coef"),
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
        aka=Aka("mask_truncated_completions"),
    )

    advantage: str | None = setting(
        None,
        "Advantage estimator; null: the algorithm's.",
        of=RL,
        enum=cell_names("advantage"),
        aka=(
            Aka("adv_estimator"),
            Aka(
                "scale_rewards",
                "norm_adv_by_std_in_grpo",
                values={
                    "true": "group_normalize",
                    "group": "group_normalize",
                    "batch": "group_center_batch_std",
                    "false": "group_center",
                    "none": "group_center",
                },
            ),
        ),
    )
    ratio: Ratio | None = setting(
        None, "Level of the importance ratio; null: the algorithm's.", of=RL
    )
    denominator: Denominator | None = setting(
        None, "Policy under the ratio; null: the algorithm's.", of=RL
    )
    loss: str | None = setting(
        None,
        "Policy loss; null: the algorithm's.",
        of=RL,
        enum=cell_names("gate"),
        aka=Aka("loss_type"),
    )
    correction: str | None = setting(
        None, "Rollout correction; null: the algorithm's.", of=RL, enum=cell_names("correction")
    )
    centering: str | None = setting(
        None,
        "What is subtracted from the policy loss of every token: none, or score: its expectation "
        "under the sampler, so that a baseline that is off moves nothing; null: the algorithm's.",
        of=RL,
        enum=cell_names("centering"),
    )
    kl: str | None = setting(
        None,
        "KL term against the reference; null: the algorithm's.",
        of=RL,
        enum=cell_names("kl"),
        aka=Aka(
            "kl_loss_type",
            note="where use_kl_loss switches it on, with train.kl_coeff: low_var_kl is loss_k3",
        ),
    )
    weights: str | None = setting(
        None,
        "Normalisation of the loss; null: the algorithm's.",
        of=RL,
        enum=cell_names("weights"),
        aka=(
            Aka("loss_type"),
            Aka(
                "loss_agg_mode",
                values={
                    "token-mean": "token_mean",
                    "seq-mean-token-mean": "sequence_mean",
                    "seq-mean-token-sum": "sequence_sum",
                    "seq-mean-token-sum-norm": "fixed_length",
                },
            ),
            Aka(
                "rl.loss_type",
                values={"dapo": "token_mean", "grpo": "sequence_mean", "dr_grpo": "fixed_length"},
            ),
        ),
    )

    loss_numbers: dict[str, Value] = setting(
        {},
        "Numbers of a policy loss of your own, train.loss: path.py:function.",
        of=RL,
        when=has_own_loss,
    )
    features: dict[str, dict[str, Value]] = setting(
        {},
        "Features of your own, classes that change the loop at its hooks, each with its numbers: "
        "{my_feature.py:MyFeature: {coeff: 0.1}}.",
        of=RL,
    )

    # Numbers of cells and features, declared in oxrl/tables/numbers.py.
    clip_low: Magnitude = number(
        declared.CLIP_LOW,
        (
            CLIPS,
            Aka("clip_ratio_low"),
        ),
    )
    clip_high: Magnitude = number(
        declared.CLIP_HIGH,
        (
            CLIPS,
            Aka("epsilon_high", "clip_ratio_high"),
        ),
    )
    clip_dual: float | None = number(declared.CLIP_DUAL, Aka("delta", "clip_ratio_c"))
    weight_min: float = number(declared.WEIGHT_MIN)
    weight_max: float = number(declared.WEIGHT_MAX)
    sapo_positive: float = number(declared.SAPO_POSITIVE)
    sapo_negative: float = number(declared.SAPO_NEGATIVE)
    gate_sharpness: float = number(declared.GATE_SHARPNESS)
    dppo_low: float = number(declared.DPPO_LOW)
    dppo_high: float = number(declared.DPPO_HIGH)
    proximal_coeff: float = number(declared.PROXIMAL_COEFF, Aka("dro_beta"))
    drpo_delta: float = number(
        declared.DRPO_DELTA,
        Aka("drpo_epsilon"),
        why="probabilities differ by no more, and a larger bound bounds nothing: write 0.15",
    )
    spo: bool = number(declared.SPO)
    influence_range: float = number(declared.INFLUENCE_RANGE, Aka("fipo_clip_range"))
    influence_half_life: float = number(declared.INFLUENCE_HALF_LIFE, Aka("fipo_decay_rate"))
    influence_ratio_max: float = number(declared.INFLUENCE_RATIO_MAX, Aka("fipo_safety_threshold"))
    simko_alpha: float = number(declared.SIMKO_ALPHA)
    simko_boost: float = number(declared.SIMKO_BOOST)
    top_candidates: int = number(declared.TOP_CANDIDATES)
    explore_quantile: float = number(declared.EXPLORE_QUANTILE)
    cov_fraction: float = number(declared.COV_FRACTION)
    cov_low: float = number(declared.COV_LOW)
    cov_high: float = number(declared.COV_HIGH)
    kl_cov_coeff: float = number(declared.KL_COV_COEFF)
    gamma: float = number(declared.GAMMA)
    gae_lambda: float = number(declared.GAE_LAMBDA, Aka("lam"))
    turn_gamma: float | None = number(declared.TURN_GAMMA, when=has_environment)
    turn_lambda: float | None = number(declared.TURN_LAMBDA, when=has_environment)
    length_alpha: float = number(declared.LENGTH_ALPHA)
    whiten: bool = number(declared.WHITEN)
    bootstrap_on_truncation: bool = number(declared.BOOTSTRAP_ON_TRUNCATION)
    pass_k: int = number(declared.PASS_K)
    iqr_floor: float = number(declared.IQR_FLOOR)
    maxrl_order: int | None = number(declared.MAXRL_ORDER)
    correction_level: Level = number(declared.CORRECTION_LEVEL)
    correction_max: float = number(declared.CORRECTION_MAX)
    correction_min: float = number(declared.CORRECTION_MIN)
    correction_k3_max: float = number(declared.CORRECTION_K3_MAX)
    correction_veto: float = number(declared.CORRECTION_VETO)
    drift_max: float = number(declared.DRIFT_MAX)
    second_moment_max: float = number(declared.SECOND_MOMENT_MAX)
    center_top: int = number(declared.CENTER_TOP)
    center_tail: declared.Tail = number(declared.CENTER_TAIL)
    kl_coeff: float = number(
        declared.KL_COEFF,
        (
            Aka("init_kl_coef"),
            Aka(
                "kl_coef",
                "kl_loss_coef",
                "kl_ctrl",
                "use_kl_loss",
                "use_kl_in_reward",
                note="0 where no such term is switched on; train.kl says where it is",
            ),
            Aka("rl.beta"),
        ),
    )
    length_power: float = number(declared.LENGTH_POWER)
    weights_length: int | None = number(declared.WEIGHTS_LENGTH)
    kl_target: float = number(declared.KL_TARGET)
    kl_horizon: float = number(declared.KL_HORIZON)
    sampling_rounds: int = number(declared.SAMPLING_ROUNDS)
    overlong_buffer: int | None = number(declared.OVERLONG_BUFFER)
    critic_lr: float = number(declared.CRITIC_LR, Aka("critic_learning_rate", "critic.optim.lr"))
    value_clip: float | None = number(
        declared.VALUE_CLIP, Aka("cliprange_value", "critic.cliprange_value")
    )
    critic_warmup_steps: int = number(declared.CRITIC_WARMUP_STEPS, Aka("critic_warmup"))
    beta: float = number(declared.BETA)
    label_noise: float = number(declared.LABEL_NOISE, Aka("label_smoothing"))
    preference_alpha: float = number(declared.ALPHA)
    preference_gamma: float = number(declared.MARGIN_GAMMA)
    preference_tau: float = number(declared.TAU)
    calibration_coeff: float = number(declared.CALIBRATION_COEFF)
    length_coeff: float = number(declared.LENGTH_COEFF)
    penalty_coeff: float = number(declared.PENALTY_COEFF)
    rejected_scale: float = number(declared.REJECTED_SCALE)
    balance: float = number(declared.BALANCE)
    mass_coeff: float = number(declared.MASS_COEFF)
    nll_coeff: float = number(declared.NLL_COEFF)
    robustness: float = number(declared.ROBUSTNESS)
    odds_coeff: float = number(declared.ODDS_COEFF)
    desirable_coeff: float = number(declared.DESIRABLE_COEFF, Aka("desirable_weight"))
    undesirable_coeff: float = number(declared.UNDESIRABLE_COEFF, Aka("undesirable_weight"))
    beta_scale: float = number(declared.BETA_SCALE)
    drop_frac: float = number(declared.DROP_FRAC)
    tail_coeff: float = number(declared.TAIL_COEFF)
    reference_sync_steps: int = number(declared.REFERENCE_SYNC_STEPS, Aka("ref_model_sync_steps"))
    reference_sync_rate: float = number(declared.REFERENCE_SYNC_RATE)
    teacher_coeff: float = number(declared.TEACHER_COEFF)
    teacher_coeff_end: float | None = number(declared.TEACHER_COEFF_END)
    teacher_gamma: float = number(declared.TEACHER_GAMMA)
    teacher_mean: bool = number(declared.TEACHER_MEAN)
    prefix_coeff: float = number(declared.PREFIX_COEFF)
    teacher_candidates: int = number(
        declared.TEACHER_CANDIDATES, Aka("distillation.topk", "loss_top_k")
    )
    divergence_alpha: float = number(declared.DIVERGENCE_ALPHA)
    gkd_lambda: float = number(declared.GKD_LAMBDA, Aka("lmbda"))
    candidates_rest: declared.Rest = number(declared.CANDIDATES_REST)
    discriminator_lr: float = number(declared.DISCRIMINATOR_LR)
    discriminator_warmup_steps: int = number(declared.DISCRIMINATOR_WARMUP_STEPS)
    keep_reward: float = number(declared.KEEP_REWARD)
    keep_per_prompt: int | None = number(declared.KEEP_PER_PROMPT)
    center_coeff: float = number(declared.CENTER_COEFF, Aka("center_rewards_coefficient"))

    @field_validator("alg_name", "advantage", "loss", "correction", "centering", "kl", "weights")
    @classmethod
    def _named(cls, value: str | None, info: ValidationInfo) -> str | None:
        name = cast(str, info.field_name)
        if value is None or (name == "loss" and ":" in value):
            return value
        if name == "alg_name":
            return value if value in ROWS else known(value, ROWS)
        if name == "loss" and ("gate", value) not in TABLE:
            from oxrl.usercode.locate import names_of  # for names that nobody else knows

            if value in names_of(GATE):
                return value
        return known(value, cell_names(CELLS[name]))

    @property
    def updates(self) -> int:
        """Optimizer steps per rollout step."""
        return self.epochs * self.minibatches

    @property
    def row(self) -> Row:
        """Row of `alg_name` with the overridden cells put in."""
        return compose_row(ROWS[self.alg_name], vars(self))

    @property
    def engine(self) -> TrainingEngine:
        """Row of `backend` in the table of engines."""
        return TRAINING_ENGINES[self.backend]

    def value(self, number: Number[T]) -> T:
        """Return the value of a number of the tables in this run; the recipe's rows can read it."""
        return getattr(self, number.key)


def compose_row(row: Row, train: Mapping[str, object]) -> Row:
    """Put the cells that fields of `train` name into `row`."""
    if row.recipe != "rl":
        return row
    chosen = {kind: train.get(name) for name, kind in CELLS.items()}
    named = {kind: name for kind, name in chosen.items() if isinstance(name, str)}
    if not named:
        return row
    return dataclasses.replace(row, **named)  # pyright: ignore[reportArgumentType]
