"""Which fields a run reads: a pure function of its algorithm's row and of the features it switches on.

A field that is written down but not read is refused: a knob that turns nothing must not look as if it did.
"""

from __future__ import annotations

from oxrl.algorithms import PARAMETERS, ROWS, Row
from oxrl.config.schema import CELLS, FIELDS, Config

_OPTIMIZER = (
    "train.alg_name train.backend train.lr train.lr_schedule train.warmup_steps train.weight_decay train.decay "
    "train.adam_beta1 train.adam_beta2 train.adam_eps train.max_grad_norm train.micro_batch_tokens "
    "train.max_skipped_steps"
).split()
_RL_RUN = ("run.record", "run.deadline_s")
# Read where something runs in Ray actors: anything, the training ranks, both kinds, the sampler.
RAY, RAY_TRAINING, RAY_BOTH = "run.ray_address", "run.max_restarts", "inference_engine.placement"
RAY_SAMPLING = "inference_engine.probe_every"
VLLM = frozenset(f"inference_engine.{name}" for name in ("tensor_parallel", "gpu_memory_fraction", "kv_cache_gb"))
WITH_EVAL = frozenset(["run.eval_every", "data.eval_rows"])
RL_WITH_EVAL = frozenset(["rollout.eval_samples", "rollout.eval_temperature"])
OFFLINE_WITH_EVAL = frozenset(["run.keep_best"])
ALWAYS = frozenset(
    [path for path in FIELDS if path.startswith(("run.", "model.")) and path not in (*_RL_RUN, RAY, RAY_TRAINING)]
    + ["data.train", "data.eval", "data.overlong", "lora.rank", *_OPTIMIZER]
).difference(WITH_EVAL, OFFLINE_WITH_EVAL)
RL = frozenset(
    [path for path in FIELDS if path.startswith(("reward.", "rollout.", "inference_engine."))]
    + ["data.prompts_per_step", "data.max_prompt_tokens", "train.epochs", "train.minibatches"]
    + [
        "train.old_logprobs",
        "train.entropy_coeff",
        "train.mask_truncated",
        *(f"train.{name}" for name in CELLS),
        *_RL_RUN,
    ]
).difference(RL_WITH_EVAL, [RAY_BOTH, RAY_SAMPLING], VLLM)
DEEPSPEED = frozenset(path for path in FIELDS if path.startswith("deepspeed."))
REFERENCE = frozenset(path for path in FIELDS if path.startswith("deepspeed_ref."))
STREAMED = frozenset(["data.stream"])
LORA = frozenset(["lora.alpha", "lora.targets"])
OFFLINE = frozenset(["data.rows_per_step"])
SUPERVISED = frozenset(["data.pack_tokens"])
REJECTION = frozenset(
    [path for path in FIELDS if path.startswith(("reward.", "inference_engine."))]
    + ["rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_tokens", "rollout.n_samples"]
    + ["run.deadline_s", "data.prompts_per_step", "data.max_prompt_tokens"]
).difference(["inference_engine.actors", RAY_BOTH, RAY_SAMPLING], VLLM)


def row_fields(row: Row) -> frozenset[str]:
    """Dotted `train.*` paths that the cells and features of `row` read."""
    cells = [*row.cells, ("selection", row.gate), *(("extra", extra) for extra in row.needs)]
    names = [name for cell in cells for name in PARAMETERS.get(cell, ())]
    return frozenset(f"train.{name}" for name in (*names, *row.numbers))


def has_reference_model(cfg: Config) -> bool:
    """Whether a frozen or following copy of the policy is held beside it: a table or a switched-off adapter is none."""
    row = cfg.train.row
    if row.recipe == "preference":
        return "reference_sync_rate" in row.numbers
    return row.kl != "none" and cfg.train.kl_coeff > 0 and not cfg.lora.rank


def fields_read(cfg: Config) -> frozenset[str]:
    """Dotted paths that training with `cfg` reads."""
    row = cfg.train.row
    read = ALWAYS | row_fields(row) | (RL if row.recipe == "rl" else OFFLINE)
    read |= SUPERVISED if row.recipe in ("supervised", "rejection") else frozenset()
    read |= REJECTION if row.recipe == "rejection" else frozenset()
    if cfg.train.backend != "local":
        read |= {"run.deadline_s"}
    if cfg.train.backend == "deepspeed":
        read |= DEEPSPEED | (REFERENCE if has_reference_model(cfg) else frozenset())
    read |= frozenset() if row.recipe in ("preference", "rejection") else STREAMED
    if cfg.lora.rank:
        read |= LORA
    if row.recipe == "rl":
        training, sampling = cfg.train.backend != "local", cfg.inference_engine.actors > 0
        read |= {RAY} if training or sampling else frozenset()
        read |= {RAY_TRAINING} if training else frozenset()
        read |= {RAY_BOTH} if training and sampling else frozenset()
        read |= {RAY_SAMPLING} if sampling else frozenset()
        read |= VLLM if cfg.inference_engine.name == "vllm" else frozenset()
    if cfg.data.eval is not None:
        read |= WITH_EVAL | (RL_WITH_EVAL if row.recipe == "rl" else OFFLINE_WITH_EVAL)
    return read


def why_unread(path: str, cfg: Config) -> str:
    """Say what reads `path`, and so why this run does not."""
    name, algorithm = path.partition(".")[2], cfg.train.alg_name
    if path in WITH_EVAL | RL_WITH_EVAL | OFFLINE_WITH_EVAL and cfg.data.eval is None:
        return "has no effect without data.eval; remove it, or give held-out rows in data.eval"
    if path in STREAMED:
        return f"is not read by {algorithm}, which keeps something of every row in memory; remove it"
    if path in LORA:
        return "is read with lora.rank above 0, the rank of the adapters; set that, or remove it"
    if path in REFERENCE and cfg.train.backend == "deepspeed":
        return f"is read where there is a reference model; {algorithm} as configured has none: remove it"
    if path in DEEPSPEED | REFERENCE:
        return f"is read with train.backend: deepspeed; this run's is {cfg.train.backend}: remove it"
    if path in (RAY, RAY_TRAINING, RAY_BOTH, RAY_SAMPLING):
        return (
            "is read by reinforcement learning with Ray actors (train.backend deepspeed or fsdp: training actors; "
            "inference_engine.actors: rollout actors; the placement needs both): remove it"
        )
    if path in VLLM:
        return "is read by reinforcement learning with inference_engine.name: vllm; set that, or remove it"
    if path in RL | RL_WITH_EVAL:
        return f"is read by reinforcement learning; {algorithm} is not: remove it"
    if path in OFFLINE | OFFLINE_WITH_EVAL:
        return f"is read by supervised and preference algorithms; {algorithm} is reinforcement learning: remove it"
    if path in SUPERVISED:
        return f"is read by supervised fine-tuning; {algorithm} is not: remove it"
    algorithms = ", ".join(other for other, row in ROWS.items() if path in row_fields(row))
    kinds = {kind: field for field, kind in CELLS.items()}
    choices = [(kind, cell) for (kind, cell), names in PARAMETERS.items() if kind in kinds and name in names]
    cells = ", ".join(f"train.{kinds[kind]}: {cell}" for kind, cell in choices)
    readers = "; ".join(part for part in (f"algorithms: {algorithms}" if algorithms else "", cells) if part)
    return f"is not read by {algorithm} as configured (read by {readers}); remove it, or choose one of those"
