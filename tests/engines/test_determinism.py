"""`run.deterministic`: what PyTorch, cuBLAS and vLLM are told. Its effect needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from oxrl.engines.determinism import cumulative_sum
from oxrl.engines.sample import vllm
from support.command_line import oxrl

TELLS = """
import json, os, torch
from oxrl.config import Config
from oxrl.assembly.assembly import Assembly

os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
os.environ.update({environment!r})
Assembly(Config.model_validate({sections!r})).device
print(json.dumps([
    torch.are_deterministic_algorithms_enabled(),
    torch.backends.cudnn.deterministic,
    os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
]))
"""


def told(
    folder: Path, deterministic: bool | None, workspace: str | None = None
) -> subprocess.CompletedProcess[str]:
    run = {"name": "told", "steps": 1, "device": "cpu"}
    if deterministic is not None:
        run["deterministic"] = deterministic
    sections = {
        "run": run,
        "model": {"name": "builtin:tiny"},
        "data": {"train": "rows.jsonl"},
        "train": {"alg_name": "sft"},
    }
    environment = {} if workspace is None else {"CUBLAS_WORKSPACE_CONFIG": workspace}
    script = folder / "tells.py"
    script.write_text(TELLS.format(environment=environment, sections=sections))
    return oxrl(folder=folder, script=script)


def test_deterministic_kernels_are_asked_for_by_the_field_and_not_without_it(
    tmp_path: Path,
) -> None:
    assert json.loads(told(tmp_path, None).stdout) == [False, False, None]
    assert json.loads(told(tmp_path, True, ":16:8").stdout) == [True, True, ":16:8"]


def test_a_workspace_that_is_not_deterministic_is_refused_with_its_value(tmp_path: Path) -> None:
    said = told(tmp_path, True, ":0:0")
    assert said.returncode != 0
    assert "CUBLAS_WORKSPACE_CONFIG is ':0:0'" in said.stderr
    assert "use :4096:8 or :16:8" in said.stderr


def test_sums_are_those_of_pytorch() -> None:
    values = torch.rand(3, 50)
    assert torch.equal(cumulative_sum(values), values.cumsum(1))


class AfterTheSettings(Exception):
    """What VllmEngine does next needs vLLM and a GPU."""


@pytest.mark.parametrize("asked", [True, False])
def test_vllm_on_a_gpu_is_told_to_be_batch_invariant(
    asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise AfterTheSettings

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm, "load_tokenizer", stop)
    with pytest.raises(AfterTheSettings):
        vllm.VllmEngine("model", vllm.VllmOptions(log_file="vllm.log", batch_invariant=asked))
    assert os.environ.get("VLLM_BATCH_INVARIANT") == ("1" if asked else None)


@pytest.mark.gpu
def test_a_gpu_sums_alike_every_time(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.use_deterministic_algorithms(True)
    try:
        values = torch.rand(64, 150_000, device="cuda")
        assert torch.equal(cumulative_sum(values), cumulative_sum(values))
    finally:
        torch.use_deterministic_algorithms(False)
