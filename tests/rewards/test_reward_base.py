"""Finding a reward by name, and what becomes of every kind of thing a reward may return or
raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oxrl.errors import RewardError
from oxrl.rewards.loaded import LoadedReward
from oxrl.types import Completion, Prompt, Score, Segment
from support.loaded_rewards import load_reward

PROMPT = Prompt(
    uid="p7", messages=({"role": "user", "content": "2+2"},), token_ids=(1,), answer="4"
)
Load = Callable[..., LoadedReward]


def completion(text: str) -> Completion:
    return Completion(
        segments=(Segment(token_ids=(5,), logprobs=(-0.5,), versions=(3,)),),
        text=text,
        finish_reason="stop",
    )


GROUP = [completion("4"), completion("5")]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load(source)` is the reward `score` of a file with that source."""
    monkeypatch.chdir(tmp_path)

    def write_and_load(source: str, name: str = "mine.py:score") -> LoadedReward:
        (tmp_path / "mine.py").write_text(source)
        return load_reward(name)

    return write_and_load


def test_builtin_names_score_text_against_the_answer() -> None:
    assert [score.value for score in load_reward("math")(PROMPT, GROUP)] == [1.0, 0.0]
    assert [score.value for score in load_reward("exact")(PROMPT, GROUP)] == [1.0, 0.0]


def test_reasoning_gym_tasks_are_scored_by_their_own_verifier() -> None:
    pytest.importorskip("reasoning_gym", reason="the [tasks] extra is not installed")
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    prompt = Prompt(uid="q", messages=(), token_ids=(), answer="3", metadata={"entry": entry})
    right, tagged, wrong = (completion(text) for text in ("3", "so <answer> 3 </answer>.", "4"))
    assert [
        score.value for score in load_reward("reasoning-gym")(prompt, [right, tagged, wrong])
    ] == [1.0, 1.0, 0.0]


def test_a_function_of_one_sample_gets_the_prompt_and_the_text(load: Load) -> None:
    reward = load(
        "def score(prompt, completion): return len(completion) + 10 * (completion == prompt.answer)"
    )
    assert reward.per_sample
    assert [score.value for score in reward(PROMPT, [completion("4"), completion("777")])] == [
        11.0,
        3.0,
    ]


def test_a_reward_of_the_group_gets_completions_with_their_tokens(load: Load) -> None:
    reward = load(
        "from oxrl.types import Score\n"
        "def score(prompt, completions):\n"
        "    parts = {'n': len(completions)}\n"
        "    return [Score(value=2.0, parts=parts, reason=str(c.token_ids)) for c in completions]"
    )
    assert not reward.per_sample
    assert reward(PROMPT, GROUP) == [Score(value=2.0, parts={"n": 2.0}, reason="(5,)")] * 2


@pytest.mark.parametrize("second", ["completion", "completions"])
def test_rewards_may_be_async(load: Load, second: str) -> None:
    value = "0.5" if second == "completion" else f"[0.5] * len({second})"
    reward = load(
        "import asyncio\n"
        f"async def score(prompt, {second}):\n    await asyncio.sleep(0)\n    return {value}"
    )
    assert [score.value for score in reward(PROMPT, GROUP)] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("messages", "question"), [(PROMPT.messages * 2, "2+2"), ((), "")], ids=["some", "none"]
)
def test_a_reward_may_ask_a_prompt_for_its_question(
    load: Load, messages: tuple[Any, ...], question: str
) -> None:
    reward = load(f"def score(prompt, completion): return prompt.question == {question!r}")
    [score] = reward(replace(PROMPT, messages=messages), GROUP[:1])
    assert score.value == 1.0


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("True", 1.0),
        ("3", 3.0),
        ("__import__('numpy').float32(0.25)", 0.25),
        ("__import__('torch').tensor([2.0])", 2.0),
    ],
)
def test_numbers_of_other_types_are_numbers(load: Load, value: str, number: float) -> None:
    assert load(f"def score(prompt, completion): return {value}")(PROMPT, GROUP[:1]) == [
        Score(value=number)
    ]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("float('nan')", "returned nan, need a finite number"),
        ("float('-inf')", "returned -inf, need a finite number"),
        ("Score(value=float('nan'))", "returned nan, need a finite number"),
        ("'1.0'", "returned '1.0' (str), need a number"),
        ("None", "returned None (NoneType), need a number"),
        ("1j", "returned 1j (complex), need a number"),
        ("[1.0]", "returned [1.0] (list), need a number"),
        (
            "__import__('torch').zeros(2)",
            "returned tensor([0., 0.]) (Tensor), which is no single number",
        ),
    ],
)
def test_a_value_that_is_no_finite_number_is_invalid_and_names_function_and_sample(
    load: Load, value: str, reason: str
) -> None:
    # The dry call has answer "2": there the function behaves.
    reward = load(
        "from oxrl.types import Score\n"
        f"def score(prompt, completion): return 0 if prompt.answer == '2' else {value}"
    )
    for index, score in enumerate(reward(PROMPT, GROUP)):
        assert score.value is None and score.status == "invalid"
        assert (
            f"mine.py:score, sample {index} of prompt p7: " in score.reason
            and reason in score.reason
        )


