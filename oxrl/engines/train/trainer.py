"""What every training engine shares: the micro-batch loop, what a step reports, and the one
checkpoint format.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from oxrl.engines.train.base import Bucket, Want
from oxrl.engines.train.micro_batches import Merged, own_share
from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.ranks import ALONE, Ranks
from oxrl.errors import CheckpointError, EngineError
from oxrl.functional.logprobs import bootstrap_positions, chunked_head, predicted_positions, spread
from oxrl.models.lora import adapter_off
from oxrl.models.network import TokenModel, token_model
from oxrl.models.weights import save_model, stored_tensors, stored_weights, write_sharded
from oxrl.types import LossFn, Metrics, Output, TokenBatch, TrainBatch

STATE_FILE = "trainer_state.json"
STATE_FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
# Weights of these types are stepped as float32 copies, their masters.
LOW = (torch.bfloat16, torch.float16)


class Stored(NamedTuple):
    """A whole weight and its optimizer state; without `moments` it was never stepped."""

    name: str
    weight: Tensor
    master: Tensor | None = None
    moments: Mapping[str, Tensor] = MappingProxyType({})
    steps: int = 0


def undecayed(model: nn.Module) -> frozenset[str]:
    """Parameters that hold no matrix product: norms, biases and embeddings, also where one is the
    output head too.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    return frozenset(
        name for name, p in model.named_parameters() if p.ndim < 2 or id(p) in embeddings
    )


