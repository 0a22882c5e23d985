"""Rewards for how a response looks, and the options of built-in rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from oxrl.errors import RewardDefinitionError
from oxrl.rewards.builtin import option_problem
from oxrl.types import Completion, Prompt, Segment
from oxrl_datasets.published import aqua, bbh
from oxrl_graders.choices import choice_reward
from oxrl_graders.formats import cosine_length_value, format_reward, repetition_reward
from oxrl_graders.tool_calls import tool_call_reward
from support.loaded_rewards import load_reward

PROMPT = Prompt(uid="p", messages=(), token_ids=(1,), answer="2")


def test_a_format_is_a_whole_text_that_matches() -> None:
    right = "<think>\na\nb</think>\n<answer>2</answer>\n"
    assert format_reward(right).value == 1.0
    for wrong in ("", "<answer>2</answer>", f"so: {right}", f"{right} and"):
        assert format_reward(wrong).value == 0.0
        assert "does not match" in format_reward(wrong).reason
    assert format_reward("a 1", pattern=r"[a-z] \d").value == 1.0


def test_options_of_a_built_in_reward_reach_it() -> None:
    reward = load_reward("format", {"pattern": "#+ 2"})
    assert reward.call(PROMPT, "## 2") != reward.call(PROMPT, "2")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("format", {"patern": "x"}, "no option 'patern'; it has pattern; did you mean 'pattern'"),
        ("format", {"pattern": "("}, "is no regular expression"),
        ("cosine", {"judge": "maths"}, "must be one of"),
        ("cosine", {"max_tokens": 0}, "need max_tokens >= 1"),
        ("repetition", {"words": 0}, "need words >= 1"),
        ("format", {"pattern": 1}, "must be of type str, got 1"),
        ("math", {"pattern": "x"}, "it has none"),
        ("mine.py:score", {"pattern": "x"}, "is none"),
        ("code", {"sandbox": "strict", "program_s": True}, "must be of type float"),
    ],
)
def test_options_that_a_reward_does_not_have_are_refused(
    name: str, options: dict[str, object], words: str
) -> None:
    assert words in option_problem(name, options)
    if name != "mine.py:score":
        with pytest.raises(RewardDefinitionError, match=r"reward\.options"):
            load_reward(name, options)


def test_repeated_runs_of_words_are_punished_by_their_share() -> None:
    assert repetition_reward("a b c d").value == 0.0
    assert repetition_reward("a b").value == 0.0
    assert repetition_reward("a b c A B C").value == pytest.approx(-0.25)  # abc bca cab abc
    assert repetition_reward("a " * 100, words=2, worst=-2.0).value == pytest.approx(-2 * 98 / 99)


def test_short_is_better_where_it_is_right_and_worse_where_it_is_wrong() -> None:
    def value(tokens: int, right: bool) -> float:
        return cosine_length_value(tokens, right, max_tokens=100)

    assert [value(n, True) for n in (0, 50, 100, 200)] == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert [value(n, False) for n in (0, 50, 100, 200)] == pytest.approx([-1.0, -0.75, -0.5, -0.5])


def test_the_cosine_reward_counts_tokens_and_asks_a_judge() -> None:
    def completion(text: str, tokens: int) -> Completion:
        ids = tuple(range(tokens))
        segment = Segment(token_ids=ids, logprobs=(0.0,) * tokens, versions=(0,) * tokens)
        return Completion(segments=(segment,), text=text, finish_reason="stop")

    reward = load_reward("cosine", {"judge": "exact", "max_tokens": 10})
    scores = reward(PROMPT, [completion("2", 5), completion("3", 10), completion("2", 1)])
    assert [score.value for score in scores] == pytest.approx([0.75, -0.5, 0.98776], abs=1e-5)
    assert scores[0].parts == {"exact": 1.0}
    unreadable = Prompt(uid="p", messages=(), token_ids=(1,), answer=None)
    assert reward(unreadable, [completion("2", 5)])[0].status == "invalid"


def test_what_a_tool_said_is_no_part_of_a_responses_length() -> None:
    def segment(tokens: int, origin: Literal["policy", "environment"]) -> Segment:
        ids = (1,) * tokens
        return Segment(token_ids=ids, logprobs=(0.0,) * tokens, versions=ids, origin=origin)

    turns = (segment(2, "policy"), segment(40, "environment"), segment(3, "policy"))
    talk = Completion(segments=turns, text="2", finish_reason="stop")
    reward = load_reward("cosine", {"judge": "exact", "max_tokens": 10})
    # Half of max_tokens: in the middle of 1 and 0.5.
    assert reward(PROMPT, [talk])[0].value == pytest.approx(0.75)


CALL = {"name": "search", "arguments": {"text": "rice", "count": 2, "exact": True}}
SAME = '{"arguments": {"count": 2.0, "exact": true, "text": "rice"}, "name": "search"}'


@pytest.mark.parametrize(
    "response",
    [
        SAME,
        f"<think>no: {{}}</think>{SAME}",
        f"I search.\n<tool_call>\n{SAME}\n</tool_call>",
        f"<functioncall> {SAME}",
        f"so\n```json\n{SAME}\n```",
        f"[{SAME}]",
        '{"function": {"name": "search", "arguments": '
        + json.dumps(json.dumps(CALL["arguments"]))
        + "}}",
    ],
)
def test_the_right_call_is_one_however_it_is_written(response: str) -> None:
    for answer in (CALL, [CALL], json.dumps(CALL)):
        assert tool_call_reward(response, answer).value == 1.0, tool_call_reward(response, answer)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (SAME.replace("search", "find"), "calls 'find'"),
        (SAME.replace("rice", "rise"), "expected"),
        (SAME.replace("2.0", "true"), "expected"),
        (SAME.replace("true", "1"), "expected"),
        (SAME.replace('"count": 2.0, ', ""), "expected"),
        (SAME.replace("{", '{"more": 1, ', 1).replace('"exact"', '"x": 1, "exact"'), "expected"),
        (f"[{SAME}, {SAME}]", "2 calls"),
        (SAME[:-1], "holds no call"),
        ("I would search for rice.", "holds no call"),
        ("", "holds no call"),
        ("[]", "holds no call"),
    ],
)
def test_any_other_call_is_zero(response: str, words: str) -> None:
    score = tool_call_reward(response, CALL)
    assert score.value == 0.0
    assert words in score.reason


def test_calls_count_in_their_order() -> None:
    other = {"name": "order", "arguments": {}}
    both = f"<tool_call>{SAME}</tool_call>\n<tool_call>{json.dumps(other)}</tool_call>"
    assert tool_call_reward(both, [CALL, other]).value == 1.0
    assert tool_call_reward(both, [other, CALL]).value == 0.0
    for wrong in (None, [], {}, "text", {"name": "x", "arguments": [1]}):
        assert tool_call_reward(both, wrong).status == "invalid"


@pytest.mark.parametrize(
    ("response", "answer", "value"),
    [
        ("#### B", "B", 1.0),
        ("So the answer is (B).", "B", 1.0),
        ("The correct answer is **B**", "(B)", 1.0),
        ("Answer: B) 12 apples", "B", 1.0),
        ("\\boxed{\\text{B}}", "B", 1.0),
        ("<answer>b</answer>", "B", 1.0),
        ("B", "B", 1.0),
        ("I choose\n(B)", "(B)", 1.0),
        ("<think>the answer is A</think>\nThe answer is B.", "B", 1.0),
        ("The answer is A. No, the answer is B.", "B", 1.0),
        ("#### A", "B", 0.0),
        ("#### A or (B)", "B", 0.0),
        ("(A) or (B)", "B", 0.0),
        ("The answer is a dog", "A", 0.0),
        ("Because B is one of them, I think", "B", 0.0),
        ("", "B", 0.0),
        ("The answer is not E.", "E", 0.0),
        ("The answer isn't (E).", "E", 0.0),
        ("The answer cannot be E.", "E", 0.0),
        ("The answer is neither D nor E.", "E", 0.0),
        ("Anything but E.", "E", 0.0),
        ("答案不是E。", "E", 0.0),
        ("E is not the answer", "E", 0.0),
        ("E is wrong.", "E", 0.0),
        ("The answer is E? No, D.", "E", 0.0),
        ("The answer is D, not E.", "D", 1.0),
        ("The answer is not E but D.", "D", 1.0),
        ("\\boxed{\\textbf{(C)}\\ 42}", "C", 1.0),
        ("\\boxed{\\textbf{C) } 42}", "C", 1.0),
        ("\\boxed{\\mathrm{(C)}}", "C", 1.0),
        ("\\boxed{C)}", "C", 1.0),
        ('The answer is "E".', "E", 1.0),
        ("The answer is ‘E’.", "E", 1.0),
        ("The answer is E because it holds.", "E", 1.0),
        ("The answer is (B), as x = 2.", "B", 1.0),
        ("The answer is A – the first.", "A", 1.0),
        ("答案是B。", "B", 1.0),
        ("Die Antwort ist B.", "B", 1.0),
        ("The answer is True.", "True", 1.0),
        ("so the answer is false", "True", 0.0),
        ("#### 24", "24", 1.0),
        ("Answer:  ] ]  >", "] ] >", 1.0),
        ("word list\napple  Pear", "apple pear", 1.0),
    ],
)
def test_a_choice_is_read_from_the_end(response: str, answer: str, value: float) -> None:
    assert choice_reward(response, answer).value == value, choice_reward(response, answer)


def test_of_long_texts_a_choice_shows_80_characters() -> None:
    score = choice_reward("Answer: " + "b" * 100, "a" * 100)
    assert score.reason == f"read '{'b' * 80}', expected '{'a' * 80}'"


def test_right_choices_of_real_data_are_right_and_others_wrong(
    real_data: Callable[[str], Path],
) -> None:
    rows = [
        row
        for line in (real_data("aqua") / "test.jsonl").read_text().splitlines()
        for row in aqua(json.loads(line))
    ]
    rows += [
        row
        for line in (real_data("bbh") / "examples.jsonl").read_text().splitlines()[::9]
        for row in bbh(json.loads(line))
    ]
    for row in rows:
        gold = row["answer"]
        assert choice_reward(f"Let me see.\nThe answer is {gold}", gold).value == 1.0, row
        assert choice_reward("The answer is (Z)", gold).value == 0.0, row
    assert choice_reward("B", 2).status == "invalid"
