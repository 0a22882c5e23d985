"""What oxRL asks of DeepSpeed; runs without DeepSpeed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from oxrl.engines.train.options import TrainerOptions
from oxrl.engines.train.zero import deepspeed_config
from oxrl.errors import EngineError

CLIPPED = TrainerOptions(lr=1e-3, max_grad_norm=0.5)


def test_the_stage_and_each_offload_reach_deepspeed() -> None:
    zero = deepspeed_config(CLIPPED, torch.float32, zero_stage=3, offload_optimizer=True)[
        "zero_optimization"
    ]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in zero
    zero = deepspeed_config(
        CLIPPED, torch.float32, zero_stage=3, offload_optimizer=True, offload_param=True
    )
    assert zero["zero_optimization"]["offload_param"]["device"] == "cpu"


def test_clipping_is_deepspeeds_and_infinity_turns_it_off() -> None:
    unclipped = TrainerOptions(lr=1e-3, max_grad_norm=math.inf)
    for options, clipping in ((CLIPPED, 0.5), (unclipped, 0.0)):
        config = deepspeed_config(options, torch.float32, zero_stage=1)
        assert config["gradient_clipping"] == clipping


def test_bfloat16_sums_stay_in_float32() -> None:
    config = deepspeed_config(CLIPPED, torch.bfloat16, zero_stage=2)
    assert config["bf16"]["enabled"]
    assert config["data_types"]["grad_accum_dtype"] == config["communication_data_type"] == "fp32"


@pytest.mark.parametrize(
    ("settings", "dtype", "words"),
    [
        ({"zero_stage": 0}, torch.bfloat16, "one step off"),
        ({"zero_stage": 2, "offload_param": True}, torch.float32, "parameters stage 3"),
        ({"zero_stage": 0, "offload_optimizer": True}, torch.float32, "optimizer needs stage 1"),
    ],
)
def test_what_deepspeed_would_do_wrongly_is_refused(
    settings: dict[str, Any], dtype: torch.dtype, words: str
) -> None:
    with pytest.raises(EngineError, match=words):
        deepspeed_config(CLIPPED, dtype, **settings)
