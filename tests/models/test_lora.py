"""Adapters in every recipe: what is trained, what is stored, what the reference and the sampler
see, and merging.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from oxrl.assembly.assemble import assemble
from oxrl.assembly.assembly import Assembly
from oxrl.checkpoint.model_files import save_model
from oxrl.commands.export import run_export
from oxrl.commands.train import run
from oxrl.config import Config, dump_config, load_config
from oxrl.engines.sample.local import LocalSampler
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.trainer import AdapterOff
from oxrl.errors import ConfigError
from oxrl.models.load import LoadOptions, load_critic, load_policy, load_tokenizer
from oxrl.models.lora import AdapterOptions, add_adapter
from oxrl.models.weights import adapter_off
from oxrl.plan.preflight import Prepared, examine
from oxrl.rewards.reward_model import RewardModel
from oxrl.rollouts.sync import SyncRollouts
from oxrl.runs.clock import Clock
from oxrl.types import Completion, Prompt, Segment, TokenBatch
from support.adapter_runs import AHEAD, KEPT, assert_sampled_by_their_versions, logits
from support.figures import SEED, Learned
from support.rewards_here import CODES
from support.small_runs import final_files, metric_lines, preference_config, rl_config, sft_config

pytest.importorskip("peft", reason='needs peft: pip install -e ".[dev]"')
BUILD = {
    "sft": sft_config,
    "dpo": preference_config,
    "reward_model": preference_config,
    "sgrpo": rl_config,
}
WANT = frozenset({"logprobs"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model on disk, as an adapter needs it."""
    folder = tmp_path_factory.mktemp("made")
    save_model(load_policy("builtin:tiny", LoadOptions(seed=7 + SEED)), folder)
    load_tokenizer("builtin:tiny").save_pretrained(folder)
    return folder


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    """The model, beside which a test has its runs."""
    return Path(shutil.copytree(made, tmp_path / "base"))


def config(
    base: Path, name: str, algorithm: str, overrides: tuple[str, ...] = (), **sections: Any
) -> Config:
    train = {"alg_name": algorithm, "lr": 1e-2} | sections.pop("train", {})
    last_checkpoint_only = {"checkpoint_every": 0}
    return BUILD.get(algorithm, rl_config)(
        base.parent,
        name,
        overrides,
        run=last_checkpoint_only | sections.pop("run", {}),
        model={"name": str(base)} | sections.pop("model", {}),
        lora=sections.pop("lora", {"rank": 4}),
        train=train,
        **sections,
    )


def newest(cfg: Config) -> Path:
    return max((cfg.run.directory / "checkpoints").glob("step_*"))


def some_tokens(rows: int = 3, length: int = 9) -> TokenBatch:
    tokens = torch.randint(5, 250, (rows, length), generator=torch.Generator().manual_seed(1))
    everything = torch.ones_like(tokens, dtype=torch.bool)
    return TokenBatch(tokens=tokens, attention_mask=everything, response_mask=everything)


DORA = {"rank": 4, "dora": True, "rslora": True}


