"""One scenario for every training engine, and what one rank of it leaves in a folder of results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import AttentionModel, batches, token_batch
from torch import Tensor, nn

from oxrl.engines.ranks import Ranks, joined_ranks
from oxrl.functional.policy_losses import ppo_clip
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.models.load import load_critic, load_policy
from oxrl.types import Output, SupervisedBatch

# Seven rows on two ranks: four and three, in three and two micro-batches of 15 tokens, so one rank sits one out.
LENGTHS = [(2, 5), (1, 9), (4, 1), (3, 0), (1, 3), (2, 7), (6, 2)]
OPTIONS: dict[str, Any] = {
    "lr": 1e-3,
    "lr_schedule": "linear",
    "warmup_steps": 2,
    "total_steps": 20,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "micro_batch_tokens": 15,
    "temperature": 0.8,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
LOGPROBS = frozenset({"logprobs"})


def ppo(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    mask = batch.inputs.response_mask
    loss, metrics = ppo_clip(output.logprobs, batch.old_logprobs, batch.advantages, mask, batch.loss_weights)
    return loss - 0.1 * (output.entropy * batch.loss_weights).sum(), metrics


def supervised(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(output.logprobs, batch.inputs.response_mask, batch.loss_weights)


def make_trainer(engine: str, model: nn.Module, ranks: Ranks, **options: Any) -> Any:
    options = OPTIONS | options
    if engine == "local":
        from oxrl.engines.local import LocalTrainer

        return LocalTrainer(model, **options)
    if engine == "fsdp":
        from oxrl.engines.fsdp_engine import FsdpTrainer

        return FsdpTrainer(model, ranks=ranks, **options)
    from oxrl.engines.deepspeed_engine import DeepSpeedTrainer

    stage, _, offload = engine.removeprefix("zero").partition("+")
    config = {"zero_stage": int(stage)}
    if offload:
        config |= {"offload_optimizer": True, "offload_param": int(stage) == 3}
    return DeepSpeedTrainer(model, ranks=ranks, settings=config, **options)


def make_model(dtype: str) -> nn.Module:
    return AttentionModel() if dtype == "float64" else load_policy("builtin:tiny", dtype=DTYPES[dtype], seed=0)


def steps(trainer: Any, batch: Any, count: int) -> list[dict[str, float]]:
    lines: list[dict[str, float]] = []
    for _ in range(count):
        trainer.forward_backward(batch, supervised, LOGPROBS)
        loss = trainer.last_loss
        lines.append({"loss": loss} | trainer.optim_step())
    return lines


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().float().clone() for bucket in trainer.weights() for name, tensor in bucket}


def measure(engine: str, dtype: str, folder: Path, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that must not depend on the engine: tensors by `group/name`, and numbers."""
    vocabulary = 13 if dtype == "float64" else 261
    # bfloat16 rounds the gradient of each micro-batch, so only with the same micro-batches do engines agree closely.
    options = {"micro_batch_tokens": 1} if dtype == "bfloat16" else {}
    trainer = make_trainer(engine, make_model(dtype), ranks, **options)
    field_dtype = torch.float64 if dtype == "float64" else torch.float32
    problem = batches(LENGTHS, dtype=field_dtype, vocabulary=vocabulary)
    policy, sft = problem["policy"], problem["supervised"]
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}

    def keep(group: str, values: dict[str, Tensor]) -> None:
        tensors.update({f"{group}/{name}": value.clone() for name, value in values.items()})

    def keep_gradients(group: str) -> None:
        keep(group, dict(trainer.gradients()))
        numbers[f"{group}/norm"] = trainer.skip_step()["update/grad_norm"]

    said = trainer.forward(policy.inputs, frozenset({"logprobs", "entropy", "top_k=2"}))
    keep("forward", {name: value for name, value in vars(said).items() if value is not None and name != "top_ids"})
    said = trainer.forward_backward(policy, ppo, frozenset({"logprobs", "entropy"}))
    keep("forward_backward", {"logprobs": said.logprobs})
    numbers["ppo/loss"] = trainer.last_loss
    keep_gradients("gradient")
    for rows in ([0, 1, 2], [3, 4, 5, 6]):
        trainer.forward_backward(policy.select(torch.tensor(rows)), ppo, frozenset({"logprobs", "entropy"}))
    keep_gradients("gradient_of_two_calls")
    trainer.forward_backward(policy.select(torch.tensor([5])), ppo, frozenset({"logprobs", "entropy"}))
    keep_gradients("gradient_of_one_row")

    empty = token_batch([(3, 0), (5, 0), (2, 0)], vocabulary=vocabulary)
    trainer.forward_backward(
        SupervisedBatch(inputs=empty, loss_weights=torch.full(empty.tokens.shape, math.nan)), supervised, LOGPROBS
    )
    numbers["empty"] = trainer.optim_step()

    numbers["steps"] = steps(trainer, sft, 3)
    keep("weights", whole_weights(trainer))

    def poisoned(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = supervised(output, batch)
        return (loss * math.inf if batch.inputs.attention_mask.sum(1).max() == 10 else loss), metrics

    trainer.forward_backward(sft, poisoned, LOGPROBS)
    numbers["poisoned"] = trainer.optim_step()
    keep("weights_after_poison", whole_weights(trainer))

    if dtype != "float64":
        trainer.save(folder)
        numbers["steps_after_save"] = steps(trainer, sft, 2)
        keep("weights_at_the_end", whole_weights(trainer))
    return tensors, numbers


def measure_critic(engine: str, ranks: Ranks) -> dict[str, Tensor]:
    critic = load_critic("builtin:tiny", seed=0)
    torch.nn.init.normal_(critic.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(engine, critic, ranks)
    said = trainer.forward(token_batch(LENGTHS, vocabulary=261), frozenset({"values"}))
    return {"critic/values": said.values, "critic/bootstrap": said.bootstrap}


def resume(engine: str, dtype: str, folder: Path, ranks: Ranks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Continue from the checkpoint in `folder`, with a model of other weights, for the two steps `measure` took."""
    model = load_policy("builtin:tiny", dtype=DTYPES[dtype], seed=1)
    trainer = make_trainer(engine, model, ranks, **({"micro_batch_tokens": 1} if dtype == "bfloat16" else {}))
    trainer.load(folder)
    loaded = {f"weights_loaded/{name}": tensor for name, tensor in whole_weights(trainer).items()}
    sft = batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"]
    numbers = {"steps_after_save": steps(trainer, sft, 2)}
    return loaded | {f"weights_at_the_end/{n}": t for n, t in whole_weights(trainer).items()}, numbers


def take_over(engine: str, source: Path, target: Path) -> None:
    """On one rank: a step more from the checkpoint in `source`, saved to `target`."""
    with joined_ranks(torch.device("cpu"), deadline_s=120) as ranks:
        trainer = make_trainer(engine, load_policy("builtin:tiny", seed=1), ranks)
        trainer.load(source)
        steps(trainer, batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"], 1)
        trainer.save(target)


def measure_all(engine: str, folder: Path, dtypes: list[str], resumed: Path) -> None:
    """On one rank: measure per dtype, resume what the local engine saved in `resumed`; results into `folder`."""
    with joined_ranks(torch.device("cpu"), deadline_s=120) as ranks:
        for dtype in dtypes:
            results = {"measured": measure(engine, dtype, folder / f"checkpoint_{dtype}", ranks)}
            if dtype == "float32":
                results["measured"][0].update(measure_critic(engine, ranks))
            if dtype != "float64":
                results["resumed"] = resume(engine, dtype, resumed / f"checkpoint_{dtype}", ranks)
            for name, (tensors, numbers) in results.items():
                target = folder / f"{name}_{dtype}_{ranks.rank}"
                save_file({key: value.contiguous() for key, value in tensors.items()}, f"{target}.safetensors")
                Path(f"{target}.json").write_text(json.dumps(numbers))
