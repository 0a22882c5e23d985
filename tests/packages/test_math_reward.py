"""math_reward and exact_reward on the spellings that models use."""

from __future__ import annotations

import signal

import pytest

from oxrl.rewards import exact_reward, math_reward
from oxrl_graders import math, solutions
from oxrl_graders.quantities import around
from oxrl_graders.relations import EndlessError, deadline

RIGHT = [
    ("<answer>42</answer>", "42"),
    ("<answer> $42.00 </answer> done", "42"),
    ("<answer>\\boxed{42}</answer>", "42"),
    ("<answer>42", "42"),
    ("so it is \\boxed{42}", "42"),
    ("\\boxed{\\$42}", "42"),
    ("It costs \\$42.", "42"),
    ("\\boxed{1{,}234}", "1234"),
    ("\\boxed{42 \\text{ km}}", "42"),
    ("2+3 = 5\n#### 5", "5"),
    ("#### 1,234,567", "1234567"),
    ("#### 1 234", "1234"),
    ("#### -5", "-5"),
    ("#### 5+3=8", "8"),
    ("A: 1,234", "1,234"),
    ("A: -$5", "-5"),
    ("The answer is 42.", "42"),
    ("The answer is 42 apples.", "42"),
    ("The answer is **42**, not 43.", "42"),
    ("The final answer is: $42$.", "42"),
    ("**Final Answer:** 42", "42"),
    ("Answer:\n42", "42"),
    ("The answer is 42. I hope this answer is helpful.", "42"),
    ("The answer is −5", "-5"),
    ("It was $5 a day, so $18 in total.", "18"),
    ("it's not 10, it's 1,000.99m²", "1000.99"),
    ("20%", "20"),
    ("20%", "0.2"),
    ("1.50", 1.5),
    ("#### 42", 42.0),
    ("The answer is 12.", "7 + 5 = 12\n#### 12"),
    ("<think>The answer is 3</think> The answer is 4", "4"),
    ("\\boxed{\\frac{3}{4}}", "0.75"),
    ("The answer is 3/4.", "\\frac{3}{4}"),
    ("<answer>2\\sqrt{3}</answer>", "2\\sqrt{3}"),
    ("The answer is (3, 5).", "(3,5)"),
    ("\\boxed{1} and \\boxed{-2}", "\\boxed{-2, 1}"),
]
WRONG = [
    ("The answer is 43, not 42", "42"),
    ("\\boxed{42} no, #### 43", "42"),
    ("#### 42.5", "42"),
    ("#### 420", "42"),
    ("A: 0.1000000000000000000001", "0.1"),
    ("10000000000000000000001", "10000000000000000000002"),
    ("\\boxed{32, 349}", "32349"),
    ("\\boxed{42}, \\boxed{43}", "42"),
    ("The answer is 1e999999999999", "5"),
    ("9" * 5000, "5"),
    ("1/0", "3"),
    ("\\boxed{" * 500, "3"),
]
# Numbers that would take hours to work out.
ENDLESS = (
    "99999999!",
    "1e999!",
    "9^{9^9}",
    "9^{9^{9^9}}",
    "\\prod_{k=1}^{10^6} k",
    "\\prod_{k=1}^{10^6} (1 + \\frac{1}{k^2})",
    "\\binom{10^9}{10^8}",
    "\\frac{10^{10^{10}}}{7}",
    "\\sqrt{2^{10^{12}} + 1}",
    "x^2 + 7^{7^{7^7}}",
)


@pytest.mark.parametrize(("response", "answer"), RIGHT)
def test_a_right_answer_is_read_however_it_is_written(response: str, answer: object) -> None:
    score = math_reward(response, answer)
    assert (score.value, score.status) == (1.0, "ok"), score.reason


@pytest.mark.parametrize(("response", "answer"), WRONG)
def test_a_wrong_answer_scores_zero_with_a_reason(response: str, answer: str) -> None:
    score = math_reward(response, answer)
    assert (score.value, score.status) == (0.0, "ok") and score.reason


@pytest.mark.parametrize("number", ENDLESS)
def test_a_number_that_takes_too_long_to_work_out_has_no_score(
    number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math, "_DEADLINE_S", 1)
    score = math_reward(f"\\boxed{{{number}}}", "3")
    assert (score.value, score.status) == (None, "timeout") and score.reason
    assert math_reward("\\boxed{\\sqrt{3}}", number).value is None
    assert math_reward(f"#### ${number}$", number).value == 1.0


def test_what_runs_for_too_long_is_ended_where_a_signal_can_end_it() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(EndlessError, match="1 seconds"), deadline(1):
        while True:
            pass
    assert signal.getsignal(signal.SIGALRM) is before


@pytest.mark.parametrize("response", ["", "I do not know.", "<answer></answer>"])
def test_no_answer_is_a_wrong_answer_and_says_so(response: str) -> None:
    assert math_reward(response, "42") == math_reward(response, "7")
    assert math_reward(response, "42").value == 0.0
    assert math_reward(response, "42").reason == "no answer found"


@pytest.mark.parametrize(
    "answer", [None, True, "", "what?", [1], {"a": 1}, float("nan"), "\\frac{"]
)
def test_a_ground_truth_that_cannot_be_read_is_invalid_and_never_zero(answer: object) -> None:
    score = math_reward("#### 5", answer)
    assert score.value is None and score.status == "invalid" and repr(answer) in score.reason


def test_exact_compares_stripped_text_and_refuses_other_types() -> None:
    assert exact_reward(" 42\n", "42").value == 1.0
    assert exact_reward("42", 42).value == 1.0
    assert exact_reward("42.0", "42").value == 0.0
    assert exact_reward("42", None).status == "invalid"
    assert exact_reward("True", True).status == "invalid"


def test_words_that_end_200_characters_before_a_number_are_not_heard() -> None:
    denial = "not " + "a" * 195 + " "
    assert len(denial) == 200
    assert around(denial, "") == {"denied"}
    assert around(denial.replace("a ", "aa "), "") == set()


def test_a_list_far_longer_than_the_ground_truth_is_compared_up_to_what_differs() -> None:
    said = 60
    listed = ", ".join(map(str, range(1, said + 1)))
    solutions._equal.cache_clear()
    assert math_reward(f"\\boxed{{{listed}}}", "5, 7").value == 0.0
    compared = solutions._equal.cache_info()
    assert compared.hits + compared.misses < 4 * said


def test_only_ground_truths_are_kept() -> None:
    math._marked_final.cache_clear()
    for said in range(5):
        assert math_reward(f"<answer>{said}</answer>", "7").value == 0.0
    assert math._marked_final.cache_info().currsize == 1
