"""The reward for programs: what is read from a response, what is run, and what a verdict is."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxrl.errors import RewardDefinitionError
from oxrl.rewards import code_reward
from oxrl.rewards.workers import RewardPool
from oxrl.types import Completion, Prompt, Score, Segment
from oxrl_datasets.published import humaneval, mbpp
from oxrl_sandbox.code_reward import code_of, jobs_of
from oxrl_sandbox.layers import why_not

LEVEL = "strict" if not why_not("strict") else "off"
ADD = {"tests": ["assert add(1, 2) == 3", "assert add(20, 22) == 42"], "setup": ""}
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a + b if a < 9 else 0\n"
CHECK = {
    "prompt": 'from typing import List\n\ndef double(x: int) -> int:\n    return 2 * x\n\ndef add(a: int, b: int) -> int:\n    """Add."""\n',
    "test": "def check(candidate):\n    assert True, 'says nothing'\n    for a in range(3):\n        assert candidate(a, 1) == double(a) - a + 1\n    assert candidate(20, 22) == 42\n",
    "entry_point": "add",
}


def score(response: str, answer: object, **options: Any) -> Score:
    return code_reward(response, answer, sandbox=LEVEL, **options)


def fenced(code: str) -> str:
    return f"First a thought.\n```python\n{code}\n```\nThat is all."


@pytest.mark.parametrize("level", [None, "", "container", "Strict", 1])
def test_without_a_level_there_is_no_number(level: Any) -> None:
    """Nor a score at all, whose value a caller could take for 0."""
    with pytest.raises(RewardDefinitionError, match="strict, basic, off"):
        code_reward(RIGHT, ADD, sandbox=level)


def test_without_a_level_nothing_is_judged() -> None:
    with pytest.raises(RewardDefinitionError, match="sandbox="):
        code_reward(RIGHT, ADD)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("x = 1", "x = 1"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nor\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1\n```\n```\n\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("~~~\nx = 1\n~~~", "x = 1\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("inline `x = 1` only", "inline `x = 1` only"),
    ],
)
def test_the_program_is_the_last_fenced_block_or_everything(response: str, code: str) -> None:
    assert code_of(response) == code


def test_right_is_one_and_wrong_is_zero_with_a_reason() -> None:
    assert score(fenced(RIGHT), ADD) == Score(value=1.0)
    wrong = score(fenced(WRONG), ADD)
    assert wrong.value == 0.0
    assert "add(20, 22) == 42 failed" in wrong.reason and "returned 0" in wrong.reason


def test_partial_credit_is_the_share_of_asserts_that_hold() -> None:
    assert score(WRONG, ADD, partial=True).value == 0.5
    assert score(WRONG, CHECK, partial=True).value == 0.75  # `assert True` counts nothing
    assert score("def add(a, b): return None", CHECK, partial=True).value == 0.0
    assert score("import os\nos._exit(0)", ADD, partial=True).value == 0.0
    dies = "import os\ndef add(a, b):\n    return 3 if a == 1 else os._exit(0)\n"
    three = {"tests": [*ADD["tests"], "assert add(0, 0) == 0", "assert add(1, 1) == 2"]}
    assert score(dies, three, partial=True).value == 0.25


@pytest.mark.parametrize(
    "response",
    [
        fenced(RIGHT),
        fenced(CHECK["prompt"] + "    return a + b\n"),
        "    return a + b\n",  # goes on where the prompt ends
        "    c = a + b\n    return c\n\n\ndef more(): pass\n",
        "add = lambda a, b: a + b",
        "from operator import add",
        "class Adder:\n    def __call__(self, a, b): return a + b\nadd = Adder()\n",
        "def add(a: List, b: int):  # the prompt's imports are there\n    return double(a) + b - a\n",
    ],
)
def test_a_function_may_be_written_in_many_ways(response: str) -> None:
    assert score(response, CHECK).value == 1.0, score(response, CHECK)


def test_helpers_of_the_prompt_are_not_the_programs() -> None:
    # A program that redefines `double` would otherwise decide what is right.
    assert score("def double(x): return x\ndef add(a, b): return 1\n", CHECK).value == 0.0


def test_tests_may_use_classes_of_the_program() -> None:
    program = "class Node:\n    def __init__(self, value):\n        self.value = value\n        self.next = None\ndef length(node):\n    return 1 + length(node.next) if node else 0\n"
    answer = {
        "tests": ["assert length(root) == 2", "assert root.next.value == 5"],
        "setup": "root = Node(4)\nroot.next = Node(5)",
    }
    assert score(program, answer) == Score(value=1.0)
    assert score(program.replace("1 +", "2 +"), answer).value == 0.0


def test_arguments_that_a_function_changes_are_changed_for_the_test() -> None:
    tests = [
        "values = [3, 1, 2]\nsort(values)\nassert values == [1, 2, 3]",
        "seen = {'a': 1}\nsort(seen)\nassert seen == {}",
    ]
    program = (
        "def sort(values):\n    values.sort() if isinstance(values, list) else values.clear()\n"
    )
    assert score(program, {"tests": tests}) == Score(value=1.0)
    assert score("def sort(values): pass", {"tests": tests}).value == 0.0


def test_every_kind_of_plain_data_arrives_as_itself() -> None:
    program = "import array, collections, datetime, decimal, fractions\ndef same(x): return x\ndef made(): return [collections.Counter('aab'), collections.deque([1]), decimal.Decimal('0.1'), fractions.Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(1), array.array('i', [1]), {1: 2}.keys(), 3j, b'x', frozenset([1]), range(3), 10 ** 5000]\n"
    answer = {
        "setup": "import array, collections, datetime, decimal, fractions",
        "tests": [
            "assert made() == [{'a': 2, 'b': 1}, collections.deque([1]), decimal.Decimal('0.1'), fractions.Fraction(1, 3), datetime.date(2020, 1, 2), datetime.timedelta(1), array.array('i', [1]), {1}, 3j, b'x', frozenset([1]), range(3), 10 ** 5000]",
            "assert same({(1, 2): [None, {True}, 'x\\ud800', float('inf')]}) == {(1, 2): [None, {True}, 'x\\ud800', float('inf')]}",
            "assert same(float('nan')) != same(float('nan'))",
            "assert same(int) is int and same(0.1) == 0.1 and same(-0.0).hex() == '-0x0.0p+0'",
        ],
    }
    assert score(program, answer) == Score(value=1.0)


def test_iterators_can_be_read_and_exceptions_caught() -> None:
    program = "def squares(n):\n    if n < 0: raise ValueError('negative')\n    return (i * i for i in range(n))\n"
    tests = [
        "assert list(squares(4)) == [0, 1, 4, 9]",
        "try:\n    squares(-1)\nexcept ValueError as error:\n    assert str(error) == 'negative'\nelse:\n    assert squares is None",
    ]
    assert score(program, {"tests": tests}) == Score(value=1.0)


def test_names_of_python_mean_what_python_says_whatever_the_program_defines() -> None:
    program = "def set(x): return 1\ndef sorted(x): return 1\nclass math:\n    isclose = lambda *a: True\ndef f(x): return x\n"
    for test in ("set(f([1])) == set([2])", "sorted(f([1])) == [2]", "math.isclose(f(1), 2)"):
        assert score(program, {"tests": [f"assert {test}"]}).value == 0.0
    # Where a built-in name is all that the tests call, it is the function under test.
    assert score("def sum(a, b): return a + b", {"tests": ["assert sum(1, 2) == 3"]}).value == 1.0


def test_programs_are_judged_by_what_they_print() -> None:
    cases = {"cases": [{"input": "1 2\n", "output": "3"}, {"input": "2 2\n", "output": "4\n\n"}]}
    listed = {"inputs": ["1 2\n", "2 2\n"], "outputs": ["3", "4"]}
    program = fenced("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')")
    assert score(program, cases) == score(program, json.dumps(listed)) == Score(value=1.0)
    three = fenced("print(3)")
    assert score(three, listed).value == 0.0
    assert score(three, listed).reason == "case 2: the program printed '3' in line 1, not '4'"
    assert score(three, cases, partial=True).value == 0.5
    guarded = "if __name__ == '__main__':\n    a, b = map(int, input().split())\n    print(a + b)"
    assert score(guarded, listed).value == 1.0


# How a program ends that has printed what is right, and started a thread.
STARTS = "import sys, threading, time\nprint(3, flush=True)\nthreading.Thread({}).start()\n"
LATER = "def later():\n    time.sleep(0.3)\n    print(4, flush=True)\n"


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise SystemExit"])
def test_a_program_has_not_ended_while_a_thread_of_it_goes_on(end: str) -> None:
    cases = {"cases": [{"input": "", "output": "3"}]}
    for_ever = STARTS.format("target=time.sleep, args=(100,)") + end
    found = score(for_ever, cases, program_s=1)
    assert (found.value, found.status) == (0.0, "ok")
    assert "did not end within" in found.reason
    beside = STARTS.format("target=time.sleep, args=(100,), daemon=True") + end
    assert score(beside, cases, program_s=1) == Score(value=1.0)
    more = {"cases": [{"input": "", "output": "3\n4"}]}
    assert score(LATER + STARTS.format("target=later") + end, more) == Score(value=1.0)


def test_a_program_gets_the_time_and_the_memory_that_are_said() -> None:
    busy = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass\n"
    assert score(busy + RIGHT, ADD, program_s=1).reason.endswith("1 s of processor time")
    assert score(busy + RIGHT, ADD, program_s=30).value == 1.0
    large = "held = bytearray(200 << 20)\n"
    assert "MemoryError" in score(large + RIGHT, ADD, program_mb=100).reason
    assert score(large + RIGHT, ADD, program_mb=400).value == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "2",
        {},
        {"tests": []},
        {"tests": "assert 1"},
        {"cases": []},
        {"cases": [{"input": "1"}]},
        {"inputs": ["1"], "outputs": []},
        {"tests": ["assert ("]},
        {"tests": ["x = 1"]},
        {"tests": ["assert True"]},
        {"test": "pass", "entry_point": "add"},
        {"tests": ["assert add(object(), 1) == 3"]},
    ],
)
def test_tests_that_can_judge_nothing_are_invalid_and_no_zero(answer: object) -> None:
    found = score(RIGHT, answer)
    assert (found.value, found.status) == (None, "invalid"), found
    assert found.reason


def test_the_same_program_gets_the_same_verdict_every_time() -> None:
    program = "import random\ndef f():\n    return [*{'a', 'b', 'c', 'd'}, random.random()]\n"
    reasons = {score(program, {"tests": ["assert f() == 0"]}).reason for _ in range(3)}
    assert len(reasons) == 1


def test_a_pool_scores_programs_and_says_before_the_run_where_a_level_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompt = Prompt(uid="p", messages=(), token_ids=(1,), answer=ADD)
    segment = Segment(token_ids=(5,), logprobs=(0.0,), versions=(0,))
    texts = (RIGHT, WRONG, "import os\nos.kill(os.getppid(), 9)", RIGHT)
    group = [Completion(segments=(segment,), text=text, finish_reason="stop") for text in texts]
    pool = RewardPool("code", workers=2, timeout_s=30, options={"sandbox": LEVEL})
    try:
        pool.start()
        assert [found.value for found in pool.score([(prompt, group)])[0]][:2] == [1.0, 0.0]
        assert pool.score([(prompt, group[-1:])])[0][0].value == 1.0
    finally:
        pool.close()
    nowhere = RewardPool("code", options={"sandbox": "strict", "url": "http://127.0.0.1:9"})
    with pytest.raises(RewardDefinitionError, match=r"reward\.sandbox_url: http://127.0.0.1:9"):
        nowhere.start()
    nowhere.close()


def test_cases_that_take_too_long_together_count_nothing_in_a_pool_either() -> None:
    cases = [{"input": f"{number}\n", "output": f"{number}\n"} for number in range(9)]
    prompt = Prompt(uid="p", messages=(), token_ids=(1,), answer={"cases": cases})
    segment = Segment(token_ids=(5,), logprobs=(0.0,), versions=(0,))
    slow = "import time\nprint(input(), flush=True)\ntime.sleep(0.6)\n"
    options = {"sandbox": LEVEL, "partial": True, "program_s": 1.0}
    for text, least, most in ((slow, 0.1, 0.7), (slow + "raise SystemExit(1)", 0.0, 0.0)):
        pool = RewardPool("code", timeout_s=2.0, options=options)
        try:
            group = [Completion(segments=(segment,), text=text, finish_reason="stop")]
            ((found,),) = pool.score([(prompt, group)])
        finally:
            pool.close()
        assert found.status == "ok" and found.value is not None
        assert least <= found.value <= most
        assert "2 s, all that there was" in found.reason or "case 1" in found.reason


def published(real_data: Callable[[str], Path], name: str) -> list[dict[str, Any]]:
    folder, convert = {"humaneval": ("HumanEval", humaneval), "mbpp": ("mbpp", mbpp)}[name]
    lines = (real_data(name) / f"{folder}.jsonl").read_text().splitlines()
    return [row for line in lines for row in convert(json.loads(line))]


class _Wrapped(ast.NodeTransformer):
    """Every function returns a list that holds what it returned before."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = node.value or ast.Constant(None)
        return ast.copy_location(ast.Return(ast.List([value], ast.Load())), node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        return node


def mutated(code: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Wrapped().visit(ast.parse(code))))


