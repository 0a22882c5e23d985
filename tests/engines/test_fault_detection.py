"""Faults on the way of a weight to a sampled token, as `benchmarks/fault_detection.py` makes them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    path = ROOT / "benchmarks" / "fault_detection.py"
    spec = importlib.util.spec_from_file_location("fault_detection", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("dtype", "running"),
    [
        ("bfloat16", True),
        pytest.param("float32", False, marks=pytest.mark.full),
        pytest.param("float32", True, marks=pytest.mark.full),
    ],
)
def test_every_fault_whose_bytes_differ_is_found_wherever_it_happens(
    faults: ModuleType, dtype: str, running: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A smaller model and fewer rows: every trial takes steps and deliveries, and a processor
    # without products in bfloat16 takes long for them.
    small = {**faults.BUILTIN_DIMS["builtin:tiny"], "hidden_size": 32, "intermediate_size": 64}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    monkeypatch.setattr(faults, "BUILTIN_DIMS", {"builtin:tiny": small})
    monkeypatch.setattr(faults, "ROWS", 2)
    sampler = faults.new_sampler("local", getattr(torch, dtype), tmp_path)
    trials = faults.Trials(sampler, getattr(torch, dtype), 1e-6, running=running)
    found = {(f, at): trials.outcome(f, at) for f in faults.FAULTS for at in faults.PLACES}
    # At this learning rate some tensors in bfloat16 do not change at all in a step.
    assert set(found.values()) <= {"m", "w", "h", "l", "n", "="}
    differing = {key: letter for key, letter in found.items() if letter != "="}
    assert len(differing) >= (28 if dtype == "bfloat16" else 56)
    assert {letter for (_, at), letter in differing.items() if at == faults.LATER} == {"n"}
    assert {letter for (_, at), letter in differing.items() if at == faults.LOAD} == {"h"}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["ray", "ray-vllm", "host", "host-vllm"])
def test_every_fault_is_found_on_the_way_to_other_processes(
    faults: ModuleType, engine: str, tmp_path: Path
) -> None:
    if engine.startswith("ray"):
        pytest.importorskip("ray", reason="needs Ray: make env-scale")
    if engine.endswith("vllm"):
        pytest.importorskip("vllm", reason="needs vLLM: make env-scale")
    found = {
        (line["fault"], line["place"]): line["found"]
        for line in faults.apart_table(engine, torch.float32, [1e-4], running=True)
    }
    assert len(found) == len(faults.FAULTS) * len(faults.PLACES)
    assert set(found.values()) <= {"m", "w", "h", "l", "n", "="}
    differing = {key: letter for key, letter in found.items() if letter != "="}
    assert len(differing) >= 54
    assert {letter for (_, at), letter in differing.items() if at == faults.LATER} == {"n"}


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_deliveries_of_real_training_raise_no_alarm(
    faults: ModuleType, dtype: str
) -> None:
    said = faults.false_alarms("local", getattr(torch, dtype), 100, 3e-4)
    assert said["alarms"] == 0
    assert said["worst_share_of_limit"] < 0.9
