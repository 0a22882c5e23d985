"""The memory and the disk that a run needs, in bytes and in words."""

from __future__ import annotations

from rich.filesize import decimal

from oxrl.config.schema import Config
from oxrl.modelfiles.dims import ModelDims
from oxrl.plan.memory import memory, on_cpu

# On a CPU, in resident bytes, as benchmarks/real_memory.py finds it: Python with PyTorch,
# transformers and a tokenizer; and what the system's allocator holds where tensors have been.
RUNTIME = 700_000_000
ALLOCATED = 1.05


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
        phases = {phase: int(size * ALLOCATED) + RUNTIME for phase, size in phases.items()}
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
