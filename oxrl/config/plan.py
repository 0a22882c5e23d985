"""`oxrl plan`: what a run will do, in words and numbers, computed from the configuration and files on disk alone."""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal

from oxrl.config.dims import ModelDims, context_length, model_dims
from oxrl.config.reads import has_reference_model
from oxrl.config.schema import Config
from oxrl.errors import ConfigError

# Bytes per parameter. float32 weights are their own masters; with bfloat16 weights their own gradients exist beside the
# float32 sums until the pass ends.
BYTES = {"float32": 4, "bfloat16": 2}
MASTERS_AND_MOMENTS = {"float32": 8, "bfloat16": 12}
GRADIENTS = {"float32": 4, "bfloat16": 6}


def plan_text(cfg: Config) -> str:
    """Batch equation, totals, data, memory per phase and disk of a run, one `label  text` line each."""
    row = cfg.train.row
    kinds = {"rl": _rl_batch, "rejection": _rejection_batch}
    batch = kinds.get(row.recipe, _supervised_batch)(cfg)
    where = f"on {cfg.model.name}, {cfg.model.dtype}, device {cfg.run.device}, into {cfg.run.directory}"
    lines = {"run": f"{cfg.run.name}: {cfg.train.alg_name} ({row.summary}) {where}"}
    lines |= batch | _evaluation(cfg) | _memory(cfg)
    return "\n".join(f"{label:<11}{text}" for label, text in lines.items())


def _rl_batch(cfg: Config) -> dict[str, str]:
    prompts, samples, longest = cfg.data.prompts_per_step, cfg.rollout.n_samples, cfg.rollout.max_tokens
    epochs, minibatches, steps = cfg.train.epochs, cfg.train.minibatches, cfg.run.steps
    rows, updates = prompts * samples, cfg.train.updates
    rollouts = steps // updates
    group = f"{_count(prompts, 'prompt')} x {_count(samples, 'sample')} = {_count(rows, 'row')}"
    share = f"{_count(minibatches, 'minibatch', 'es')} of {_count(rows // minibatches, 'row')}"
    passes = f"{share}, {_count(epochs, 'epoch')} = {_count(updates, 'optimizer step')}"
    lag = f"; {_count(cfg.wave, 'rollout step')} at a time, while earlier ones train, at most "
    lag += f"{(2 * cfg.wave - 1) * updates} weight versions old"
    drawn = f"{_count(steps, 'optimizer step')} = {_count(rollouts, 'rollout step')} = {rollouts * rows:,} responses"
    return {
        "rollout": f"{group} per rollout step, up to {longest:,} response tokens each{lag if cfg.wave else ''}",
        "update": f"{_count(rows, 'row')} in {passes} per rollout step",
        "total": f"{drawn}, at most {rollouts * rows * longest:,} tokens",
        "data": _passes(cfg, rollouts * prompts, "prompts"),
    }


def _supervised_batch(cfg: Config) -> dict[str, str]:
    rows, steps = cfg.data.rows_per_step, cfg.run.steps
    return {
        "update": f"{_count(rows, 'row')} per optimizer step",
        "total": f"{_count(steps, 'optimizer step')} = {_count(steps * rows, 'row')}",
        "data": _passes(cfg, steps * rows, "rows"),
    }


def _rejection_batch(cfg: Config) -> dict[str, str]:
    prompts, samples = count_rows(cfg.data.train_files[0]), cfg.rollout.n_samples
    asked = f"{_count(prompts, 'prompt')} x {_count(samples, 'sample')} = {prompts * samples:,} responses"
    return _supervised_batch(cfg) | {"data": f"{cfg.data.train}: {asked}; rows are those that are kept"}


