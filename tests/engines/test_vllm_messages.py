"""What is made of vLLM's messages; vLLM itself has a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oxrl.engines.sample import vllm
from oxrl.errors import EngineError


def test_a_length_that_vllm_refuses_is_named_as_the_field_that_sets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("User-specified max_model_len (64) is greater than the derived one")

    def stand_in(name: str) -> Any:
        engine = SimpleNamespace(from_engine_args=refuse)
        return SimpleNamespace(LLMEngine=engine, EngineArgs=dict)

    monkeypatch.setattr(vllm, "vllm_module", stand_in)
    engine = object.__new__(vllm.VllmEngine)
    told = r"start \(User-specified model\.max_length \(64\) is greater .*its messages: vllm\.log"
    with pytest.raises(EngineError, match=told):
        engine._start({}, "vllm.log")
