"""The bytes that a run holds, by the settings that ask for them: `oxrl plan` on memory and disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from oxrl.assembly.micro_batch_rules import by_rule, micro_batch_tokens
from oxrl.config.conditions import obstacles
from oxrl.config.field import SAMPLING
from oxrl.config.roles import roles_of
from oxrl.config.schema import Config
from oxrl.modelfiles.dims import ModelDims, model_dims
from oxrl.plan.activations import MicroBatch, activation_bytes
from oxrl.tables.roles import Role

# There where Linux has a GPU of NVIDIA or AMD.
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
# There where Linux counts the memory of a container; "max" where that has no limit.
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
FLOAT32 = 4
WEIGHT_BYTES = {"float32": FLOAT32, "bfloat16": 2}
# Packing has to save at least a tenth: PAYS in oxrl/models/shared_prefix.py.
PAYS = 0.9
# Rows up to so many tokens attend side by side: SIDE_BY_SIDE there.
SIDE_BY_SIDE = 256
# Slots of the local sampler hold multiples of so many tokens: SPAN in engines/sample/local.py.
SPAN = 32
# Rows that are cut to save padding seldom fill a micro-batch further: with conversations of GSM8K
# the largest of a step has half of the tokens that it may have where a step has 8 rows, 0.7 with
# 16, 0.9 with 32.
FILLED = 0.8
# DeepSpeed collects gradients in a buffer of so many float32 numbers (`reduce_bucket_size`), and
# leaves smaller weights than PERSISTENT whole at stage 3 (`stage3_param_persistence_threshold`).
BUCKET = 500_000_000
PERSISTENT = 100_000
# Kept by the optimizer, in bytes per trained weight.
MOMENTS = 8.0  # of AdamW, both float32
MOMENTUM = 4.0  # of Muon
CODES = 2 + 2 * 4 / 256  # of 8-bit AdamW: two codes, and two float32 scales of each 256 values
# Of a weight in four bits: half a byte, a scale of one byte for 64, and a float32 for 256 of these.
FOUR_BITS = 0.5 + 1 / 64 + 4 / (64 * 256)
# On a CPU, in resident bytes, as benchmarks/real_memory.py finds it: Python with PyTorch,
# transformers and a tokenizer; and what the system's allocator holds where tensors have been.
RUNTIME = 700_000_000
ALLOCATED = 1.05


class Memory(NamedTuple):
    """Bytes of a run.

    phases: on each rank's device, by phase of a step. held: of it, what is there between steps.
    offloaded: in CPU memory, per rank. stored: of one checkpoint.
    """

    phases: dict[str, int]
    held: int
    offloaded: int
    stored: int


class Held(NamedTuple):
    """Bytes per trained weight.

    weights: that the model computes with, or pieces of them. masters: float32 copies. kept: by the
    optimizer between steps. own_gradients: of one micro-batch, in the type of the weights, until
    they are added up to float32. stored: of weight and master in a checkpoint.
    """

    weights: float
    masters: float
    kept: float
    own_gradients: float
    stored: float


class Ranks(NamedTuple):
    """The cutting up of models over ranks.

    world: number of ranks. stage: of ZeRO, from which on the optimizer's state (1), gradients (2)
    and weights (3) are.
    """

    world: int
    stage: int

    def share(self, size: float, since: int) -> int:
        """Return one rank's share of `size` bytes that are cut up from stage `since` on."""
        return int(size) // (self.world if self.stage >= since else 1)


def memory_needed(cfg: Config, dims: ModelDims) -> tuple[int, str]:
    """Count the bytes of memory that a run needs at its most, and tell by phase, in words.

    Args:
        dims: of `cfg.model`.

    Returns:
        Bytes of a device; on a CPU of all training ranks and all that Python needs, for they
        share it. The words follow.
    """
    phases, _, offloaded, _ = memory(cfg, dims)
    here = on_cpu(cfg)
    if here:
        # What Python needs, each sampling process as well.
        python = RUNTIME * (1 + _processes(cfg))
        phases = {phase: int(size * ALLOCATED) + python for phase, size in phases.items()}
    needed = max(phases.values())
    text = "about " + ", ".join(f"{decimal(size)} in {phase}" for phase, size in phases.items())
    ranks = cfg.run.training_gpus
    if ranks > 1:
        text += " per rank"
    if offloaded:
        text += f" and {decimal(offloaded)} offloaded to CPU memory"
    if here:
        needed = ranks * (needed + offloaded)
    return needed, text