def _evaluation(cfg: Config) -> dict[str, str]:
    if cfg.data.eval is None:
        return {}
    rows = min(count_rows(cfg.data.eval), cfg.data.eval_rows or 10**18)
    each = f" x {_count(cfg.rollout.eval_samples, 'sample')}" if cfg.train.row.recipe == "rl" else ""
    when = f"every {_count(cfg.run.eval_every, 'optimizer step')} and " if cfg.run.eval_every else ""
    return {"eval": f"{_count(rows, 'row')} of {cfg.data.eval}{each}, {when}at the end"}


def _passes(cfg: Config, drawn: int, unit: str) -> str:
    rows, path = sum(count_rows(file) for file in cfg.data.train_files), ", ".join(cfg.data.train_files)
    passes = f" = {drawn / rows:.2f} passes over the data" if rows else ""
    return f"{path}: {_count(rows, 'row')}; {drawn:,} {unit} drawn{passes}"


def count_rows(path: str) -> int:
    """Rows of a JSONL (lines that are not blank) or Parquet file."""
    if path.endswith(".parquet"):
        # Imported here: pyarrow is heavy, and only Parquet files need it.
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with Path(path).open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _memory(cfg: Config) -> dict[str, str]:
    dims = model_dims(cfg.model.name)
    if dims is None:
        return {"memory": f"unknown: {cfg.model.name} is not on disk, or has no sizes this reads", "disk": "unknown"}
    phases = memory_phases(cfg, dims)
    shown = ", ".join(f"{phase} {decimal(size)}" for phase, size in phases.items())
    peak = f"peak in {max(phases, key=phases.__getitem__)}"
    one, kept, (_, offloaded) = _stored(cfg, dims), cfg.run.keep_checkpoints, _held(cfg, dims)
    where = " per rank" if cfg.run.training_gpus > 1 else ""
    where += f" and {decimal(offloaded)} offloaded to CPU memory" if offloaded else ""
    return {
        "model": f"{dims.parameters:,} parameters, context {context_length(cfg) or 'unknown'}",
        "memory": f"about {shown}{where}; {peak} (weights, moments, cache, activations; the runtime's comes on top)",
        "disk": f"{decimal(one)} per checkpoint, {decimal(one * (kept + 1))} with {kept} kept and one being written",
    }


