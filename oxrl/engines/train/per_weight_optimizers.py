"""Weights stepped one after the other: Muon, AdamW with 8-bit moments, weights without masters.

AdamW over all weights at once is in `oxrl/engines/train/optimizers.py`; a run with it does not come
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from oxrl.checkpoint.shares import PieceOfWeight
from oxrl.engines.train.optimizers import BLOCK, KEPT, LOW_PRECISION, MOMENTS
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import EngineError, MissingExtraError
from oxrl.functional.rounding import NOISE, round_stochastically
from oxrl.runs.device import where_float64_is
from oxrl.runs.ranks import Ranks
from oxrl.seeds import stable_seed
from oxrl.tables.engines import Optimizer
from oxrl.types import TensorMap, Tensors

# Random numbers of a weight are drawn by blocks, so that a piece of it needs its own alone.
DRAWN = 1 << 20
Place = Callable[[str, Tensor], PieceOfWeight]
Group = Mapping[str, Any]
State = Tensors


class PerWeightOptimizers(torch.optim.Optimizer):
    """Steps each weight by the rule that is its own.

    What the rules compute is that of their libraries: each is given one weight in float32 at a
    time. Weights in bfloat16 are rounded stochastically afterwards. `changes` has the norm of the
    last change of what this rank holds, by weight.

    Args:
        named: the weights, or this rank's pieces of them.
        rules: what steps each.
        decays: the weight decay of each.
        options: of the engine.
        place: what this rank holds of a tensor that has the shape of a weight.
        whole: the whole of one; collective.

    Raises:
        MissingExtraError: a library is not installed.
    """

    def __init__(
        self,
        named: Mapping[str, Parameter],
        rules: Mapping[str, Optimizer],
        decays: Mapping[str, float],
        options: TrainerOptions,
        *,
        place: Place,
        whole: Callable[[Tensor], Tensor],
    ) -> None:
        groups = [
            {
                "params": [weight],
                "name": name,
                "rule": rules[name],
                "weight_decay": decays[name],
                "rate": options.rates.get(name, 1.0),
            }
            for name, weight in named.items()
        ]
        super().__init__(groups, {})
        self.changes: dict[Parameter, Tensor] = {}
        self._options = options
        self._place = place
        self._whole = whole
        self._eight_bit = EightBit(options) if "adamw_8bit" in rules.values() else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the group of one weight; torch's own looks for it in every group before."""
        self.param_groups.append(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every weight that has a gradient; a group has the "lr" and "index" of the step."""
        for group in self.param_groups:
            [weight] = group["params"]
            if weight.grad is not None:
                state = self.state[weight]
                if not state:
                    self._begin(weight, group, state)
                self._take(weight, group, state)

    def _begin(self, weight: Parameter, group: Group, state: State) -> None:
        """Make the optimizer state of a weight that was never stepped."""
        own = self._place(group["name"], weight).values
        state["step"] = torch.zeros((), device=own.device)
        for kept in KEPT[group["rule"]]:
            state[kept.kind] = kept.zeros(weight, own.numel())

    def _take(self, weight: Parameter, group: Group, state: State) -> None:
        """Step one weight, and note how far it went."""
        name = group["name"]
        own = self._place(name, weight)
        gradient: Any = weight.grad
        if group["rule"] == "muon":
            stepped = self._take_whole(weight, gradient, group, state)
            stepped = stepped.view(-1)[own.start : own.start + own.values.numel()]
            stepped = stepped.to(own.values.device)  # pieces may wait in CPU memory
        else:
            stepped = self._raised(own.values)
            flat = self._place(name, gradient).values
            if group["rule"] == "adamw":
                held = {kind: self._place(name, state[kind]).values for kind in MOMENTS}
                adamw_step(stepped, flat, held, group, self._options, state["step"])
            elif self._eight_bit is not None and stepped.numel():
                self._eight_bit.step(stepped, flat, state, group)
        state["step"] += 1
        if own.values.dtype in LOW_PRECISION:
            stepped = self._rounded(name, weight, own, stepped, group["index"])
        change = where_float64_is(self._raised(stepped) - own.values)
        self.changes[weight] = torch.linalg.vector_norm(change, dtype=torch.float64)
        own.values.copy_(stepped)

    def _take_whole(
        self, weight: Parameter, gradient: Tensor, group: Group, state: State
    ) -> Tensor:
        """Return the whole weight after Muon's step: pieces have other singular values."""
        stepped = self._raised(self._whole(weight.detach()))
        momentum = self._whole(state["momentum_buffer"])
        muon_step(stepped, self._whole(gradient), momentum, group)
        own = self._place(group["name"], state["momentum_buffer"])
        own.values.copy_(momentum.view(-1)[own.start : own.start + own.values.numel()])
        return stepped

    def _raised(self, values: Tensor) -> Tensor:
        """Make a copy to step, at least float32."""
        dtype = torch.promote_types(values.dtype, torch.float32)
        return values.to(dtype, copy=True)

    def _rounded(
        self, name: str, weight: Parameter, own: PieceOfWeight, stepped: Tensor, index: int
    ) -> Tensor:
        """Round stochastically, by numbers that the run's seed, the step and the place decide."""
        rounded = torch.empty_like(stepped, dtype=torch.bfloat16)
        generator = torch.Generator(device=stepped.device)
        end = own.start + stepped.numel()
        for block in range(own.start // DRAWN, -(-end // DRAWN)):
            begin = block * DRAWN
            count = min(DRAWN, weight.numel() - begin)
            seed = stable_seed("rounding", self._options.seed, index, name, block)
            generator.manual_seed(seed)
            noise = torch.randint(
                NOISE, (count,), generator=generator, dtype=torch.int32, device=stepped.device
            )
            first = max(begin, own.start)
            last = min(begin + count, end)
            here = slice(first - own.start, last - own.start)
            drawn = noise[first - begin : last - begin]
            rounded[here] = round_stochastically(stepped[here], drawn)
        return rounded


def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    moments: TensorMap,
    group: Group,
    options: TrainerOptions,
    step: Tensor,
) -> None:
    """torch's AdamW on one weight, in place.

    Args:
        weight, gradient: [n]. moments: [n] each. step: how often it was stepped before.
    """
    parameter = Parameter(weight)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=group["lr"],
        betas=options.adam_betas,
        eps=options.adam_eps,
        weight_decay=group["weight_decay"],
        fused=True,
    )
    optimizer.state[parameter] = {"step": step.clone(), **moments}
    optimizer.step()


