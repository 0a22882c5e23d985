"""How much memory the output head takes, as `benchmarks/head_memory.py` measures it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
VOCABULARY = 151_936
FLOAT32 = 4
# What is promised is a sixteenth of the logits of 8,192 tokens.
PROMISED, HELD = 16, 24


@pytest.fixture(scope="module")
def measure() -> ModuleType:
    path = ROOT / "benchmarks" / "head_memory.py"
    spec = importlib.util.spec_from_file_location("head_memory", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_head_takes_a_fraction_of_the_logits_whatever_the_number_of_tokens(
    measure: ModuleType,
) -> None:
    one, beside = measure.head_peak(64, VOCABULARY)
    two, _ = measure.head_peak(128, VOCABULARY)
    logits = FLOAT32 * 8192 * VOCABULARY
    assert beside * HELD <= logits
    assert one * PROMISED <= logits
    # A chunk more: not another chunk's buffers, but the tokens' own numbers.
    assert two - one < 64 * 1024


def test_what_is_counted_is_what_is_alive(measure: ModuleType) -> None:
    import torch

    given = torch.zeros(1000)
    with measure.PeakBytes() as measured:
        view = given[:10]  # of what was there before
        kept = given + 1
        dropped = kept * 2
        del dropped
        again = kept * 3
    assert (measured.now, measured.peak) == (8000, 8000)
    del view, kept, again
    assert measured.now == 0