def disk_needed(cfg: Config, dims: ModelDims) -> tuple[int, int]:
    """Count the bytes of the checkpoints that are on the disk at once, and the checkpoints.

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
    each = held_of(cfg, dims)
    stage = cfg.train.engine.zero_stage
    ranks = Ranks(cfg.run.training_gpus, cfg.deepspeed.zero_stage if stage is None else stage)
    trained, _ = _models(cfg, dims)
    held, offloaded = _held(cfg, dims, ranks)
    phases: dict[str, int] = {}
    if cfg.recipe in SAMPLING:
        phases["rollout"] = sampler_bytes(cfg, dims)
        alone = not (cfg.sampling_process or cfg.inference_engine.actors)
        if alone or cfg.inference_engine.processes:
            # The slots of the local sampler stay where they are; processes do not sleep on a CPU.
            held += phases["rollout"] * max(1, cfg.samplers)
            phases["rollout"] = held
        elif cfg.sampling_process or cfg.inference_engine.placement == "colocated":
            phases["rollout"] += held
    bucket, whole = _of_deepspeed(cfg, dims, ranks)
    held += whole
    gradients = ranks.share(trained * FLOAT32, since=2)
    # Gradients of a micro-batch, in the type of the weights, appear as its activations go.
    own = ranks.share(trained * each.own_gradients, since=2)
    activations = activation_bytes(cfg, dims, micro_batch(cfg))
    if cfg.fsdp.offload_optimizer:
        offloaded += gradients
        gradients = 0
    computing = bucket + max(activations.on_device, own) + _gathered(cfg, dims, ranks)
    phases["update"] = held + gradients + max(computing, _stepping(cfg, dims, ranks))
    stored = int(trained * (each.stored + each.kept))
    stored += sum(size for role, size in _answering(cfg, dims) if role.saved is not None)
    return Memory(phases, held, offloaded + activations.offloaded, stored)


def _processes(cfg: Config) -> int:
    """Count the processes of this machine that only sample."""
    return cfg.samplers if cfg.sampling_process and cfg.recipe in SAMPLING else 0


def _models(cfg: Config, dims: ModelDims) -> tuple[int, int]:
    """Count the parameters that are trained, and the models that lie under adapters."""
    models = sum(role.trained for role in roles_of(cfg))
    if cfg.lora.rank:
        return models * adapter_parameters(cfg, dims), models
    return models * dims.parameters, 0


def _answering(cfg: Config, dims: ModelDims) -> Iterator[tuple[Role, int]]:
    """The models that only answer, each with the bytes of its weights."""
    for role in roles_of(cfg):
        if not role.trained:
            # One of unknown size counts as the policy.
            own = dims if role.model == cfg.model.name else model_dims(role.model) or dims
            yield role, own.parameters * WEIGHT_BYTES[role.dtype or cfg.model.dtype]


def adapter_parameters(cfg: Config, dims: ModelDims) -> int:
    """Count the parameters of adapters on every linear layer."""
    # Of queries, keys, values, output, gate, up and down.
    outputs = dims.queries + 2 * (dims.keys + dims.hidden + dims.intermediate)
    inputs = 5 * dims.hidden + dims.queries + dims.intermediate
    each = cfg.lora.rank * (inputs + outputs)
    if cfg.lora.dora:  # a magnitude for each output
        each += outputs
    return dims.layers * each


def _held(cfg: Config, dims: ModelDims, ranks: Ranks) -> tuple[int, int]:
    """Count the bytes that a rank holds between steps: on its device, and in CPU memory."""
    zero = cfg.deepspeed
    each = held_of(cfg, dims)
    trained, frozen = _models(cfg, dims)
    weights = ranks.share(frozen * frozen_bytes(cfg, dims) + trained * each.weights, since=3)
    states = ranks.share(trained * (each.masters + each.kept), since=1)
    of_others = ranks
    if cfg.train.backend == "deepspeed":
        of_others = Ranks(ranks.world, cfg.deepspeed_ref.zero_stage)
    others = sum(of_others.share(size, since=3) for _, size in _answering(cfg, dims))
    offloaded = weights * zero.offload_param + states * zero.offload_optimizer
    offloaded += others * cfg.deepspeed_ref.offload_param
    if cfg.fsdp.offload_optimizer:
        offloaded = weights + states
    return weights + states + others - offloaded, offloaded


def held_of(cfg: Config, dims: ModelDims) -> Held:
    """Compute the bytes that each trained weight of a run takes, on average.

    Args:
        dims: of `cfg.model`.
    """
    kept = kept_by_optimizer(cfg, dims)
    # Adapters with magnitudes are float32 beside any model.
    if cfg.model.weight_bytes == FLOAT32 or cfg.lora.dora:
        # DeepSpeed steps flat copies of any weights, float32 ones too.
        copied = cfg.train.backend == "deepspeed" and cfg.deepspeed.zero_stage > 0
        return Held(4, 4 * copied, kept, 0, 4)
    if cfg.train.master_weights == "none":
        return Held(2, 0, kept, 2, 2)
    if cfg.train.backend == "fsdp" and not cfg.lora.rank:
        # Its pieces are the masters; what a layer computes with is cast when it is gathered.
        return Held(4, 0, kept, 0, 6)
    return Held(2, 4, kept, 2, 6)


def frozen_bytes(cfg: Config, dims: ModelDims) -> float:
    """Count the bytes of the model under an adapter.

    Args:
        dims: of `cfg.model`.

    Returns:
        Linear layers count in four bits where they are held so; experts, head, embeddings and norms
        are in `model.dtype` in any case.
    """
    size = cfg.model.weight_bytes
    whole = dims.parameters * size
    if not cfg.model.load_in_4bit:
        return whole
    of_layer = dims.attention if dims.routed else dims.layer
    return whole - dims.layers * of_layer * (size - FOUR_BITS)


def kept_by_optimizer(cfg: Config, dims: ModelDims) -> float:
    """Count the bytes per trained weight that the optimizer keeps between steps."""
    optimizer = cfg.train.optimizer
    if optimizer == "adamw" or not dims.parameters:
        return MOMENTS
    less = MOMENTUM if optimizer == "muon" else CODES
    if cfg.lora.rank:
        return less
    inside = dims.layers * dims.layer
    if dims.routed:
        inside = dims.parameters - dims.ends
    # Embeddings and head are AdamW's beside Muon; norms and biases are in any case.
    fewer = inside if optimizer == "muon" else inside + dims.ends
    share = min(1.0, fewer / dims.parameters)
    return share * less + (1 - share) * MOMENTS


def _gathered(cfg: Config, dims: ModelDims, ranks: Ranks) -> int:
    """Count the bytes that each rank gathers as it runs: two layers, and all outside of layers."""
    if ranks.stage < 3:
        return 0
    whole = dims.parameters - (dims.layers - 2) * dims.layer
    if cfg.train.backend == "deepspeed":
        whole = max(0, whole - persistent_parameters(dims))
    return whole * cfg.model.weight_bytes


def _of_deepspeed(cfg: Config, dims: ModelDims, ranks: Ranks) -> tuple[int, int]:
    """Count DeepSpeed's bytes beside weights and optimizer state: in an update, and always."""
    if cfg.train.backend != "deepspeed" or ranks.stage == 0:
        return 0, 0
    bucket = BUCKET * FLOAT32
    if ranks.stage < 3:
        return bucket, 0
    return 0, bucket + persistent_parameters(dims) * cfg.model.weight_bytes


