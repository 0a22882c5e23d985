"""Whose reward a function is, and that no parameter ever gets what its name does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.errors import RewardDefinitionError
from oxrl.rewards.loaded import LoadedReward
from oxrl.rewards.workers import RewardPool
from oxrl.types import Completion, Prompt, Score, Segment
from support.loaded_rewards import load_reward

PLAIN = Prompt(
    uid="p7",
    messages=({"role": "user", "content": "2+2"},),
    token_ids=(1,),
    answer="4",
    source="sums",
    metadata={"level": 3},
    plain=True,
)
CHAT = Prompt(
    uid="p8",
    messages=({"role": "system", "content": "short"}, {"role": "user", "content": "2+2"}),
    token_ids=(1,),
    answer="4",
    metadata={"level": 3},
)
Load = Callable[..., LoadedReward]


def completion(text: str) -> Completion:
    segment = Segment(token_ids=(5, 6), logprobs=(-0.5, -0.5), versions=(3, 3))
    return Completion(segments=(segment,), text=text, finish_reason="stop")


GROUP = [completion("4"), completion("5")]


def values(scores: list[Score]) -> list[Any]:
    return [score.value if score.status == "ok" else score.reason for score in scores]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load(source)` is the reward `score` of a file with that source."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(source: str) -> LoadedReward:
        (tmp_path / "mine.py").write_text(source)
        return load_reward("mine.py:score")

    return write_and_load


@pytest.mark.parametrize(
    "parameters",
    [
        "prompt, completion",
        "completion, prompt",
        "*, completion, prompt",
        "_prompt, completion",
        "prompt, completion, weight=1.0",
        "prompt, completion, **more",
    ],
)
def test_oxrls_own_parameters_are_bound_by_name_in_any_order(load: Load, parameters: str) -> None:
    asked = "_prompt" if "_prompt" in parameters else "prompt"
    reward = load(f"def score({parameters}): return completion == {asked}.answer")
    assert values(reward(PLAIN, GROUP)) == [1.0, 0.0]


def test_the_group_comes_by_its_name_in_any_order_too(load: Load) -> None:
    reward = load(
        "def score(completions, prompt): return [c.text == prompt.answer for c in completions]"
    )
    assert values(reward(PLAIN, GROUP)) == [1.0, 0.0]


@pytest.mark.parametrize(
    "parameters",
    [
        "prompt, response",
        "response, answer",
        "completion, answer",
        "question, response, gold",
        "text, gold",
        "completion",
        "*given",
        "prompt, completion, gold",
        "prompt, completion, completions",
        "solution_str, gold",
        "data_source, ground_truth",
        "completions, trainer_state",
    ],
)
def test_names_that_say_nothing_certain_are_refused_with_what_to_write(
    load: Load, parameters: str
) -> None:
    with pytest.raises(RewardDefinitionError, match=r"mine\.py:2\) has the signature") as caught:
        load(f"\ndef score({parameters}): return 1.0")
    assert "write def score(prompt, completion) -> float" in str(caught.value)
    assert caught.value.exit_code == 2


VERL = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ('sums', ''), data_source
    assert data_source == '' or extra_info == {'level': 3}, extra_info
    return float(solution_str == ground_truth)
"""


def test_a_reward_of_verl_is_called_as_verl_would(load: Load) -> None:
    reward = load(VERL)
    assert reward.per_sample
    assert values(reward(PLAIN, GROUP)) == [1.0, 0.0]


def test_what_a_reward_of_verl_returns_may_be_a_mapping_with_its_score(load: Load) -> None:
    reward = load(
        "def score(solution_str, ground_truth, **kwargs):\n"
        "    right = solution_str == ground_truth\n"
        "    return {'score': 2.0 * right, 'acc': right, 'pred': solution_str}"
    )
    assert reward(PLAIN, GROUP) == [
        Score(value=2.0, parts={"acc": 1.0}),
        Score(value=0.0, parts={"acc": 0.0}),
    ]


def test_a_row_in_verls_layout_brings_its_own_source_and_information(load: Load) -> None:
    fields = {"data_source": "gsm8k", "extra_info": {"index": 1}}
    prompt = Prompt(uid="v", messages=PLAIN.messages, token_ids=(1,), answer="4", metadata=fields)
    reward = load(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    seen = (data_source, extra_info)\n"
        "    return ground_truth == '2' or seen == ('gsm8k', {'index': 1})"
    )
    assert values(reward(prompt, GROUP)) == [1.0, 1.0]