def test_a_group_of_the_wrong_length_is_invalid_as_a_whole(load: Load) -> None:
    reward = load(
        "def score(prompt, completions):\n"
        "    return [1.0] * (len(completions) if prompt.uid == 'dry-call' else 1)"
    )
    (first, second) = reward(PROMPT, GROUP)
    assert first == second and first.status == "invalid"
    assert (
        first.reason
        == "mine.py:score, samples 0 to 1 of prompt p7: returned 1 scores for 2 completions"
    )


def test_one_bad_value_in_a_group_spoils_only_its_sample(load: Load) -> None:
    reward = load(
        "def score(prompt, completions): return [1.0, 0.0 if prompt.answer == '2' else float('nan')]"
    )
    assert [score.status for score in reward(PROMPT, GROUP)] == ["ok", "invalid"]


def test_an_exception_is_an_error_with_its_text(load: Load) -> None:
    reward = load("def score(prompt, completion): return 1 / (len(completion) - 1)")
    (score,) = reward(PROMPT, GROUP[:1])
    assert score.status == "error" and score.reason.endswith(
        "raised ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "did you mean 'math'"),
        ("nowhere.py:score", r"nowhere\.py: no such file"),
        (
            "mine.py",
            r"must be math, exact, code, ifeval, toolcall, choice, format, repetition, cosine, judge, reasoning-gym, path\.py:function",
        ),
        ("mine.py:scor", "defines no 'scor'; did you mean 'score'"),
        ("mine.py:other", "defines no 'other'; it has score"),
    ],
)
def test_a_name_that_leads_nowhere_teaches(load: Load, name: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load("def score(prompt, completion): return 0", name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "def score(prompt, completion, answer): return 0",
            r"mine\.py:1\) has the signature \(prompt, completion, answer\); oxRL passes no answer: the",
        ),
        (
            "def score(text): return 0",
            r"signature \(text\); parameters are bound by their names; write",
        ),
        ("class score: pass", "type is not a function"),
        ("score = 3", "int is not a function"),
        ("def score(prompt, completion) return 0", r"mine\.py:1 is not Python: expected ':'"),
        (
            "import no_such_library as score",
            "raised ModuleNotFoundError: No module named 'no_such_library'",
        ),
        ("import sys; score = sys.exit(3)", "raised SystemExit: 3"),
        ("def score(prompt, completion): return nmae", "a dry call .* raised NameError"),
        (
            "def score(prompt, completion): import no_such_library",
            "a dry call .* raised ModuleNotFoundError",
        ),
        ("def score(prompt, completion): return prompt.gold", "a dry call .* no attribute 'gold'"),
        (
            "def score(prompt, completion): return completion.text",
            "a dry call .* 'str' object has no attribute 'text'",
        ),
        (
            "def score(prompt, completion): pass",
            r"a dry call .* returned None \(NoneType\), need a number",
        ),
        (
            "def score(prompt, completions): return 1.0",
            r"a dry call .* returned 1\.0 \(float\), need a list of 2",
        ),
    ],
)
def test_a_reward_that_cannot_work_is_refused_when_it_is_loaded(
    load: Load, source: str, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        load(source)


def test_a_failure_that_the_made_up_sample_may_explain_is_left_to_the_run(load: Load) -> None:
    prompt = Prompt(uid="q", messages=(), token_ids=(), answer={"value": 2})
    for read in ("prompt.answer['value']", "prompt.answer.get('value')"):
        assert load(f"def score(prompt, completion): return {read}")(prompt, GROUP[:1]) == [
            Score(value=2.0)
        ]


@pytest.mark.parametrize(("letters", "cut"), [(78, False), (79, True)])
def test_what_a_reward_gave_is_shown_up_to_a_length(letters: int, cut: bool, load: Load) -> None:
    with pytest.raises(RewardError) as refused:
        load(f"def score(prompt, completion): return {letters} * 'x'")
    assert (f"{'x' * letters!r} (str)" in str(refused.value)) != cut
    assert f"'{77 * 'x'}" in str(refused.value)


def test_a_step_may_end_before_the_first_character_and_cost_something(load: Load) -> None:
    steps = "((0, 0.5), (3, -0.25))"
    source = "from oxrl.types import Score\n"
    source += f"def score(prompt, completion): return Score(value=1.0, steps={steps})"
    (score,) = load(source)(PROMPT, GROUP[:1])
    assert (score.status, score.steps) == ("ok", ((0, 0.5), (3, -0.25)))
    (score,) = load(source.replace("(0,", "(-1,"))(PROMPT, GROUP[:1])
    assert score.status == "invalid" and "(-1, 0.5) in steps" in score.reason