@pytest.mark.parametrize(
    ("algorithm", "lora"),
    [
        *((name, {"rank": 4}) for name in BUILD),
        ("sgrpo", DORA),
        pytest.param("dpo", DORA, marks=pytest.mark.full),
    ],
    ids=[*BUILD, "sgrpo dora", "dpo dora"],
)
def test_a_run_stores_the_adapter_alone_and_resumes_exactly(
    base: Path, algorithm: str, lora: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"lora": lora}
    if algorithm == "sgrpo":
        (base.parent / "codes.py").write_text(CODES)
        given["reward"] = {"name": f"{base.parent / 'codes.py'}:codes"}
    whole = config(base, "whole", algorithm, ("run.steps=3",), **given)
    run(whole)
    names = {path.name for path in newest(whole).iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert not [name for name in names if name.startswith("model")]
    adapted = json.loads((newest(whole) / "adapter_config.json").read_text())["target_modules"]
    assert adapted == sorted(adapted) and len(adapted) == 7
    assert (
        sum(
            len(data)
            for name, data in final_files(whole.run.directory).items()
            if "optimizer" in name
        )
        < 300_000
    )
    assert all(line["update/grad_norm"] > 0 for line in metric_lines(whole.run.directory))

    part = config(base, "part", algorithm, ("run.steps=2",), **given)
    run(part)
    (part.run.directory / "result.json").unlink()
    written = part.run.directory / "config.yaml"
    written.write_text(written.read_text().replace("steps: 2", "steps: 3"))
    run(config(base, "part", algorithm, ("run.steps=3",), **given), resume=True)
    left, right = final_files(whole.run.directory), final_files(part.run.directory)
    assert (
        left.keys() == right.keys() and [name for name in left if left[name] != right[name]] == []
    )


def test_only_the_adapter_is_trained_and_it_starts_as_nothing(base: Path) -> None:
    plain, adapted = load_policy(str(base)), load_policy(str(base))
    add_adapter(adapted, AdapterOptions(rank=4, alpha=32.0), base=str(base), seed=0)
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all(
        "lora_" in name for name in trained
    )  # A and B, 7 linears, 2 layers
    assert sum(adapted.get_parameter(name).numel() for name in trained) == 4 * 2 * (
        9 * 64 + 2 * 64 + 3 * 256
    )
    tokens = some_tokens().tokens
    assert torch.equal(logits(plain, tokens), logits(adapted, tokens))
    some = load_policy(str(base))
    two = AdapterOptions(rank=2, alpha=32.0, targets="q_proj, v_proj")
    add_adapter(some, two, base=str(base), seed=0)
    assert (
        len([name for name, parameter in some.named_parameters() if parameter.requires_grad])
        == 2 * 2 * 2
    )
    with pytest.raises(ConfigError, match=r"no linear layer for \['qproj'\].* \['down_proj'"):
        wrong = AdapterOptions(rank=2, alpha=1.0, targets="qproj")
        add_adapter(load_policy(str(base)), wrong, base=str(base), seed=0)


@pytest.mark.parametrize("targets", ["all-linear", "c_attn"])
def test_a_model_without_linear_layers_is_refused_in_words_by_plan_too(
    targets: str, tmp_path: Path
) -> None:
    """The layers of GPT-2 are of another class."""
    settings = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=261, eos_token_id=1)
    GPT2LMHeadModel(settings).save_pretrained(tmp_path / "base")
    load_tokenizer("builtin:tiny").save_pretrained(tmp_path / "base")
    cfg = config(tmp_path / "base", "run", "sft", (f"lora.targets={targets}",))
    said = f"the model has no linear layer for .*{targets}.*none beside its output head"
    found = examine(cfg, Prepared(), "adapter")
    assert found.state == "wrong" and re.search(said, found.text)
    with pytest.raises(ConfigError, match=said):
        run(cfg)
    with pytest.raises(ConfigError, match=said):
        Assembly(cfg).policy_to_train()


@pytest.mark.parametrize("dora", [False, True])
def test_plan_puts_the_adapter_on_a_model_without_weights(dora: bool, base: Path) -> None:
    cfg = config(base, "run", "sft", lora={"rank": 4, "dora": dora})
    assert examine(cfg, Prepared(), "adapter").state == "ok"
    cfg = config(base, "run", "sft", ("lora.targets=qproj",))
    assert "['down_proj', 'gate_proj'" in examine(cfg, Prepared(), "adapter").text


def test_another_kind_of_layer_with_the_name_of_a_linear_one_is_refused_in_words() -> None:
    model = load_policy("builtin:tiny")
    model.get_submodule("model.layers.0").add_module("q_proj", torch.nn.LayerNorm(64))
    with pytest.raises(ConfigError, match=r"LayerNorm.* is not supported.* name others of"):
        add_adapter(model, AdapterOptions(rank=2, alpha=1.0), base="builtin:tiny", seed=0)


def test_the_adapter_switched_off_is_the_base_and_the_sampler_sees_it_switched_on(
    base: Path,
) -> None:
    cfg = config(base, "run", "sgrpo")
    with ExitStack() as stack:
        machine = assemble(Assembly(cfg), Clock(), stack)
        trainer = machine.policy
        assert isinstance(machine.source, SyncRollouts)
        sampler = machine.source.parts.sampler
        assert isinstance(trainer, LocalTrainer) and isinstance(sampler, LocalSampler)
        before = trainer.forward(some_tokens(), WANT).logprobs
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
        sampler.update_weights(trainer.weights(), version=1)
        inputs = some_tokens()
        adapted = trainer.forward(inputs, WANT).logprobs
        reference = AdapterOff(trainer).forward(inputs, WANT).logprobs
        assert before is not None and adapted is not None and reference is not None
        sampled = torch.tensor(sampler.logprobs(inputs.tokens.tolist()))
        torch.testing.assert_close(sampled, adapted, rtol=0, atol=1e-5)
        assert torch.equal(reference, before)
        assert (adapted - reference).abs().max() > 0.1
        assert torch.equal(trainer.forward(inputs, WANT).logprobs, adapted)  # it is on again


def test_training_on_its_own_samples_meets_no_mismatch_and_a_reference_without_a_second_model(
    base: Path, learned: Learned
) -> None:
    cfg = config(base, "run", "sgrpo", train={"kl": "loss_k3", "kl_coeff": 0.1})
    with ExitStack() as stack:
        machine = assemble(Assembly(cfg), Clock(), stack)
        assert isinstance(machine.models["reference"], AdapterOff)
    run(cfg)
    lines = metric_lines(cfg.run.directory)
    assert max(line["mismatch/abs_logdiff_max"] for line in lines) < 1e-4
    assert lines[0]["kl/ref_k3"] == pytest.approx(0, abs=1e-6)
    learned("log10 of kl/ref_k3", math.log10(lines[-1]["kl/ref_k3"]), at_least=-4)


