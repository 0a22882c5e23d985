"""`oxrl plan`: what a run will do, in words and numbers, computed from the configuration and files on disk alone."""

from __future__ import annotations

from pathlib import Path

from oxrl.config.dims import ModelDims, context_length, model_dims
from oxrl.config.schema import Config

BYTES = {"float32": 4, "bfloat16": 2}
MOMENTS = 8
MASTERS = {"float32": 0, "bfloat16": 4}
# float32 gradients; with bfloat16 weights their own gradients exist beside the float32 sums until the pass ends.
GRADIENTS = {"float32": 4, "bfloat16": 6}


def plan_text(cfg: Config) -> str:
    """Batch equation, totals, data, memory per phase and disk of a run, one `label  text` line each."""
    row = cfg.train.row
    batch = _rl_batch(cfg) if row.recipe == "rl" else _supervised_batch(cfg)
    where = f"on {cfg.model.name}, {cfg.model.dtype}, device {cfg.run.device}, into {cfg.run.directory}"
    lines = [("run", f"{cfg.run.name}: {cfg.train.alg_name} ({row.summary}) {where}"), *batch, *_memory(cfg)]
    return "\n".join(f"{label:<11}{text}" for label, text in lines)


def _rl_batch(cfg: Config) -> list[tuple[str, str]]:
    prompts, samples = cfg.data.prompts_per_step, cfg.rollout.n_samples
    epochs, minibatches, steps = cfg.train.epochs, cfg.train.minibatches, cfg.run.steps
    rows, updates = prompts * samples, epochs * minibatches
    iterations = steps // updates
    group = f"{_count(prompts, 'prompt')} x {_count(samples, 'sample')} = {_count(rows, 'row')}"
    passes = (
        f"{_count(minibatches, 'minibatch', 'es')} of {_count(rows // minibatches, 'row')}, {_count(epochs, 'epoch')}"
    )
    drawn = (
        f"{_count(steps, 'optimizer step')} = {_count(iterations, 'rollout step')} = {iterations * rows:,} responses"
    )
    longest = cfg.rollout.max_tokens
    return [
        ("rollout", f"{group} per rollout step, up to {longest:,} response tokens each"),
        ("update", f"{_count(rows, 'row')} in {passes} = {_count(updates, 'optimizer step')} per rollout step"),
        ("total", f"{drawn}, at most {iterations * rows * longest:,} tokens"),
        ("data", _epochs(cfg, iterations * prompts, "prompts")),
        *_evaluation(cfg, cfg.rollout.eval_samples),
    ]


def _supervised_batch(cfg: Config) -> list[tuple[str, str]]:
    rows, steps = cfg.data.rows_per_step, cfg.run.steps
    return [
        ("update", f"{_count(rows, 'row')} per optimizer step"),
        ("total", f"{_count(steps, 'optimizer step')} = {_count(steps * rows, 'row')}"),
        ("data", _epochs(cfg, steps * rows, "rows")),
        *_evaluation(cfg, 1),
    ]


def _evaluation(cfg: Config, samples: int) -> list[tuple[str, str]]:
    if cfg.data.eval is None:
        return []
    rows = count_rows(Path(cfg.data.eval))
    if cfg.data.eval_rows is not None:
        rows = min(rows, cfg.data.eval_rows)
    when = (
        f"every {_count(cfg.run.eval_every, 'optimizer step')} and at the end" if cfg.run.eval_every else "at the end"
    )
    each = f" x {_count(samples, 'sample')}" if cfg.train.row.recipe == "rl" else ""
    return [("eval", f"{_count(rows, 'row')} of {cfg.data.eval}{each}, {when}")]


def _epochs(cfg: Config, drawn: int, unit: str) -> str:
    rows, path = sum(count_rows(Path(file)) for file in cfg.data.train_files), ", ".join(cfg.data.train_files)
    passes = f" = {drawn / rows:.2f} passes over the data" if rows else ""
    return f"{path}: {_count(rows, 'row')}; {drawn:,} {unit} drawn{passes}"


