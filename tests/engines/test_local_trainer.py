from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import OPTConfig, OPTForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from oxrl.checkpoint import shares
from oxrl.engines.train import forward as offload
from oxrl.engines.train.forward import FEWEST_BYTES, Kept
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.optimizers import undecayed
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import CheckpointError, EngineError, NonFiniteError
from oxrl.functional.gates import ppo_clip
from oxrl.functional.logprobs import logprobs_from_logits
from oxrl.functional.policy_losses import LossAndMetrics, cispo
from oxrl.functional.supervised_losses import supervised_loss
from oxrl.functional.value_losses import value_loss
from oxrl.modelfiles.builtin import BUILTIN_DIMS
from oxrl.models.load import LoadOptions, load_critic, load_policy, load_tokenizer
from oxrl.models.network import ValueModel
from oxrl.types import LossFn, Output, SupervisedBatch, Want
from support.tiny import AttentionModel, batches, token_batch

LENGTHS = [(2, 5), (1, 9), (4, 1), (3, 0), (1, 3), (2, 7), (6, 2)]


def _ppo(output: Output, batch: Any) -> LossAndMetrics:
    mask = batch.inputs.response_mask
    return ppo_clip(output.logprobs, batch.old_logprobs, batch.advantages, mask, batch.loss_weights)


def _ppo_with_entropy(output: Output, batch: Any) -> LossAndMetrics:
    loss, metrics = _ppo(output, batch)
    weights = batch.loss_weights.masked_fill(~batch.inputs.response_mask, 0.0)
    return loss - 0.1 * (output.entropy * weights).sum(), metrics


def _cispo(output: Output, batch: Any) -> LossAndMetrics:
    mask = batch.inputs.response_mask
    return cispo(output.logprobs, batch.old_logprobs, batch.advantages, mask, batch.loss_weights)


def _value(output: Output, batch: Any) -> LossAndMetrics:
    mask = batch.inputs.response_mask
    return value_loss(
        output.values, batch.old_values, batch.returns, mask, batch.loss_weights, value_clip=0.5
    )


def _supervised(output: Output, batch: Any) -> LossAndMetrics:
    return supervised_loss(output.logprobs, batch.inputs.response_mask, batch.loss_weights)


LOSSES = {
    "supervised_loss": ("supervised", _supervised, frozenset({"logprobs"})),
    "ppo_clip": ("policy", _ppo, frozenset({"logprobs"})),
    "ppo_clip_with_entropy": ("policy", _ppo_with_entropy, frozenset({"logprobs", "entropy"})),
    "cispo": ("policy", _cispo, frozenset({"logprobs"})),
    "value_loss": ("value", _value, frozenset({"values"})),
}


def _gradient(
    model: nn.Module, batch: Any, loss_fn: LossFn, want: Want, *, micro_batch_tokens: int
) -> tuple[Tensor, Output, float]:
    model.zero_grad()
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3, micro_batch_tokens=micro_batch_tokens))
    output = trainer.forward_backward(batch, loss_fn, want)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, output, trainer.last_loss


def _variants(
    kind: str, loss_fn: LossFn, want: Want, model: nn.Module, dtype: torch.dtype, vocabulary: int
) -> Iterator[tuple[str, Tensor, Output, float]]:
    """(what, gradient, output, loss) for micro-batches, row orders and paddings that must not
    matter.
    """
    plain = batches(LENGTHS, dtype=dtype, vocabulary=vocabulary)[kind]
    widest = max(sum(pair) for pair in LENGTHS)
    for rows in (1, 3, len(LENGTHS)):
        yield (
            f"{rows} rows",
            *_gradient(model, plain, loss_fn, want, micro_batch_tokens=rows * widest),
        )
    order = torch.tensor([4, 0, 6, 2, 5, 1, 3])
    gradient, output, loss = _gradient(
        model, plain.select(order), loss_fn, want, micro_batch_tokens=25
    )
    yield "row order", gradient, output.select(order.argsort()), loss
    padded = batches(LENGTHS, extra=11, dtype=dtype, vocabulary=vocabulary, poison=True)[kind]
    for budget in (1, 10_000):
        gradient, output, loss = _gradient(model, padded, loss_fn, want, micro_batch_tokens=budget)
        yield (
            f"padding, {budget} tokens",
            gradient,
            output.select(torch.arange(len(LENGTHS)), widest),
            loss,
        )


