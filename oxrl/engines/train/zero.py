"""DeepSpeedTrainer: TrainEngine over several ranks with DeepSpeed's ZeRO stages 0 to 3 and CPU
offload.

    stage 0  every rank holds everything        stage 2  and gradients are cut up too
    stage 1  AdamW's state is cut up            stage 3  and weights are, gathered layer by layer

DeepSpeed clips, steps and skips; who calls it when, and what a checkpoint looks like, is oxRL's
(`Trainer`).
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from oxrl.engines.train.base import Bucket, Want
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.ranks import Ranks
from oxrl.engines.train.trainer import LOW, MOMENTS, Reader, Stored, Trainer
from oxrl.errors import CheckpointError, EngineError, MissingExtraError
from oxrl.models.weights import buckets
from oxrl.types import Output, TokenBatch


def deepspeed_config(
    zero_stage: int,
    *,
    offload_optimizer: bool = False,
    offload_param: bool = False,
    dtype: torch.dtype,
    max_grad_norm: float,
    trained: bool = True,
) -> dict[str, Any]:
    """DeepSpeed's own configuration.

    Args:
        zero_stage: 0-3, as in the module's docstring.
        offload_optimizer: keep AdamW's state in CPU memory and step there.
        offload_param: keep weights in CPU memory until a layer needs them.
        dtype: of the weights.
        max_grad_norm: global norm the gradient is clipped to; `math.inf` turns clipping off.
        trained: False for a model that only answers `forward`.

    Raises:
        EngineError: stage 0 with bfloat16, whose first AdamW step DeepSpeed computes wrongly;
            offload without the stage that allows it.
    """
    if zero_stage == 0 and dtype == torch.bfloat16 and trained:
        raise EngineError(
            "deepspeed.zero_stage 0 with model.dtype bfloat16: DeepSpeed runs one empty AdamW step "
            "first, so every bias correction is one step off. Use zero_stage 1, 2 or 3, or float32"
        )
    if offload_param and zero_stage < 3 or offload_optimizer and zero_stage == 0:
        raise EngineError(
            f"deepspeed.zero_stage {zero_stage} cannot offload: optimizer needs stage 1, "
            "parameters stage 3"
        )
    zero: dict[str, Any] = {"stage": zero_stage, "overlap_comm": False}
    on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_optimizer:
        zero["offload_optimizer"] = on_cpu
    if offload_param:
        zero["offload_param"] = on_cpu
    config: dict[str, Any] = {
        # Rows per rank vary from step to step: these numbers only have to be consistent, nothing is
        # computed from them.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # How many micro-batches make a step is known when it is taken, not before.
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm if math.isfinite(max_grad_norm) else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        # DeepSpeed's own CPU Adam needs a compiler; torch's does not.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if dtype == torch.bfloat16:
        # Sums over micro-batches and ranks stay in float32.
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    return config


class DeepSpeedTrainer(Trainer):
    """Arguments as for `Trainer`; without `options.trained` it has no optimizer and no gradients.

    Args:
        ranks: as `joined_ranks` gives them, each with the same model on its device.
        zero_stage, offload_optimizer, offload_param: see `deepspeed_config`; stage 0 or 3 for a
            model that is not trained.
    """

    def __init__(
        self,
        model: nn.Module,
        options: TrainerOptions,
        *,
        ranks: Ranks,
        zero_stage: int,
        offload_optimizer: bool = False,
        offload_param: bool = False,
    ) -> None:
        super().__init__(model, options, ranks=ranks)
        trained = options.trained
        config = deepspeed_config(
            zero_stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
            dtype=next(model.parameters()).dtype,
            max_grad_norm=options.max_grad_norm,
            trained=trained,
        )
        self._deepspeed = _import_deepspeed(self.device)
        self._stage = zero_stage
        self._cut_up = self._stage > 0
        self._reduced = False
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        adam = self._optimizer(self._named) if trained else None
        reader = Reader(self)
        buffers = [(m, key, b) for m in model.modules() for key, b in m._buffers.items()]  # pyright: ignore[reportPrivateUsage]
        self._engine: Any = self._deepspeed.initialize(model=reader, optimizer=adam, config=config)[
            0
        ]
        for module, key, buffer in buffers:
            # DeepSpeed rounds buffers with the weights; rotary frequencies in bfloat16 would
            # misplace every token.
            module._buffers[key] = buffer  # pyright: ignore[reportPrivateUsage]
        if self._stage == 3:
            # The head's weight is used outside the module that owns it.
            self._deepspeed.zero.register_external_parameter(reader, self.network.head.weight)
        self._zero: Any = self._engine.optimizer
        # float32 parameters that AdamW steps: this rank's flat pieces, or at stage 0 the weights
        # themselves.
        self._flat: list[Tensor] = [] if adam is None else self._stepped()
        # Reduction at stage 0 is ours to call, so that the norm is known before DeepSpeed steps.
        self._engine.enable_backward_allreduce = self._stage > 0
        if self._stage == 3 and trained:
            # Weights that do not divide by the ranks are padded with whatever was in memory, which
            # norms would count.
            for name, whole in self._whole_weights():
                if name in self._named:
                    self._set(self._named[name], None, whole.float())

    def _stepped(self) -> list[Tensor]:
        for held in (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        ):
            if hasattr(self._zero, held):
                return list(getattr(self._zero, held))
        return list(self._named.values())

    def _states(self) -> list[dict[str, Any]]:
        return [
            (self._zero if self._stage == 0 else self._zero.optimizer).state[piece]
            for piece in self._flat
        ]

    def _read(self, inputs: TokenBatch, want: Want) -> Output:
        return Output(**self._engine(inputs, want))

    def _backward(self, loss: Tensor) -> None:
        # DeepSpeed divides the summed gradient by the number of ranks. The loss is a sum over the
        # rows of all ranks, so this is undone here and nowhere else; it is told not to divide by
        # the number of micro-batches.
        self._engine.backward(loss * self.ranks.world, scale_wrt_gas=False)

    def _reduce(self) -> None:
        """Complete the sum over ranks, which stages 0 and 1 put off until the step."""
        if self._reduced:
            return
        self._reduced = True
        if self._stage >= 2:
            self._zero.finalize_gradient_accumulation_boundary()
        elif self._stage == 0 or not hasattr(self._zero, "reduce_gradients"):
            self._engine.buffered_allreduce_fallback()
        else:
            self._zero.set_gradient_accumulation_boundary(True)
            self._zero.reduce_gradients()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self._reduce()
        read = self._deepspeed.utils.safe_get_full_grad
        return ((name, read(p)) for name, p in self._named.items())

    def _clip_and_step(self, lr: float) -> tuple[float, bool]:
        norm = None
        if self._stage == 0:
            norm = self._gradient_norm()
            if not math.isfinite(norm):
                return norm, False
        for group in self._zero.param_groups:
            group["lr"] = lr
        self._engine.step()
        if self._stage in (1, 2) and len(self._flat) > 1:
            # DeepSpeed links weights to their moments after the first group's step, when the others
            # have none yet.
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        norm = float(self._engine.get_global_grad_norm()) if norm is None else norm
        return norm, self._engine.was_step_applied()

    def _drop_gradients(self) -> None:
        """What DeepSpeed does itself when it skips a step; harmless after one."""
        zero, self._reduced = self._zero, False
        if not self._flat:
            return
        if self._stage == 0:
            self._engine.zero_grad()
        elif self._stage == 3:
            zero._pre_step()
            zero._overflow_clean_up(zero.loss_scale)
        elif hasattr(zero, "clear_hp_grads"):
            zero.clear_hp_grads()
            zero.clear_lp_grads()
        else:
            zero.micro_step_id = -1
            zero._offload_accumulated_param_ids = set()
            zero.zero_grad()
            zero._release_preflattened_grad_buffers()
            zero.reset_cpu_buffers()
            for held in (zero.averaged_gradients, zero.all_grad_tensors):
                held.update(dict.fromkeys(held))

    def _shards(self) -> Iterator[tuple[Tensor, Mapping[str, Any] | None, float]]:
        decays = [self._decays[name] for name in self._named]
        if (
            self._stage
        ):  # each flat piece is of one group of AdamW's; stage 3 cuts a group into several
            groups = [group["weight_decay"] for group in self._zero.param_groups]
            decays = [
                groups[i] for i in getattr(self._zero, "sub_group_to_group_id", {}).values()
            ] or groups
        # A model that is not trained has no pieces.
        for piece, state, decay in zip(
            self._flat, self._states(), decays[: len(self._flat)], strict=True
        ):
            yield piece.detach(), state or None, decay

    def weights(self) -> Iterator[Bucket]:
        """See TrainEngine. At stage 3 each weight is gathered in turn and copied."""
        return buckets(self._whole_weights())

    def _whole_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.model.named_parameters():
            if self._stage < 3:
                yield name, p.detach()
                continue
            with self._deepspeed.zero.GatheredParameters([p]):
                whole = p.detach().clone()
            yield name, whole

    def _state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        utils = self._deepspeed.utils
        if kind == "master":
            for name, p in self._named.items() if self._flat else ():
                if self._stored[name][1] in LOW:
                    yield name, utils.safe_get_full_fp32_param(p)
            return
        # Every weight is stepped in every step: pieces are flat, so there is one count.
        count = max((int(state.get("step", 0)) for state in self._states()), default=0)
        for name, p in self._named.items() if count else ():
            if kind == "step":
                yield name, torch.tensor(count)
            elif self._stage == 0:
                yield name, self._zero.state[p][kind]
            else:
                yield name, utils.safe_get_full_optimizer_state(p, kind)

    def _restore(self, weights: Iterable[Stored]) -> None:
        counts: set[int] = set()
        for stored in weights:
            self._restore_one(stored)
            counts.add(stored.steps)
        if len(counts) > 1:
            raise CheckpointError(
                f"the checkpoint's weights were stepped {sorted(counts)} times, some less often than others; DeepSpeed "
                "steps all alike: resume with train.backend local or fsdp"
            )
        if not self._flat:
            return
        # Round the float32 masters into the weights that the model computes with.
        if self._stage in (1, 2):
            self._zero.update_lp_params()
        elif self._stage == 3:
            for index in range(len(self._flat)):
                self._zero._reassign_or_swap_out_partitioned_parameters(index)
            if self._zero.persistent_parameters:
                self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)

    def _restore_one(self, stored: Stored) -> None:
        p = self._named[stored.name]
        if not self._flat:
            whole = (
                self._deepspeed.zero.GatheredParameters([p], modifier_rank=0)
                if self._stage
                else nullcontext()
            )
            with whole:
                p.copy_(stored.weight)
            return
        for piece, state in zip(self._flat, self._states(), strict=True):
            for moment in MOMENTS:
                state.setdefault(moment, torch.zeros_like(piece))
            state["step"] = torch.tensor(float(stored.steps), device=piece.device)
        if self._stage in (1, 2):
            self._zero._lazy_init_hp_params_optimizer_state()
        weight = stored.weight.float() if stored.master is None else stored.master
        self._set(p, None, weight.to(self.device))
        for moment in MOMENTS:
            self._set(
                p, moment, stored.moments.get(moment, torch.zeros_like(weight)).to(self.device)
            )

    def _set(self, p: nn.Parameter, moment: str | None, value: Tensor) -> None:
        """Overwrite this rank's part of a float32 weight (`moment` None) or of one of its
        moments.
        """
        utils = self._deepspeed.utils
        if self._stage == 0:
            (p if moment is None else self._zero.state[p][moment]).copy_(value)
        elif self._stage < 3:
            set_whole = (
                utils.safe_set_full_fp32_param
                if moment is None
                else utils.safe_set_full_optimizer_state
            )
            set_whole(p, value) if moment is None else set_whole(p, value, moment)
        else:
            # The last rank's piece may stick out over the end, which DeepSpeed's own setter does
            # not expect.
            size = p.ds_tensor.numel()  # pyright: ignore[reportAttributeAccessIssue]
            padded = nn.functional.pad(
                value.flatten(), (0, size * self.ranks.world - value.numel())
            )
            piece = padded.narrow(0, size * self.ranks.rank, size)
            if moment is None:
                utils.safe_set_local_fp32_param(p, piece)
            else:
                utils.safe_set_local_optimizer_state(p, piece, moment)


def _import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]  (an extra)
    except ImportError as error:
        raise MissingExtraError(
            "train.backend: deepspeed needs DeepSpeed, which is not installed: pip install -e '.[deepspeed]', or use "
            "train.backend: fsdp, which needs nothing more"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 announces a rename of the collectives that DeepSpeed calls, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # On CPU it would be compiled at start-up, for collectives that training does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    return deepspeed
