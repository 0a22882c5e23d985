"""LocalTrainer: TrainEngine in one process, plain PyTorch, CPU or one GPU. The executable specification."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedTokenizerBase

from oxrl.engines.base import Bucket, Want
from oxrl.errors import CheckpointError, EngineError
from oxrl.functional.logprobs import bootstrap_positions, chunked_head, predicted_positions, spread
from oxrl.models.network import TokenModel, token_model
from oxrl.models.weights import buckets, read_sharded, restore_model, save_model, write_sharded
from oxrl.types import LossFn, Metrics, Output, TokenBatch, TrainBatch

STATE_FILE = "trainer_state.json"
STATE_FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, *, lr: float, schedule: str, warmup_steps: int, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (the first is 0): linear warm-up, then the schedule down to 0 at the end.

    A pure function of the step, so a resumed or skipped step cannot shift it. Step `warmup_steps - 1` already has the
    full rate; `linear` and `cosine` reach 0 only at step `total_steps`, which is never run.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant" or total_steps is None:
        return lr
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return lr * SCHEDULES[schedule](min(1.0, progress))


class LocalTrainer:
    """A model, its gradient and its AdamW.

    Args:
        model: a Hugging Face causal LM, a ValueModel, or any TokenModel module. Kept in eval mode: dropout would make
            the ratio of unchanged weights differ from 1.
        lr, lr_schedule, warmup_steps, total_steps: see `learning_rate`. `total_steps` may be None for `constant`.
        weight_decay, adam_betas, adam_eps: AdamW. bf16 and fp16 weights get float32 masters and float32 gradient sums.
        max_grad_norm: global norm the gradient is clipped to; `math.inf` turns clipping off.
        micro_batch_tokens: largest number of tokens, padding included, that go through the model at once; a unit
            (row, or all rows of a pair) longer than that goes alone.
        temperature: logprobs, entropy and the rest are those of logits / temperature.
        gradient_checkpointing: recompute each layer in backward instead of storing its activations.
        tokenizer: saved beside the weights, so that the checkpoint is complete.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        lr_schedule: str = "constant",
        warmup_steps: int = 0,
        total_steps: int | None = None,
        weight_decay: float = 0.0,
        adam_betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if lr_schedule not in SCHEDULES:
            raise EngineError(f"lr_schedule {lr_schedule!r} is none of {', '.join(SCHEDULES)}")
        if lr_schedule != "constant" and total_steps is None:
            raise EngineError(f"lr_schedule {lr_schedule!r} needs total_steps")
        self.model = model.eval()
        self.network: TokenModel = token_model(model)
        self.tokenizer = tokenizer
        self.temperature = temperature
        self.max_grad_norm = max_grad_norm
        self.micro_batch_tokens = micro_batch_tokens
        self.step = 0
        self.last_loss = 0.0
        self._schedule: dict[str, Any] = {
            "lr": lr,
            "schedule": lr_schedule,
            "warmup_steps": warmup_steps,
            "total_steps": total_steps,
        }
        self._pending_losses: list[float] = []
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master_of(p) for name, p in self._parameters.items()}
        self._adam = torch.optim.AdamW(
            self._masters.values(), lr=lr, betas=adam_betas, eps=adam_eps, weight_decay=weight_decay, fused=True
        )
        self._checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            _enable_gradient_checkpointing(model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def forward(self, inputs: TokenBatch, want: Want) -> Output:
        """See TrainEngine. Token fields are 0.0 wherever `response_mask` is False: the head runs nowhere else."""
        merged = _Merged(inputs)
        for rows, length in self._micro_batches(inputs):
            merged.add(rows, self._run(inputs.select(rows, length).to(self.device), want))
        return merged.output()

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, want: Want) -> Output:
        """See TrainEngine. The loss summed over micro-batches is left in `last_loss`.

        A batch with several rows per unit keeps the rows of unit u at `rows_per_unit * u` onwards in `inputs`.
        """
        merged = _Merged(batch.inputs)
        rows_per_unit = len(batch.inputs) // max(1, len(batch))
        losses: list[Tensor] = []
        if self._checkpointing:
            self.model.train()
        for units, length in self._micro_batches(batch):
            micro = batch.select(units, length).to(self.device)
            output = self._run(micro.inputs, want)
            loss, _ = loss_fn(output, micro)
            # No trained token means no gradient at all, not a zero one that would still move weights by momentum.
            if loss.requires_grad and bool(micro.inputs.response_mask[:, 1:].any()):
                loss.backward()
                self._raise_gradients()
            losses.append(loss.detach())
            merged.add((units[:, None] * rows_per_unit + torch.arange(rows_per_unit)).flatten(), output)
        if self._checkpointing:
            self.model.eval()
        self.last_loss = torch.stack(losses).double().sum().item() if losses else 0.0
        self._pending_losses.append(self.last_loss)
        return merged.output()

    def optim_step(self) -> Metrics:
        """See TrainEngine. Without any gradient (nothing was masked in) the step is skipped too."""
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        total_norm = get_total_norm(gradients)
        norm = total_norm.item()
        if not gradients or not math.isfinite(norm) or not all(map(math.isfinite, self._pending_losses)):
            return self._finish_step(norm, skipped=True)
        if norm > self.max_grad_norm:
            clip_grads_with_norm_(self._masters.values(), self.max_grad_norm, total_norm)
        self._adam.param_groups[0]["lr"] = self._learning_rate()
        self._adam.step()
        self._lower_masters()
        return self._finish_step(norm, skipped=False)

    def skip_step(self) -> Metrics:
        """See TrainEngine."""
        gradients = [p.grad for p in self._masters.values() if p.grad is not None]
        return self._finish_step(get_total_norm(gradients).item(), skipped=True)

    def weights(self) -> Iterator[Bucket]:
        """See TrainEngine. The tensors are the model's own, not copies."""
        return buckets((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def save(self, directory: Path) -> None:
        """See TrainEngine. Moments, and masters where the weights are not float32, lie beside the weights."""
        save_model(self.model, directory)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(directory)
        state = {name: self._adam.state[p] for name, p in self._masters.items() if self._adam.state[p]}
        for moment in MOMENTS:
            write_sharded(directory, f"optimizer_{moment}", ((name, held[moment]) for name, held in state.items()))
        lowered = ((name, p) for name, p in self._masters.items() if p is not self._parameters[name])
        write_sharded(directory, "optimizer_master", lowered)
        adam_steps = {name: int(held["step"]) for name, held in state.items()}
        content = {"format": STATE_FORMAT, "step": self.step, "adam_steps": adam_steps}
        (directory / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def load(self, directory: Path) -> None:
        """See TrainEngine.

        Raises:
            CheckpointError: the directory does not hold a checkpoint of this model.
        """
        path = directory / STATE_FILE
        if not path.is_file():
            raise CheckpointError(f"{directory} has no {STATE_FILE}: it is not a training checkpoint")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != STATE_FORMAT:
            raise CheckpointError(f"{path} has format {content.get('format')!r}; this version reads {STATE_FORMAT}")
        restore_model(self.model, directory)
        with torch.no_grad():
            masters = dict(read_sharded(directory, "optimizer_master"))
            for name, master in self._masters.items():
                if master is not self._parameters[name]:
                    master.copy_(masters.get(name, self._parameters[name]))
        moments = {moment: dict(read_sharded(directory, f"optimizer_{moment}")) for moment in MOMENTS}
        self._adam.state.clear()
        for name, steps in content["adam_steps"].items():
            if name not in self._masters or any(name not in tensors for tensors in moments.values()):
                raise CheckpointError(f"{directory} has an incomplete optimizer state for {name!r}")
            held = {moment: tensors[name].to(self.device) for moment, tensors in moments.items()}
            step = torch.tensor(float(steps), device=self.device)
            self._adam.state[self._masters[name]] = {"step": step, **held}
        self._adam.zero_grad()
        self._pending_losses.clear()
        self.step = content["step"]

    def _learning_rate(self) -> float:
        return learning_rate(self.step, **self._schedule)

    def _run(self, inputs: TokenBatch, want: Want) -> Output:
        """One micro-batch through the model."""
        # Rows are right-padded and attention is causal, so no real token sees padding and no mask has to be built.
        positions = inputs.position_ids
        mask = None if positions is None else inputs.attention_mask
        hidden = self.network.backbone(inputs.tokens, mask, positions)
        flat = hidden.flatten(0, 1)
        head = self.network.head
        token_at, hidden_at = predicted_positions(inputs.response_mask)
        if "values" in want:
            if head.weight.shape[0] != 1:
                raise EngineError(f"{type(self.model).__name__} has no value head, but values were asked for")
            values = nn.functional.linear(flat, head.weight, head.bias).squeeze(1)
            values = values if values.dtype == torch.float64 else values.float()
            token_values = spread(values[hidden_at], token_at, inputs.tokens)
            return Output(values=token_values, bootstrap=values[bootstrap_positions(inputs.attention_mask)])
        result = chunked_head(
            flat[hidden_at],
            head,
            inputs.tokens.flatten()[token_at],
            temperature=self.temperature,
            entropy="entropy" in want,
            sum_p_squared="sum_p_squared" in want,
            top_k=_top_k(want),
        )
        placed = {
            name: None if value is None else spread(value, token_at, inputs.tokens)
            for name, value in result._asdict().items()
        }
        return Output(**placed)

    def _micro_batches(self, batch: TrainBatch) -> Iterator[tuple[Tensor, int]]:
        """(unit indices, length of the longest row): longest first, at most `micro_batch_tokens` with padding."""
        units = len(batch)
        if units == 0:
            return
        rows_per_unit = len(batch.inputs) // units
        lengths = batch.inputs.attention_mask.sum(1).view(units, rows_per_unit).amax(1).clamp(min=1)
        ordered, order = lengths.sort(descending=True, stable=True)
        longest = ordered.tolist()
        start = 0
        while start < units:
            count = max(1, self.micro_batch_tokens // (longest[start] * rows_per_unit))
            yield order[start : start + count].cpu(), longest[start]
            start += count

    @torch.no_grad()
    def _raise_gradients(self) -> None:
        """Add low-precision gradients to their float32 masters: a bf16 running sum would lose micro-batches."""
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if master is parameter or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def _lower_masters(self) -> None:
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                self._parameters[name].copy_(master)

    def _finish_step(self, norm: float, *, skipped: bool) -> Metrics:
        lr = self._learning_rate()
        param_norm = get_total_norm([p.detach() for p in self._masters.values()]).item()
        update_norm = 0.0 if skipped else self._update_norm(lr)
        self._adam.zero_grad()
        self._pending_losses.clear()
        self.step += 1
        return {
            "update/grad_norm": norm,
            "update/lr": lr,
            "update/skipped": float(skipped),
            "update/param_norm": param_norm,
            "update/update_norm_ratio": update_norm / max(param_norm, 1e-30),
        }

    @torch.no_grad()
    def _update_norm(self, lr: float) -> float:
        """Norm of the step just taken, from the moments: no copy of the weights is kept for it."""
        group = self._adam.param_groups[0]
        beta1, beta2 = group["betas"]
        squares: list[Tensor] = []
        for parameter in self._masters.values():
            if parameter.grad is None:
                continue
            held = self._adam.state[parameter]
            step = held["step"].item()
            scale = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
            denominator = held["exp_avg_sq"].sqrt().add_(group["eps"] * math.sqrt(1 - beta2**step))
            change = held["exp_avg"] / denominator * scale
            if group["weight_decay"]:
                decay = lr * group["weight_decay"]
                change = change + (parameter + change) * (decay / (1 - decay))
            squares.append(torch.linalg.vector_norm(change))
        return torch.linalg.vector_norm(torch.stack(squares)).item()


class _Merged:
    """Puts the outputs of micro-batches back into the row order and the length of the whole batch, on the CPU."""

    def __init__(self, inputs: TokenBatch) -> None:
        self._shape = inputs.tokens.shape
        self._fields: dict[str, Tensor] = {}

    def add(self, rows: Tensor, output: Output) -> None:
        for name, value in vars(output).items():
            if value is None:
                continue
            value = value.detach().cpu()
            if name not in self._fields:
                whole = self._shape[:1] if value.ndim == 1 else (*self._shape, *value.shape[2:])
                self._fields[name] = value.new_zeros(whole)
            field = self._fields[name]
            if value.ndim == 1:
                field[rows] = value
            else:
                field[rows, : value.shape[1]] = value

    def output(self) -> Output:
        return Output(**self._fields)


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself in float32 and float64, else a float32 copy that the optimizer steps instead."""
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return nn.Parameter(parameter.detach().float())


def _top_k(want: Want) -> int:
    return next((int(item.removeprefix("top_k=")) for item in want if item.startswith("top_k=")), 0)


def _enable_gradient_checkpointing(model: nn.Module) -> None:
    host = getattr(model, "decoder", model)
    if not hasattr(host, "gradient_checkpointing_enable"):
        raise EngineError(f"{type(model).__name__} does not support gradient checkpointing; set it to false")
    cast(Any, host).gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Checkpointed layers recompute only in train mode, which must not switch dropout on.
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            cast(Any, module).attention_dropout = 0.0