def _worst_difference(model: nn.Module, name: str, dtype: torch.dtype, vocabulary: int) -> float:
    kind, loss_fn, want = LOSSES[name]
    variants = list(_variants(kind, loss_fn, want, model, dtype, vocabulary))
    _, gradient, output, loss = variants[2]
    assert gradient.norm() > 1e-3
    worst = 0.0
    for _, other, other_output, other_loss in variants:
        worst = max(
            worst,
            ((other - gradient).norm() / gradient.norm()).item(),
            abs(other_loss - loss) / abs(loss),
        )
        for field in ("logprobs", "values"):
            if getattr(output, field) is not None:
                assert torch.allclose(
                    getattr(output, field), getattr(other_output, field), rtol=1e-4, atol=1e-5
                )
    return worst


@pytest.mark.parametrize("name", LOSSES)
def test_a_steps_gradient_does_not_depend_on_micro_batches_row_order_or_padding_in_float64(
    name: str,
) -> None:
    model = AttentionModel(1 if name == "value_loss" else 13)
    assert _worst_difference(model, name, torch.float64, 13) < 1e-10


@pytest.mark.parametrize("name", LOSSES)
def test_a_steps_gradient_does_not_depend_on_micro_batches_row_order_or_padding_on_the_hf_model(
    name: str,
) -> None:
    if name == "value_loss":
        model = load_critic("builtin:tiny", LoadOptions(seed=0))
        torch.nn.init.normal_(
            model.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(1)
        )
    else:
        model = load_policy("builtin:tiny", LoadOptions(seed=0))
    assert _worst_difference(model, name, torch.float32, 261) < 1e-5


def test_the_gradient_is_that_of_plain_autograd_over_the_full_logits() -> None:
    model = AttentionModel()
    batch = batches(LENGTHS)["policy"]
    gradient, output, loss = _gradient(
        model, batch, _ppo, frozenset({"logprobs"}), micro_batch_tokens=20
    )
    model.zero_grad()
    logits = model.backbone(batch.inputs) @ model.output.t() + model.bias
    logprobs = logprobs_from_logits(logits, batch.inputs.tokens) * batch.inputs.response_mask
    reference, _ = _ppo(Output(logprobs=logprobs), batch)
    reference.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
    assert torch.allclose(output.logprobs, logprobs.detach(), rtol=0, atol=1e-12)
    assert loss == pytest.approx(reference.item(), abs=1e-12)


def test_logprobs_are_those_of_the_hf_models_own_logits_at_the_temperature() -> None:
    model = load_policy("builtin:tiny", LoadOptions(seed=0))
    inputs = token_batch(LENGTHS, vocabulary=261)
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3, micro_batch_tokens=20, temperature=0.7))
    output = trainer.forward(inputs, frozenset({"logprobs", "entropy", "sum_p_squared", "top_k=2"}))
    with torch.no_grad():
        logits = model(input_ids=inputs.tokens, attention_mask=inputs.attention_mask).logits
    expected = logprobs_from_logits(logits, inputs.tokens, temperature=0.7) * inputs.response_mask
    assert torch.allclose(output.logprobs, expected, atol=1e-5)
    assert output.top_ids.shape == (*inputs.tokens.shape, 2)
    inside = inputs.response_mask
    assert (output.top_logprobs[..., 0] >= output.logprobs - 1e-6)[inside].all()
    assert (output.entropy[inside] > 0).all() and (output.sum_p_squared[inside] > 0).all()


def test_gradients_of_two_calls_add() -> None:
    model = AttentionModel()
    batch = batches(LENGTHS)["supervised"]
    whole, _, _ = _gradient(
        model, batch, _supervised, frozenset({"logprobs"}), micro_batch_tokens=100
    )
    model.zero_grad()
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3))
    trainer.forward_backward(
        batch.select(torch.tensor([0, 1, 2])), _supervised, frozenset({"logprobs"})
    )
    trainer.forward_backward(
        batch.select(torch.tensor([3, 4, 5, 6])), _supervised, frozenset({"logprobs"})
    )
    assert torch.allclose(
        torch.cat([p.grad.flatten() for p in model.parameters()]), whole, rtol=0, atol=1e-12
    )


