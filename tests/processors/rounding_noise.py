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
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

SEED = int(os.environ.get("OXRL_TEST_NOISE", "0"))
STEPS = (-2, -1, 1, 2)
# Units of zero and of what is next to it are left alone: they would change its sign.
SMALLEST = 2
# Of this many moves, one after the other, every step begins at another.
MOVES = 1 << 18
# Whether what steps now is a part of an optimizer that is shaken as a whole.
_within = False


@cache
def moves() -> Tensor:
    """The moves of one seed: [MOVES], in units; the generator draws the same on every processor."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(len(STEPS), (MOVES,), generator=generator)
    return torch.tensor(STEPS, dtype=torch.int32)[drawn]


def shake(weight: Tensor, step: int, start: int = 0) -> None:
    """Move each value by one or two units in the last place.

    Args:
        weight: float32, changed in place.
        step: how often it was stepped.
        start: the place of its first value in the whole weight.
    """
    of_step = int.from_bytes(blake2b(str(step).encode(), digest_size=4).digest())
    first = (of_step + start) % MOVES
    last = first + weight.numel()
    chosen = moves().repeat(-(-last // MOVES)) if last > MOVES else moves()
    chosen = chosen[first:last].view(weight.shape).to(weight.device)
    bits = weight.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    bits += chosen * (magnitude > SMALLEST)


@torch.no_grad()
def shake_all(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Move what an optimizer has just stepped; a hook of torch's."""
    if _within:
        return
    for group in optimizer.param_groups:
        if not group["lr"]:
            continue
        for weight in group["params"]:
            if weight.grad is None or weight.dtype != torch.float32:
                continue
            step = _steps(optimizer.state, weight)
            rows, start = _held(weight)
            shake(rows, step, start)


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
    """Of what steps one weight at a time by optimizers of its own: as a whole, and what is rounded
    to bfloat16 before that.

    Args:
        module: oxrl.engines.train.per_weight_optimizers.
    """
    stepped: Callable[..., Any] = module.OneByOne.step
    rounded: Callable[..., Tensor] = module.OneByOne._rounded

    def step(self: Any, closure: Any = None) -> Any:
        with _whole():
            return stepped(self, closure)

    def shaken(self: Any, name: str, weight: Any, own: Any, values: Tensor, index: int) -> Tensor:
        shake(values, _steps(self.state, weight), own.start)
        return rounded(self, name, weight, own, values, index)

    module.OneByOne.step = step
    module.OneByOne._rounded = shaken


@contextmanager
def _whole() -> Any:
    global _within
    _within = True
    try:
        yield
    finally:
        _within = False
