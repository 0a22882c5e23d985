"""`exact.json`: what is promised of bits, what that depends on, and who is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from oxrl.errors import CheckpointError, ConfigError, EngineError
from oxrl.models import exact, exact_contract
from oxrl.models.exact_contract import Contract, find_contract

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


def qwen3(**changed: Any) -> PreTrainedConfig:
    return Qwen3Config(**SMALL | changed)


def written(contract: Contract, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    contract.write(folder)
    return json.loads((folder / "exact.json").read_text())


def test_the_file_says_what_is_promised_and_what_that_depends_on(tmp_path: Path) -> None:
    found = written(find_contract(qwen3()), tmp_path)
    assert [*sorted(found)] == [
        "claims",
        "constants",
        "digest",
        "format",
        "instructions",
        "model",
        "probe",
        "versions",
    ]
    assert found["versions"]["torch"] == torch.__version__
    assert re.fullmatch(r"\d+\.\d+(\.\d+)?", found["versions"]["oneDNN"])
    assert torch.backends.cpu.get_cpu_capability() in found["instructions"]
    assert found["constants"] == {"rows": exact.ROWS, "keys": exact.KEYS, "values": exact.VALUES}
    assert "gradients" in found["claims"][1]
    # Anybody can compute the digest: it is of everything else, keys in order.
    digest = found.pop("digest")
    assert digest == sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def test_it_is_the_same_again_and_on_more_threads() -> None:
    once = find_contract(qwen3())
    usual = torch.get_num_threads()
    state = torch.get_rng_state()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert find_contract(qwen3()) == once
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(torch.get_rng_state(), state)  # nobody's random numbers are taken


def test_sizes_of_the_model_make_no_difference_and_its_kind_does() -> None:
    once = find_contract(qwen3())
    larger = qwen3(hidden_size=256, intermediate_size=512, num_attention_heads=16, vocab_size=900)
    larger.num_key_value_heads = 8
    assert find_contract(larger) == once
    assert find_contract(LlamaConfig(**SMALL)).digest != once.digest
    assert find_contract(qwen3(hidden_act="gelu")).digest != once.digest


def other_instructions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")


def other_onednn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exact_contract, "onednn_version", lambda: "9.9.9")


def other_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "__version__", "9.9.9")


def other_machine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("platform.machine", lambda: "riscv64")


def other_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(exact_contract, "ROWS", 8)


def other_numbers(patch: pytest.MonkeyPatch) -> None:
    """As a library's that adds up in another order: nothing that is told by a name changes."""
    usual = exact_contract.small_copy

    def changed(*given: Any, **options: Any) -> Any:
        model = usual(*given, **options)
        head: Any = model.get_output_embeddings()
        head.weight.data.mul_(1 + 1e-6)
        return model

    patch.setattr(exact_contract, "small_copy", changed)


OTHERS = {
    "AVX9": other_instructions,
    "oneDNN 9.9.9": other_onednn,
    "torch 9.9.9": other_torch,
    "riscv64": other_machine,
    "rows 8": other_rows,
    "probe": other_numbers,
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_machine_that_differs_in_one_thing_is_refused_with_both_lines(
    what: str, tmp_path: Path
) -> None:
    here = find_contract(qwen3())
    with pytest.MonkeyPatch.context() as patch:
        OTHERS[what](patch)
        there = find_contract(qwen3())
    assert there.line != here.line
    assert what in there.line
    here.write(tmp_path)
    here.check_resumed(tmp_path)
    here.check_same(find_contract(qwen3()))
    there.check_same(None)
    with pytest.raises(CheckpointError) as refused:
        there.check_resumed(tmp_path)
    lines = str(refused.value).splitlines()
    assert lines[1].split("then")[1].strip() == here.line
    assert lines[2].split("now")[1].strip() == there.line
    assert "run.exact: false" in lines[3]
    with pytest.raises(EngineError) as differs:
        there.check_same(here)
    lines = str(differs.value).splitlines()
    assert lines[1].split("first")[1].strip() == here.line
    assert lines[2].split("other")[1].strip() == there.line
    assert "run.exact: false" in lines[3]


def test_a_checkpoint_of_a_run_that_promised_nothing_is_taken(tmp_path: Path) -> None:
    find_contract(qwen3()).check_resumed(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"digest": 7}', "{}"])
def test_a_damaged_contract_is_no_contract_that_is_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "exact.json").write_text(content)
    if content in ("", "[]"):
        find_contract(qwen3()).check_resumed(tmp_path)  # verification of checkpoints finds these
        return
    with pytest.raises(CheckpointError):
        find_contract(qwen3()).check_resumed(tmp_path)


CODE = """
from transformers import Qwen3Config
from oxrl.models.exact_contract import find_contract
import json, sys
print(find_contract(Qwen3Config(**json.loads(sys.argv[1]))).line)
"""


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"ATEN_CPU_CAPABILITY": "default"}, "DEFAULT"),
        pytest.param({"ONEDNN_MAX_CPU_ISA": "SSE41"}, "probe", marks=pytest.mark.full),
    ],
    ids=["PyTorch", "oneDNN"],
)
def test_a_processor_that_is_told_to_use_fewer_instructions_has_another_contract(
    told: dict[str, str], words: str
) -> None:
    """Only PyTorch says what it uses; that oneDNN uses others is seen in what it computes."""
    here = find_contract(qwen3())
    found = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(SMALL)],
        env=os.environ | told,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.strip()
    assert words in found
    assert found != here.line
    assert digits_of("probe", found) != digits_of("probe", here.line)


def digits_of(name: str, line: str) -> str:
    found = re.search(rf"{name} ([0-9a-f]+)", line)
    assert found is not None, line
    return found[1]


# --- Models of which some part has no exact form.
REFUSED = {
    "an activation": (("Qwen3Config", {"hidden_act": "mish"}), "MishActivation"),
    "another activation": (("LlamaConfig", {"hidden_act": "quick_gelu"}), "QuickGELUActivation"),
    "a window": (("MistralConfig", {"sliding_window": 64}), "sliding_window"),
    "some windows": (
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
        "sliding_window",
    ),
    "a softcap": (("Gemma2Config", {}), "softcap"),
    "sinks": (("GptOssConfig", {"num_local_experts": 4}), "GptOssAttention"),
    "experts": (("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32}), "Experts"),
    "experts of a router": (("MixtralConfig", {"num_local_experts": 4}), "Mixtral"),
    "transposed layers": (("GPT2Config", {}), "Conv1D"),
    "a recurrent state": (("MambaConfig", {}), "MambaMixer"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_without_an_exact_form_is_refused_by_what_has_none(kind: str) -> None:
    import transformers

    (name, values), words = REFUSED[kind]
    config = getattr(transformers, name)(**SMALL | values)
    with pytest.raises(ConfigError) as refused:
        find_contract(config)
    text = str(refused.value)
    assert text.startswith("run.exact: no exact form of ")
    assert words in text
    assert " exists; set run.exact: false" in text


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"])
def test_activations_with_an_exact_form_are_taken(act: str) -> None:
    assert find_contract(LlamaConfig(**SMALL, hidden_act=act)).facts["model"] == "LlamaForCausalLM"
