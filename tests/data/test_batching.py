"""oxrl/data/batching.py: layout of rollouts as tensors, and the checks a broken batch must fail."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, cast, get_args

import pytest
import torch

from oxrl.data.batching import check_rollout_batch, pad_rows, to_rollout_batch
from oxrl.errors import InvariantError
from oxrl.types import (
    Completion,
    EpisodeEnd,
    Prompt,
    Rollout,
    RolloutBatch,
    Score,
    Segment,
    Turn,
)

STOP = 2


def rollout(
    prompt: list[int], response: list[int], finish: str, value: float | None, group: int
) -> Rollout:
    segment = Segment(
        token_ids=tuple(response),
        logprobs=tuple(-0.5 for _ in response),
        versions=tuple(7 for _ in response),
    )
    return Rollout(
        prompt=Prompt(uid=str(prompt), messages=(), token_ids=tuple(prompt)),
        completion=Completion(segments=(segment,), text="", finish_reason=finish),  # pyright: ignore
        score=Score(value=value)
        if value is not None
        else Score(value=None, status="error", reason="broke"),
        group_id=group,
        sample=0,
        seed=0,
    )


def two_rows() -> RolloutBatch:
    """Rows of the module docstring of oxrl/types.py: "4 6 <stop>" and "9", cut by the limit of 1...
    of 3 tokens.
    """
    return to_rollout_batch(
        [
            rollout([11, 12], [4, 6, STOP], "stop", 1.0, 5),
            rollout([13], [9, 8, 7], "length", 0.0, 6),
        ],
        pad_id=0,
    )


def check(batch: RolloutBatch, **changes: object) -> None:
    arguments = {"stop_token_ids": [STOP], "max_tokens": 3, "strict_version": 7} | changes
    check_rollout_batch(batch, **arguments)  # pyright: ignore


def test_rollouts_are_laid_out_token_aligned_with_the_reward_on_the_last_policy_token() -> None:
    batch = two_rows()
    assert batch.inputs.tokens.tolist() == [[11, 12, 4, 6, 2], [13, 9, 8, 7, 0]]
    assert batch.inputs.attention_mask.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.inputs.response_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 1, 0]]
    assert batch.token_rewards.tolist() == [[0, 0, 0, 0, 1.0], [0, 0, 0, 0.0, 0]]
    assert batch.versions.tolist() == [[-1, -1, 7, 7, 7], [-1, 7, 7, 7, -1]]
    assert batch.terminated.tolist() == [True, False] and batch.truncated.tolist() == [False, True]
    check(batch)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("rows", [[[1, 0, 1], [], [0]], [[], []], []])
def test_rows_of_uneven_length_are_filled_on_the_right(
    rows: list[list[int]], dtype: torch.dtype
) -> None:
    found = pad_rows(rows, 1, dtype)
    length = max(map(len, rows), default=0) or 1
    expected = [[row[at] if at < len(row) else 1 for at in range(length)] for row in rows]
    assert found.dtype == dtype and found.shape == (len(rows), length)
    assert found.tolist() == expected


def test_numbers_of_rows_keep_every_bit() -> None:
    wide = [[0.1, -math.inf, math.nan, 1e-320], [2**62 + 1.0]]
    found = pad_rows(wide, -0.0, torch.float64)
    assert str(found.tolist()) == str([wide[0], [*wide[1], -0.0, -0.0, -0.0]])
    assert pad_rows([[2**62 + 1]], 0, torch.int64).tolist() == [[2**62 + 1]]
    assert pad_rows([[0.1]], 0, torch.float32).item() == torch.tensor(0.1).item()


def test_a_failed_score_is_an_invalid_row_and_never_a_zero() -> None:
    batch = to_rollout_batch([rollout([1], [4, STOP], "stop", None, 0)], pad_id=0)
    assert batch.valid.tolist() == [False] and batch.rewards.isnan().all()


def test_an_aborted_sample_is_never_valid() -> None:
    batch = to_rollout_batch([rollout([1], [4, 5], "abort", 1.0, 0)], pad_id=0)
    assert batch.valid.tolist() == [False]


ENDS: dict[str, tuple[bool, bool, bool]] = {
    # How it ended -> terminated, truncated, valid.
    "completed": (True, False, True),
    "parse_error": (True, False, True),
    "max_turns": (False, True, True),
    "max_tokens": (False, True, True),
    "max_tool_calls": (False, True, True),
    "max_seconds": (False, True, True),
    "context": (False, True, True),
    "environment_error": (False, False, False),
    "timeout": (False, False, False),
}


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("end", ENDS)
def test_an_episode_is_over_cut_or_broken_off_as_it_says_itself(end: str, finish: str) -> None:
    """Whatever its last turn ended with; of a response alone that decides."""
    assert set(ENDS) == set(get_args(EpisodeEnd))
    plain = rollout([11], [4, STOP], finish, 1.0, 5)
    completion = dataclasses.replace(plain.completion, end=cast(EpisodeEnd, end))
    batch = to_rollout_batch([dataclasses.replace(plain, completion=completion), plain], pad_id=0)
    found = (batch.terminated[0], batch.truncated[0], batch.valid[0])
    assert tuple(map(bool, found)) == ENDS[end]
    assert batch.terminated[1] == (finish == "stop") and batch.truncated[1] == (finish == "length")


def part(
    tokens: int,
    turn: int,
    origin: Literal["policy", "environment"] = "policy",
    context: tuple[int, ...] | None = None,
) -> Segment:
    ids = (9,) * tokens
    return Segment(
        token_ids=ids,
        logprobs=(-0.5,) * tokens,
        versions=ids,
        origin=origin,
        turn=turn,
        context=context,
    )


def episode(*segments: Segment) -> Rollout:
    completion = Completion(
        segments=segments, text="", finish_reason="stop", turns=(Turn(text=""),), end="completed"
    )
    return dataclasses.replace(rollout([11, 12], [], "stop", 1.0, 5), completion=completion)


def test_every_sampled_token_has_the_number_of_its_turn() -> None:
    whole = episode(part(2, 0), part(1, 0, "environment"), part(1, 1), part(2, 2))
    short = episode(part(1, 0))
    batch = to_rollout_batch([whole, short], pad_id=0)
    assert batch.turns is not None
    assert batch.turns.tolist() == [
        [-1, -1, 0, 0, -1, 1, 2, 2],
        [-1, -1, 0, -1, -1, -1, -1, -1],
    ]
    assert to_rollout_batch([rollout([1], [4, STOP], "stop", 1.0, 5)], pad_id=0).turns is None


def test_turns_that_read_other_things_keep_their_numbers_in_the_line_of_their_episode() -> None:
    parted = episode(part(2, 0), part(1, 1, context=(5, 6, 7)), part(2, 2, context=(8,)))
    batch = to_rollout_batch([parted, episode(part(1, 0))], pad_id=0)
    assert batch.turns is not None
    # One token before each turn, then those of the turn.
    assert batch.turns.tolist() == [
        [-1, 0, 0, -1, 1, -1, 2, 2],
        [-1, 0, -1, -1, -1, -1, -1, -1],
    ]


def test_environment_tokens_are_read_but_not_trained() -> None:
    base = rollout([1], [4], "stop", 1.0, 0)
    tool = Segment(
        token_ids=(8, 9), logprobs=(0.0, 0.0), versions=(-1, -1), origin="environment", reward=0.25
    )
    last = Segment(token_ids=(STOP,), logprobs=(-0.1,), versions=(7,))
    completion = dataclasses.replace(
        base.completion, segments=(*base.completion.segments, tool, last)
    )
    batch = to_rollout_batch([dataclasses.replace(base, completion=completion)], pad_id=0)
    assert batch.inputs.response_mask.int().tolist() == [[0, 1, 0, 0, 1]]
    # The score is that of the whole: what a segment carries is part of it.
    assert batch.token_rewards.tolist() == [[0, 0.25, 0, 0, 0.75]]


@pytest.mark.parametrize(
    ("field", "position", "value", "message"),
    [
        ("attention_mask", (0, 2), False, "padding hole"),
        ("response_mask", (1, 4), True, "padding position"),
        ("tokens", (0, 4), 9, "does not end in one"),
        ("tokens", (1, 3), STOP, "cut by the token limit ends in a stop token"),
        ("tokens", (0, 3), STOP, "a stop token inside a response"),
    ],
)
def test_broken_inputs_are_named_with_their_row(
    field: str, position: tuple[int, int], value: object, message: str
) -> None:
    batch = two_rows()
    broken = getattr(batch.inputs, field).clone()
    broken[position] = value
    if (
        field == "attention_mask"
    ):  # keep the trained tokens on real ones, so that only the hole is wrong
        trained = batch.inputs.response_mask.clone()
        trained[position] = False
        batch = dataclasses.replace(
            batch, inputs=dataclasses.replace(batch.inputs, response_mask=trained)
        )
    with pytest.raises(InvariantError, match=message):
        check(
            dataclasses.replace(batch, inputs=dataclasses.replace(batch.inputs, **{field: broken}))
        )


def test_a_positive_sampler_logprob_is_refused() -> None:
    batch = two_rows()
    logprobs = batch.rollout_logprobs.clone()
    logprobs[0, 2] = 0.3
    with pytest.raises(InvariantError, match="log-probability above"):
        check(dataclasses.replace(batch, rollout_logprobs=logprobs))


def test_strict_on_policy_refuses_a_token_of_another_version() -> None:
    with pytest.raises(InvariantError, match="force_strict_on_policy"):
        check(two_rows(), strict_version=8)
    check(two_rows(), strict_version=None)


def test_a_row_marked_as_cut_before_the_limit_is_refused() -> None:
    with pytest.raises(InvariantError, match="before rollout.max_tokens=4"):
        check(two_rows(), max_tokens=4)
