"""Adapters on weights in four bits (QLoRA): what is trained, stored, merged and delivered."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.checkpoint.model_files import save_model
from oxrl.commands.export import run_export
from oxrl.commands.train import run
from oxrl.config import Config
from oxrl.engines.delivery.sync import SyncOptions, WeightSync
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import ConfigError, DataError, MissingExtraError
from oxrl.modelfiles.dims import model_dims
from oxrl.models.four_bit import NOTE, in_four_bits, whole_type, whole_weight
from oxrl.models.load import LoadOptions, load_critic, load_policy, load_tokenizer
from oxrl.models.lora import AdapterOptions, add_adapter
from oxrl.models.weights import adapter_off
from oxrl.plan.memory import frozen_bytes
from oxrl.plan.plan import memory, plan_text
from oxrl.types import TokenBatch
from support.adapter_runs import learn
from support.checks_here import examine_here
from support.small_runs import final_files, metric_lines, preference_config, rl_config, sft_config

pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: the extra qlora"
)
BUILD = {
    "sft": sft_config,
    "dpo": preference_config,
    "reward_model": preference_config,
    "sgrpo": rl_config,
    "ppo": rl_config,
}
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk, as an adapter needs it."""
    folder = tmp_path_factory.mktemp("made")
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7)), folder)
    load_tokenizer("builtin:tiny").save_pretrained(folder)
    return folder


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    """The model, beside which a test has its runs."""
    return Path(shutil.copytree(made, tmp_path / "base"))


def config(base: Path, name: str, algorithm: str, overrides: tuple[str, ...] = ()) -> Config:
    return BUILD[algorithm](
        base.parent,
        name,
        overrides,
        model={"name": str(base), "load_in_4bit": True},
        lora={"rank": 4},
        train={"alg_name": algorithm, "lr": 1e-2},
    )


def adapted(base: Path, options: AdapterOptions, **load: Any) -> Any:
    model = load_policy(str(base), LoadOptions(four_bit="held", **load))
    add_adapter(model, options, base=str(base), seed=0)
    return model


