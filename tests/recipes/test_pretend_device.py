"""Whole runs and commands on a device that is none, byte for byte as on the CPU.

The device is as strict as a GPU about tensors that are elsewhere, and lacks float64, as Apple's do
(tests/support/pretend_device.py). What it cannot show: kernels, and how they round.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pretend_device
import pretend_runs as cases
import pytest

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


@pytest.mark.parametrize("case", EQUAL, ids=[case.__name__ for case in EQUAL])
def test_it_is_as_on_the_cpu(case: cases.Case, tmp_path: Path) -> None:
    on_cpu, there = cases.on_both(case, tmp_path)
    assert cases.differing(on_cpu, there) == []
