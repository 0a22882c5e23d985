"""FsdpTrainer: TrainEngine over several ranks with PyTorch's fully_shard (FSDP2).

Each rank holds a piece of every weight, gradient and moment; a layer's weights are gathered while
it runs. Everything but the cutting up is LocalTrainer's. Needs nothing but PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import starmap
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Module

from oxrl.checkpoint.shares import PieceOfWeight
from oxrl.engines.train import Bucket, OneRanksBucket, Part
from oxrl.engines.train.forward import Check, Reader
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.micro_batches import Share
from oxrl.engines.train.optimizers import LOW_PRECISION
from oxrl.engines.train.options import TrainerOptions
from oxrl.models.meta_init import materialised
from oxrl.models.weights import Whole, buckets, has_adapter, room_for, sent_bytes
from oxrl.runs.ranks import Ranks
from oxrl.types import Output, Tensors, TokenBatch, TrainBatch, Want


class FsdpTrainer(LocalTrainer):
    """Arguments as for `Trainer`.

    Args:
        ranks: as `joined_ranks` gives them, each with the same model on its device.
        offload_optimizer: this rank's pieces, their gradients and moments stay in CPU memory, and
            are stepped there.
    """

    def __init__(
        self,
        model: Module,
        options: TrainerOptions,
        *,
        ranks: Ranks,
        offload_optimizer: bool = False,
    ) -> None:
        self._offloads = offload_optimizer
        super().__init__(model, options, ranks=ranks)

    def _shard_model(self) -> None:
        dtype = _computing_dtype(self.model)
        # The pieces are the float32 masters; the weights a layer computes with are cast when it
        # gathers them, and gradients are cast up before they are summed over ranks and
        # micro-batches. Without masters the pieces stay as they are stored.
        for parameter in self.model.parameters():
            if parameter.dtype == dtype and self.options.masters == "float32":
                parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=torch.float32 if dtype else None,
            cast_forward_inputs=False,
        )
        pieces = OffloadPolicy()
        if self._offloads:
            pieces = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        mesh = init_device_mesh(self.device.type, (self.ranks.world,))
        self._reader = Reader(self.model, self.network, self.options.temperature)
        for layer in _layers(self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=pieces)
        fully_shard(self._reader, mesh=mesh, mp_policy=policy, offload_policy=pieces)
        if self._awaited:
            self._read_pieces()
        for module in self._reader.modules():
            if isinstance(module, FSDPModule):
                # FSDP divides gradients by the number of ranks; the loss is a sum over all rows, so
                # nothing may be.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def _read_pieces(self) -> None:
        """Give every piece its memory, and read what the model's files hold of it."""
        home = torch.device("cpu") if self._offloads else self.device
        # What shards the model notes its new pieces when it is moved.
        self._reader._apply(partial(materialised, device=home))  # pyright: ignore[reportPrivateUsage]
        weights = ((name, self.model.get_parameter(name)) for name in self._awaited)
        self._take_in(starmap(self._place, weights))

    def _place(self, name: str, tensor: Tensor) -> PieceOfWeight:
        """Return this rank's rows of a tensor."""
        rows = cast(DTensor, tensor)
        _, offsets = compute_local_shape_and_global_offset(
            rows.shape, rows.device_mesh, rows.placements
        )
        start = offsets[0] * prod(rows.shape[1:]) if rows.ndim else 0
        return PieceOfWeight(name, start, rows.to_local().detach().view(-1))

    def checked(self, check: Check) -> None:
        """See Trainer."""
        self._reader(check, frozenset())
        cast(FSDPModule, self._reader).reshard()

    def _share(self, batch: TrainBatch) -> Iterator[Share]:
        yield from super()._share(batch)
        # FSDP leaves the outermost weights whole for the backward pass that follows. After a
        # `forward`, or where nothing is trained, none does; if the pieces change meanwhile, the
        # next pass would read the old ones.
        cast(FSDPModule, self._reader).reshard()

    def _read(self, inputs: TokenBatch, want: Want) -> Output:
        return Output(**self._reader(inputs, want))

    def _whole(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if self.device.type == "cpu" and tensor.ndim and tensor.placements == (Shard(0),):
            return _joined_rows(tensor)
        # Pieces in CPU memory travel between devices, which is faster.
        here = cast(DTensor, tensor.to(self.device))
        return here.full_tensor()

    def weights_in_turn(self, part: Part, dtype: torch.dtype | None) -> Iterator[OneRanksBucket]:
        """See Trainer. On a CPU no other rank gathers a bucket either."""
        if part == "merged" or self.device.type != "cpu":
            yield from super().weights_in_turn(part, dtype)
            return
        # Tensors without memory, as large as what is delivered.
        described = (
            (name, torch.empty(p.shape, dtype=self._stored[name].dtype, device="meta"))
            for name, p in self._of(part)
        )
        limit = sent_bytes(self.device)
        for index, bucket in enumerate(buckets(described, limit=limit)):
            yield self._gathered(bucket, dtype, index % self.ranks.world)

    @torch.no_grad()
    def _gathered(self, described: Bucket, dtype: torch.dtype | None, owner: int) -> OneRanksBucket:
        """Whole weights, cast, on the rank that owns them; the others give what they hold."""
        shapes = [(name, tensor.shape) for name, tensor in described]
        dtypes = {tensor.dtype if dtype is None else dtype for _, tensor in described}
        whole: Whole | None = None
        room: Tensors = {}
        if self.ranks.rank == owner and len(dtypes) == 1:
            whole = room_for(shapes, dtypes.pop(), self.device)
            room = dict(whole.bucket)
        elif self.ranks.rank == owner:
            room = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in described
            }
        passing: list[dist.Work | None] = []
        given: list[Tensor] = []
        for name, _ in shapes:
            parameter = self.model.get_parameter(name)
            own = self._delivered(name, self._piece(parameter), dtype).contiguous()
            given.append(own)  # held until it has left
            if room:
                passing += _take(room[name], own, parameter)
            elif isinstance(parameter, DTensor) and own.numel():
                group = parameter.device_mesh.get_group()
                passing.append(dist.isend(own, group=group, group_dst=owner))
        self.ranks.wait(passing)
        return whole or list(room.items()) or None

    def _piece(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _master_pieces(self, part: Part) -> Iterator[tuple[PieceOfWeight, torch.Size]]:
        if part == "merged":  # of whole layers
            yield from super()._master_pieces(part)
            return
        for name, parameter in self._of(part):
            master = self._masters.get(name, parameter)
            held = self._place(name, master)
            yield held._replace(values=self._delivered(name, held.values, None)), master.shape


def _take(whole: Tensor, own: Tensor, parameter: Tensor) -> list[dist.Work | None]:
    """Begin to fill a weight with the rows that every rank holds; return what to wait for."""
    if not isinstance(parameter, DTensor):
        whole.copy_(own)
        return []
    group = parameter.device_mesh.get_group()
    passing: list[dist.Work | None] = []
    for rank, rows in enumerate(whole.chunk(parameter.device_mesh.size())):
        if rank == parameter.device_mesh.get_rank():
            rows.copy_(own)
        elif rows.numel():
            passing.append(dist.irecv(rows, group=group, group_src=rank))
    return passing


def _joined_rows(rows: DTensor) -> Tensor:
    """Join a tensor whose rows lie on several ranks; collective.

    Each rank's rows arrive where they belong. All-gathering over gloo moves as many bytes, and then
    copies everything twice.
    """
    group = rows.device_mesh.get_group()
    whole = torch.empty(rows.shape, dtype=rows.dtype)
    arriving: list[Any] = []
    for rank, part in enumerate(whole.chunk(rows.device_mesh.size())):
        if rank == rows.device_mesh.get_rank():
            part.copy_(rows.to_local())
        arriving.append(dist.broadcast(part, group=group, group_src=rank, async_op=True))
    for part in arriving:
        part.wait()
    return whole


def _computing_dtype(model: Module) -> torch.dtype | None:
    """Return the low precision that gathered weights are cast to; None: they stay as they are.

    An adapter computes in float32 beside frozen weights as they are stored: nothing is cast then.
    """
    if has_adapter(model):
        return None
    for parameter in model.parameters():
        if parameter.dtype in LOW_PRECISION:
            return parameter.dtype
    return None


def _layers(model: Module) -> list[Module]:
    """List the repeated blocks of a Hugging Face model, which are gathered one at a time."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
