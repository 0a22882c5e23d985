"""One scenario for every training engine, and what one rank of it leaves in a folder of results."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from oxrl.assembly.assembly import trainer_class
from oxrl.engines.train.joined_ranks import joined_ranks
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import CheckpointError, NonFiniteError
from oxrl.functional.gates import ppo_clip
from oxrl.functional.preference_losses import dpo
from oxrl.functional.preference_statistics import sequence_logprobs
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.models.fingerprints import fingerprint
from oxrl.models.load import LoadOptions, load_critic, load_policy
from oxrl.models.lora import AdapterOptions, add_adapter
from oxrl.models.weights import Whole
from oxrl.runs.ranks import Ranks
from oxrl.tables.watch import Deadlines
from oxrl.types import Output, PreferenceBatch, SupervisedBatch
from support.tiny import AttentionModel, batches, token_batch

# Seven rows on two ranks: four and three, in three and two micro-batches of 15 tokens, so one rank
# sits one out.
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
REFERENCES = ("local", "fsdp", "zero0", "zero3", "zero3+offload")
LOGPROBS = frozenset({"logprobs"})


def ppo(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    mask = batch.inputs.response_mask
    loss, metrics = ppo_clip(
        output.logprobs, batch.old_logprobs, batch.advantages, mask, batch.loss_weights
    )
    return loss - 0.1 * (output.entropy * batch.loss_weights).sum(), metrics


def supervised(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return supervised_loss(output.logprobs, batch.inputs.response_mask, batch.loss_weights)


def make_trainer(engine: str, model: nn.Module, ranks: Ranks, **changed: Any) -> Any:
    """An engine of the table; DeepSpeed's stages are `zero0` to `zero3`, `+offload` moves to the
    CPU what can be.
    """
    options = TrainerOptions(**(OPTIONS | changed))
    if not engine.startswith("zero"):
        return trainer_class(engine)(model, options, ranks=ranks)
    stage, _, offload = engine.removeprefix("zero").partition("+")
    settings = {
        "zero_stage": int(stage),
        "offload_optimizer": bool(offload) and options.trained,
        "offload_param": bool(offload) and int(stage) == 3,
    }
    return trainer_class("deepspeed")(model, options, ranks=ranks, **settings)


def preference(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    sums, _ = sequence_logprobs(output.logprobs, batch.inputs.response_mask)
    refs = batch.ref_logprobs
    lengths = batch.inputs.response_mask.sum(1)
    return dpo(
        sums[0::2],
        sums[1::2],
        refs[0::2],
        refs[1::2],
        lengths[0::2],
        lengths[1::2],
        batch.loss_weights,
    )


def make_model(dtype: str) -> nn.Module:
    return (
        AttentionModel()
        if dtype == "float64"
        else load_policy("builtin:tiny", LoadOptions(dtype=DTYPES[dtype], seed=0))
    )


def steps(trainer: Any, batch: Any, count: int) -> list[dict[str, float]]:
    lines: list[dict[str, float]] = []
    for _ in range(count):
        trainer.forward_backward(batch, supervised, LOGPROBS)
        loss = trainer.last_loss
        lines.append({"loss": loss} | trainer.optim_step())
    return lines


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    return {
        name: tensor.detach().float().clone()
        for bucket in trainer.weights()
        for name, tensor in bucket
    }


def weights_that_lie(trainer: Any) -> list[str]:
    """Names of the weights that are yielded otherwise than the optimizer holds them."""
    found: list[str] = []
    for dtype in (torch.float32, torch.bfloat16):
        held = trainer.fingerprints(dtype)
        found += [name for name, print in by_turns(trainer, dtype).items() if print != held[name]]
        for bucket in trainer.weights():
            found += [name for name, w in bucket if fingerprint(w.to(dtype)) != held.pop(name)]
        found += held
    return found


def by_turns(trainer: Any, dtype: torch.dtype) -> dict[str, str]:
    """Fingerprints of the weights as ranks gather them to send them, each on one rank only."""
    own: dict[str, str] = {}
    for index, given in enumerate(trainer.weights_in_turn("all", dtype)):
        mine = index % trainer.ranks.world == trainer.ranks.rank
        assert (given is not None) == mine
        if isinstance(given, Whole):
            # Memory that nobody else has, in the order of the bucket.
            assert given.memory.dtype == dtype
            flat = torch.cat([tensor.reshape(-1) for _, tensor in given.bucket])
            assert torch.equal(given.memory, flat)
            given = given.bucket
        own |= {name: fingerprint(weight.to(dtype)) for name, weight in given or ()}
    shares = trainer.ranks.gather(own)
    assert sum(map(len, shares)) == len(trainer.fingerprints(dtype))
    return {name: print for share in shares for name, print in share.items()}


def measure(
    engine: str, dtype: str, folder: Path, ranks: Ranks
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that must not depend on the engine: tensors by `group/name`, and numbers."""
    vocabulary = 13 if dtype == "float64" else 261
    # bfloat16 rounds the gradient of each micro-batch, so only with the same micro-batches do
    # engines agree closely.
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
    keep(
        "forward",
        {
            name: value
            for name, value in vars(said).items()
            if value is not None and name != "top_ids"
        },
    )
    said = trainer.forward_backward(policy, ppo, frozenset({"logprobs", "entropy"}))
    keep("forward_backward", {"logprobs": said.logprobs})
    numbers["ppo/loss"] = trainer.last_loss
    keep_gradients("gradient")
    for rows in ([0, 1, 2], [3, 4, 5, 6]):
        trainer.forward_backward(
            policy.select(torch.tensor(rows)), ppo, frozenset({"logprobs", "entropy"})
        )
    keep_gradients("gradient_of_two_calls")
    trainer.forward_backward(
        policy.select(torch.tensor([5])), ppo, frozenset({"logprobs", "entropy"})
    )
    keep_gradients("gradient_of_one_row")
    pairs = token_batch(LENGTHS[:6], vocabulary=vocabulary)
    refs = torch.linspace(-9, -7, 6, dtype=field_dtype)
    weights = torch.tensor([0.5, 0.2, 0.3], dtype=field_dtype)
    trainer.forward_backward(
        PreferenceBatch(inputs=pairs, ref_logprobs=refs, loss_weights=weights), preference, LOGPROBS
    )
    keep_gradients("gradient_of_pairs")

    empty = token_batch([(3, 0), (5, 0), (2, 0)], vocabulary=vocabulary)
    untrained = SupervisedBatch(inputs=empty, loss_weights=torch.full(empty.tokens.shape, math.nan))
    trainer.forward_backward(untrained, supervised, LOGPROBS)
    numbers["empty"] = trainer.optim_step()

    numbers["steps"] = steps(trainer, sft, 3)
    keep("weights", whole_weights(trainer))
    numbers["lies"] = weights_that_lie(trainer)

    def poisoned(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = supervised(output, batch)
        return (
            loss * math.inf if batch.inputs.attention_mask.sum(1).max() == 10 else loss
        ), metrics

    def steep(output: Output, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = supervised(output, batch)
        nothing = (output.logprobs.sum() * 0).abs().sqrt()  # 0, with a gradient of NaN
        return (loss + nothing if batch.inputs.attention_mask.sum(1).max() == 10 else loss), metrics

    for name, broken in (("poisoned", poisoned), ("steep", steep)):
        trainer.forward_backward(sft, broken, LOGPROBS)
        numbers[name] = trainer.optim_step()
        keep(f"weights_after_{name}", whole_weights(trainer))

    if dtype != "float64":
        trainer.save(folder)
        numbers["steps_after_save"] = steps(trainer, sft, 2)
        keep("weights_at_the_end", whole_weights(trainer))
        numbers["lies"] += weights_that_lie(trainer)

    # The pass without a backward comes last: what it gathered must not be what the next one reads.
    trainer.forward_backward(sft, supervised, LOGPROBS)
    trainer.forward_backward(untrained, supervised, LOGPROBS)
    trainer.optim_step()
    keep("weights_as_read", {"logprobs": trainer.forward(policy.inputs, LOGPROBS).logprobs})
    return tensors, numbers


def measure_critic(engine: str, ranks: Ranks) -> dict[str, Tensor]:
    critic = load_critic("builtin:tiny", LoadOptions(seed=0))
    torch.nn.init.normal_(
        critic.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(1)
    )
    trainer = make_trainer(engine, critic, ranks)
    said = trainer.forward(token_batch(LENGTHS, vocabulary=261), frozenset({"values"}))
    return {"critic/values": said.values, "critic/bootstrap": said.bootstrap}


def measure_reference(engine: str, dtype: str, folder: Path, ranks: Ranks) -> dict[str, Tensor]:
    """What a model says that is never trained; after it took over other weights; and after a
    checkpoint of those.
    """
    inputs = token_batch(LENGTHS, vocabulary=261)
    model = load_policy("builtin:tiny", LoadOptions(dtype=DTYPES[dtype], seed=0))
    trainer = make_trainer(engine, model, ranks, lr=0.0, trained=False)
    said = {"reference/first": trainer.forward(inputs, LOGPROBS).logprobs}
    other = load_policy("builtin:tiny", LoadOptions(dtype=DTYPES[dtype], seed=1))
    trainer.set_weights((name, p.detach()) for name, p in other.named_parameters())
    said["reference/other"] = trainer.forward(inputs, LOGPROBS).logprobs
    trainer.save(folder)
    ranks.agree("rank 0 has written")
    trainer.set_weights((name, p.detach() * 0.5) for name, p in other.named_parameters())
    trainer.load(folder)
    said["reference/loaded"] = trainer.forward(inputs, LOGPROBS).logprobs
    return said


def measure_checkpointing(engine: str, ranks: Ranks) -> tuple[dict[str, Tensor], list[int]]:
    """Gradients with activation checkpointing; times the first layer ran in one micro-batch without
    and with it.
    """
    sft, gradients, runs = (
        batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"],
        {},
        [],
    )
    for checkpointing in (False, True):
        model = load_policy("builtin:tiny", LoadOptions(seed=0))
        calls: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer = make_trainer(
            engine, model, ranks, gradient_checkpointing=checkpointing, micro_batch_tokens=10**6
        )
        calls.clear()  # an engine tries a new model out
        trainer.forward_backward(sft, supervised, LOGPROBS)
        gradients = {f"checkpointed/{name}": tensor.clone() for name, tensor in trainer.gradients()}
        trainer.skip_step()
        runs.append(len(calls))
    return gradients, runs


def resume(
    engine: str, dtype: str, folder: Path, ranks: Ranks
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Continue from the checkpoint in `folder`, with a model of other weights, for the two steps
    `measure` took.
    """
    model = load_policy("builtin:tiny", LoadOptions(dtype=DTYPES[dtype], seed=1))
    trainer = make_trainer(
        engine, model, ranks, **({"micro_batch_tokens": 1} if dtype == "bfloat16" else {})
    )
    sft = batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"]
    # As a run does whose reference is the policy before training: stage 3 keeps what this gathers.
    trainer.forward(sft.inputs, LOGPROBS)
    trainer.load(folder)
    loaded = {f"weights_loaded/{name}": tensor for name, tensor in whole_weights(trainer).items()}
    numbers = {"steps_after_save": steps(trainer, sft, 2)}
    return loaded | {
        f"weights_at_the_end/{n}": t for n, t in whole_weights(trainer).items()
    }, numbers


def take_over(engine: str, source: Path, target: Path) -> None:
    """On one rank: a step more from the checkpoint in `source`, saved to `target`."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        trainer = make_trainer(engine, load_policy("builtin:tiny", LoadOptions(seed=1)), ranks)
        trainer.load(source)
        steps(trainer, batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"], 1)
        trainer.save(target)


def refuse(engine: str, source: Path, target: Path) -> None:
    """On one rank: what loading the checkpoint in `source` ends with, into the file `target`."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        try:
            make_trainer(engine, load_policy("builtin:tiny", LoadOptions(seed=1)), ranks).load(
                source
            )
        except CheckpointError as error:
            target.write_text(str(error))


def save_what_is_not_finite(engine: str, dtype: str, folder: Path) -> None:
    """What saving a weight with an infinity ends with, on every rank, into `folder`."""
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        model = load_policy("builtin:tiny", LoadOptions(dtype=DTYPES[dtype], seed=0))
        with torch.no_grad():
            # At the end of a weight, so that only the last rank's piece holds it.
            model.get_parameter("model.layers.1.mlp.down_proj.weight")[-1, -1] = math.inf
        trainer = make_trainer(engine, model, ranks)
        try:
            trainer.save(folder / "saved")
        except NonFiniteError as error:
            (folder / f"rank_{ranks.rank}").write_text(str(error))


def adapter_gradients(engine: str, folder: Path, ranks: Ranks | None = None) -> None:
    """On one rank: the gradients of adapters in float64, into `folder`."""
    if ranks is None:
        with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as joined:
            return adapter_gradients(engine, folder, joined)
    found: dict[str, Tensor] = {}
    for kind in ("lora", "dora"):
        options = AdapterOptions(rank=2, alpha=4.0, dora=kind == "dora")
        model = load_policy("builtin:tiny", LoadOptions(dtype=torch.float64, seed=0))
        add_adapter(model, options, base="builtin:tiny", seed=0)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                learned = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.data = learned * 0.05
        trainer = make_trainer(engine, model, ranks)
        problem = batches(LENGTHS, dtype=torch.float64, vocabulary=261)
        trainer.forward_backward(problem["supervised"], supervised, LOGPROBS)
        for name, tensor in trainer.gradients():
            found[f"{kind} {name}"] = tensor.contiguous()
    save_file(found, folder / f"{engine}_{ranks.world}_{ranks.rank}.safetensors")


def measure_all(engine: str, folder: Path, dtypes: list[str], resumed: Path) -> None:
    """On one rank: measure per dtype, resume what the local engine saved in `resumed`; results into
    `folder`.
    """
    with joined_ranks(torch.device("cpu"), Deadlines.alike(120)) as ranks:
        for dtype in dtypes:
            results = {"measured": measure(engine, dtype, folder / f"checkpoint_{dtype}", ranks)}
            if dtype == "float32":
                results["measured"][0].update(measure_critic(engine, ranks))
                tensors, results["measured"][1]["layer_runs"] = measure_checkpointing(engine, ranks)
                results["measured"][0].update(tensors)
            if dtype != "float64" and engine in REFERENCES:
                results["reference"] = (
                    measure_reference(engine, dtype, folder / f"reference_{dtype}", ranks),
                    {},
                )
            if dtype != "float64":
                results["resumed"] = resume(engine, dtype, resumed / f"checkpoint_{dtype}", ranks)
            for name, (tensors, numbers) in results.items():
                target = folder / f"{name}_{dtype}_{ranks.rank}"
                save_file(
                    {key: value.contiguous() for key, value in tensors.items()},
                    f"{target}.safetensors",
                )
                Path(f"{target}.json").write_text(json.dumps(numbers))


needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed here; `make test-scale` runs this",
)