def count_rows(path: Path) -> int:
    """Rows of a JSONL (lines that are not blank) or Parquet file."""
    if path.suffix == ".parquet":
        # Imported here: pyarrow is heavy, and only Parquet files need it.
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _memory(cfg: Config) -> list[tuple[str, str]]:
    dims = model_dims(cfg.model.name)
    if dims is None:
        reason = f"{cfg.model.name} is not on disk, or has no sizes this reads"
        return [("memory", f"unknown: {reason}"), ("disk", "unknown")]
    phases = memory_phases(cfg, dims)
    peak = max(phases, key=lambda phase: phases[phase])
    shown = ", ".join(f"{phase} {_size(size)}" for phase, size in phases.items())
    one, kept = checkpoint_bytes(cfg, dims), cfg.run.keep_checkpoints
    return [
        ("model", f"{dims.parameters:,} parameters, context {context_length(cfg) or 'unknown'}"),
        (
            "memory",
            f"about {shown}; peak in {peak} (weights, moments, cache, activations; the runtime's own comes on top)",
        ),
        ("disk", f"{_size(one)} per checkpoint, {_size(one * (kept + 1))} with {kept} kept and one being written"),
    ]


def memory_phases(cfg: Config, dims: ModelDims) -> dict[str, int]:
    """Bytes held in each phase of a step: states of every model, plus the cache (rollout) or gradients and activations.

    A trained model holds weights, float32 masters if the weights are not float32, and two moments; the critic is one
    more of the policy's size, the reference one more copy of the weights.
    """
    size, dtype = BYTES[cfg.model.dtype], cfg.model.dtype
    row = cfg.train.row
    trained = 2 if "critic" in row.extras and row.recipe == "rl" else 1
    held = trained * dims.parameters * (size + MASTERS[dtype] + MOMENTS)
    if row.recipe == "rl" and row.kl != "none" and cfg.train.kl_coeff > 0:
        held += dims.parameters * size
    context = context_length(cfg) or 0
    longest = context
    phases: dict[str, int] = {}
    tokens = cfg.train.micro_batch_tokens
    if row.recipe == "rl":
        prompt = cfg.data.max_prompt_tokens
        longest = min(context, prompt + cfg.rollout.max_tokens) if prompt is not None and context else context
        longest = longest or cfg.rollout.max_tokens
        rows = cfg.data.prompts_per_step * cfg.rollout.n_samples
        cache = 2 * dims.layers * dims.kv_heads * dims.head_dim * size
        phases["rollout"] = held + min(rows, cfg.inference_engine.max_rows) * longest * cache
        tokens = min(tokens, rows * longest)
    phases["update"] = held + dims.parameters * GRADIENTS[dtype] * trained + activation_bytes(cfg, dims, tokens)
    return phases


def activation_bytes(cfg: Config, dims: ModelDims, tokens: int) -> int:
    """Activations kept for the backward pass of one micro-batch.

    12 hidden + 4 intermediate + 4 kv_heads head_dim numbers per token and layer: counted with saved-tensor hooks on
    three Qwen3 shapes, where it is 5 to 6 % above the count. Checkpointing keeps one hidden state per layer and
    recomputes a layer at a time.
    """
    layer = 12 * dims.hidden + 4 * dims.intermediate + 4 * dims.kv_heads * dims.head_dim
    numbers = dims.layers * dims.hidden + layer if cfg.model.gradient_checkpointing else dims.layers * layer
    return tokens * numbers * BYTES[cfg.model.dtype]


def checkpoint_bytes(cfg: Config, dims: ModelDims) -> int:
    """Bytes of one checkpoint: weights, masters where they differ from the weights, moments; critic included."""
    trained = 2 if "critic" in cfg.train.row.extras else 1
    return trained * dims.parameters * (BYTES[cfg.model.dtype] + MASTERS[cfg.model.dtype] + MOMENTS)


def _count(number: int, unit: str, plural: str = "s") -> str:
    return f"{number:,} {unit}{'' if number == 1 else plural}"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


def dry_run_config(cfg: Config, directory: Path) -> Config:
    """Smallest run that takes every turn of `cfg`: one rollout or supervised step of a random tiny model."""
    supervised = cfg.train.row.recipe != "rl"
    changes = {
        "run": {
            "dir": str(directory),
            "steps": 1 if supervised else cfg.train.epochs * cfg.train.minibatches,
            "mlflow": False,
            "checkpoint_every": 0,
            "eval_every": 0,
        },
        "model": {"name": "builtin:tiny", "dtype": "float32", "max_length": None, "chat_template": None},
        "data": {
            "prompts_per_step": cfg.train.minibatches,
            "rows_per_step": min(cfg.data.rows_per_step, 4),
            "max_prompt_tokens": None,
            "eval_rows": 2 if cfg.data.eval is not None else None,
            "overlong": "drop",
        },
        "rollout": {"n_samples": min(cfg.rollout.n_samples, 4), "max_tokens": min(cfg.rollout.max_tokens, 32)},
    }
    return cfg.model_copy(
        update={name: getattr(cfg, name).model_copy(update=update) for name, update in changes.items()}
    )
