"""DeepSpeedTrainer: TrainEngine over several ranks with DeepSpeed's ZeRO and CPU offload.

    stage 0  every rank holds everything        stage 2  and gradients are cut up too
    stage 1  AdamW's state is cut up            stage 3  and weights are, gathered layer by layer

DeepSpeed clips, steps and skips; who calls it when, and what a checkpoint looks like, is oxRL's
(`Trainer`).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from oxrl.checkpoint.layout import MASTER, WEIGHT, StoredWeight
from oxrl.checkpoint.shares import HeldWeights, PieceOfWeight
from oxrl.engines.train import Part
from oxrl.engines.train.forward import Check, Reader
from oxrl.engines.train.optimizers import LOW_PRECISION, MOMENTS, Piece, adamw
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.trainer import Trainer
from oxrl.errors import CheckpointError, EngineError, MissingExtraError
from oxrl.models.meta_init import materialised
from oxrl.models.stored import NamedTensors
from oxrl.runs.files import Json
from oxrl.runs.ranks import Ranks
from oxrl.types import Output, TokenBatch, Want


def deepspeed_config(
    options: TrainerOptions,
    dtype: torch.dtype,
    *,
    zero_stage: int,
    offload_optimizer: bool = False,
    offload_param: bool = False,
) -> Json:
    """DeepSpeed's own configuration.

    Args:
        options: of the engine.
        dtype: of the weights.
        zero_stage: 0-3, as in the module's docstring.
        offload_optimizer: keep AdamW's state in CPU memory and step there.
        offload_param: keep weights in CPU memory until a layer needs them.

    Raises:
        EngineError: stage 0 with bfloat16, whose first AdamW step DeepSpeed computes wrongly;
            offload without the stage that allows it.
    """
    if zero_stage == 0 and dtype == torch.bfloat16 and options.trained:
        raise EngineError(
            "deepspeed.zero_stage 0 with model.dtype bfloat16: DeepSpeed runs one empty AdamW step "
            "first, so every bias correction is one step off. Use zero_stage 1, 2 or 3, or float32"
        )
    if offload_param and zero_stage < 3 or offload_optimizer and zero_stage == 0:
        raise EngineError(
            f"deepspeed.zero_stage {zero_stage} cannot offload: optimizer needs stage 1, "
            "parameters stage 3"
        )
    zero: Json = {"stage": zero_stage, "overlap_comm": False}
    on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if offload_optimizer:
        zero["offload_optimizer"] = on_cpu
    if offload_param:
        zero["offload_param"] = on_cpu
    clipping = options.max_grad_norm if isfinite(options.max_grad_norm) else 0.0
    config: Json = {
        # Rows per rank vary from step to step: these numbers only have to be consistent, nothing is
        # computed from them.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # How many micro-batches make a step is known when it is taken, not before.
        "managed_gradient_accumulation": False,
        "gradient_clipping": clipping,
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
        model: Module,
        options: TrainerOptions,
        *,
        ranks: Ranks,
        zero_stage: int,
        offload_optimizer: bool = False,
        offload_param: bool = False,
    ) -> None:
        super().__init__(model, options, ranks=ranks)
        if options.optimizer != "adamw" or options.master_weights != "float32":
            raise EngineError(
                f"train.optimizer: {options.optimizer} with train.master_weights: "
                f"{options.master_weights}: DeepSpeed steps flat float32 pieces of many weights "
                "with AdamW; use adamw and float32, or train.backend: local or fsdp"
            )
        config = deepspeed_config(
            options,
            next(model.parameters()).dtype,
            zero_stage=zero_stage,
            offload_optimizer=offload_optimizer,
            offload_param=offload_param,
        )
        self._deepspeed = _import_deepspeed(self.device)
        self._stage = zero_stage
        self._cut_up = zero_stage > 0
        self._reduced = False
        if zero_stage == 3:
            self._cut_weights(config)
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        adam = adamw(self._named, self._decays, options) if options.trained else None
        self._engine = self._initialize(adam, config)
        self._zero: Any = self._engine.optimizer
        # float32 parameters that AdamW steps: this rank's flat pieces, or at stage 0 the weights
        # themselves.
        self._flat: list[Tensor] = [] if adam is None else self._stepped()
        # Reduction at stage 0 is ours to call, so that the norm is known before DeepSpeed steps.
        self._engine.enable_backward_allreduce = zero_stage > 0

    def _cut_weights(self, config: Json) -> None:
        """Stage 3: cut every weight over the ranks, one after the other, and read what waits.

        DeepSpeed's own conversion takes whole models and sends rank 0's weights to all.
        """
        zero = self._deepspeed.zero.Init(
            module=Module(),  # with a module it makes linear layers gather their weights again
            config_dict_or_path=config,
            remote_device=config["zero_optimization"].get("offload_param", {}).get("device"),
            pin_memory=torch.cuda.is_available(),
            dtype=next(self.model.parameters()).dtype,
        )
        for p in list(self.model.parameters()):
            whole: Any = p
            if p.is_meta:
                # Never written to, so on a CPU it takes no memory either.
                whole = Parameter(materialised(p.data, self.device), p.requires_grad)
                _replace(self.model, p, whole)
            zero._convert_to_deepspeed_param(whole)
            whole.partition()
            self._own_end(whole).zero_()
        if self._awaited:
            self._take_in(map(self._piece_of, self._awaited))

    def _own_end(self, p: Any) -> Tensor:
        """Return the padding behind the end of a weight in this rank's flat piece of it.

        Weights that do not divide by the ranks are padded with whatever was in memory, which norms
        would count.
        """
        size = p.ds_tensor.numel()
        inside = min(max(p.ds_numel - size * self.ranks.rank, 0), size)
        return p.ds_tensor[inside:]

    def _piece_of(self, name: str) -> PieceOfWeight:
        """Return this rank's flat piece of a weight at stage 3, without what sticks out."""
        p: Any = self.model.get_parameter(name)
        size = p.ds_tensor.numel()
        kept = size - self._own_end(p).numel()
        return PieceOfWeight(name, size * self.ranks.rank, p.ds_tensor[:kept])

    def _initialize(self, adam: torch.optim.AdamW | None, config: Json) -> Any:
        reader = Reader(self.model, self.network, self.options.temperature)
        buffers = [(module, dict(module._buffers)) for module in self.model.modules()]  # pyright: ignore[reportPrivateUsage]
        engine = self._deepspeed.initialize(model=reader, optimizer=adam, config=config)[0]
        # DeepSpeed rounds buffers with the weights; rotary frequencies in bfloat16 would misplace
        # every token.
        for module, kept in buffers:
            module._buffers.update(kept)  # pyright: ignore[reportPrivateUsage]
        if self._stage == 3:
            # The head's weight is used outside the module that owns it.
            self._deepspeed.zero.register_external_parameter(reader, self.network.head.weight)
        return engine

    def _stepped(self) -> list[Tensor]:
        held_by_stage = (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        )
        for name in held_by_stage:
            if hasattr(self._zero, name):
                return list(getattr(self._zero, name))
        return list(self._named.values())

    def _adam_states(self) -> list[dict[str, Any]]:
        """Return AdamW's state of each piece; empty for a model that is only read."""
        if not self._flat:
            return []
        adam = self._zero if self._stage == 0 else self._zero.optimizer
        return [adam.state[piece] for piece in self._flat]

    def checked(self, check: Check) -> None:
        """See Trainer."""
        self._engine(check, frozenset())

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

    def gradients(self) -> NamedTensors:
        """See Trainer."""
        self._reduce()
        whole_gradient = self._deepspeed.utils.safe_get_full_grad
        return ((name, whole_gradient(p)) for name, p in self._named.items())

    def _clip_and_step(self, lr: float) -> tuple[float, bool]:
        norm = None
        if self._stage == 0:
            norm = self._gradient_norm()
            if not isfinite(norm):
                return norm, False
        for group in self._zero.param_groups:
            group["lr"] = lr
        self._engine.step()
        if self._stage in (1, 2) and len(self._flat) > 1:
            # DeepSpeed links weights to their moments after the first group's step, when the others
            # have none yet.
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()
        if norm is None:
            norm = float(self._engine.get_global_grad_norm())
        return norm, self._engine.was_step_applied()

    def _drop_gradients(self) -> None:
        """Drop the gradients, as DeepSpeed does itself when it skips a step; harmless after one."""
        self._reduced = False
        if not self._flat:
            return
        zero = self._zero
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

    def _pieces(self) -> Iterator[Piece]:
        if not self._flat:  # a model that is not trained
            return
        states = self._adam_states()
        for piece, state, decay in zip(self._flat, states, self._piece_decays(), strict=True):
            yield Piece(piece.detach(), state or None, decay)

    def _piece_decays(self) -> list[float]:
        if self._stage == 0:
            return [self._decays[name] for name in self._named]
        # Each flat piece is of one group of AdamW's; stage 3 cuts a group into several.
        decays = [group["weight_decay"] for group in self._zero.param_groups]
        group_of_piece = getattr(self._zero, "sub_group_to_group_id", {})
        return [decays[group] for group in group_of_piece.values()] or decays

    def _own_weights(self, part: Part) -> NamedTensors:
        for name, p in self._of(part):
            yield name, self._whole_weight(p)

    def _whole_weight(self, p: Parameter) -> Tensor:
        if self._stage < 3:
            return p.detach()
        with self._deepspeed.zero.GatheredParameters([p]):
            return p.detach().clone()

    def masters(self, part: Part) -> NamedTensors:
        """See Trainer. At stage 0, and of what is not trained, there is one copy only."""
        has_copies = self._stage > 0 and bool(self._flat)
        for name, p in self._of(part):
            if has_copies and name in self._named:
                yield name, self._deepspeed.utils.safe_get_full_fp32_param(p)
            else:
                yield name, self._whole_weight(p)

    def _trained(self) -> Iterable[str]:
        return self._named if self._flat else ()

    def _adam_steps(self) -> dict[str, int]:
        # Every weight is stepped in every step: pieces are flat, so there is one count.
        count = max([int(state.get("step", 0)) for state in self._adam_states()], default=0)
        return dict.fromkeys(self._named, count) if count else {}

    def _held(self) -> HeldWeights:
        for name, p in self.model.named_parameters():
            if self._stage == 3:
                yield WEIGHT, self._piece_of(name)
            else:
                yield WEIGHT, self._even_share(PieceOfWeight(name, 0, p.detach().view(-1)))
        moments = MOMENTS if self._adam_steps() else ()
        for name in self._trained():
            low = self._stored[name].dtype in LOW_PRECISION
            for kind in (*moments, None) if low else moments:
                piece = self._place(name, kind)
                if piece is not None:
                    yield kind or MASTER, self._even_share(piece) if self._stage == 0 else piece

    def _even_share(self, whole: PieceOfWeight) -> PieceOfWeight:
        """Return this rank's share of what every rank has whole."""
        size = whole.values.numel()
        start = size * self.ranks.rank // self.ranks.world
        end = size * (self.ranks.rank + 1) // self.ranks.world
        return PieceOfWeight(whole.name, start, whole.values[start:end])

    def _place(self, name: str, moment: str | None) -> PieceOfWeight | None:
        """Return this rank's piece of a float32 weight, or of a moment of it; None: it has none."""
        p: Any = self._named[name]
        if self._stage == 0:
            held = p.detach() if moment is None else self._zero.state[p][moment]
            return PieceOfWeight(name, 0, held.view(-1))
        if self._stage == 3:
            held, _ = self._zero._get_fp32_opt_state_partition(
                p, release_swap_buffers=True, optim_state_key=moment
            )
            piece = self._piece_of(name)
            return PieceOfWeight(name, piece.start, held[: piece.values.numel()])
        fragment = p._hp_mapping
        if fragment is None:
            return None
        start = fragment.lp_fragment_address.start
        return PieceOfWeight(name, start, fragment.get_hp_fragment(moment))

    def _restore(self, weights: Iterable[StoredWeight]) -> None:
        if self._stage == 3:
            # Whole weights that a forward pass gathered and kept are the old ones.
            getattr(self._zero, "parameter_offload", self._zero).partition_all_parameters()
        if self._flat:
            self._make_moments()
        counts: set[int] = set()
        for stored in weights:
            counts.add(stored.steps)
            if self._flat and stored.name in self._named:
                self._restore_trained(stored)
            elif self._stage == 3:
                piece = self._piece_of(stored.name)
                stored.weight.fill(piece.values, piece.start)
            else:
                stored.weight.fill(self.model.get_parameter(stored.name).detach().view(-1))
        if len(counts) > 1:
            raise CheckpointError(
                f"the checkpoint's weights were stepped {sorted(counts)} times, some less often "
                "than others; DeepSpeed steps all alike: resume with train.backend local or fsdp"
            )
        for piece, state in zip(self._flat, self._adam_states(), strict=True):
            state["step"] = torch.tensor(float(max(counts, default=0)), device=piece.device)
        self._round_masters()

    def _make_moments(self) -> None:
        """AdamW's state of each piece, where it was never stepped."""
        for piece, state in zip(self._flat, self._adam_states(), strict=True):
            for moment in MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(piece)
            state.setdefault("step", torch.zeros((), device=piece.device))
        if self._stage in (1, 2):
            self._zero._lazy_init_hp_params_optimizer_state()

    def _restore_trained(self, stored: StoredWeight) -> None:
        master = stored.weight if stored.master is None else stored.master
        for moment in (None, *MOMENTS):
            piece = self._place(stored.name, moment)
            if piece is None:
                continue
            source = master if moment is None else stored.moments.get(moment)
            if source is None:
                piece.values.zero_()
            else:
                source.fill(piece.values, piece.start)

    def _round_masters(self) -> None:
        """Round the float32 masters into the weights that the model computes with."""
        if self._flat and self._stage in (1, 2):
            self._zero.update_lp_params()
        if self._stage < 3:
            return
        for index in range(len(self._flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(index)
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def _replace(model: Module, old: Parameter, new: Parameter) -> None:
    """Put a parameter into the place of another, wherever the model has it: some are tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():  # pyright: ignore[reportPrivateUsage]
            if parameter is old:
                module._parameters[name] = new  # pyright: ignore[reportPrivateUsage]


def _import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed  # pyright: ignore[reportMissingImports]  (an extra)
    except ImportError as error:
        raise MissingExtraError(
            "train.backend: deepspeed needs DeepSpeed, which is not installed: "
            "pip install -e '.[deepspeed]', or use train.backend: fsdp, which needs nothing more"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 announces a rename of the collectives that DeepSpeed calls, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # On CPU it would be compiled at start-up, for collectives that training does not use.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    return deepspeed