def check_canonical(rows: list[dict[str, Any]]) -> None:
    problems: list[str] = []
    for row in rows:
        # Minutes of a busy machine are no fault of a program.
        right = score(fenced(row["completion"]), row["answer"], program_s=30.0)
        wrong = score(fenced(mutated(row["completion"])), row["answer"], program_s=30.0)
        if right.value != 1.0:
            problems.append(f"{row['uid']} canonical: {right}")
        if wrong.value != 0.0:
            problems.append(f"{row['uid']} mutated: {wrong}")
    assert not problems


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_some_canonical_solutions_are_right_and_changed_ones_wrong(
    real_data: Callable[[str], Path], name: str
) -> None:
    rows = published(real_data, name)
    check_canonical(rows[:: len(rows) // 12])


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_all_canonical_solutions_are_right_and_changed_ones_wrong(
    real_data: Callable[[str], Path], name: str
) -> None:
    check_canonical(published(real_data, name))


@pytest.mark.parametrize(
    ("answer", "has"), [({"b": 1, "a": 2}, "a, b"), ({}, "it is dict"), (3, "it is int")]
)
def test_an_answer_without_tests_is_told_by_what_it_has(answer: object, has: str) -> None:
    with pytest.raises(ValueError, match=f"code needs an answer with .*: got {has}$"):
        jobs_of(RIGHT, answer, partial=False)
