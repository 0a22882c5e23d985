"""Rewards of steps: from characters of the text to the tokens of the response, and into training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from oxrl.data.batching import to_rollout_batch
from oxrl.functional.advantages import ADVANTAGES, AdvantageInputs
from oxrl.models.load import load_tokenizer
from oxrl.rewards.builtin import option_problem
from oxrl.rewards.parts import Part, combined
from oxrl.rewards.step_rewards import StepScorer
from oxrl.rewards.workers import RewardPool
from oxrl.runs.waiting import Patience
from oxrl.types import Completion, Group, Prompt, Rollout, Score, Segment

TOKENIZER: Any = load_tokenizer("builtin:tiny")
END = int(TOKENIZER.eos_token_id)
PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "?"},), token_ids=(5, 6))


def segment(text: str, *, end: bool = False, **fields: Any) -> Segment:
    ids = (*TOKENIZER.encode(text, add_special_tokens=False), *((END,) if end else ()))
    nothing = {"logprobs": (0.0,) * len(ids), "versions": (0,) * len(ids)}
    return Segment(token_ids=ids, **nothing, **fields)


def said(text: str, **fields: Any) -> Completion:
    reply = segment(text, end=True)
    return Completion(segments=(reply,), text=text, finish_reason="stop", **fields)


class Given:
    """A scorer that says what it was told to."""

    def __init__(self, *scores: Score) -> None:
        self._scores = list(scores)

    def score(self, groups: Sequence[Group], patience: Patience | None = None) -> list[list[Score]]:
        return [self._scores for _ in groups]


def placed(completion: Completion, score: Score) -> Score:
    ((found,),) = StepScorer(Given(score), TOKENIZER, (END,)).score([(PROMPT, [completion])])
    return found


def rewards_of(completion: Completion, score: Score) -> list[float]:
    rollout = Rollout(
        prompt=PROMPT,
        completion=completion,
        score=placed(completion, score),
        group_id=0,
        sample=0,
        seed=0,
    )
    return to_rollout_batch([rollout], pad_id=0).token_rewards[0].tolist()


def test_a_step_is_rewarded_on_the_token_that_ends_it_and_the_last_one_on_the_stop() -> None:
    # A character is a token here: 12\n3\n\n4, then the token that ends the response.
    score = Score(value=1.0, steps=((2, 0.5), (4, 0.2), (7, 0.3)))
    found = rewards_of(said("12\n3\n\n4"), score)
    assert found == pytest.approx([0, 0, 0, 0.5, 0, 0.2, 0, 0, 0, 0.3])
    # What steps leave of the value is earned at the end, as without them.
    assert rewards_of(said("12\n3"), Score(value=1.0, steps=((2, 0.25),))) == pytest.approx(
        [0, 0, 0, 0.25, 0, 0, 0.75]
    )
    assert rewards_of(said("12"), Score(value=0.5)) == [0, 0, 0, 0, 0.5]


def test_characters_of_several_bytes_and_special_tokens_do_not_shift_a_step() -> None:
    text = "1\u20ac\n\U0001f600 2\n3"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    decoded = TOKENIZER.decode(ids, skip_special_tokens=True)
    score = placed(said(decoded), Score(value=1.0, steps=((len("1\u20ac"), 1.0),)))
    (place,) = score.token_rewards
    assert TOKENIZER.decode(list(ids[: place + 1])).rstrip("\n") == decoded.split("\n")[0]


def test_only_the_last_turn_of_an_episode_has_steps() -> None:
    turns = (
        segment("123", end=True),
        segment("go", origin="environment"),
        segment("4\n5", end=True, turn=1),
    )
    completion = Completion(segments=turns, text="4\n5", finish_reason="stop", end="completed")
    score = placed(completion, Score(value=1.0, steps=((1, 0.5), (3, 0.5))))
    assert dict(score.token_rewards) == {4: 0.5, 7: 0.5}
    found = rewards_of(completion, Score(value=1.0, steps=((1, 0.5), (3, 0.5))))
    assert found == pytest.approx([0] * 8 + [0.5, 0, 0, 0.5])


def test_a_text_that_the_tokens_do_not_say_is_invalid() -> None:
    completion = Completion(segments=(segment("12"),), text="34", finish_reason="stop")
    score = placed(completion, Score(value=1.0, steps=((1, 1.0),)))
    assert (score.value, score.status) == (None, "invalid")
    assert "another text" in score.reason


def test_parts_weigh_their_steps() -> None:
    pool: Any = None
    parts = {
        name: Part(pool=pool, weight=weight, optional=False)
        for name, weight in (("a", 2), ("b", -1))
    }
    scores = {"a": Score(value=0.5, steps=((1, 0.5),)), "b": Score(value=0.25, steps=((1, 0.25),))}
    assert combined(parts, scores, {}).steps == ((1, 1.0), (1, -0.25))
    assert dict(placed(said("1\n2"), combined(parts, scores, {})).token_rewards) == {0: 0.75}


REWARD = """
from oxrl.types import Score