def persistent_parameters(dims: ModelDims) -> int:
    """Count the parameters that stage 3 leaves whole: those of small weights."""
    widths = 2 * [dims.queries, dims.keys] + 3 * [dims.intermediate]
    sizes = [dims.hidden * width for width in widths] * dims.layers
    sizes += [dims.vocabulary * dims.hidden] * (1 if dims.tied else 2)
    return sum(size for size in sizes if size < PERSISTENT)


def _stepping(cfg: Config, dims: ModelDims, ranks: Ranks) -> int:
    """Count the bytes that a step needs for a moment, for the largest weight or flat piece."""
    if cfg.lora.rank or cfg.fsdp.offload_optimizer or cfg.deepspeed.offload_optimizer:
        return 0  # adapters are small; the rest is stepped in CPU memory
    largest = max(dims.vocabulary, dims.intermediate) * dims.hidden
    if cfg.train.backend == "deepspeed" and ranks.stage >= 1:
        largest = dims.parameters
    copies = 1 + (cfg.train.weight_decay > 0)
    if cfg.train.optimizer != "adamw" or cfg.train.master_weights == "none":
        copies = 3  # the weight, raised and stepped, and how far it went
    return ranks.share(copies * FLOAT32 * largest, since=1)


def sync_bytes(cfg: Config, dims: ModelDims) -> int:
    """Count the bytes that a delivery of weights sends; of an adapter where that alone travels."""
    size = cfg.model.weight_bytes
    if cfg.lora.rank and cfg.lora.delivery == "adapter":
        kept = FLOAT32 if cfg.lora.dora else size
        return adapter_parameters(cfg, dims) * kept
    return dims.parameters * size