def test_values_of_a_fresh_critic_are_zero_and_the_bootstrap_is_read_after_the_last_token() -> None:
    model = AttentionModel(1)
    inputs = token_batch(LENGTHS)
    output = LocalTrainer(model, TrainerOptions(lr=1e-3, micro_batch_tokens=15)).forward(
        inputs, frozenset({"values"})
    )
    hidden = model.backbone(inputs)
    values = (hidden @ model.output.t() + model.bias).squeeze(-1).detach()
    row, (prompt, response) = 5, LENGTHS[5]
    expected = values[row, prompt - 1 : prompt + response - 1]
    assert torch.allclose(output.values[row, prompt : prompt + response], expected)
    assert output.bootstrap[row].item() == pytest.approx(values[row, prompt + response - 1].item())
    critic = LocalTrainer(load_critic("builtin:tiny"), TrainerOptions(lr=1e-3))
    assert not critic.forward(token_batch(LENGTHS), frozenset({"values"})).values.any()


def test_asking_a_policy_for_values_is_an_error() -> None:
    with pytest.raises(EngineError, match="no value head"):
        LocalTrainer(AttentionModel(), TrainerOptions(lr=1e-3)).forward(
            token_batch(LENGTHS), frozenset({"values"})
        )


def _optimizer_problem(model: nn.Module | None = None, **options) -> tuple[LocalTrainer, Any]:
    trainer = LocalTrainer(
        model or AttentionModel(), TrainerOptions(lr=1e-2, micro_batch_tokens=30, **options)
    )
    return trainer, batches(LENGTHS)["supervised"]


def _one_step(trainer: LocalTrainer, batch: Any) -> dict[str, float]:
    trainer.forward_backward(batch, _supervised, frozenset({"logprobs"}))
    return trainer.optim_step()


def test_a_step_is_torchs_adamw_after_a_global_clip_and_reports_its_norms() -> None:
    trainer, batch = _optimizer_problem(weight_decay=0.1, max_grad_norm=0.5, adam_betas=(0.8, 0.95))
    reference = AttentionModel()
    adam = torch.optim.AdamW(reference.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    for _ in range(3):
        before = torch.cat([p.detach().flatten().clone() for p in reference.parameters()])
        metrics = _one_step(trainer, batch)
        gradient, _, _ = _gradient(
            reference, batch, _supervised, frozenset({"logprobs"}), micro_batch_tokens=999
        )
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        adam.step()
        after = torch.cat([p.detach().flatten() for p in reference.parameters()])
        ours = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        assert torch.allclose(ours, after, rtol=0, atol=1e-12)
        assert metrics["update/grad_norm"] == pytest.approx(gradient.norm().item())
        assert metrics["update/param_norm"] == pytest.approx(after.norm().item())
        ratio = ((after - before).norm() / after.norm()).item()
        assert metrics["update/update_norm_ratio"] == pytest.approx(ratio, rel=1e-6)
        assert metrics["update/skipped"] == 0.0
        assert metrics["update/lr"] == 1e-2


def test_weight_decay_can_spare_norms_biases_and_embeddings() -> None:
    """Two runs that differ in decay alone: the same matrices, and spared weights as without any
    decay.
    """
    ended: dict[str, dict[str, Tensor]] = {}
    batch = batches([(2, 3), (1, 5)], vocabulary=200, dtype=torch.float32)["supervised"]
    for kind, weight_decay in (("matrices", 0.5), ("all", 0.5), ("all", 0.0)):
        model = load_policy("builtin:tiny", LoadOptions(seed=1))
        spared = undecayed(model)
        trainer = LocalTrainer(
            model, TrainerOptions(lr=1e-2, weight_decay=weight_decay, decay=kind)
        )
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        metrics = _one_step(trainer, batch)
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        ratio = float((after - before).norm() / after.norm())
        assert metrics["update/update_norm_ratio"] == pytest.approx(ratio, rel=1e-3)
        ended[f"{kind} {weight_decay}"] = dict(model.named_parameters())
    some, everything, none = ended.values()
    assert {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
    } <= spared
    assert not [name for name in spared if "proj" in name] and len(spared) == 2 + 2 * 4
    for name, weight in some.items():
        assert torch.equal(weight, (none if name in spared else everything)[name]), name
        assert not torch.equal(everything[name], none[name]), name


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_loss_is_not_applied_and_the_step_index_is_consumed(poison: float) -> None:
    trainer, batch = _optimizer_problem()
    _one_step(trainer, batch)
    before = [p.detach().clone() for p in trainer.model.parameters()]

    def broken(output: Output, micro: Any) -> LossAndMetrics:
        loss, metrics = _supervised(output, micro)
        return loss * poison, metrics

    trainer.forward_backward(batch, broken, frozenset({"logprobs"}))
    metrics = trainer.optim_step()
    assert metrics["update/skipped"] == 1.0
    assert trainer.step == 2
    assert all(
        torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True)
    )
    assert all(p.grad is None for p in trainer.model.parameters())
    assert _one_step(trainer, batch)["update/skipped"] == 0.0


