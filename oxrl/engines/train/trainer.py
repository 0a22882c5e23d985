"""The base of every training engine: the loop over micro-batches, and the report of a step."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from oxrl.checkpoint.layout import (
    MASTER,
    WEIGHT,
    FileLayouts,
    KeptTypes,
    Key,
    StoredWeight,
    TrainerState,
    optimizer_files,
    write_state,
)
from oxrl.checkpoint.model_files import (
    is_stored_as_it_computes,
    stored_types,
    weight_files,
    whole_tensors,
    write_description,
)
from oxrl.checkpoint.shares import HeldWeights, PieceOfWeight, ShareWriter, copies
from oxrl.engines.train import BucketStream, OneRanksBucket, Part, Rounding
from oxrl.engines.train.micro_batches import (
    Share,
    group_micro_batches,
    micro_batches,
    own_share,
)
from oxrl.engines.train.optimizers import (
    KEPT,
    Piece,
    has_master,
    last_change,
    rules_of,
    weight_decays,
)
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import CheckpointError, DataError
from oxrl.models.load import not_finite
from oxrl.models.meta_init import arrived, awaited, home_of
from oxrl.models.network import (
    CausalNetwork,
    TokenModel,
    check_tokens,
    read_tokens,
    token_model,
    vocabulary_of,
)
from oxrl.models.self_checks import check_small
from oxrl.models.shared_prefix import SharedPrefixNetwork
from oxrl.models.stored import GivenTensor, NamedTensor, NamedTensors
from oxrl.models.weights import WeightType, adapter_off, buckets, sent_bytes
from oxrl.runs.device import free_cache, home_of_float64, is_out_of_memory, where_float64_is
from oxrl.runs.ranks import ALONE, Ranks
from oxrl.types import LossFn, Metrics, Output, Tensors, TokenBatch, TrainBatch, Want

if TYPE_CHECKING:
    from oxrl.engines.train.forward import Check

log = logging.getLogger(__name__)


class Trainer(ABC):
    """TrainEngine: a model, its gradient and its AdamW, in one process or in several (SPMD).

    Every rank is given the whole batch, reads its own share of the rows (`micro_batches`) and
    returns the whole output; the gradient is that of the plain sum of the loss over all rows,
    whatever the number of ranks.

    Args:
        model: a Hugging Face causal LM, a ValueModel, or any TokenModel module. Kept in eval mode:
            dropout would make the ratio of unchanged weights differ from 1.
        options: of the optimizer, of micro-batches and of what is read from logits.
        ranks: the training ranks; alone by default.
    """

    def __init__(self, model: Module, options: TrainerOptions, *, ranks: Ranks = ALONE) -> None:
        self.options = options
        self.model = model.eval()
        self.network: TokenModel
        if options.share_prefix and isinstance(model, PreTrainedModel):
            self.network = SharedPrefixNetwork(model)
            self._cut = group_micro_batches
        else:
            self.network = token_model(model)
            self._cut = micro_batches
        self.ranks = ranks
        self.device = home_of(model)
        # Parameters that the model was built without, and where they are stored.
        self._awaited = awaited(model)
        if self._awaited and isinstance(self.network, CausalNetwork):
            check_small(self.network.model)
        # Less than was asked for where that did not fit into memory.
        self.micro_batch_tokens = options.micro_batch_tokens
        # Whether what ran out of memory may begin anew: not where other ranks wait in a collective,
        # or a library holds half of a gradient.
        self._begins_anew = False
        self.step = 0
        self.last_loss = 0.0
        self._decays = weight_decays(model, options)
        self._rules = rules_of(model, self.network.head.weight, options.optimizer)
        self._has_gradient = False
        self._saving: ShareWriter | None = None
        # Files beside the tensors that are the same in every checkpoint, by name.
        self._description: dict[str, bytes] = {}
        self._losses_finite = True  # since the last step
        self._vocabulary = vocabulary_of(model)
        # Whether a rank holds pieces only, so that norms have to be summed; alone, it has them all.
        self._cut_up = True
        # Each weight as it is stored, before an engine cuts it up or raises it to float32.
        self._stored = stored_types(model)
        # Around a forward pass: where what its backward will read waits.
        self._activations_kept: Callable[[], AbstractContextManager[object]] = nullcontext
        if options.gradient_checkpointing or options.offload_activations:
            from oxrl.engines.train.forward import prepare_activations  # if one of them is on

            self._activations_kept = prepare_activations(model, options)

    # What an engine does in its own way.

    @abstractmethod
    def checked(self, check: Check) -> None:
        """Call what runs the model, where an engine has its weights ready; collective."""

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, summed over ranks, to what has accumulated."""

    @abstractmethod
    def gradients(self) -> NamedTensors:
        """Yield (name, whole gradient accumulated so far) on every rank; collective.

        Only `skip_step` may follow.
        """

    @abstractmethod
    def _own_weights(self, part: Part) -> NamedTensors:
        """Yield (name, whole weight as the model computes with it) on every rank; collective."""

    @abstractmethod
    def masters(self, part: Part) -> NamedTensors:
        """Yield (name, whole weight as the optimizer holds it) on every rank; collective.

        Not what `weights` reads, wherever there are two copies.
        """

    @abstractmethod
    def _clip_and_step(self, lr: float) -> tuple[float, bool]:
        """Clip, and step if the gradient is finite; return its norm before, and if it stepped."""

    @abstractmethod
    def _drop_gradients(self) -> None: ...

    @abstractmethod
    def _pieces(self) -> Iterator[Piece]:
        """Everything that this rank holds of the float32 weights."""

    @abstractmethod
    def _trained(self) -> Iterable[str]:
        """Return the weights that AdamW steps."""

    @abstractmethod
    def _adam_steps(self) -> dict[str, int]:
        """Return the number of AdamW's steps for each weight that it has moments of."""

    @abstractmethod
    def _held(self) -> HeldWeights:
        """Yield (WEIGHT, MASTER or an optimizer's kind, piece) of all that this rank is to write.

        All ranks together hold every element once.
        """

    @abstractmethod
    def _restore(self, weights: Iterable[StoredWeight]) -> None:
        """Read this rank's pieces of weights and of their optimizer state; on every rank."""

    # What all engines have in common.

    @torch.no_grad()
    def _take_in(self, pieces: Iterable[PieceOfWeight]) -> None:
        """Read this rank's pieces of weights that the model was built without; collective.

        Raises:
            DataError: some of the weights, of whatever rank, are not finite.
        """
        wrong: str | None = None
        for name, start, values in pieces:
            rounded = self._stored[name].dtype
            if self._awaited[name].fill(values, start, rounded) and wrong is None:
                wrong = name
        wrong = self.ranks.any_of(wrong)
        if wrong is not None:
            raise not_finite(self._awaited[wrong].path.parent, wrong)
        arrived(self.model)

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """See TrainEngine. In smaller micro-batches where they did not fit into memory."""
        return self._as_it_fits(partial(self._forward, inputs, want), inputs)

    def forward_without_adapter(self, inputs: TokenBatch, want: Want) -> Output:
        """See Scorer: of the model under the adapter."""
        with adapter_off(self.model):
            return self.forward(inputs, want)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        """See TrainEngine. In smaller micro-batches where they did not fit into memory.

        The gradient then begins anew, so it is that of the smaller ones from the start. Where a
        call before has added to it already, running out of memory is an error.
        """
        compute = partial(self._forward_backward, batch, loss_fn, want)
        if self._has_gradient:
            return compute()
        return self._as_it_fits(compute, batch.inputs, self._forget_gradients)

    def _as_it_fits(
        self,
        compute: Callable[[], Output],
        inputs: TokenBatch,
        forget: Callable[[], None] = lambda: None,
    ) -> Output:
        """Compute with half as many tokens at once, until they fit.

        Args:
            compute: the whole computation.
            inputs: what it reads.
            forget: what a pass that failed has left.
        """
        while True:
            try:
                return compute()
            except RuntimeError as error:
                longest = max(inputs.attention_mask.sum(1).tolist(), default=0)
                goes_on = self._begins_anew and self.micro_batch_tokens > longest
                if not goes_on or not is_out_of_memory(error):
                    raise
                halved = max(self.micro_batch_tokens // 2, longest)
                said = str(error).partition("\n")[0]
                text = "micro-batches of %d tokens do not fit into memory, going on with %d: %s"
                log.warning(text, self.micro_batch_tokens, halved, said)
            # Outside of the handler, where the failed pass is no longer alive.
            self.micro_batch_tokens = halved
            self.model.eval()
            forget()
            free_cache(self.device)

    @torch.no_grad()
    def _forward(self, inputs: TokenBatch, want: Want) -> Output:
        merged = Merged(inputs)
        for share in self._share(inputs):
            merged.add(share.rows, self._said(share, want))
        return merged.output(self.ranks)

    def _forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        """Run forward and backward; the loss, over micro-batches and ranks, is in `last_loss`."""
        # Without any trained token there is no gradient at all, not a zero one that would still
        # move weights by momentum. Every rank sees the whole batch, so all of them decide alike.
        trained = _has_trained_token(batch)
        self._has_gradient |= trained
        if self.options.gradient_checkpointing:
            self.model.train()
        merged = Merged(batch.inputs)
        losses = [torch.zeros((), dtype=torch.float64)]
        for share in self._share(batch):
            with self._activations_kept():
                output = self._said(share, want)
            loss: Tensor | None = None
            if len(share.rows):
                home = home_of_float64(self.device)
                found, _ = loss_fn(output.to(home), share.part)
                losses.append(found.detach().cpu().double())
                if found.requires_grad and _has_trained_token(share.part):
                    loss = found
            if trained:
                self._backward(_zero_of(output) if loss is None else loss)
            merged.add(share.rows, output)
        if self.options.gradient_checkpointing:
            self.model.eval()
        self.last_loss = self.ranks.sum(torch.stack(losses).sum()).item()
        self._losses_finite &= isfinite(self.last_loss)
        return merged.output(self.ranks)

    def _said(self, share: Share, want: Want) -> Output:
        """Return the model's output for the rows of a share."""
        output = self._read(share.read, want)
        rows, length = share.part.inputs.tokens.shape
        if len(share.read) > rows:  # where ranks read images, and this one none
            return output.select(torch.arange(rows), length)
        return output

    def _read(self, inputs: TokenBatch, want: Want) -> Output:
        """Run the model on one micro-batch; an engine that wraps the model has its own way."""
        return read_tokens(self.network, inputs, want, temperature=self.options.temperature)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, as they are stored."""
        return sum(kind.shape.numel() * kind.dtype.itemsize for kind in self._stored.values())

    def _share(self, batch: TrainBatch) -> Iterator[Share]:
        check_tokens(batch.inputs.tokens, self._vocabulary)
        shares = self._cut(
            batch,
            budget=self.micro_batch_tokens,
            ranks=self.ranks.world,
            price=self.options.price,
        )
        return own_share(batch, shares, ranks=self.ranks, device=self.device)

    def optim_step(self) -> Metrics:
        """See TrainEngine. Without any gradient (nothing was masked in) the step is skipped too."""
        if not self._has_gradient or not self._losses_finite:
            return self.skip_step()
        norm, applied = self._clip_and_step(self.options.learning_rate(self.step))
        return self._finish_step(norm, skipped=not applied)

    def skip_step(self) -> Metrics:
        """See TrainEngine."""
        norm = self._gradient_norm() if self._has_gradient else 0.0
        return self._finish_step(norm, skipped=True)

    def _gradient_norm(self) -> float:
        norms = [
            torch.linalg.vector_norm(where_float64_is(gradient), dtype=torch.float64)
            for _, gradient in self.gradients()
        ]
        return torch.linalg.vector_norm(torch.stack(norms)).item()

    @torch.no_grad()
    def _finish_step(self, norm: float, *, skipped: bool) -> Metrics:
        lr = self.options.learning_rate(self.step)
        of_weights = of_change = 0.0
        for piece in self._pieces():
            weight = where_float64_is(piece.weight)
            norm_of_weight = torch.linalg.vector_norm(weight, dtype=torch.float64).item()
            of_weights += norm_of_weight * norm_of_weight
            if not skipped:
                change = last_change(piece, self.options, lr)
                of_change += change * change
        squares = torch.tensor([of_weights, of_change], dtype=torch.float64)
        if self._cut_up:
            squares = self.ranks.sum(squares)
        param_norm, update_norm = squares.sqrt().tolist()
        self._forget_gradients()
        self.step += 1
        return {
            "update/grad_norm": norm,
            "update/lr": lr,
            "update/skipped": float(skipped),
            "update/param_norm": param_norm,
            "update/update_norm_ratio": update_norm / max(param_norm, 1e-30),
        }

    def _forget_gradients(self) -> None:
        self._drop_gradients()
        self._has_gradient = False
        self._losses_finite = True

    def save(self, directory: Path) -> None:
        """See TrainEngine. Where rank 0 says, whatever the others were told."""
        writer = self._begun(directory, copied=False)
        if writer is not None:
            writer.finish()

    def begin_save(self, directory: Path, copied: bool) -> bool:
        """See SavedByRanks."""
        self._saving = self._begun(directory, copied)
        return self._saving is not None

    def _begun(self, directory: Path, copied: bool) -> ShareWriter | None:
        """Begin to write this rank's share; return None where rank 0's disk refused."""
        directory = self.ranks.agree(directory.resolve())
        adam_steps = self._adam_steps()
        weights = weight_files(self.model, self._stored)
        files = [*weights, *optimizer_files(self._kept_types(), adam_steps)]
        pieces = {(kind, piece.name): piece for kind, piece in self._held()}
        if not is_stored_as_it_computes(weights, self._stored):
            pieces = self._in_other_form(pieces)
        writer = ShareWriter(
            self.ranks, directory, files, copies(files, pieces) if copied else pieces
        )
        begun = writer.begin(partial(self._describe, directory, adam_steps, weights))
        return writer if begun else None

    def save_progress(self) -> tuple[int, bool]:
        """See SavedByRanks."""
        return (0, True) if self._saving is None else self._saving.progress()

    def end_save(self) -> None:
        """See SavedByRanks."""
        writer = self._saving
        self._saving = None
        if writer is not None:
            writer.finish()

    def drop_save(self) -> None:
        """See SavedByRanks."""
        if self._saving is not None:
            self._saving.drop()
            self._saving = None

    def part_problems(self, directory: Path) -> list[str]:
        """See SavedByRanks."""
        from oxrl.checkpoint.verify import part_problems  # a run that begins has no files

        directory = self.ranks.agree(directory.resolve())
        own = list(part_problems(directory, rank=self.ranks.rank, world=self.ranks.world))
        return [problem for found in self.ranks.gather(own) for problem in found]

    def _in_other_form(self, pieces: dict[Key, PieceOfWeight]) -> dict[Key, PieceOfWeight]:
        """Put what transformers stores in place of the weights; it turns whole ones, on rank 0."""
        found = {key: piece for key, piece in pieces.items() if key[0] != WEIGHT}
        weights = chain.from_iterable(self.weights())
        if self.ranks.first:
            for name, tensor in whole_tensors(self.model, weights).items():
                found[WEIGHT, name] = PieceOfWeight(name, 0, tensor.view(-1))
        for _ in weights:  # every rank takes part
            pass
        return found

    def _kept_types(self) -> dict[str, KeptTypes]:
        """List what belongs beside each trained weight: moments, and masters in low precision."""
        found: dict[str, KeptTypes] = {}
        for name in self._trained():
            stored = self._stored[name]
            types = {kept.kind: kept.stored_as(stored) for kept in KEPT[self._rules[name]]}
            if has_master(stored.dtype, self.options.masters):
                types[MASTER] = WeightType(stored.shape, torch.float32)
            found[name] = types
        return found

    def _describe(
        self, directory: Path, adam_steps: Mapping[str, int], weights: FileLayouts
    ) -> None:
        """Write what belongs beside the tensors, and is small."""
        directory.mkdir(parents=True, exist_ok=True)
        if not self._description:
            # On the disk of the checkpoint: another may be full, or not be there.
            with TemporaryDirectory(dir=directory) as made:
                self._write_description(Path(made), weights)
                self._description = _contents(Path(made))
        for name, content in self._description.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        options = self.options
        lowered = self.micro_batch_tokens < options.micro_batch_tokens
        fits = self.micro_batch_tokens if lowered else None
        state = TrainerState(self.step, adam_steps, fits, options.optimizer, options.master_weights)
        write_state(directory, state)

    def _write_description(self, directory: Path, weights: FileLayouts) -> None:
        """Write what is the same in every checkpoint; transformers takes its time for it."""
        write_description(self.model, directory, self._stored, weights)
        options = self.options
        if options.tokenizer is not None:
            options.tokenizer.save_pretrained(directory)
        if options.image_processor is not None:
            options.image_processor.save_pretrained(directory)
        if options.actions is not None:
            options.actions.write(directory)

    def load(self, directory: Path) -> None:
        """See TrainEngine."""
        from oxrl.checkpoint.reader import (  # a run that begins reads no checkpoint
            read_state,
            read_weights_and_moments,
            require_same_optimizer,
        )

        options = self.options
        state = read_state(directory)
        require_same_optimizer(directory, state, options.optimizer, options.master_weights)
        kept = self._kept_types()
        weights = read_weights_and_moments(directory, self.model, self._stored, kept, state)
        try:
            with torch.no_grad():
                self._restore(weights)
        except DataError as error:
            raise CheckpointError(str(error)) from error
        self._forget_gradients()
        self.step = state.step
        if state.fits is not None:
            self.micro_batch_tokens = min(self.micro_batch_tokens, state.fits)

    def weights(self, part: Part = "all") -> BucketStream:
        """See TrainEngine. A copy of each, or on one rank the model's own."""
        whole = self._merged(self._own_weights) if part == "merged" else self._own_weights(part)
        return buckets(whole, limit=sent_bytes(self.device))

    def weights_in_turn(self, part: Part, dtype: torch.dtype | None) -> Iterator[OneRanksBucket]:
        """Yield the buckets of `weights`, each whole on one rank only: bucket i on rank i % world.

        Args:
            part: as of `weights`.
            dtype: what those are cast to that come in one piece; None: they stay as they are.

        Returns:
            On every rank as many; None: it is another rank's. Collective.
        """
        for index, bucket in enumerate(self.weights(part)):
            yield bucket if index % self.ranks.world == self.ranks.rank else None

    @torch.no_grad()
    def _merged(self, read: Callable[[Part], NamedTensors]) -> NamedTensors:
        """Yield the weights of the model with its adapter merged in, on every rank; collective.

        Args:
            read: gives whole weights: those that are computed with, or masters.
        """
        from oxrl.models.lora import merged_into  # only where an adapter is delivered so

        adapter = dict(read("adapter"))
        yield from merged_into(self.model, read("all"), adapter)

    @torch.no_grad()
    def fingerprints(
        self, dtype: torch.dtype | None, part: Part = "all", rounded: Rounding | None = None
    ) -> dict[str, str]:
        """See TrainEngine. Ranks read what they hold, and join what they found."""
        from oxrl.models.fingerprints import (  # of samplers that have weights of their own
            HeldPieces,
            joined_reports,
            pieces_of,
        )

        own: HeldPieces = {}
        for piece, shape in self._master_pieces(part):
            values = piece.values if dtype is None else piece.values.to(dtype)
            if rounded is not None:
                values = rounded(values.view(shape)).view(-1)
            own[piece.name] = pieces_of(values, shape, piece.start)
        return joined_reports(self.ranks.gather(own))

    def _master_pieces(self, part: Part) -> Iterator[tuple[PieceOfWeight, torch.Size]]:
        """Yield this rank's pieces of what `weights` has to yield, each with the shape of the whole
        weight; together the ranks have all.

        Where every rank can read whole masters, they take turns.
        """
        if part == "merged":
            whole = self._merged(self._stored_masters)
        else:
            whole = self._stored_masters(part)
        for index, (name, weight) in enumerate(whole):
            if index % self.ranks.world == self.ranks.rank:
                yield PieceOfWeight(name, 0, weight.reshape(-1)), weight.shape

    def _stored_masters(self, part: Part) -> NamedTensors:
        """Yield masters, rounded as they are stored."""
        for name, master in self.masters(part):
            yield name, self._delivered(name, master, None)

    def _of(self, part: Part) -> Iterator[tuple[str, Parameter]]:
        """Yield parameters of the model, whole or cut up."""
        for name, parameter in self.model.named_parameters():
            if part == "all" or parameter.requires_grad:
                yield name, parameter

    def _delivered(self, name: str, master: Tensor, dtype: torch.dtype | None) -> Tensor:
        """Round a master, or a part of it, as it is stored, and cast it to what is delivered."""
        stored = master.to(self._stored[name].dtype)
        return stored if dtype is None else stored.to(dtype)

    @torch.no_grad()
    def set_weights(self, named: Iterable[NamedTensor]) -> None:
        """See TrainEngine."""
        self._restore(StoredWeight(name, GivenTensor(weight)) for name, weight in named)


class Adapted(Protocol):
    """A policy that also answers without its adapter, wherever it is."""

    def forward_without_adapter(self, inputs: TokenBatch, want: Want) -> Output:
        """See Scorer."""
        ...


class AdapterOff:
    """The policy without its adapter, as the reference: no second model in memory."""

    def __init__(self, policy: Adapted) -> None:
        self._policy = policy

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """See Scorer."""
        return self._policy.forward_without_adapter(inputs, want)


def _has_trained_token(batch: TrainBatch) -> bool:
    """True if a token is trained; position 0 never is, because nothing predicts it."""
    return bool(batch.inputs.response_mask[:, 1:].any())


def _zero_of(output: Output) -> Tensor:
    """Return a zero that hangs on every weight.

    Backward must run on all ranks alike, also where there is nothing to learn.
    """
    zero = torch.zeros(())
    for field in vars(output).values():
        if field is not None and field.requires_grad:
            zero = zero + field.sum() * 0.0
    return zero


class Merged:
    """Outputs of micro-batches, put back into the row order and length of the batch, on the CPU."""

    def __init__(self, inputs: TokenBatch) -> None:
        self._shape = inputs.tokens.shape
        self._fields: Tensors = {}

    def add(self, rows: Tensor, output: Output) -> None:
        """Place `output` at `rows` of the batch.

        Without rows (padding) it only tells which fields there are.
        """
        for name, value in vars(output).items():
            if value is not None:
                self._place(name, rows, value.detach().cpu())

    def _place(self, name: str, rows: Tensor, value: Tensor) -> None:
        per_row = value.ndim == 1  # [B]; everything else is [B, T] or [B, T, K]
        if name not in self._fields:
            shape = self._shape[:1] if per_row else (*self._shape, *value.shape[2:])
            self._fields[name] = value.new_zeros(shape)
        if not len(rows):
            return
        field = self._fields[name]
        if per_row:
            field[rows] = value
        else:
            field[rows, : value.shape[1]] = value

    def output(self, ranks: Ranks) -> Output:
        """Sum the whole batch over ranks: each row is zero but on the rank that had it."""
        return Output(**{name: ranks.sum(field) for name, field in self._fields.items()})


def _contents(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder, by its path there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}
