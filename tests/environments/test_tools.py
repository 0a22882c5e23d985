"""Tools: found calls, checked arguments, mistakes told to the model, and a calculator that is safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oxrl.data.tool_calls import BrokenCall, ToolCall, find_calls
from oxrl.environments import tool
from oxrl.environments.find import find_environment
from oxrl.environments.find_tool import find_tool
from oxrl.environments.tool_environment import ToolEnvironment
from oxrl.environments.typed_tool import as_tool
from oxrl.types import Prompt
from oxrl_envs.calculator import calculator

PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "q"},), token_ids=(1,))


def tagged(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        'I look. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>{"name": "add", "parameters": {"a": 1}}',
        '{"name": "add", "arguments": {"a": 1}, "parameters": {"b": 2}}',
        ' {"name": "add", "parameters": {"a": 1}} ',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
    ],
)
def test_a_call_is_found_in_every_usual_format(text: str) -> None:
    assert find_calls(text) == [ToolCall("add", {"a": 1})]


def test_several_calls_are_found_in_order_and_plain_text_calls_nothing() -> None:
    text = tagged("a", x=1) + "and" + tagged("b")
    assert find_calls(text) == [ToolCall("a", {"x": 1}), ToolCall("b", {})]
    assert find_calls('The answer is {4}. "name"') == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>add(1)</tool_call>", "no JSON"),
        ("<tool_call>[1]</tool_call>", "no JSON object"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'no "name"'),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "no JSON object"),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', "no JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
        ('{"name": "a", "parameters": {', "no JSON"),
    ],
)
def test_a_broken_call_says_what_is_wrong(text: str, problem: str) -> None:
    (found,) = find_calls(text)
    assert isinstance(found, BrokenCall)
    assert problem in found.problem


class Shop(ToolEnvironment):
    def reset(self, prompt: Prompt, seed: int) -> str:
        self.stock = 3
        return "What is left?"

    @tool
    def take(self, count: int, note: str = "") -> int:
        """Take things out of the shop.

        More text.
        """
        if count > self.stock:
            raise ValueError("so many are not there")
        self.stock -= count
        return self.stock


def test_marked_methods_are_tools_and_keep_their_state() -> None:
    shop = Shop()
    shop.reset(PROMPT, 0)
    (schema,) = shop.tools
    assert schema["type"] == "function"
    described: Any = schema["function"]
    assert described["name"] == "take"
    assert described["description"] == "Take things out of the shop."
    assert described["parameters"]["properties"]["count"]["type"] == "integer"
    assert described["parameters"]["required"] == ["count"]
    step = shop.step(tagged("take", count=2))
    assert step.messages == [{"role": "tool", "content": "1"}]
    assert not step.terminated


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (tagged("take", count=9), "error: take raised ValueError: so many are not there"),
        (tagged("take", count="many"), "error: wrong arguments of take: count: "),
        (tagged("take"), "error: wrong arguments of take: count: Field required"),
        (tagged("take", count=1, other=2), "error: wrong arguments of take: other: "),
        (tagged("tale", count=1), "did you mean 'take'"),
        ("<tool_call>take</tool_call>", "error: the call is no JSON"),
    ],
)
def test_a_mistake_is_told_to_the_model_and_counted(text: str, told: str) -> None:
    shop = Shop()
    shop.reset(PROMPT, 0)
    step = shop.step(text)
    assert told in step.messages[0]["content"]
    assert shop.failures == 1
    assert not step.terminated


def test_a_turn_without_a_call_ends_and_too_many_calls_cut() -> None:
    shop = Shop(max_calls=2)
    shop.reset(PROMPT, 0)
    assert Shop().step("Three are left.").terminated
    shop.step(tagged("take", count=1))
    step = shop.step(tagged("take", count=1) + tagged("take", count=1))
    assert step.truncated
    assert step.reason == "max_tool_calls"
    assert len(step.messages) == 1


def test_functions_of_a_file_and_built_in_ones_are_tools(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def double(x: float) -> float:\n    return 2 * x\n")
    environment = ToolEnvironment(["calculator", f"{file}:double"])
    assert [made["function"]["name"] for made in environment.tools] == ["calculator", "double"]
    (message,) = environment.step(tagged("double", x=4)).messages
    assert message["content"] == "8.0"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("calculater", "did you mean 'calculator'"),
        ("none.py:f", "no such file"),
        ("mine.py:g", "defines no 'g'"),
    ],
)
def test_a_wrong_tool_says_what_to_write(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def f(x: int): ...")
    with pytest.raises(ValueError, match=problem):
        find_tool(name)


def test_a_tool_without_types_and_an_environment_without_tools_are_refused() -> None:
    def untyped(x): ...  # noqa: ANN001, ANN202

    def starred(*x: int) -> None: ...

    with pytest.raises(TypeError, match="no type for 'x'"):
        as_tool(untyped)
    with pytest.raises(TypeError, match="parameters with names"):
        as_tool(starred)
    with pytest.raises(ValueError, match="there is no tool"):
        ToolEnvironment()


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("448*89", "39872"),
        (" (3 + 4) * 2 ", "14"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("2^10", "1024"),
        ("-3 // 2", "-2"),
        ("1e3", "1000"),
    ],
)
def test_the_calculator_works_arithmetic_out(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "9**9**9",
        "10**1001",
        "(-8)**0.5",
        "1/0",
        "a+1",
        "True+1",
        "'a'*9",
        "[1]",
        "(" * 400 + "1" + ")" * 400,
        "1+" * 300 + "1",
        "",
        "1e999",
    ],
)
def test_the_calculator_refuses_everything_else(expression: str) -> None:
    with pytest.raises((ValueError, ZeroDivisionError, OverflowError)):
        calculator(expression)


# As TRL's documentation describes its `environment_factory`: a class without `step`, whose public
# typed methods are tools, and whose `reset` gets the columns of the row.
TRL = '''
class Counter:
    def __init__(self):
        self.reward = 0.0

    def reset(self, **kwargs):
        self.count = 0
        self.goal = kwargs["answer"]
        return f" Count to {self.goal} from {kwargs['start']}."

    def increment(self, step: int) -> int:
        """
        Count up.

        Args:
            step: by how much.

        Returns:
            Where the counter is.
        """
        self.count += step
        self.reward = float(self.count == self.goal)
        return self.count


class Echo:
    def reset(self, seed: int):
        self.seed = seed

    def echo(self, message: str) -> str:
        """Say it again."""
        return message
'''


def test_an_object_without_step_offers_its_methods_as_tools(tmp_path: Path) -> None:
    file = tmp_path / "trl_like.py"
    file.write_text(TRL)
    prompt = Prompt(
        uid="p",
        messages=({"role": "user", "content": "Go."},),
        token_ids=(1,),
        answer=3,
        metadata={"start": 0},
    )
    counter = find_environment(f"{file}:Counter")(max_calls=4)
    assert counter.reset(prompt, 5)[-1]["content"] == "Go. Count to 3 from 0."
    assert [made["function"]["name"] for made in counter.tools] == ["increment"]
    steps = [counter.step(tagged("increment", step=step)) for step in (2, 1, 1)]
    assert [step.messages[0]["content"] for step in steps] == ["2", "3", "4"]
    # What the object is worth counts where it changes, so that it counts wherever a limit cuts.
    assert [step.reward for step in steps] == [0.0, 1.0, -1.0]
    done = counter.step("I went too far.")
    assert (done.reward, done.terminated) == (0.0, True)
    echo = find_environment(f"{file}:Echo")()
    assert echo.reset(prompt, 5) == [{"role": "user", "content": "Go."}]
    assert echo.step(tagged("echo", message="well")).messages[0]["content"] == "well"
