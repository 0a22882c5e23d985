from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
)

from oxrl.checkpoint.layout import NAMES
from oxrl.checkpoint.model_files import save_model
from oxrl.engines.sample.cached import CachedSampler
from oxrl.engines.sample.local import LocalSampler, module_sampler
from oxrl.engines.train.local import LocalTrainer
from oxrl.engines.train.options import TrainerOptions
from oxrl.errors import DataError, MachineError, NonFiniteError
from oxrl.modelfiles.builtin import BUILTIN_DIMS
from oxrl.modelfiles.dims import WITHOUT
from oxrl.models.load import (
    LoadOptions,
    load_critic,
    load_policy,
    load_tokenizer,
    named_in_errors,
)
from oxrl.models.weights import buckets


def test_the_tokenizer_has_one_token_per_byte_and_gives_any_text_back() -> None:
    tokenizer = load_tokenizer("builtin:tiny")
    text = "  12 + 7 = 19?\n\té 漢"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == BUILTIN_DIMS["builtin:tiny"]["vocab_size"] == 261


def test_the_chat_template_marks_roles_and_ends_every_message() -> None:
    tokenizer = load_tokenizer("builtin:tiny")
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|system|>s<|end|><|user|>1+2<|end|><|assistant|>"
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert len(ids) == 3 + 2 + 1 + 2 - 1 + 2
    assert tokenizer.decode(ids, skip_special_tokens=True) == "s1+2"
    assert tokenizer.eos_token == "<|end|>" and tokenizer.pad_token == "<|pad|>"


def test_builtin_weights_depend_on_the_seed_only() -> None:
    first, again, other = (
        load_policy("builtin:tiny", LoadOptions(seed=seed)) for seed in (0, 0, 1)
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first.state_dict()[name], again.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_the_small_model_has_the_benchmarks_size() -> None:
    assert sum(p.numel() for p in load_policy("builtin:small").parameters()) == pytest.approx(
        3.3e6, rel=0.02
    )


def test_a_saved_policy_and_tokenizer_load_from_their_directory(tmp_path: Path) -> None:
    model = load_policy("builtin:tiny", LoadOptions(seed=2, dtype=torch.bfloat16))
    save_model(model, tmp_path)
    load_tokenizer("builtin:tiny").save_pretrained(tmp_path)
    again = load_policy(str(tmp_path), LoadOptions(dtype=torch.bfloat16))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )
    assert load_tokenizer(str(tmp_path)).decode([69, 70]) == load_tokenizer("builtin:tiny").decode(
        [69, 70]
    )


