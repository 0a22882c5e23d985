"""Two tokens that rounding alone decides between are a near tie, all others a difference.

pytest tests/rollouts/test_replayed_schedule.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from oxrl.engines.sample.gumbel import gumbel_noise, noise_keys
from oxrl.rollouts.replayed_schedule import Piece, ReplayedSchedule
from oxrl.types import Completion, Prompt, Request, Sampling, Segment

SEED = 11
PLACE = 2
RECORDED, NOW = 5, 9


def compared(gap: float, temperature: float) -> list[Any]:
    """What is found where another token comes out, so many nats ahead of the recorded one."""
    noise = gumbel_noise(noise_keys(torch.tensor([SEED]), torch.tensor([PLACE])), 12)[0]
    ahead = float(noise[RECORDED] - noise[NOW]) if temperature else 0.0
    recorded = Segment(token_ids=(1, 2, RECORDED), logprobs=(-1.0, -1.0, -3.0), versions=(0, 0, 4))
    now = replace(recorded, token_ids=(1, 2, NOW), logprobs=(-1.0, -1.0, -3.0 + ahead + gap))
    request = Request(
        id="4/0/1",
        prompt=Prompt(uid="0", messages=(), token_ids=(7,)),
        draw=0,
        sample=1,
        sampling=Sampling(max_tokens=3, temperature=temperature),
        seed=SEED,
    )
    source = ReplayedSchedule(Path(), cast(Any, None), steps=[4], lag=4, tolerance=1e-5)
    piece = Piece("sample 1 of draw 0 in the batch of step 4", recorded, request, PLACE, 3)
    source._compare(piece, Completion(segments=(now,), text="", finish_reason="length"))  # pyright: ignore
    return source.found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_near_tie_is_named_with_its_place_and_counts_as_equal(temperature: float) -> None:
    [found] = compared(1e-5, temperature)
    assert found.equal
    place = "token 2 of sample 1 of draw 0 in the batch of step 4, sampled by version 4"
    assert found.what.startswith(f"near tie, {place}: 5 and 9 are ")
    [found] = compared(1e-3, temperature)
    assert not found.equal and found.what == place
    assert (found.recorded, found.now) == ("5", "9")
