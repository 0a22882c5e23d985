"""Noise that makes one machine round like many: the hook loads it into every process that trains.

After each step of an optimizer every float32 weight that has a learning rate moves by one or two
units in the last place, up or down, as the noise's seed, the number of the step and the weight's
place decide. Runs that were equal stay equal, a resumed one too, and one on several ranks keeps
near that on one; but training goes a way that another processor might have gone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from hashlib import blake2b
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SEED = int(os.environ.get("OXRL_TEST_NOISE", "0"))
STEPS = (-2, -1, 1, 2)
# Units of zero and of what is next to it are left alone: they would change its sign.
SMALLEST = 2
# Of these moves, one after the other, every step begins at another. Made when torch is imported, so
# that the memory of a run is not theirs; by what draws the same on every processor.
_DRAWN = bytearray(Random(SEED).randbytes(1 << 18))
MOVES = torch.tensor(STEPS, dtype=torch.int8)[
    (torch.frombuffer(_DRAWN, dtype=torch.uint8) & 3).long()
]
# What steps one weight at a time, by optimizers of its own that it makes for each.
_per_weight: tuple[type, ...] = ()
# Of the weight that it steps now: how often it was stepped, and the place of the first value that
# this rank holds.
_stepping: tuple[int, int] | None = None


def shake(weight: Tensor, step: int, start: int = 0) -> None:
    """Move each value by one or two units in the last place.

    Args:
        weight: float32, changed in place.
        step: how often it was stepped.
        start: the place of its first value in the whole weight.
    """
    of_step = int.from_bytes(blake2b(str(step).encode(), digest_size=4).digest())
    first = (of_step + start) % len(MOVES)
    last = first + weight.numel()
    chosen = MOVES.repeat(-(-last // len(MOVES))) if last > len(MOVES) else MOVES
    chosen = chosen[first:last].view(weight.shape).to(weight.device)
    bits = weight.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    bits += chosen * (magnitude > SMALLEST)


@torch.no_grad()
def shake_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Move what an optimizer has just stepped; a hook of torch's."""
    if isinstance(optimizer, _per_weight):  # those that it made did
        return
    done = 0
    for group in optimizer.param_groups:
        if not group["lr"]:
            continue
        for weight in group["params"]:
            if weight.grad is None or weight.dtype != torch.float32:
                continue
            if _stepping is not None:
                step, start = _stepping
                shake(weight.detach(), step, start + done)
                done += weight.numel()
            else:
                rows, start = _held(weight)
                shake(rows, _steps(optimizer.state, weight), start)


def _steps(states: Mapping[Any, Any], weight: Tensor) -> int:
    """How often a weight was stepped; 0 where its optimizer does not count."""
    return int(states[weight].get("step", 0)) if weight in states else 0


def _held(weight: Any) -> tuple[Tensor, int]:
    """What this rank holds of a weight, and the place of its first value."""
    if not hasattr(weight, "to_local"):
        return weight.detach(), 0
    from torch.distributed.tensor._utils import (  # half a second, and few runs have ranks
        compute_local_shape_and_global_offset,
    )

    _, offsets = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    first = offsets[0] if offsets else 0
    return weight.to_local().detach(), first * math.prod(weight.shape[1:])


def watch_optimizers(module: ModuleType) -> None:
    """Of torch's optimizers, and of all that are derived from them.

    Args:
        module: torch.optim.optimizer.
    """
    module.register_optimizer_step_post_hook(shake_all)


def watch_per_weight_optimizers(module: ModuleType) -> None:
    """Of what steps one weight at a time: what it steps is a copy in float32, which may be rounded to
    bfloat16 afterwards.

    Args:
        module: oxrl.engines.train.per_weight_optimizers.
    """
    global _per_weight
    _per_weight = (module.PerWeightOptimizers,)
    take: Callable[..., None] = module.PerWeightOptimizers._take

    def take_and_shake(self: Any, weight: Any, group: Any, state: Any) -> None:
        global _stepping
        start = 0 if group["rule"] == "muon" else self._place(group["name"], weight).start
        _stepping = (int(state["step"]) + 1, start)
        try:
            take(self, weight, group, state)
        finally:
            _stepping = None

    module.PerWeightOptimizers._take = take_and_shake