def lines(prompt, completion):
    ends = [k for k, letter in enumerate(completion) if letter == "|"]
    return Score(value=float(len(ends)), steps=tuple((k + 1, 1.0) for k in ends))

def wrong(prompt, completion):
    return Score(value=1.0, steps=((1, float("nan")),))
"""


def test_a_function_of_a_user_may_reward_steps(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    group = (PROMPT, [said("1|2|3")])
    pool = RewardPool(f"{tmp_path}/reward.py:lines", timeout_s=30)
    assert pool.score([group])[0][0] == Score(value=2.0, steps=((2, 1.0), (4, 1.0)))
    pool.close()


def test_a_step_whose_reward_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    from oxrl.rewards.loaded import find_reward

    (score,) = find_reward(f"{tmp_path}/reward.py:wrong")(PROMPT, [said("1")])
    assert score.status == "invalid" and "in steps" in score.reason


@pytest.mark.parametrize("name", ["gae", "returns"])
def test_returns_give_a_step_credit_for_itself_and_for_what_follows(name: str) -> None:
    score = Score(value=1.0, steps=((2, 0.5), (5, 0.5)))
    rollout = Rollout(
        prompt=PROMPT,
        completion=said("12\n34"),
        score=placed(said("12\n34"), score),
        group_id=0,
        sample=0,
        seed=0,
    )
    batch = to_rollout_batch([rollout], pad_id=0)
    mask = batch.inputs.response_mask
    zeros = torch.zeros_like(batch.token_rewards)
    given = AdvantageInputs(
        rewards=batch.rewards,
        token_rewards=batch.token_rewards,
        response_mask=mask,
        group_ids=batch.group_ids,
        truncated=batch.truncated,
        values=zeros,
        bootstrap=zeros[:, 0],
    )
    assert name in ADVANTAGES, sorted(ADVANTAGES)
    advantages, _ = ADVANTAGES[name](given)
    of_first, of_second = advantages[0, 2:4], advantages[0, 4:]
    assert float(of_first.min()) > float(of_second.max())


def test_options_of_a_reward_model_are_checked(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for kind in ("process", "outcome"):
        (tmp_path / kind).mkdir()
        head = {"weight": torch.zeros(1)}
        save_file(head, tmp_path / kind / "value_head.safetensors", metadata={"kind": kind})
    process = str(tmp_path / "process")
    assert option_problem(process, {"steps": "worst"}) == ""
    assert "must be one of" in option_problem(process, {"steps": "wurst"})
    assert "did you mean" in option_problem(process, {"steps": "wurst"})
    assert "takes only steps" in option_problem(process, {"step": "worst"})
    assert "judges the whole" in option_problem(str(tmp_path / "outcome"), {"steps": "worst"})