def test_in_bfloat16_a_token_far_from_the_start_is_where_transformers_puts_it(
    tmp_path: Path,
) -> None:
    save_model(load_policy("builtin:tiny", LoadOptions(seed=2, dtype=torch.bfloat16)), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    tokens = torch.randint(5, 261, (1, 1500), generator=torch.Generator().manual_seed(0))
    for name in (str(tmp_path), "builtin:tiny"):
        ours = load_policy(name, LoadOptions(seed=2, dtype=torch.bfloat16))
        assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
        with torch.no_grad():
            assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
        critic = load_critic(name, LoadOptions(seed=2, dtype=torch.bfloat16))
        for found, expected in zip(critic.decoder.buffers(), theirs.buffers(), strict=True):
            assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_what_is_not_trained_and_still_part_of_the_model_is_saved_with_it(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "vocab_size": 261,
    }
    heads = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    }
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **heads, **experts)).eval()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.arange(4.0))
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3))
    trainer.save(tmp_path)
    assert torch.equal(load_policy(str(tmp_path)).get_buffer(name), torch.arange(4.0))
    with torch.no_grad():
        before = [p.clone() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.zero_()
    trainer.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_a_buffer_may_be_of_any_type_and_hold_infinite_values(tmp_path: Path) -> None:
    model = load_policy("builtin:tiny")
    buffers = {f"of_{kind}": torch.tensor([0, 1, 2]).to(dtype) for dtype, kind in NAMES.items()}
    buffers["mask"] = torch.full((3, 3), float("-inf")).triu(1)
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    trainer = LocalTrainer(model, TrainerOptions(lr=1e-3))
    trainer.save(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    for name, buffer in buffers.items():
        assert torch.equal(stored[name].view(torch.uint8), buffer.view(torch.uint8))
    save_file(stored, tmp_path / "library.safetensors", metadata={"format": "pt"})
    written = (tmp_path / "saved" / "model.safetensors").read_bytes()
    assert written == (tmp_path / "library.safetensors").read_bytes()
    trainer.load(tmp_path / "saved")
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[0] = float("inf")
    with pytest.raises(NonFiniteError, match=r"weight model\.norm\.weight: 1 of "):
        trainer.save(tmp_path / "broken")


def test_a_policy_is_not_made_of_a_checkpoint_that_lacks_weights(tmp_path: Path) -> None:
    critic = load_critic("builtin:tiny", LoadOptions(seed=0))
    torch.nn.init.ones_(critic.value_head.weight)
    save_model(critic, tmp_path)
    assert load_critic(str(tmp_path)).value_head.weight.eq(1).all()
    save_model(load_policy("builtin:tiny"), tmp_path / "policy")
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config["layer_types"].append("full_attention")
    (tmp_path / "policy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="lacks"):
        load_policy(str(tmp_path / "policy"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("builtin:huge", "builtin:tiny, builtin:small"), ("./no/such/model", "no directory")],
)
def test_an_unknown_name_says_what_would_work(name: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        load_policy(name)
    with pytest.raises(DataError, match=says):
        load_tokenizer(name)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory ran out"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory ran out"),
        (OSError(errno.ENOSPC, "No space left on device", "cache"), "the disk refused"),
        (MemoryError(), "memory ran out"),
    ],
)
def test_a_machine_without_room_is_not_told_as_a_model_that_is_missing(
    error: Exception, says: str, tmp_path: Path
) -> None:
    with pytest.raises(MachineError, match=says), named_in_errors("model", str(tmp_path)):
        raise error
    with pytest.raises(DataError, match="no model"), named_in_errors("model", str(tmp_path)):
        raise RuntimeError("unexpected key")


def test_a_chat_template_file_replaces_the_models_own(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer("builtin:tiny", chat_template=str(path))
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    )
    with pytest.raises(DataError, match="no file"):
        load_tokenizer("builtin:tiny", chat_template=str(tmp_path / "none"))


@pytest.mark.parametrize("stored", [False, True])
def test_attention_is_computed_by_what_is_asked_for(tmp_path: Path, stored: bool) -> None:
    name = "builtin:tiny"
    if stored:
        name = str(tmp_path)
        save_model(load_policy("builtin:tiny"), tmp_path)
        load_tokenizer("builtin:tiny").save_pretrained(tmp_path)
    tokens = torch.tensor([[5, 6, 7, 8]])
    logits: list[torch.Tensor] = []
    for attention, sampler in (("eager", CachedSampler), ("sdpa", LocalSampler)):
        model = load_policy(name, LoadOptions(attention=attention))
        assert model.config._attn_implementation == attention  # pyright: ignore
        logits.append(model(input_ids=tokens).logits)
        made = module_sampler(model, load_tokenizer("builtin:tiny"), max_rows=2)
        assert type(made) is sampler
        critic = load_critic(name, LoadOptions(attention=attention))
        assert critic.decoder.config._attn_implementation == attention  # pyright: ignore
    assert torch.allclose(*logits, atol=1e-5)


def test_families_without_an_attention_are_those_of_transformers() -> None:
    supports = {"sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}
    for wanted, families in WITHOUT.items():
        for family in (*families, "qwen3", "llama", "gemma3_text", "falcon"):
            found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[family]]
            model = found[0] if isinstance(found, tuple) else found
            assert getattr(model, supports[wanted]) is (family not in families), family


def test_buckets_keep_order_and_size() -> None:
    named = [(str(i), torch.zeros(10)) for i in range(5)]
    assert [[name for name, _ in bucket] for bucket in buckets(named, limit=80)] == [
        ["0", "1"],
        ["2", "3"],
        ["4"],
    ]
    assert [len(bucket) for bucket in buckets(named, limit=1)] == [1] * 5