def test_a_batch_reward_of_verl_gets_the_completions_of_a_prompt(load: Load) -> None:
    reward = load(
        "def score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    pairs = zip(solution_strs, ground_truths, strict=True)\n"
        "    return [{'score': float(a == b)} for a, b in pairs]"
    )
    assert not reward.per_sample
    assert values(reward(PLAIN, GROUP)) == [1.0, 0.0]


@pytest.mark.parametrize(
    "parameters",
    [
        "completions, prompts=None, **kwargs",
        "prompts, completions, **kwargs",
        "completions, prompts, completion_ids, answer, level",
        "**kwargs, ",
    ],
)
def test_a_reward_of_trl_gets_texts_for_a_text_prompt_and_columns_as_lists(
    load: Load, parameters: str
) -> None:
    if parameters == "**kwargs, ":
        parameters = "completions, **kwargs"
    read = {name: f"kwargs['{name}']" for name in ("prompts", "answer", "level", "completion_ids")}
    read |= {name: name for name in read if name in parameters}
    reward = load(
        f"def score({parameters}):\n"
        f"    if {read['prompts']} == ['1 + 1?'] * 2: return [0.0] * 2\n"
        f"    assert {read['prompts']} == ['2+2', '2+2'], {read['prompts']}\n"
        f"    assert {read['level']} == [3, 3] and {read['completion_ids']} == [[5, 6]] * 2\n"
        f"    return [float(c == a) for c, a in zip(completions, {read['answer']}, strict=True)]"
    )
    assert values(reward(PLAIN, GROUP)) == [1.0, 0.0]


def test_a_reward_of_trl_gets_messages_for_a_prompt_of_messages(load: Load) -> None:
    reward = load(
        "def score(completions, prompts, answer, **kwargs):\n"
        "    assert [m['role'] for m in prompts[0]] == ['system', 'user'], prompts\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    return [float(text == gold) for text, gold in zip(texts, answer)]"
    )
    assert values(reward(CHAT, GROUP)) == [1.0, 0.0]


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardPool]]:
    monkeypatch.chdir(tmp_path)
    opened: list[RewardPool] = []

    def open_(source: str) -> RewardPool:
        (tmp_path / "mine.py").write_text(source)
        opened.append(RewardPool("mine.py:score", timeout_s=20))
        return opened[-1]

    yield open_
    for pool in opened:
        pool.close()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        # Written for messages; these prompts are texts.
        (
            "def score(completions, **kwargs): return [c[0]['content'] == '4' for c in completions]",
            r"raised TypeError: string indices must be .* \(.*mine\.py:1\)",
        ),
        (
            "def score(completions, solution, **kwargs):\n    return [float(s) for s in solution]",
            r"missing 1 required .* 'solution'",
        ),
        (
            "def score(prompt, completion): return prompt.metadata['gold'] == completion",
            r"raised KeyError: 'gold' \(.*mine\.py:1\) for completion",
        ),
        (
            "def score(prompt, completion):\n    return None if prompt.uid != 'dry-call' else 0",
            r"returned None \(NoneType\), need a number",
        ),
    ],
)
def test_a_reward_that_fails_on_the_data_is_refused_before_training(
    pools: Callable[..., RewardPool], source: str, problem: str
) -> None:
    with pytest.raises(RewardDefinitionError, match=problem) as caught:
        pools(source).rehearse([PLAIN, PLAIN])
    assert "it failed on 2 of 2 prompts of the data" in str(caught.value)


def test_a_reward_that_works_on_some_of_the_data_is_left_to_the_run(
    pools: Callable[..., RewardPool],
) -> None:
    pool = pools(
        "import json\n"
        "def score(prompt, completion): return float(json.loads(completion)['answer'] == '4')"
    )
    pool.rehearse([PLAIN])
    pool = pools("def score(prompt, completion): return prompt.metadata['rare'] * 1.0")
    rare = Prompt(uid="r", messages=PLAIN.messages, token_ids=(1,), metadata={"rare": 1})
    pool.rehearse([PLAIN, rare])