def memory_phases(cfg: Config, dims: ModelDims) -> dict[str, int]:
    """Bytes on each rank's device in each phase of a step: states of every model, plus the cache (rollout) or gradients
    and activations.

    The critic is one more model of the policy's size, the reference one more copy of the weights.
    """
    row, size, tokens = cfg.train.row, BYTES[cfg.model.dtype], cfg.train.micro_batch_tokens
    held, _ = _held(cfg, dims)
    phases: dict[str, int] = {}
    if row.recipe in ("rl", "rejection"):
        context, prompt = context_length(cfg), cfg.data.max_prompt_tokens
        longest = context or cfg.rollout.max_tokens
        if context and prompt is not None:
            longest = min(context, prompt + cfg.rollout.max_tokens)
        rows, engine = cfg.data.prompts_per_step * cfg.rollout.n_samples, cfg.inference_engine
        cache = 2 * dims.layers * dims.kv_heads * dims.head_dim * size
        sampler = min(-(-rows // max(engine.actors, 1)), engine.max_rows) * longest * cache
        if engine.actors:  # weights of its own, on a device of its own or beside a training rank
            sampler = (sampler + dims.parameters * size) // engine.tensor_parallel
        alone = engine.actors > 0 and engine.placement == "separate"
        phases["rollout"] = sampler + (0 if alone else held)
        tokens = min(tokens, -(-rows // cfg.run.training_gpus) * longest) if row.recipe == "rl" else tokens
    gradients = _trained(cfg, dims) * GRADIENTS[cfg.model.dtype] // _cut(cfg, 2)
    phases["update"] = held + gradients + activation_bytes(cfg, dims, tokens)
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


def _models(cfg: Config) -> int:
    return 2 if "critic" in cfg.train.row.needs else 1


def _trained(cfg: Config, dims: ModelDims) -> int:
    """Parameters that are trained: all, or those of adapters on every linear layer (at hidden = heads x head_dim)."""
    linears = 9 * dims.hidden + 2 * dims.kv_heads * dims.head_dim + 3 * dims.intermediate
    return _models(cfg) * (cfg.lora.rank * dims.layers * linears if cfg.lora.rank else dims.parameters)


def _stored(cfg: Config, dims: ModelDims) -> int:
    """Bytes of a checkpoint: weights, masters and moments of what is trained."""
    return _trained(cfg, dims) * (BYTES[cfg.model.dtype] + MASTERS_AND_MOMENTS[cfg.model.dtype])


def _cut(cfg: Config, least: int) -> int:
    """Pieces that something is cut into which ZeRO divides from stage `least` on; FSDP divides as stage 3 does."""
    stage = {"local": 0, "fsdp": 3, "deepspeed": cfg.deepspeed.zero_stage}[cfg.train.backend]
    return cfg.run.training_gpus if stage >= least else 1


def _held(cfg: Config, dims: ModelDims) -> tuple[int, int]:
    """Bytes that a rank holds between steps, on its device and offloaded: weights, masters, moments and the reference.

    Where weights are cut up, two layers and what is outside of layers are whole while they run.
    """
    size, deepspeed = BYTES[cfg.model.dtype], cfg.train.backend == "deepspeed"
    adapters = _trained(cfg, dims) if cfg.lora.rank else 0
    layer = dims.hidden * (2 * dims.hidden + 2 * dims.kv_heads * dims.head_dim + 3 * dims.intermediate)
    gathered = (dims.parameters - (dims.layers - 2) * layer) * size
    reference, zero = dims.parameters * size * has_reference_model(cfg), cfg.deepspeed_ref
    reference_cut = (cfg.run.training_gpus if zero.zero_stage == 3 else 1) if deepspeed else _cut(cfg, 3)
    parts = (
        ((_models(cfg) * dims.parameters + adapters) * size // _cut(cfg, 3), deepspeed and cfg.deepspeed.offload_param),
        (
            _trained(cfg, dims) * MASTERS_AND_MOMENTS[cfg.model.dtype] // _cut(cfg, 1),
            deepspeed and cfg.deepspeed.offload_optimizer,
        ),
        (reference // reference_cut, deepspeed and zero.offload_param),
    )
    on_device = sum(size for size, offloaded in parts if not offloaded) + (gathered if _cut(cfg, 3) > 1 else 0)
    return on_device, sum(size for size, offloaded in parts if offloaded)


def _count(number: int, unit: str, plural: str = "s") -> str:
    return f"{number:,} {unit}{'' if number == 1 else plural}"


def dry_run_config(cfg: Config, directory: Path) -> Config:
    """Smallest run that takes every turn of `cfg`: one rollout or supervised step of a random tiny model."""
    train, rollout, data = cfg.train, cfg.rollout, cfg.data
    if train.row.recipe == "rejection":
        raise ConfigError(f"{train.alg_name} has no dry run: a random model's responses would not be kept")
    changes = {
        "run": {
            "dir": str(directory),
            "steps": train.updates if train.row.recipe == "rl" else 1,
            "mlflow": False,
            "checkpoint_every": 0,
            "eval_every": 0,
        },
        "model": {"name": "builtin:tiny", "dtype": "float32", "max_length": None, "chat_template": None},
        "data": {
            "prompts_per_step": train.minibatches,
            "rows_per_step": min(data.rows_per_step, 4),
            "eval_rows": 2 if data.eval is not None else None,
            "max_prompt_tokens": None,
            "overlong": "drop",
        },
        "rollout": {"n_samples": min(rollout.n_samples, 4), "max_tokens": min(rollout.max_tokens, 32)},
    }
    return cfg.model_copy(update={name: getattr(cfg, name).model_copy(update=new) for name, new in changes.items()})