def test_tokens_drawn_ahead_are_of_the_adapters_whose_versions_they_have(
    base: Path, learned: Learned
) -> None:
    cfg = config(base, "run", "sgrpo", run=KEPT, rollout=AHEAD)
    run(cfg)
    assert_sampled_by_their_versions(cfg.run.directory, learned)


def test_the_reference_of_dpo_is_the_base(base: Path, learned: Learned) -> None:
    cfg = config(base, "adapted", "dpo", ("run.steps=14",))
    run(cfg)
    full = preference_config(
        base.parent,
        "full",
        model={"name": str(base)},
        train={"alg_name": "dpo", "lr": 1e-2},
        run={"steps": 1},
    )
    run(full)
    first, other = (metric_lines(c.run.directory)[0] for c in (cfg, full))
    for key in ("update/loss", "preference/chosen_logprobs", "preference/displacement"):
        assert first[key] == pytest.approx(other[key], abs=1e-5)
    last = metric_lines(cfg.run.directory)[-1]
    learned("update/loss", last["update/loss"], at_most=0.65)  # ln 2 is no preference


def test_a_checkpoint_loads_in_transformers_and_merges_into_the_same_model(
    base: Path, tmp_path: Path, learned: Learned
) -> None:
    cfg = config(base, "run", "sft")
    run(cfg)
    tokens = some_tokens().tokens
    theirs = AutoModelForCausalLM.from_pretrained(newest(cfg)).eval()
    assert AutoTokenizer.from_pretrained(newest(cfg)).chat_template
    ours = load_policy(str(newest(cfg)))
    run_export(cfg.run.directory, tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    expected = logits(theirs, tokens)
    torch.testing.assert_close(logits(ours, tokens), expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits(merged, tokens), expected, rtol=0, atol=1e-4)
    moved = (expected - logits(load_policy(str(base)), tokens)).abs().max()
    learned("what a logit moved", moved.item(), at_least=0.1)
    with adapter_off(theirs):
        torch.testing.assert_close(
            logits(theirs, tokens), logits(load_policy(str(base)), tokens), rtol=0, atol=1e-6
        )


def test_merging_adds_alpha_over_rank_times_b_a_to_the_weight(base: Path, tmp_path: Path) -> None:
    cfg = config(base, "run", "sft", ("lora.alpha=6", "lora.targets=q_proj", "run.steps=2"))
    run(cfg)
    adapter = load_file(newest(cfg) / "adapter_model.safetensors")
    prefix, name = "base_model.model.", "model.layers.1.self_attn.q_proj"
    a, b = (adapter[f"{prefix}{name}.lora_{part}.weight"] for part in "AB")
    weight, merged = (
        load_policy(str(f)).get_parameter(f"{name}.weight") for f in (base, newest(cfg))
    )
    assert a.shape == (4, 64) and b.abs().max() > 0
    torch.testing.assert_close(merged, weight + 6 / 4 * b @ a, rtol=0, atol=1e-6)


def by_hand(base: Path, adapter: Path, scale: float) -> Any:
    """The model that DoRA's equation 5 describes: rows of W + s B A, as long as their magnitudes."""
    model: Any = load_policy(str(base))
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for key, magnitude in tensors.items():
            if key.endswith("lora_magnitude_vector.weight"):
                place = key.removesuffix("lora_magnitude_vector.weight")
                weight = model.get_parameter(f"{place.removeprefix('base_model.model.')}weight")
                a, b = (tensors[f"{place}lora_{part}.weight"] for part in "AB")
                direction = weight.double() + scale * (b.double() @ a.double())
                unit = direction / direction.square().sum(1, keepdim=True).sqrt()
                weight.copy_(magnitude[:, None] * unit)
    return model


def test_dora_with_rslora_loads_in_transformers_and_merges_as_its_equation_says(
    base: Path, tmp_path: Path, learned: Learned
) -> None:
    cfg = config(base, "run", "sft", ("lora.alpha=6",), lora=DORA)
    run(cfg)
    noted = json.loads((newest(cfg) / "adapter_config.json").read_text())
    assert noted["use_dora"] and noted["use_rslora"]
    expected = logits(by_hand(base, newest(cfg), 6 / 4**0.5), some_tokens().tokens)
    run_export(cfg.run.directory, tmp_path / "merged")
    theirs = AutoModelForCausalLM.from_pretrained(newest(cfg)).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for model in (theirs, merged, load_policy(str(newest(cfg)))):
        found = logits(model, some_tokens().tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    wrong_scale = logits(by_hand(base, newest(cfg), 6 / 4), some_tokens().tokens)
    off = (wrong_scale - expected).abs().max()
    learned("log10 of what the wrong scale changes", math.log10(off.item()), at_least=-2)
    before = load_policy(str(base))
    trained = load_file(newest(cfg) / "adapter_model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    magnitude = trained[f"base_model.model.{name}.lora_magnitude_vector.weight"]
    start = torch.linalg.norm(before.get_parameter(f"{name}.weight"), dim=1)
    learned("magnitudes trained", (magnitude - start).abs().max().item(), at_least=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dora_starts_as_nothing_and_switches_off(base: Path, dtype: str) -> None:
    stored = LoadOptions(dtype=getattr(torch, dtype))
    plain, adapted = load_policy(str(base), stored), load_policy(str(base), stored)
    add_adapter(adapted, AdapterOptions(rank=4, alpha=8.0, dora=True), base=str(base), seed=0)
    tokens = some_tokens().tokens
    assert torch.equal(logits(plain, tokens), logits(adapted, tokens))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                assert parameter.requires_grad and parameter.dtype == torch.float32
                parameter.mul_(1.5)
    assert (logits(plain, tokens) - logits(adapted, tokens)).abs().max() > 0.1
    with adapter_off(adapted):
        assert torch.equal(logits(plain, tokens), logits(adapted, tokens))


@pytest.mark.full
def test_dora_in_bfloat16_samples_from_what_it_trains(base: Path) -> None:
    bfloat16 = {"dtype": "bfloat16"}
    cfg = config(base, "run", "sgrpo", ("run.steps=2",), lora=DORA, model=bfloat16)
    run(cfg)
    assert max(line["mismatch/abs_logdiff_max"] for line in metric_lines(cfg.run.directory)) < 0.2


def test_a_reward_model_with_an_adapter_scores_as_merged(
    base: Path, tmp_path: Path, learned: Learned
) -> None:
    cfg = config(base, "run", "reward_model")
    run(cfg)
    run_export(cfg.run.directory, tmp_path / "merged")
    prompt = Prompt(uid="0", messages=({"role": "user", "content": "say 1"},), token_ids=(1,))
    segment = Segment(token_ids=(1,), logprobs=(0.0,), versions=(0,))
    answers = [
        Completion(segments=(segment,), text=text, finish_reason="stop") for text in ("17", "abc")
    ]
    adapted, merged = (
        [score.value for score in RewardModel(folder)(prompt, answers)]
        for folder in (newest(cfg), tmp_path / "merged")
    )
    assert adapted == pytest.approx(merged, rel=1e-4)
    learned("log10 of a score", math.log10(max(map(abs, adapted))), at_least=-3)
    assert load_critic(str(tmp_path / "merged")).value_head.weight.abs().max() > 0


def test_adapters_learn_at_ten_times_the_default_rate(base: Path) -> None:
    def resolved(**sections: Any) -> str:
        cfg = sft_config(base.parent, "lr", ["~train.lr"], model={"name": str(base)}, **sections)
        return dump_config(cfg)

    assert "  lr: 1.0e-06\n" in resolved() and "alpha" not in resolved()
    assert "  lr: 1.0e-05\n" in resolved(lora={"rank": 8}) and "  alpha: 32.0\n" in resolved(
        lora={"rank": 8}
    )
    assert "  lr: 0.5\n" in dump_config(config(base, "set", "sft", train={"lr": 0.5}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=builtin:tiny"], "stored without the model under it"),
        (["train.backend=deepspeed", "model.dtype=bfloat16"], "DeepSpeed rounds adapters"),
        (["train.alg_name=tr_dpo"], "moves its reference by all weights"),
        (["lora.rank=0", "lora.alpha=16"], "is read with lora.rank above 0"),
        (["lora.rank=0", "lora.dora=true"], "is read with lora.rank above 0"),
        (["lora.delivery=merged"], "samplers have weights of their own"),
    ],
)
def test_what_adapters_cannot_do_is_an_error(
    base: Path, overrides: list[str], message: str
) -> None:
    path = config(base, "run", "dpo").run.directory.with_suffix(".yaml")
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=message):
        warnings.simplefilter("ignore", UserWarning)
        load_config(path, overrides)


def test_an_adapter_on_an_adapter_is_refused(base: Path) -> None:
    cfg = config(base, "run", "sft", ("run.steps=1",))
    run(cfg)
    with pytest.raises(ConfigError, match="merge it first"):
        config(base, "again", "sft", (f"model.name={newest(cfg)}",))
    run(
        sft_config(base.parent, "full", ["run.steps=1"], model={"name": str(newest(cfg))})
    )  # merged when loaded