def logits(model: Any, device: str = "cpu") -> torch.Tensor:
    tokens = torch.randint(5, 250, (3, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=tokens.to(device), use_cache=False).logits.float().cpu()


@needs_bitsandbytes
@TYPES
def test_linear_layers_are_held_in_four_bits_and_read_back_as_they_compute(
    base: Path, dtype: torch.dtype
) -> None:
    held = load_policy(str(base), LoadOptions(four_bit="held", dtype=dtype))
    rounded = load_policy(str(base), LoadOptions(four_bit="rounded", dtype=dtype))
    plain = load_policy(str(base), LoadOptions(dtype=dtype))
    whole = dict(plain.named_parameters())
    linear = [name for name, weight in held.named_parameters() if weight.dtype == torch.uint8]
    assert len(linear) == 14 and in_four_bits(held) and not in_four_bits(rounded)
    for name, weight in held.named_parameters():
        assert (
            whole_type(weight)
            == (whole[name].shape, whole[name].dtype)
            == (whole[name].shape, dtype)
        )
        assert torch.equal(whole_weight(weight), rounded.get_parameter(name))
        if name in linear:
            assert weight.nbytes == weight.numel() == whole[name].numel() // 2
            assert (
                0
                < (whole_weight(weight) - whole[name]).abs().mean()
                < 0.1 * whole[name].abs().mean()
            )
        else:
            assert torch.equal(weight, whole[name])
    close = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(logits(held), logits(rounded), rtol=0, atol=close)
    assert not torch.allclose(logits(held), logits(plain), rtol=0, atol=close)


@needs_bitsandbytes
@TYPES
def test_the_plan_counts_the_bytes_that_are_held(base: Path, dtype: torch.dtype) -> None:
    """The tables of codes, the same for every layer, are beside the count."""
    held = load_policy(str(base), LoadOptions(four_bit="held", dtype=dtype))
    measured = 0
    for weight in held.parameters():
        measured += weight.nbytes
        state = getattr(weight, "quant_state", None)
        if state is not None:
            measured += state.absmax.nbytes + state.state2.absmax.nbytes
    cfg = config(base, "counted", "sft", (f"model.dtype={str(dtype).removeprefix('torch.')}",))
    dims = model_dims(str(base))
    assert dims is not None
    assert frozen_bytes(cfg, dims) == pytest.approx(measured, rel=0.005)
    whole = config(base, "whole", "sft", ("model.load_in_4bit=false",))
    assert memory(cfg, dims).phases["update"] < memory(whole, dims).phases["update"]
    assert "in four bits" in plan_text(cfg) and "in four bits" not in plan_text(whole)


@needs_bitsandbytes
@pytest.mark.parametrize("algorithm", BUILD)
def test_a_run_stores_the_adapter_alone_and_resumes_exactly(base: Path, algorithm: str) -> None:
    whole = config(base, "whole", algorithm)
    run(whole)
    newest = max((whole.run.directory / "checkpoints").glob("step_*"))
    names = {path.name for path in newest.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", NOTE} <= names
    assert not [name for name in names if name.startswith("model")]
    assert all(line["update/grad_norm"] > 0 for line in metric_lines(whole.run.directory))
    stopped = ("run.steps=4", "run.dir=" + str(base.parent / "part"))
    part = config(base, "part", algorithm, stopped)
    run(part)
    (part.run.directory / "result.json").unlink()
    written = part.run.directory / "config.yaml"
    written.write_text(written.read_text().replace("steps: 4", "steps: 6"))
    run(config(base, "part", algorithm), resume=True)
    left, right = final_files(whole.run.directory), final_files(part.run.directory)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []


@needs_bitsandbytes
@pytest.mark.parametrize(
    "options",
    [
        AdapterOptions(rank=4, alpha=8.0),
        AdapterOptions(rank=4, alpha=8.0, dora=True, rslora=True),
    ],
    ids=["lora", "dora"],
)
def test_a_checkpoint_is_merged_into_the_weights_that_it_learned_on(
    base: Path, tmp_path: Path, options: AdapterOptions
) -> None:
    policy = LocalTrainer(adapted(base, options), TrainerOptions(lr=1e-3))
    with adapter_off(policy.model):
        torch.testing.assert_close(
            logits(policy.model), logits(load_policy(str(base), LoadOptions(four_bit="held")))
        )
    learn(policy, 2)
    folder = tmp_path / "adapter"
    policy.save(folder)
    load_tokenizer("builtin:tiny").save_pretrained(folder)
    merged = load_policy(str(folder))
    assert not in_four_bits(merged)
    torch.testing.assert_close(logits(merged), logits(policy.model), rtol=0, atol=1e-5)
    run_export(folder, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    assert torch.equal(logits(load_policy(str(tmp_path / "out"))), logits(merged))
    # Onto the weights as they are stored it computes something else.
    (folder / NOTE).unlink()
    assert not torch.allclose(logits(load_policy(str(folder))), logits(merged), atol=1e-3)
    (folder / NOTE).write_text('{"load_in_8bit": true}')
    with pytest.raises(DataError, match="only NF4 is known"):
        load_policy(str(folder))


@needs_bitsandbytes
def test_a_critic_of_a_checkpoint_stands_on_the_weights_that_it_learned_on(
    base: Path, tmp_path: Path
) -> None:
    critic: Any = load_critic(str(base), LoadOptions(four_bit="held"))
    add_adapter(critic.decoder, AdapterOptions(rank=4, alpha=8.0), base=str(base), seed=0)
    policy = LocalTrainer(critic, TrainerOptions(lr=1e-3))
    learn(policy, 2)
    with torch.no_grad():
        critic.value_head.weight.fill_(0.01)
    policy.save(tmp_path / "critic")
    loaded = load_critic(str(tmp_path / "critic"))
    tokens = torch.randint(5, 250, (3, 9), generator=torch.Generator().manual_seed(1))
    everything = torch.ones_like(tokens, dtype=torch.bool)
    inputs = TokenBatch(tokens=tokens, attention_mask=everything, response_mask=everything)
    want = frozenset({"values"})
    ours = policy.forward(inputs, want).values
    theirs = LocalTrainer(loaded, TrainerOptions(lr=1e-3)).forward(inputs, want).values
    assert ours is not None and theirs is not None and ours.abs().max() > 0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@needs_bitsandbytes
@TYPES
def test_merged_weights_are_delivered_and_proved(base: Path, dtype: torch.dtype) -> None:
    model = adapted(base, AdapterOptions(rank=4, alpha=8.0), dtype=dtype)
    policy = LocalTrainer(model, TrainerOptions(lr=1e-3))
    plain = LoadOptions(dtype=dtype)
    sampler = LocalSampler(load_policy(str(base), plain), load_tokenizer(str(base)), max_rows=4)
    how = SyncOptions(dtype=dtype, vocabulary=261, temperature=1.0, probe_tokens=64, part="merged")
    sync = WeightSync(policy, sampler, how, lambda: load_policy(str(base), plain))
    for version in range(1, 3):
        learn(policy, version)
        sync.deliver(version)
    metrics = sync.metrics()
    assert metrics["sync/retries"] == 0 and metrics["sync/probe_limit_share"] < 1
    close = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(logits(sampler.model), logits(policy.model), rtol=0, atol=close)


@pytest.mark.gpu
@needs_bitsandbytes
def test_on_a_gpu_codes_are_held_there_and_merged_weights_compute_the_same(base: Path) -> None:
    model = adapted(base, AdapterOptions(rank=4, alpha=8.0), dtype=torch.bfloat16, device="cuda")
    assert {weight.device.type for weight in model.parameters()} == {"cuda"}
    policy = LocalTrainer(model, TrainerOptions(lr=1e-3))
    learn(policy, 2)
    merged = load_policy(str(base), LoadOptions(dtype=torch.bfloat16, device="cuda"))
    with torch.no_grad():
        for bucket in policy.weights("merged"):
            for name, weight in bucket:
                merged.get_parameter(name).copy_(weight)
    found = logits(merged, "cuda")
    torch.testing.assert_close(found, logits(policy.model, "cuda"), rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"lora": {"rank": 0}}, "model.load_in_4bit = true\n +is read with lora.rank above 0"),
        ({"train": {"backend": "fsdp"}}, "set train.backend to local"),
        ({"inference_engine": {"actors": 1}}, "set lora.delivery to merged"),
    ],
    ids=["no adapter", "several ranks", "samplers of their own"],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(
    base: Path, sections: dict[str, Any], said: str
) -> None:
    given = {
        "model": {"name": str(base), "load_in_4bit": True},
        "lora": {"rank": 4},
        "train": {"alg_name": "sgrpo", "lr": 1e-2} | sections.get("train", {}),
        "inference_engine": sections.get("inference_engine", {}),
    }
    with pytest.raises(ConfigError, match=said):
        rl_config(base.parent, "refused", (), **given | {"lora": sections.get("lora", {"rank": 4})})


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_without_bitsandbytes_plan_and_error_name_the_extra(base: Path) -> None:
    cfg = config(base, "planned", "sft")
    found = {subject: (state, said) for subject, state, said in examine_here(cfg)}
    state, said = found["optimizer"]
    assert state == "wrong" and "[qlora]" in said
    with pytest.raises(MissingExtraError, match=r"oxrl\[qlora\]"):
        load_policy(str(base), LoadOptions(four_bit="held"))