def sampler_bytes(cfg: Config, dims: ModelDims) -> int:
    """Count the bytes of a sampler's cache and of its own weights, where it has some."""
    engine = cfg.inference_engine
    size = cfg.model.weight_bytes
    per_token = 2 * dims.layers * dims.keys * size
    longest = _longest_row(cfg)
    if engine.name == "local":
        # It has all its slots from the first row on.
        cache = engine.max_rows * -(-longest // SPAN) * SPAN * per_token
    else:
        rows = cfg.data.prompts_per_step * cfg.rollout.n_samples
        cache = min(-(-rows // cfg.samplers), engine.max_rows) * longest * per_token
    if not cfg.samplers:
        return cache
    return (cache + dims.parameters * size) // engine.tensor_parallel


def _longest_row(cfg: Config) -> int:
    """Count the tokens of the longest prompt and response that a run may sample."""
    context = cfg.model.context_length
    if context is None:
        return cfg.rollout.max_tokens
    if cfg.data.max_prompt_tokens is None:
        return context
    return min(context, cfg.data.max_prompt_tokens + cfg.rollout.max_tokens)


def rows_no_longer(cfg: Config, tokens: int) -> Config:
    """Copy the configuration for rows of at most so many tokens, response included."""
    model = cfg.model.model_copy(update={"max_length": tokens})
    return cfg.model_copy(update={"model": model})


def micro_batch(cfg: Config) -> MicroBatch:
    """Size the largest micro-batch of a rank, with the longest rows."""
    tokens = micro_batch_tokens(cfg, on_cpu=on_cpu(cfg))
    if cfg.recipe != "rl":
        return _of_given_rows(cfg, tokens)
    rows = -(-cfg.data.prompts_per_step * cfg.rollout.n_samples // cfg.run.training_gpus)
    longest = _longest_row(cfg)
    plain = min(max(1, tokens // longest), rows)
    response = min(cfg.rollout.max_tokens, longest)
    prompt = longest - response
    group = prompt + cfg.rollout.n_samples * response
    if not _shares(cfg) or group > PAYS * cfg.rollout.n_samples * longest:
        return MicroBatch(plain * longest)
    groups = max(1, min(tokens // group, rows // cfg.rollout.n_samples))
    together = cfg.rollout.n_samples
    if tokens < group:  # a part of a group
        together = max(1, (tokens - prompt) // response)
    blocks = groups if longest > SIDE_BY_SIDE else 1
    return MicroBatch(
        tokens=groups * (prompt + together * response),
        attended=groups * together * longest,
        prompts=groups * prompt,
        seen=blocks * response * longest,
    )


def _of_given_rows(cfg: Config, tokens: int) -> MicroBatch:
    """Size a micro-batch of rows or pairs that are known before a run; a larger one goes alone."""
    longest = cfg.model.context_length
    if longest is None:
        return MicroBatch(tokens)
    unit = longest
    if cfg.recipe in ("preference", "reward_model"):
        unit = 2 * longest
    units = -(-cfg.data.rows_per_step // cfg.run.training_gpus)
    if unit == longest and by_rule(cfg):
        tokens = int(tokens * FILLED)
    return MicroBatch(min(max(tokens, unit), units * unit))


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or that the container leaves to it."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if MEMORY_LIMIT.is_file():
        limit = MEMORY_LIMIT.read_text().strip()
        if limit != "max":
            there = min(there, int(limit))
    return there


def on_cpu(cfg: Config) -> bool:
    """True if the model will be computed on the CPU, as far as files tell: PyTorch is not asked."""
    if cfg.run.device == "auto":
        return not any(Path(name).exists() for name in GPU_FILES)
    return cfg.run.device == "cpu"


def _shares(cfg: Config) -> bool:
    """True if prompts of a group are read once, as far as the configuration tells."""
    if cfg.train.share_prefix != "auto":
        return bool(cfg.train.share_prefix)
    return cfg.rollout.n_samples > 1 and not any(obstacles(cfg))