def muon_step(weight: Tensor, gradient: Tensor, momentum: Tensor, group: Group) -> None:
    """torch's Muon on one matrix, or on each of several, in place.

    Its step is scaled so that it moves a matrix about as far as AdamW does, 0.2 lr in the root mean
    square, and learning rate and decay keep their meaning.
    Source: Moonshot, arXiv:2502.16982, section 2.2.

    Args:
        weight, gradient, momentum: [out, in], or [experts, out, in].
    """
    parameters = [Parameter(matrix) for matrix in _matrices(weight)]
    optimizer = torch.optim.Muon(
        parameters,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        adjust_lr_fn="match_rms_adamw",
    )
    kept_by = zip(parameters, _matrices(gradient), _matrices(momentum), strict=True)
    for parameter, own, kept in kept_by:
        parameter.grad = own
        optimizer.state[parameter] = {"momentum_buffer": kept}
    optimizer.step()


def _matrices(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor] if tensor.ndim == 2 else tensor.unbind()


class EightBit:
    """bitsandbytes' AdamW with moments of eight bits, on one weight at a time.

    Raises:
        MissingExtraError: it is not installed.
    """

    def __init__(self, options: TrainerOptions) -> None:
        try:
            import bitsandbytes  # pyright: ignore[reportMissingImports]  (an extra)
            import bitsandbytes.functional as functions  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtraError(
                "train.optimizer: adamw_8bit needs bitsandbytes, which is not installed: "
                "pip install -e '.[8bit]', or use train.optimizer: adamw"
            ) from error
        self._optimizer: Any = bitsandbytes.optim.AdamW8bit
        self._options = options
        # What a code of a moment stands for, as a share of its block's largest value.
        self._signed: Tensor = functions.create_dynamic_map(signed=True)
        self._unsigned: Tensor = functions.create_dynamic_map(signed=False)

    def step(self, weight: Tensor, gradient: Tensor, state: State, group: Group) -> None:
        """Step [n] values in place."""
        parameter = Parameter(weight)
        parameter.grad = gradient
        optimizer = self._optimizer(
            [parameter],
            lr=group["lr"],
            betas=self._options.adam_betas,
            eps=self._options.adam_eps,
            weight_decay=group["weight_decay"],
            min_8bit_size=0,
        )
        optimizer.state[parameter] = {
            "step": int(state["step"]),
            "state1": state["exp_avg_code"],
            "qmap1": self._signed.to(weight.device),
            "absmax1": state["exp_avg_absmax"],
            "state2": state["exp_avg_sq_code"],
            "qmap2": self._unsigned.to(weight.device),
            "absmax2": state["exp_avg_sq_absmax"],
        }
        optimizer.step()
        if parameter.data_ptr() != weight.data_ptr():
            weight.copy_(parameter)


def require_whole_blocks(
    named: Mapping[str, Parameter], rules: Mapping[str, Optimizer], place: Place, ranks: Ranks
) -> None:
    """Make sure that ranks hold whole blocks of 8-bit moments, so that any number of them can go on
    from what these saved; collective.

    Raises:
        EngineError: they do not; names a weight.
    """
    cut: str | None = None
    for name, weight in named.items():
        if rules[name] == "adamw_8bit" and place(name, weight).start % BLOCK:
            cut = name
    cut = ranks.any_of(cut)
    if cut is not None:
        shape = tuple(named[cut].shape)
        raise EngineError(
            f"train.optimizer: adamw_8bit keeps moments in blocks of {BLOCK} values, and "
            f"{ranks.world} ranks cut {cut} of shape {shape} within one; use another "
            "run.training_gpus, or train.optimizer: adamw"
        )