class Trainer(ABC):
    """TrainEngine: a model, its gradient and its AdamW, in one process or in several that make the
    same calls (SPMD).

    Every rank is given the whole batch, reads its own share of the rows (`micro_batches`) and
    returns the whole output; the gradient is that of the plain sum of the loss over all rows,
    whatever the number of ranks.

    Args:
        model: a Hugging Face causal LM, a ValueModel, or any TokenModel module. Kept in eval mode:
            dropout would make the ratio of unchanged weights differ from 1.
        options: of the optimizer, of micro-batches and of what is read from logits.
        ranks: the training ranks; alone by default.
    """

    def __init__(self, model: nn.Module, options: TrainerOptions, *, ranks: Ranks = ALONE) -> None:
        self.options = options
        self.model = model.eval()
        self.network: TokenModel = token_model(model)
        self.ranks = ranks
        self.device = next(model.parameters()).device
        self.step, self.last_loss = 0, 0.0
        spared = undecayed(model) if self.options.decay == "matrices" else frozenset[str]()
        self._decays = {
            name: 0.0 if name in spared else self.options.weight_decay
            for name, _ in model.named_parameters()
        }
        self._pending_losses: list[float] = []
        self._has_gradient = False
        self._cut_up = True  # over the ranks; alone, this rank has all pieces
        # Shape and type of each weight as it is stored, before an engine cuts it up or raises it to
        # float32.
        self._stored = {name: (p.shape, p.dtype) for name, p in model.named_parameters()}
        if self.options.gradient_checkpointing:
            _enable_gradient_checkpointing(model)

    def _optimizer(self, named: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
        groups: dict[float, list[nn.Parameter]] = {}
        for name, weight in named.items():
            groups.setdefault(self._decays[name], []).append(weight)
        each = [{"params": weights, "weight_decay": decay} for decay, weights in groups.items()]
        return torch.optim.AdamW(each, fused=True, **self.options.adamw())

    # What an engine does in its own way.

    @abstractmethod
    def _read(self, inputs: TokenBatch, want: Want) -> Output:
        """One micro-batch through the model."""

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss`, summed over ranks, to what has accumulated."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole gradient accumulated so far) on every rank; collective. Only `skip_step` may
        follow.
        """

    @abstractmethod
    def weights(self) -> Iterator[Bucket]: ...

    @abstractmethod
    def _clip_and_step(self, lr: float) -> tuple[float, bool]:
        """(gradient norm before the clip, whether the step was taken: not with a non-finite
        gradient).
        """

    @abstractmethod
    def _drop_gradients(self) -> None: ...

    @abstractmethod
    def _shards(self) -> Iterator[tuple[Tensor, Mapping[str, Any] | None, float]]:
        """(this rank's piece of float32 weights, its Adam state, None if the last step did not move
        it, its decay).
        """

    @abstractmethod
    def _state(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every weight that has one; collective.

        Kinds: "exp_avg", "exp_avg_sq" and "step", AdamW's; "master", the float32 copy of a weight
            of lower precision.
        """

    @abstractmethod
    def _restore(self, weights: Iterable[Stored]) -> None:
        """Take over whole weights and their optimizer state; on every rank alike."""

    # What all engines have in common.

    @torch.no_grad()
    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """See TrainEngine. Token fields are 0.0 wherever `response_mask` is False: the head runs
        nowhere else.
        """
        merged = Merged(inputs)
        for rows, part in self._share(inputs):
            merged.add(rows, self._read(part.inputs, want))
        return merged.output(self.ranks)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        """See TrainEngine. The loss summed over micro-batches and ranks is left in `last_loss`.

        A batch with several rows per unit keeps the rows of unit u at `rows_per_unit * u` onwards
        in `inputs`.
        """
        merged = Merged(batch.inputs)
        rows_per_unit = len(batch.inputs) // max(1, len(batch))
        losses = [torch.zeros(())]
        # Without any trained token there is no gradient at all, not a zero one that would still
        # move weights by momentum. Every rank sees the whole batch, so all of them decide alike.
        trained = bool(batch.inputs.response_mask[:, 1:].any())
        self._has_gradient |= trained
        if self.options.gradient_checkpointing:
            self.model.train()
        for units, part in self._share(batch):
            output = self._read(part.inputs, want)
            loss: Tensor | None = None
            if len(units):
                found, _ = loss_fn(output, part)
                losses.append(found.detach().double().cpu())
                if found.requires_grad and bool(part.inputs.response_mask[:, 1:].any()):
                    loss = found
            if trained:
                self._backward(_nothing(output) if loss is None else loss)
            merged.add(
                (units[:, None] * rows_per_unit + torch.arange(rows_per_unit)).flatten(), output
            )
        if self.options.gradient_checkpointing:
            self.model.eval()
        self.last_loss = self.ranks.sum(torch.stack(losses).double().sum()).item()
        self._pending_losses.append(self.last_loss)
        return merged.output(self.ranks)

    def _share(self, batch: TrainBatch) -> Iterator[tuple[Tensor, TrainBatch]]:
        budget = self.options.micro_batch_tokens
        return own_share(batch, budget=budget, ranks=self.ranks, device=self.device)

    def optim_step(self) -> Metrics:
        """See TrainEngine. Without any gradient (nothing was masked in) the step is skipped too."""
        if not self._has_gradient or not all(map(math.isfinite, self._pending_losses)):
            return self.skip_step()
        norm, applied = self._clip_and_step(self.options.learning_rate(self.step))
        return self._finish_step(norm, skipped=not applied)

    def skip_step(self) -> Metrics:
        return self._finish_step(self._gradient_norm() if self._has_gradient else 0.0, skipped=True)

    def _gradient_norm(self) -> float:
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
            for _, gradient in self.gradients()
        ]
        return torch.linalg.vector_norm(torch.stack(norms)).item()

    @torch.no_grad()
    def _finish_step(self, norm: float, *, skipped: bool) -> Metrics:
        lr = self.options.learning_rate(self.step)
        squares = torch.zeros(2, dtype=torch.float64)
        for weight, adam, decay in self._shards():
            squares[0] += torch.linalg.vector_norm(weight, dtype=torch.float64).cpu() ** 2
            if adam and not skipped:
                squares[1] += self._change(weight, adam, lr, lr * decay).cpu() ** 2
        squares = self.ranks.sum(squares) if self._cut_up else squares
        param_norm, update_norm = squares.sqrt().tolist()
        self._drop_gradients()
        self._pending_losses.clear()
        self._has_gradient = False
        self.step += 1
        return {
            "update/grad_norm": norm,
            "update/lr": lr,
            "update/skipped": float(skipped),
            "update/param_norm": param_norm,
            "update/update_norm_ratio": update_norm / max(param_norm, 1e-30),
        }

    def _change(self, weight: Tensor, adam: Mapping[str, Any], lr: float, decay: float) -> Tensor:
        """Norm of AdamW's last change of `weight`, from the moments: no copy of the weights is kept
        for it.
        """
        beta1, beta2 = self.options.adam_betas
        step = float(adam["step"])
        scale = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        denominator = (
            adam["exp_avg_sq"].sqrt().add_(self.options.adam_eps * math.sqrt(1 - beta2**step))
        )
        change = adam["exp_avg"] / denominator * scale
        if decay:
            change = change + (weight + change) * (decay / (1 - decay))
        return torch.linalg.vector_norm(change, dtype=torch.float64)

    def save(self, directory: Path) -> None:
        """See TrainEngine. Moments, and masters where the weights are not float32, lie beside the
        weights.

        Collective; rank 0 writes. It takes part in every gather even when the disk refuses, so that
        nobody waits.
        """
        # Generators: nothing is gathered before it is written.
        weights = (named for bucket in self.weights() for named in bucket)
        parts: list[
            tuple[Callable[[Iterator[tuple[str, Tensor]]], None], Iterator[tuple[str, Tensor]]]
        ] = [
            (partial(save_model, self.model, directory), weights),
            *(
                (partial(write_sharded, directory, f"optimizer_{k}"), self._state(k))
                for k in ("master", *MOMENTS)
            ),
        ]
        refused: OSError | SafetensorError | None = None
        for write, named in parts:
            if self.ranks.first and refused is None:
                try:
                    write(named)
                except (OSError, SafetensorError) as error:
                    refused = error
            for _ in named:
                pass
        steps = {name: int(step) for name, step in self._state("step")}
        if refused is not None:
            raise refused
        if self.ranks.first:
            if self.options.tokenizer is not None:
                self.options.tokenizer.save_pretrained(directory)
            content = {"format": STATE_FORMAT, "step": self.step, "adam_steps": steps}
            (directory / STATE_FILE).write_text(
                json.dumps(content, indent=1) + "\n", encoding="utf-8"
            )

    def load(self, directory: Path) -> None:
        """See TrainEngine. Whichever engine wrote it, on however many ranks; each rank reads the
        files itself.

        Raises:
            CheckpointError: the directory does not hold a checkpoint of this model.
        """
        path = directory / STATE_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{directory} has no {STATE_FILE}: it is not a training checkpoint"
            )
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != STATE_FORMAT:
            raise CheckpointError(
                f"{path} has format {content.get('format')!r}; this version reads {STATE_FORMAT}"
            )
        steps: dict[str, int] = content["adam_steps"]
        state = {
            kind: stored_tensors(directory, f"optimizer_{kind}-*.safetensors")
            for kind in ("master", *MOMENTS)
        }
        for name in steps:
            dtype = self._stored[name][1] if name in self._stored else None
            needed = ("master", *MOMENTS) if dtype in LOW else MOMENTS
            if dtype is None or any(name not in state[kind] for kind in needed):
                raise CheckpointError(f"{directory} has an incomplete optimizer state for {name!r}")

        def stored() -> Iterator[Stored]:
            for name, weight in stored_weights(self.model, directory, self._stored):
                held = {kind: tensors[name]() for kind, tensors in state.items() if name in tensors}
                yield Stored(name, weight, held.pop("master", None), held, steps.get(name, 0))

        with torch.no_grad():
            self._restore(stored())
        self._drop_gradients()
        self._pending_losses.clear()
        self._has_gradient = False
        self.step = content["step"]

    @torch.no_grad()
    def set_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """See TrainEngine. The same on every rank; collective."""
        self._restore(Stored(name, weight) for name, weight in named)


class AdapterOff:
    """The policy without its adapter, as the reference: no second model in memory."""

    def __init__(self, policy: Trainer) -> None:
        self._policy = policy

    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        with adapter_off(self._policy.model):
            return self._policy.forward(inputs, want)


class Reader(nn.Module):
    """The whole of a micro-batch's forward pass as one module: what sharding libraries hook to
    gather weights.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.model = trainer.model
        self._trainer = (trainer,)  # in a tuple, so that nothing of it is registered here

    def forward(self, inputs: TokenBatch, want: Want) -> dict[str, Tensor]:
        """The fields of Output that were asked for; a dict, because hooks look for tensors in plain
        containers.
        """
        [trainer] = self._trainer
        output = read_tokens(trainer.network, inputs, want, temperature=trainer.options.temperature)
        # Cloned, because hooks that gather weights for backward do not survive on views.
        return {name: value.clone() for name, value in vars(output).items() if value is not None}


def read_tokens(
    network: TokenModel, inputs: TokenBatch, want: Want, *, temperature: float
) -> Output:
    """What `network` says of one micro-batch; differentiable."""
    # Rows are right-padded and attention is causal, so no real token sees padding and no mask has
    # to be built. Positions that start again mark packed rows: transformers keeps them apart, but
    # only when it is given no mask.
    flat = network.backbone(inputs.tokens, None, inputs.position_ids).flatten(0, 1)
    head = network.head
    token_at, hidden_at = predicted_positions(inputs.response_mask)
    if "values" in want:
        if head.weight.shape[0] != 1:
            raise EngineError(
                f"{type(network).__name__} has no value head, but values were asked for"
            )
        values = nn.functional.linear(flat, head.weight, head.bias).squeeze(1)
        values = values if values.dtype == torch.float64 else values.float()
        token_values = spread(values[hidden_at], token_at, inputs.tokens)
        return Output(
            values=token_values, bootstrap=values[bootstrap_positions(inputs.attention_mask)]
        )
    result = chunked_head(
        flat[hidden_at],
        head,
        inputs.tokens.flatten()[token_at],
        temperature=temperature,
        entropy="entropy" in want,
        sum_p_squared="sum_p_squared" in want,
        candidates=None if inputs.candidates is None else inputs.candidates.flatten(0, 1)[token_at],
        top_k=next(
            (int(item.removeprefix("top_k=")) for item in want if item.startswith("top_k=")), 0
        ),
    )
    placed = {
        name: None if value is None else spread(value, token_at, inputs.tokens)
        for name, value in result._asdict().items()
    }
    return Output(**placed)


def _nothing(output: Output) -> Tensor:
    """A zero that hangs on every weight: backward must run on all ranks alike, also where there is
    nothing to learn.
    """
    fields: Iterable[Any] = vars(output).values()
    return sum(
        (field.sum() * 0.0 for field in fields if field is not None and field.requires_grad),
        torch.zeros(()),
    )


def _enable_gradient_checkpointing(model: nn.Module) -> None:
    host = getattr(model, "decoder", model)
    if not hasattr(host, "gradient_checkpointing_enable"):
        raise EngineError(
            f"{type(model).__name__} does not support gradient checkpointing; set it to false"
        )
    cast(Any, host).gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    # Checkpointed layers recompute only in train mode, which must not switch dropout on, whatever a
    # model calls it.
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
