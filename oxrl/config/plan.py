"""`oxrl plan`: what a run will do, in words and numbers, from the configuration and files alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from oxrl.config.dims import ModelDims, context_length, model_dims
from oxrl.config.kept import DTYPE_BYTES, frozen_bytes, held_of
from oxrl.config.micro_batch import FIELD, micro_batch_tokens, tokens_by_rule
from oxrl.config.reads import generates_answers, has_reference_model
from oxrl.config.schema import Config, EngineConfig
from oxrl.data.hub import locate
from oxrl.errors import DataError, UnreachableError
from oxrl.runs.deadlines import PHASES, Phase
from oxrl.tables.cells import CRITIC
from oxrl.tables.engines import TRAINING_ENGINES
from oxrl.tables.numbers import KL_COEFF
from oxrl.tables.preference import METHODS

# There where Linux has a GPU of NVIDIA or AMD.
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")


class Memory(NamedTuple):
    """Bytes of a run.

    phases: on each rank's device, by phase of a step.
    offloaded: in CPU memory, per rank.
    stored: of one checkpoint.
    """

    phases: dict[str, int]
    offloaded: int
    stored: int


def plan_text(cfg: Config) -> str:
    """What a run will do, one `label      text` line each.

    Returns:
        Batch equation, totals, data, the reference if there is one, memory per phase and disk.

    Raises:
        DataError: a file on the hub can neither be found in the cache nor fetched.
    """
    row = cfg.train.row
    held = ", frozen linear layers in four bits" if cfg.model.load_in_4bit else ""
    batch = {"rl": _rl_batch, "rejection": _rejection_batch}.get(row.recipe, _supervised_batch)
    run = (
        f"{cfg.run.name}: {row.name} ({row.summary}) on {cfg.model.name}, "
        f"{cfg.model.dtype}{held}, device {cfg.run.device}, into {cfg.run.directory}"
    )
    lines = {"run": run} | batch(cfg) | _evaluation(cfg)
    reference = reference_text(cfg)
    if reference:
        lines["reference"] = reference
    lines |= _memory(cfg) | {"at once": _micro_batches(cfg)}
    lines["deadlines"] = _waits(cfg)
    return "\n".join(f"{label:<11}{text}" for label, text in lines.items())


def _rl_batch(cfg: Config) -> dict[str, str]:
    prompts = cfg.data.prompts_per_step
    samples = cfg.rollout.n_samples
    longest = cfg.rollout.max_tokens
    minibatches = cfg.train.minibatches
    updates = cfg.train.updates
    steps = cfg.run.steps
    rows = prompts * samples
    rollouts = steps // updates
    responses = rollouts * rows
    all_rows = _count(rows, "row")
    group = f"{_count(prompts, 'prompt')} x {_count(samples, 'sample')} = {all_rows}"
    share = f"{_count(minibatches, 'minibatch', 'es')} of {_count(rows // minibatches, 'row')}"
    passes = f"{_count(cfg.train.epochs, 'epoch')} = {_count(updates, 'optimizer step')}"
    total = f"{_count(steps, 'optimizer step')} = {_count(rollouts, 'rollout step')}"
    lag = ""
    if cfg.sampling_block:
        lag = (
            f"; {_count(cfg.sampling_block, 'rollout step')} at a time, while earlier ones train, "
            f"at most {(2 * cfg.sampling_block - 1) * updates} weight versions old"
        )
    return {
        "rollout": f"{group} per rollout step, up to {longest:,} response tokens each{lag}",
        "update": f"{all_rows} in {share}, {passes} per rollout step",
        "total": f"{total} = {responses:,} responses, at most {responses * longest:,} tokens",
        "data": _passes(cfg, rollouts * prompts, "prompts"),
    }


def _supervised_batch(cfg: Config) -> dict[str, str]:
    rows = cfg.data.rows_per_step
    steps = cfg.run.steps
    return {
        "update": f"{_count(rows, 'row')} per optimizer step",
        "total": f"{_count(steps, 'optimizer step')} = {_count(steps * rows, 'row')}",
        "data": _passes(cfg, steps * rows, "rows"),
    }


def _rejection_batch(cfg: Config) -> dict[str, str]:
    samples = cfg.rollout.n_samples
    try:
        prompts = count_rows(cfg.data.train_files[0])
    except UnreachableError:
        return _supervised_batch(cfg)
    asked = (
        f"{_count(prompts, 'prompt')} x {_count(samples, 'sample')}"
        f" = {prompts * samples:,} responses; rows are those that are kept"
    )
    return _supervised_batch(cfg) | {"data": f"{cfg.data.train}: {asked}"}


def _evaluation(cfg: Config) -> dict[str, str]:
    if cfg.data.eval is None:
        return {}
    try:
        rows = count_rows(cfg.data.eval)
    except UnreachableError:
        return {"eval": f"{cfg.data.eval}: unknown rows"}
    if cfg.data.eval_rows is not None:
        rows = min(rows, cfg.data.eval_rows)
    text = f"{_count(rows, 'row')} of {cfg.data.eval}"
    if cfg.train.row.recipe == "rl" or generates_answers(cfg):
        text += f" x {_count(cfg.rollout.eval_samples, 'sample')}"
    text += ", "
    if cfg.run.eval_every:
        text += f"every {_count(cfg.run.eval_every, 'optimizer step')} and "
    return {"eval": f"{text}at the end"}


def _passes(cfg: Config, drawn: int, unit: str) -> str:
    files = cfg.data.train_files
    try:
        rows = sum(count_rows(file) for file in files)
    except UnreachableError:
        return f"{', '.join(files)}: unknown rows; {drawn:,} {unit} drawn"
    passes = f" = {drawn / rows:.2f} passes over the data" if rows else ""
    return f"{', '.join(files)}: {_count(rows, 'row')}; {drawn:,} {unit} drawn{passes}"


def count_rows(path: str) -> int:
    """Rows of a JSONL (lines that are not blank) or Parquet file.

    Args:
        path: a file, or one on the hub, which is fetched as the run will.

    Raises:
        DataError: a Parquet file is none.
        UnreachableError: a file on the hub can neither be found in the cache nor fetched.
    """
    file = locate(path)
    if file.suffix == ".parquet":
        # Imported here: pyarrow is heavy, and only Parquet files need it.
        import pyarrow
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from None
    with file.open("rb") as lines:
        return sum(1 for line in lines if line.strip())


def reference_text(cfg: Config) -> str:
    """What a run compares the policy with, what that costs, why, and how to do without.

    A row's default may ask for a reference that nobody thought of: this is told by the plan, and
    at the start of the run. Empty where there is none.
    """
    row = cfg.train.row
    if row.recipe == "preference":
        return _preference_reference(cfg)
    if row.recipe != "rl" or row.kl == "none" or not cfg.train.value(KL_COEFF) > 0:
        return ""
    coefficient = cfg.train.value(KL_COEFF)
    usual = row.defaults.get(KL_COEFF.key) == coefficient
    origin = f"the default of {row.name}" if usual else "as configured"
    why = f"for train.kl_coeff = {coefficient:g}, {origin}"
    return f"{_reference_model(cfg)}, {why}; train.kl_coeff=0 does without"


def _reference_model(cfg: Config) -> str:
    """What the reference is held as, and its size."""
    if cfg.lora.rank:
        return "the policy with its adapter switched off (no memory of its own)"
    dims = model_dims(cfg.model.name)
    if dims is None:
        return "a second copy of the policy, of unknown size"
    size = decimal(dims.parameters * DTYPE_BYTES[cfg.model.dtype])
    return f"a second copy of the policy, {size}"


def _preference_reference(cfg: Config) -> str:
    method = METHODS[cfg.train.alg_name]
    if not (method.reference or any(METHODS[name].reference for name in cfg.train.mix)):
        return ""
    free = "train.alg_name=simpo, orpo, cpo do without"
    if method.moves_reference:
        held = f"{_reference_model(cfg)}, which follows it"
        return f"{held}: {cfg.train.alg_name} asks for it; {free}"
    held = "log-probabilities of the policy before training, computed once and kept on disk"
    return f"{held} (no second model is held): {cfg.train.alg_name} compares with them; {free}"


def _micro_batches(cfg: Config) -> str:
    tokens = cfg.train.micro_batch_tokens
    if tokens != "auto":
        return f"at most {_count(tokens, 'token')} in a pass of the model"
    found, why = tokens_by_rule(cfg, on_cpu=_on_cpu(cfg))
    return f"at most {_count(found, 'token')} in a pass of the model ({FIELD}: auto): {why}"


def _memory(cfg: Config) -> dict[str, str]:
    dims = model_dims(cfg.model.name)
    if dims is None:
        why = f"unknown: {cfg.model.name} is not on disk, or has no sizes this reads"
        return {"memory": why, "disk": "unknown"}
    phases, offloaded, stored = memory(cfg, dims)
    shown = ", ".join(f"{phase} {decimal(size)}" for phase, size in phases.items())
    where = " per rank" if cfg.run.training_gpus > 1 else ""
    if offloaded:
        where += f" and {decimal(offloaded)} offloaded to CPU memory"
    parts = "an estimate: weights, moments, cache, activations; the runtime's comes on top"
    kept = cfg.run.keep_checkpoints
    needed, _ = disk_needed(cfg, dims)
    sync = sync_text(cfg, dims)
    return ({"sync": sync} if sync else {}) | {
        "model": f"{dims.parameters:,} parameters, context {context_length(cfg) or 'unknown'}",
        "memory": f"about {shown}{where}; peak in {max(phases, key=phases.__getitem__)} ({parts})",
        "disk": (
            f"{decimal(stored)} per checkpoint, {decimal(needed)} with {kept} kept and one being "
            "written"
        ),
    }


def _on_cpu(cfg: Config) -> bool:
    """Where the model will be computed, as far as files tell: PyTorch is not asked."""
    if cfg.run.device == "auto":
        return not any(Path(name).exists() for name in GPU_FILES)
    return cfg.run.device == "cpu"


def disk_needed(cfg: Config, dims: ModelDims) -> tuple[int, int]:
    """Bytes of the checkpoints that are on the disk at once, and how many these are.

    Args:
        dims: of `cfg.model`.
    """
    every = cfg.run.checkpoint_every
    # The first one, one at every multiple of `checkpoint_every`, and the last.
    written = 2 + (cfg.run.steps - 1) // every if every else 2
    if cfg.run.first_checkpoint == "reference":
        written -= 1
    checkpoints = min(cfg.run.keep_checkpoints + 1, written)
    return memory(cfg, dims).stored * checkpoints, checkpoints


def memory(cfg: Config, dims: ModelDims) -> Memory:
    """Estimate the memory of each phase of a training step.

    Weights and optimizer state of every model, plus a cache while sampling, plus gradients and
    activations while updating. The critic is one more model of the policy's size.

    Args:
        dims: of `cfg.model`.
    """
    size = DTYPE_BYTES[cfg.model.dtype]
    each = held_of(cfg, dims)
    ranks = cfg.run.training_gpus
    engine = cfg.inference_engine
    # ZeRO cuts a thing into pieces from a stage on.
    stage = TRAINING_ENGINES[cfg.train.backend].zero_stage
    if stage is None:
        stage = cfg.deepspeed.zero_stage
    trained, frozen = _models(cfg, dims)
    weights = int(frozen * frozen_bytes(cfg, dims) + trained * each.weights)
    states = int(trained * (each.masters + each.kept))
    held, offloaded = _held(cfg, dims, weights, states, stage)
    phases: dict[str, int] = {}
    tokens = micro_batch_tokens(cfg, on_cpu=_on_cpu(cfg))
    recipe = cfg.train.row.recipe
    if recipe in ("rl", "rejection"):
        rows = cfg.data.prompts_per_step * cfg.rollout.n_samples
        longest = _longest_row(cfg)
        phases["rollout"] = _sampler(engine, dims, size, rows, longest)
        if not engine.actors or engine.placement == "colocated":
            phases["rollout"] += held
        if recipe == "rl":
            tokens = min(tokens, -(-rows // ranks) * longest)
    gradients = int(trained * each.gradients) // (ranks if stage >= 2 else 1)
    own = int(trained * each.own_gradients) // (ranks if stage >= 2 else 1)
    activations = activation_bytes(cfg, dims, tokens)
    if cfg.train.backend == "fsdp" and cfg.fsdp.offload_optimizer:
        offloaded += gradients
        gradients = 0
    # Gradients of a micro-batch appear as its activations go.
    phases["update"] = held + gradients + max(activations.on_device, own)
    stored = int(trained * (each.stored + each.kept))
    return Memory(phases, offloaded + activations.offloaded, stored)


def _models(cfg: Config, dims: ModelDims) -> tuple[int, int]:
    """How many parameters are trained, and how many models lie under adapters."""
    models = 2 if cfg.train.row.has(CRITIC) else 1
    if cfg.lora.rank:
        return models * adapter_parameters(cfg, dims), models
    return models * dims.parameters, 0


def adapter_parameters(cfg: Config, dims: ModelDims) -> int:
    """Of adapters on every linear layer, at hidden = heads x head_dim."""
    ends = 9 * dims.hidden + 2 * dims.kv_heads * dims.head_dim + 3 * dims.intermediate
    each = cfg.lora.rank * ends
    if cfg.lora.dora:  # a magnitude for each output
        each += 3 * dims.hidden + 2 * dims.kv_heads * dims.head_dim + 2 * dims.intermediate
    return dims.layers * each


def sync_text(cfg: Config, dims: ModelDims) -> str:
    """What one delivery of weights sends, and along which route; empty where nothing is sent."""
    samplers = cfg.inference_engine.actors
    if not samplers or cfg.train.row.recipe != "rl":
        return ""
    what = "weights"
    size = dims.parameters * DTYPE_BYTES[cfg.model.dtype]
    if cfg.lora.rank and cfg.lora.delivery == "adapter":
        what = "adapter"
        size = adapter_parameters(cfg, dims) * DTYPE_BYTES["float32"]
    source = "this process"
    if TRAINING_ENGINES[cfg.train.backend].several_ranks:
        source = "the training ranks, none through this process"
    to = f"to each of {samplers} samplers" if samplers > 1 else "to the sampler"
    return f"{decimal(size)} of {what} per delivery {to}, from {source}"


def _held(cfg: Config, dims: ModelDims, weights: int, states: int, stage: int) -> tuple[int, int]:
    """Bytes that a rank holds between steps: on its device, and offloaded to CPU memory."""
    zero = cfg.deepspeed
    ranks = cfg.run.training_gpus
    size = DTYPE_BYTES[cfg.model.dtype]
    reference = dims.parameters * size * has_reference_model(cfg)
    reference_stage = cfg.deepspeed_ref.zero_stage if cfg.train.backend == "deepspeed" else stage
    weights //= ranks if stage >= 3 else 1
    states //= ranks if stage >= 1 else 1
    reference //= ranks if reference_stage == 3 else 1
    offloaded = weights * zero.offload_param + states * zero.offload_optimizer
    offloaded += reference * cfg.deepspeed_ref.offload_param
    if cfg.train.backend == "fsdp" and cfg.fsdp.offload_optimizer:
        offloaded = weights + states
    held = weights + states + reference - offloaded
    if stage == 3 and ranks > 1:
        # Two layers, and what is outside of layers, are whole while they run.
        attention = 2 * dims.hidden + 2 * dims.kv_heads * dims.head_dim
        layer = dims.hidden * (attention + 3 * dims.intermediate)
        held += (dims.parameters - (dims.layers - 2) * layer) * size
    return held, offloaded


def _longest_row(cfg: Config) -> int:
    """Tokens of the longest prompt and response."""
    context = context_length(cfg)
    if context is None:
        return cfg.rollout.max_tokens
    if cfg.data.max_prompt_tokens is None:
        return context
    return min(context, cfg.data.max_prompt_tokens + cfg.rollout.max_tokens)


def _sampler(engine: EngineConfig, dims: ModelDims, size: int, rows: int, longest: int) -> int:
    """Bytes of a sampler's cache and, where it is an actor, of its own weights of `size` each."""
    per_token = 2 * dims.layers * dims.kv_heads * dims.head_dim * size
    at_once = min(-(-rows // max(engine.actors, 1)), engine.max_rows)
    cache = at_once * longest * per_token
    if not engine.actors:
        return cache
    return (cache + dims.parameters * size) // engine.tensor_parallel


class ActivationBytes(NamedTuple):
    """Of one micro-batch, and how many of them wait in CPU memory."""

    on_device: int
    offloaded: int


def activation_bytes(cfg: Config, dims: ModelDims, tokens: int) -> ActivationBytes:
    """Activations kept for the backward pass of one micro-batch.

    12 hidden + 4 intermediate + 4 kv_heads head_dim numbers per token and layer: counted with
    saved-tensor hooks on three Qwen3 shapes, where it is 5 to 6 % above the count. Checkpointing
    keeps one hidden state per layer and recomputes a layer at a time.

    Args:
        tokens: of the micro-batch, padding included.
    """
    layer = 12 * dims.hidden + 4 * dims.intermediate + 4 * dims.kv_heads * dims.head_dim
    of_number = tokens * DTYPE_BYTES[cfg.model.dtype]
    if not cfg.model.gradient_checkpointing:
        return ActivationBytes(dims.layers * layer * of_number, 0)
    inputs = dims.layers * dims.hidden * of_number
    if cfg.model.offload_activations:
        return ActivationBytes(layer * of_number, inputs)
    return ActivationBytes(inputs + layer * of_number, 0)


def model_bytes(cfg: Config) -> int:
    """Bytes of the policy's weights; 0: unknown."""
    dims = model_dims(cfg.model.name)
    return 0 if dims is None else dims.parameters * DTYPE_BYTES[cfg.model.dtype]


def models_trained(cfg: Config) -> int:
    """How many models of the policy's size training builds: with a critic and a reference."""
    return 1 + cfg.train.row.has(CRITIC) + has_reference_model(cfg)


def _waits(cfg: Config) -> str:
    """The longest wait of each phase, with the bytes of this model."""
    weights = model_bytes(cfg)
    sizes: dict[Phase, int] = {"load": models_trained(cfg) * weights, "sync": weights}
    waits = [cfg.run.waits.of(phase, sizes.get(phase, 0)) for phase in PHASES]
    shown = ", ".join(f"{wait.phase} {wait.seconds:.4g} s" for wait in waits)
    return f"{shown}; of a checkpoint for each next byte, of rollouts for each next answer"


def _count(number: int, unit: str, plural: str = "s") -> str:
    return f"{number:,} {unit}{'' if number == 1 else plural}"
