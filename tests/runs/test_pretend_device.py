"""Whole runs and commands on a device that is none, byte for byte as on the CPU.

The device is as strict as a GPU about tensors that are elsewhere, and lacks float64, as Apple's do
(tests/support/pretend_device.py). What it cannot show: kernels, and how they round.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import pretend_device
from support import pretend_runs as cases

EQUAL = [
    cases.sgrpo_with_kl,
    cases.ppo,
    cases.cispo,
    cases.gspo,
    cases.sft_packed,
    cases.sft_held_out,
    cases.scored_evaluation,
    cases.dpo,
    cases.kto,
    cases.reward_model,
    cases.process_reward_model,
    cases.rejection,
    cases.lora,
    cases.images,
    cases.image_answers,
    cases.actions,
    cases.episodes_with_tools,
    cases.episodes,
    cases.master_weights,
    cases.no_masters,
    cases.offloaded_activations,
    cases.muon,
    cases.deterministic,
    cases.prompts_read_once,
    cases.eager_attention,
    cases.async_checkpoints,
    cases.sampling_ahead,
    cases.evaluated,
    cases.generated,
    cases.played,
    cases.replayed,
    cases.scored_again,
    cases.exported,
    cases.delivered,
]


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with pretend_device.server():
        yield


# What has float64 computes losses and norms there, as CUDA does.
WITH_FLOAT64 = [cases.sgrpo_with_kl, cases.muon]


@pytest.mark.parametrize("case", EQUAL, ids=[case.__name__ for case in EQUAL])
def test_it_is_as_on_the_cpu(case: cases.Case, tmp_path: Path) -> None:
    on_cpu, there = cases.on_both(case, tmp_path)
    assert cases.differing(on_cpu, there) == []


@pytest.mark.parametrize("case", WITH_FLOAT64, ids=[case.__name__ for case in WITH_FLOAT64])
def test_it_is_as_on_the_cpu_where_the_device_has_float64(case: cases.Case, tmp_path: Path) -> None:
    on_cpu, there = cases.on_both(case, tmp_path, float64=True)
    assert cases.differing(on_cpu, there) == []


def test_a_run_that_is_killed_there_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    here = tmp_path / "here"
    here.mkdir()
    cases.done(here, cases.resumed, there=True)
    here.rename(whole)
    here.mkdir()
    cases.killed_and_resumed(here)
    assert cases.differing(whole, here) == []


@pytest.mark.parametrize("case", [cases.strict, cases.out_of_memory, cases.planned])
def test_it_is_as_strict_as_a_gpu(case: cases.Case, tmp_path: Path) -> None:
    cases.done(tmp_path, case, there=True)
