"""`oxrl plan`: what a run will do, in words and numbers, computed from the configuration and files
on disk alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from oxrl.config.dims import ModelDims, context_length, model_dims
from oxrl.config.reads import has_reference_model
from oxrl.config.schema import Config
from oxrl.data.hub import locate
from oxrl.errors import ConfigError

# Bytes per parameter of weights, masters and moments, gradients. float32 weights are their own
# masters; with bfloat16 weights their own gradients exist beside the float32 sums until the pass
# ends.
BYTES = {"float32": (4, 8, 4), "bfloat16": (2, 12, 6)}


class Memory(NamedTuple):
    """Bytes: on each rank's device by phase of a step, offloaded to a rank's CPU memory, and of a
    checkpoint.
    """

    phases: dict[str, int]
    offloaded: int
    stored: int


def plan_text(cfg: Config) -> str:
    """Batch equation, totals, data, memory per phase and disk of a run, one `label
    text` line each.
    """
    row = cfg.train.row
    batch = {"rl": _rl_batch, "rejection": _rejection_batch}.get(row.recipe, _supervised_batch)(cfg)
    where = (
        f"on {cfg.model.name}, {cfg.model.dtype}, device {cfg.run.device}, into {cfg.run.directory}"
    )
    lines = {"run": f"{cfg.run.name}: {cfg.train.alg_name} ({row.summary}) {where}"}
    lines |= batch | _evaluation(cfg) | _memory(cfg)
    return "\n".join(f"{label:<11}{text}" for label, text in lines.items())


def _rl_batch(cfg: Config) -> dict[str, str]:
    prompts, samples, longest = (
        cfg.data.prompts_per_step,
        cfg.rollout.n_samples,
        cfg.rollout.max_tokens,
    )
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
    return _supervised_batch(cfg) | {
        "data": f"{cfg.data.train}: {asked}; rows are those that are kept"
    }


def _evaluation(cfg: Config) -> dict[str, str]:
    if cfg.data.eval is None:
        return {}
    rows = min(count_rows(cfg.data.eval), cfg.data.eval_rows or 10**18)
    each = (
        f" x {_count(cfg.rollout.eval_samples, 'sample')}" if cfg.train.row.recipe == "rl" else ""
    )
    when = (
        f"every {_count(cfg.run.eval_every, 'optimizer step')} and " if cfg.run.eval_every else ""
    )
    return {"eval": f"{_count(rows, 'row')} of {cfg.data.eval}{each}, {when}at the end"}


def _passes(cfg: Config, drawn: int, unit: str) -> str:
    rows, path = (
        sum(count_rows(file) for file in cfg.data.train_files),
        ", ".join(cfg.data.train_files),
    )
    passes = f" = {drawn / rows:.2f} passes over the data" if rows else ""
    return f"{path}: {_count(rows, 'row')}; {drawn:,} {unit} drawn{passes}"


def count_rows(path: str) -> int:
    """Rows of a JSONL (lines that are not blank) or Parquet file; one on the hub is fetched, as the
    run will.
    """
    path = str(locate(path))
    if path.endswith(".parquet"):
        # Imported here: pyarrow is heavy, and only Parquet files need it.
        import pyarrow.parquet

        return int(pyarrow.parquet.read_metadata(path).num_rows)
    with Path(path).open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def _memory(cfg: Config) -> dict[str, str]:
    dims = model_dims(cfg.model.name)
    if dims is None:
        return {
            "memory": f"unknown: {cfg.model.name} is not on disk, or has no sizes this reads",
            "disk": "unknown",
        }
    phases, offloaded, one = memory(cfg, dims)
    shown = ", ".join(f"{phase} {decimal(size)}" for phase, size in phases.items())
    peak, kept = f"peak in {max(phases, key=phases.__getitem__)}", cfg.run.keep_checkpoints
    where = " per rank" if cfg.run.training_gpus > 1 else ""
    where += f" and {decimal(offloaded)} offloaded to CPU memory" if offloaded else ""
    return {
        "model": f"{dims.parameters:,} parameters, context {context_length(cfg) or 'unknown'}",
        "memory": f"about {shown}{where}; {peak} (weights, moments, cache, activations; the runtime's comes on top)",
        "disk": f"{decimal(one)} per checkpoint, {decimal(one * (kept + 1))} with {kept} kept and one being written",
    }


def memory(cfg: Config, dims: ModelDims) -> Memory:
    """States of every model, plus a cache while sampling, plus gradients and activations while
    updating.

    The critic is one more model of the policy's size, the reference one more copy of the weights.
    """
    size, states, gradient = BYTES[cfg.model.dtype]
    ranks, backend, row, engine = (
        cfg.run.training_gpus,
        cfg.train.backend,
        cfg.train.row,
        cfg.inference_engine,
    )
    models = 2 if "critic" in row.needs else 1
    weights = trained = models * dims.parameters
    if cfg.lora.rank:  # adapters on every linear layer, at hidden = heads x head_dim
        linears = 9 * dims.hidden + 2 * dims.kv_heads * dims.head_dim + 3 * dims.intermediate
        trained = models * cfg.lora.rank * dims.layers * linears
        weights += trained

    # ZeRO cuts a thing into pieces from a stage on; FSDP cuts as stage 3 does.
    stage = {"local": 0, "fsdp": 3, "deepspeed": cfg.deepspeed.zero_stage}[backend]
    cut = [ranks if stage >= least else 1 for least in range(4)]
    reference = dims.parameters * size * has_reference_model(cfg)
    reference_stage = cfg.deepspeed_ref.zero_stage if backend == "deepspeed" else stage
    parts = (
        (weights * size // cut[3], cfg.deepspeed.offload_param),
        (trained * states // cut[1], cfg.deepspeed.offload_optimizer),
        (reference // (ranks if reference_stage == 3 else 1), cfg.deepspeed_ref.offload_param),
    )
    offloaded = sum(part for part, away in parts if away)
    held = sum(part for part, away in parts if not away)
    if cut[3] > 1:  # two layers, and what is outside of layers, are whole while they run
        layer = dims.hidden * (
            2 * dims.hidden + 2 * dims.kv_heads * dims.head_dim + 3 * dims.intermediate
        )
        held += (dims.parameters - (dims.layers - 2) * layer) * size

    phases, tokens = dict[str, int](), cfg.train.micro_batch_tokens
    if row.recipe in ("rl", "rejection"):
        context, prompt = context_length(cfg), cfg.data.max_prompt_tokens
        longest = context or cfg.rollout.max_tokens
        if context and prompt is not None:
            longest = min(context, prompt + cfg.rollout.max_tokens)
        rows = cfg.data.prompts_per_step * cfg.rollout.n_samples
        cache = 2 * dims.layers * dims.kv_heads * dims.head_dim * size
        sampler = min(-(-rows // max(engine.actors, 1)), engine.max_rows) * longest * cache
        if engine.actors:  # weights of its own, on a device of its own or beside a training rank
            sampler = (sampler + dims.parameters * size) // engine.tensor_parallel
        phases["rollout"] = sampler + (
            0 if engine.actors and engine.placement == "separate" else held
        )
        tokens = min(tokens, -(-rows // ranks) * longest) if row.recipe == "rl" else tokens
    phases["update"] = held + trained * gradient // cut[2] + activation_bytes(cfg, dims, tokens)
    return Memory(phases, offloaded, trained * (size + states))


def activation_bytes(cfg: Config, dims: ModelDims, tokens: int) -> int:
    """Activations kept for the backward pass of one micro-batch.

    12 hidden + 4 intermediate + 4 kv_heads head_dim numbers per token and layer: counted with
    saved-tensor hooks on three Qwen3 shapes, where it is 5 to 6 % above the count. Checkpointing
    keeps one hidden state per layer and recomputes a layer at a time.
    """
    layer = 12 * dims.hidden + 4 * dims.intermediate + 4 * dims.kv_heads * dims.head_dim
    numbers = (
        dims.layers * dims.hidden + layer
        if cfg.model.gradient_checkpointing
        else dims.layers * layer
    )
    return tokens * numbers * BYTES[cfg.model.dtype][0]


def _count(number: int, unit: str, plural: str = "s") -> str:
    return f"{number:,} {unit}{'' if number == 1 else plural}"


def dry_run_config(cfg: Config, directory: Path) -> Config:
    """Smallest run that takes every turn of `cfg`: one rollout or supervised step of a random tiny
    model.
    """
    train, rollout, data = cfg.train, cfg.rollout, cfg.data
    if train.row.recipe == "rejection":
        raise ConfigError(
            f"{train.alg_name} has no dry run: a random model's responses would not be kept"
        )
    steps = train.updates if train.row.recipe == "rl" else 1
    changes = {
        "run": {
            "dir": str(directory),
            "steps": steps,
            "mlflow": False,
            "checkpoint_every": 0,
            "eval_every": 0,
        },
        "model": {
            "name": "builtin:tiny",
            "dtype": "float32",
            "max_length": None,
            "chat_template": None,
        },
        "data": {
            "prompts_per_step": train.minibatches,
            "rows_per_step": min(data.rows_per_step, 4),
            "eval_rows": 2,
            "max_prompt_tokens": None,
            "overlong": "drop",
        },
        "rollout": {
            "n_samples": min(rollout.n_samples, 4),
            "max_tokens": min(rollout.max_tokens, 32),
        },
    }
    return cfg.model_copy(
        update={name: getattr(cfg, name).model_copy(update=new) for name, new in changes.items()}
    )