def test_skip_step_drops_the_gradient() -> None:
    trainer, batch = _optimizer_problem()
    trainer.forward_backward(batch, _supervised, frozenset({"logprobs"}))
    metrics = trainer.skip_step()
    assert metrics["update/skipped"] == 1.0 and metrics["update/grad_norm"] > 0
    assert trainer.step == 1 and all(p.grad is None for p in trainer.model.parameters())


def test_a_batch_without_any_trained_token_has_zero_loss_and_makes_no_step() -> None:
    trainer, batch = _optimizer_problem()
    _one_step(trainer, batch)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    inputs = token_batch([(3, 0), (5, 0)])
    empty = SupervisedBatch(inputs=inputs, loss_weights=torch.full(inputs.tokens.shape, math.nan))
    output = trainer.forward_backward(empty, _supervised, frozenset({"logprobs"}))
    assert trainer.last_loss == 0.0
    assert not output.logprobs.any()
    metrics = trainer.optim_step()
    assert metrics["update/skipped"] == 1.0 and metrics["update/grad_norm"] == 0.0
    assert all(
        torch.equal(p, old) for p, old in zip(trainer.model.parameters(), before, strict=True)
    )


def test_the_learning_rate_is_a_function_of_the_step() -> None:
    def rates(schedule: str) -> list[float]:
        options = TrainerOptions(lr=1.0, lr_schedule=schedule, warmup_steps=2, total_steps=6)
        return [options.learning_rate(step) for step in range(6)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert rates("cosine") == pytest.approx(
        [0.5, 1, 1, 0.5 + 0.25 * math.sqrt(2), 0.5, 0.5 - 0.25 * math.sqrt(2)]
    )


def test_a_schedule_that_decays_needs_to_know_the_end() -> None:
    with pytest.raises(EngineError, match="total_steps"):
        LocalTrainer(AttentionModel(), TrainerOptions(lr=1.0, lr_schedule="cosine"))


def _hf_trainer(dtype: torch.dtype = torch.float32, seed: int = 0) -> LocalTrainer:
    model = load_policy("builtin:tiny", LoadOptions(dtype=dtype, seed=seed))
    tokenizer = load_tokenizer("builtin:tiny")
    return LocalTrainer(
        model,
        TrainerOptions(
            lr=1e-3,
            lr_schedule="linear",
            warmup_steps=2,
            total_steps=10,
            micro_batch_tokens=30,
            tokenizer=tokenizer,
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_from_a_checkpoint_is_bit_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    batch = batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"]
    straight = _hf_trainer(dtype)
    expected = [_one_step(straight, batch) for _ in range(5)]
    first = _hf_trainer(dtype)
    for _ in range(2):
        _one_step(first, batch)
    first.save(tmp_path)
    second = _hf_trainer(dtype, seed=1)
    second.load(tmp_path)
    assert [_one_step(second, batch) for _ in range(3)] == expected[2:]
    for (name, ours), (_, theirs) in zip(
        second.model.named_parameters(), straight.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def _experts(seed: int, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_experts": 4,
    }
    config = Qwen3MoeConfig(
        **sizes, vocab_size=261, num_attention_heads=2, num_key_value_heads=2, num_experts_per_tok=2
    )
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("critic", [False, True])
def test_experts_that_are_fused_in_memory_and_apart_in_the_checkpoint_resume_too(
    tmp_path: Path, critic: bool, dtype: torch.dtype
) -> None:
    kind, loss_fn, want = LOSSES["value_loss" if critic else "supervised_loss"]
    batch = batches(LENGTHS, dtype=torch.float32, vocabulary=261)[kind]

    def step(trainer: LocalTrainer) -> dict[str, float]:
        trainer.forward_backward(batch, loss_fn, want)
        return trainer.optim_step()

    first, second = (
        LocalTrainer(ValueModel(model.base_model) if critic else model, TrainerOptions(lr=1e-2))
        for model in (_experts(0, dtype), _experts(1, dtype))
    )
    step(first)
    first.save(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert any("experts.3.down_proj" in name for name in file.keys())
    second.load(tmp_path)
    assert step(second) == step(first)
    for ours, theirs in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_checkpoint_is_a_hugging_face_directory_without_pickle(tmp_path: Path) -> None:
    trainer = _hf_trainer()
    _one_step(trainer, batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"])
    trainer.save(tmp_path)
    model = load_policy(str(tmp_path))
    inputs = token_batch(LENGTHS, vocabulary=261)
    again = (
        LocalTrainer(model, TrainerOptions(lr=1e-3, micro_batch_tokens=30))
        .forward(inputs, frozenset({"logprobs"}))
        .logprobs
    )
    assert torch.equal(again, trainer.forward(inputs, frozenset({"logprobs"})).logprobs)
    assert (
        load_tokenizer(str(tmp_path)).chat_template == load_tokenizer("builtin:tiny").chat_template
    )
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".safetensors", ".jinja"}
    assert json.loads((tmp_path / "trainer_state.json").read_text())["step"] == 1
    assert (tmp_path / "generation_config.json").is_file()


def test_a_critic_and_a_plain_module_resume_too(tmp_path: Path) -> None:
    batch = batches(LENGTHS, dtype=torch.float32, vocabulary=261)["value"]
    critic = LocalTrainer(load_critic("builtin:tiny", LoadOptions(seed=0)), TrainerOptions(lr=1e-3))
    critic.forward_backward(batch, _value, frozenset({"values"}))
    critic.optim_step()
    critic.save(tmp_path / "critic")
    loaded = LocalTrainer(load_critic("builtin:tiny", LoadOptions(seed=5)), TrainerOptions(lr=1e-3))
    loaded.load(tmp_path / "critic")
    want = critic.forward(batch.inputs, frozenset({"values"})).values
    assert want.any()
    assert torch.equal(loaded.forward(batch.inputs, frozenset({"values"})).values, want)
    reread = LocalTrainer(load_critic(str(tmp_path / "critic")), TrainerOptions(lr=1e-3))
    assert torch.equal(reread.forward(batch.inputs, frozenset({"values"})).values, want)

    trainer, supervised = _optimizer_problem()
    _one_step(trainer, supervised)
    trainer.save(tmp_path / "plain")
    fresh = AttentionModel()
    torch.nn.init.zeros_(fresh.output)
    other, _ = _optimizer_problem(fresh)
    other.load(tmp_path / "plain")
    assert _one_step(other, supervised) == _one_step(trainer, supervised)


def test_a_directory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    trainer = _hf_trainer()
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        trainer.load(tmp_path)
    trainer.save(tmp_path)
    other = LocalTrainer(load_policy("builtin:small"), TrainerOptions(lr=1e-3))
    with pytest.raises(CheckpointError, match="the model has"):
        other.load(tmp_path)


def test_a_checkpoint_that_lost_its_masters_is_refused(tmp_path: Path) -> None:
    trainer = _hf_trainer(torch.bfloat16)
    _one_step(trainer, batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"])
    trainer.save(tmp_path)
    (tmp_path / "optimizer_master-00000.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match="incomplete optimizer state for 'model.embed_tokens.weight'"
    ):
        _hf_trainer(torch.bfloat16).load(tmp_path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    trainer = _hf_trainer()
    trainer.save(tmp_path)
    state = tmp_path / "trainer_state.json"
    state.write_text(state.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match=r"has format 2; this version reads 1"):
        trainer.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_loads_where_more_weights_are_frozen(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    batch = batches(LENGTHS, dtype=torch.float32, vocabulary=261)["supervised"]
    options = TrainerOptions(lr=1e-3, max_grad_norm=math.inf)
    trainer = LocalTrainer(load_policy("builtin:tiny", LoadOptions(dtype=dtype)), options)
    _one_step(trainer, batch)
    trainer.save(tmp_path)
    model = load_policy("builtin:tiny", LoadOptions(dtype=dtype, seed=1))
    model.get_input_embeddings().requires_grad_(False)
    frozen = LocalTrainer(model, options)
    frozen.load(tmp_path)
    _one_step(trainer, batch)
    _one_step(frozen, batch)
    left = dict(frozen.model.named_parameters())
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(left[name], weight) == ("embed" not in name), name


def test_a_checkpoint_needs_no_other_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no such folder"))
    trainer = _hf_trainer()
    for step in ("step_0", "step_1"):
        trainer.save(tmp_path / step)
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / step).iterdir()}
        for step in ("step_0", "step_1")
    )
    assert first == second
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= first.keys()


@pytest.mark.parametrize("wrong", ["a full disk", "a weight that is no number"])
def test_a_save_leaves_alone_what_is_being_written_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    trainer = _hf_trainer()
    first = next(trainer.model.parameters()).data[0, 0]
    right = first.item()
    wait = Event()

    def put(descriptor: int, data: memoryview, offset: int) -> int:
        """A slow disk for what is written first."""
        if "best" not in os.readlink(f"/proc/self/fd/{descriptor}"):
            wait.wait(10)
            if wrong == "a full disk":
                raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(descriptor, data, offset)

    monkeypatch.setattr(shares, "put", put)
    if wrong != "a full disk":
        first.fill_(math.nan)
    assert trainer.begin_save(tmp_path / "step", copied=True)
    first.fill_(right)
    trainer.save(tmp_path / "best")
    load_policy(str(tmp_path / "best"))
    assert not trainer.save_progress()[1]
    wait.set()
    with pytest.raises((OSError, NonFiniteError), match="No space left|are NaN or infinite"):
        trainer.end_save()


def test_weights_come_in_buckets_under_hugging_face_names() -> None:
    trainer = _hf_trainer()
    named = dict(pair for bucket in trainer.weights() for pair in bucket)
    assert named.keys() == dict(trainer.model.named_parameters()).keys()
    assert "model.layers.0.self_attn.q_proj.weight" in named


def test_gradient_checkpointing_changes_no_gradient() -> None:
    batch = batches(
        LENGTHS, dtype=torch.float32, vocabulary=BUILTIN_DIMS["builtin:tiny"]["vocab_size"]
    )["supervised"]
    gradients = []
    for checkpointing in (False, True):
        model = load_policy("builtin:tiny", LoadOptions(seed=0))
        trainer = LocalTrainer(model, TrainerOptions(lr=1e-3, gradient_checkpointing=checkpointing))
        trainer.forward_backward(batch, _supervised, frozenset({"logprobs"}))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert not model.training
    assert torch.allclose(*gradients, rtol=0, atol=1e-7)


@pytest.mark.parametrize("batch_rows", [1, 3])
def test_offloaded_activations_are_the_inputs_of_layers_and_change_no_gradient(
    batch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def kept(tensor: torch.Tensor, came_from: torch.device | None) -> Kept:
        if came_from is not None:
            copied.append(tensor.nbytes)
        return Kept(tensor, came_from)

    monkeypatch.setattr(offload, "Kept", kept)
    sizes = BUILTIN_DIMS["builtin:tiny"]
    layers = sizes["num_hidden_layers"]
    hidden = sizes["hidden_size"]
    # Long enough rows that the inputs of a layer are worth a copy.
    longest = FEWEST_BYTES // (4 * hidden) + 7
    rows = [(4, longest)] * batch_rows
    batch = batches(rows, dtype=torch.float32, vocabulary=sizes["vocab_size"])["supervised"]
    gradients: list[torch.Tensor] = []
    for offloads in (False, True):
        model = load_policy("builtin:tiny", LoadOptions(seed=0))
        options = TrainerOptions(lr=1e-3, gradient_checkpointing=True, offload_activations=offloads)
        LocalTrainer(model, options).forward_backward(batch, _supervised, frozenset({"logprobs"}))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        if not offloads:
            assert copied == []
    assert torch.equal(*gradients)
    one_input = batch.inputs.tokens.numel() * hidden * 4
    assert copied.count(one_input) >= layers
    weights = {p.nbytes for p in model.parameters()} - {one_input}
    assert not weights.intersection(copied)


def test_gradient_checkpointing_switches_no_dropout_on_whatever_a_model_calls_it() -> None:
    sizes = {
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 32,
        "num_hidden_layers": 2,
        "vocab_size": 13,
    }
    config = OPTConfig(
        **sizes, num_attention_heads=2, dropout=0.5, layerdrop=0.5, attention_dropout=0.5
    )
    batch = batches(LENGTHS, dtype=torch.float32)["supervised"]
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        trainer = LocalTrainer(
            OPTForCausalLM(config), TrainerOptions(lr=1e-3, gradient_checkpointing=checkpointing)
        )
        trainer.forward_backward(batch, _supervised, frozenset({"logprobs"}))
        gradients.append(torch.cat([gradient.flatten() for _, gradient in trainer.gradients()]))
    assert torch.allclose(*gradients, rtol=0, atol=1e-7)


def test_a_module_that_is_no_token_model_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match="Linear is neither"):
        LocalTrainer(torch.nn.Linear(2, 2), TrainerOptions(lr=1e-3))
