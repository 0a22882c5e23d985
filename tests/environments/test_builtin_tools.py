"""Built-in tools beside the calculator: Python in a sandbox, and search in a file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.environments.find_tool import find_tool
from oxrl.environments.pool import EnvironmentPool
from oxrl.environments.tool_environment import ToolEnvironment
from oxrl.environments.typed_tool import ToolFailure, as_tool
from oxrl.errors import DataError, EnvironmentDefinitionError
from oxrl.runs.waiting import Patience
from oxrl.types import Prompt
from oxrl.usercode.environments import ToolUnavailable
from oxrl_envs.search_tool import Bm25, SearchTool, read_passages
from oxrl_sandbox import layers
from oxrl_sandbox.inside import kernel
from oxrl_sandbox.python_tool import PythonTool

PROMPT = Prompt(uid="p", messages=({"role": "user", "content": "q"},), token_ids=(1,))


def tagged(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def python() -> Iterator[PythonTool]:
    tool = PythonTool(sandbox="off", seconds=1.0, memory_mb=256)
    yield tool
    tool.close()


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(6 * 7)", "42"),
        ("x = 6\nx * 7", "42"),
        ("import sys\nprint('no', file=sys.stderr)", "no"),
        ("x = 1", "(it printed nothing)"),
        ("'{braces} \"quotes\" \\\\n'", "'{braces} \"quotes\" \\\\n'"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int' = 3\nA()",
            "A(x=3)",
        ),
        ("print(1)\nraise SystemExit(2)", "1"),
        ("ä = 'é'\nprint(ä)", "é"),
    ],
)
def test_a_program_says_what_it_prints_and_the_value_of_a_last_expression(
    python: PythonTool, code: str, printed: str
) -> None:
    assert python.python(code) == printed


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "def f():\n    return 1 / 0\nf()",
            [
                "Traceback (most recent call last):",
                '  File "<python>", line 3, in <module>',
                "    f()",
                '  File "<python>", line 2, in f',
                "    return 1 / 0",
                "ZeroDivisionError: division by zero",
            ],
        ),
        ("def f(:", ['  File "<python>", line 1', "    def f(:", "SyntaxError: invalid syntax"]),
        (
            "import numpy",
            [
                "Traceback (most recent call last):",
                '  File "<python>", line 1, in <module>',
                "    import numpy",
                "ModuleNotFoundError: No module named 'numpy'",
            ],
        ),
    ],
)
def test_an_exception_is_told_with_the_lines_of_the_program_and_of_nothing_else(
    python: PythonTool, code: str, told: list[str]
) -> None:
    """Pythons draw different marks under a line: they are left out of the comparison."""
    lines = python.python(code).splitlines()
    assert [line for line in lines if set(line) - set(" ~^")] == told


def test_what_prints_much_is_cut_in_the_middle(python: PythonTool) -> None:
    found = python.python("print('a' * 10_000_000, 'the end')")
    assert found.startswith("aaa")
    assert "bytes are left out" in found
    assert found.endswith("a the end")
    assert len(found) < 4000
    whole = "é" * 1500
    assert python.python(f"print({whole!r})") == whole


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os\nprint('begun', flush=True)\nos.abort()", "was ended by SIGABRT"),
        ("import os\nprint('begun', flush=True)\nos._exit(3)", "ended with exit status 3"),
    ],
)
def test_a_program_that_is_ended_is_a_failed_call_with_what_it_printed(
    python: PythonTool, code: str, why: str
) -> None:
    with pytest.raises(ToolFailure, match=why) as caught:
        python.python(code)
    assert str(caught.value).endswith("having printed:\nbegun")


def test_nothing_is_kept_from_call_to_call(python: PythonTool) -> None:
    python.python("kept = 1\nopen('kept', 'w').close()")
    assert "NameError" in python.python("kept")
    assert python.python("import os\nos.path.exists('kept')") == "False"


@pytest.mark.skipif(bool(layers.why_not("strict")), reason="no strict sandbox on this machine")
def test_a_strict_sandbox_reaches_no_file_of_the_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    tool = PythonTool(sandbox="strict")
    try:
        assert "secret" not in tool.python(f"print(open({str(secret)!r}).read())").splitlines()
        assert tool.python("2 + 2") == "4"
    finally:
        tool.close()


def test_a_level_that_cannot_be_had_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "landlock_version", lambda: 0)
    with pytest.raises(ValueError, match=r"sandbox: basic of the tool python cannot be had") as e:
        ToolEnvironment.prepare(tools=[{"name": "python", "sandbox": "basic"}])
    assert "oxrl doctor" in str(e.value)
    # Should it break later, that is no answer to the policy: the episode ends without a score.
    environment = ToolEnvironment([{"name": "python", "sandbox": "basic"}])
    with pytest.raises(ToolUnavailable, match="no Landlock"):
        environment.step(tagged("python", code="1"))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("python", "needs a sandbox, one of strict, basic, off"),
        ({"name": "python", "sandbox": "stric"}, "did you mean 'strict'"),
        ({"name": "python", "sandbox": "off", "second": 3}, "did you mean 'seconds'"),
        ({"name": "python", "sandbox": "off", "seconds": 0}, "seconds from 0"),
        ("search", "needs a file"),
        ({"name": "search", "file": "x.jsonl", "top": 0}, "top and longest of 1 or more"),
        ({"name": "calculator", "x": 1}, "calculator takes no option, not 'x'"),
        ({"sandbox": "off"}, "a tool is a name"),
        (3, "a tool is a name"),
        ("serch", "did you mean 'search'"),
    ],
)
def test_a_tool_that_is_asked_for_wrongly_says_what_to_write(spec: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ToolEnvironment.prepare(tools=[spec])


def test_a_list_is_wanted() -> None:
    with pytest.raises(ValueError, match=r"must be a list, such as \[calculator\]"):
        ToolEnvironment.prepare(tools="calculator")


def test_scores_of_a_search_are_those_of_the_formula() -> None:
    ranking = Bm25(["a b b", "a c", "d"])
    # N = 3, lengths 3, 2, 1, mean 2; b is in one text, twice.
    idf = math.log(1 + (3 - 1 + 0.5) / (1 + 0.5))
    expected = idf * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 3 / 2))
    assert ranking.best("b", 3) == [(0, pytest.approx(expected, rel=1e-6))]
    # A word in two of three texts weighs less, and the shorter text more.
    assert [number for number, _ in ranking.best("A", 3)] == [1, 0]
    assert ranking.best("e", 3) == []
    assert len(ranking.best("a b c d", 2)) == 2


def test_an_index_keeps_nothing_but_its_numbers() -> None:
    kept = [part for word in Bm25(["a b", "a"])._weights.values() for part in word]
    assert all(part.base is None for part in kept)


def test_scores_agree_with_another_implementation() -> None:
    bm25s = pytest.importorskip("bm25s", reason="bm25s is not installed")
    texts = [f"{'x ' * (i % 4)}word{i % 5} word{i % 3} y" for i in range(40)]
    other = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    other.index([text.split() for text in texts], show_progress=False)
    query = "word1 x word2"
    theirs = other.get_scores(query.split())
    for number, score in Bm25(texts).best(query, 40):
        # Lucene leaves out the factor k1 + 1, which is the same for all.
        assert score == pytest.approx(theirs[number] * 2.2, rel=1e-5)


def passages(folder: Path, *rows: Any) -> str:
    file = folder / "passages.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_a_search_shows_titles_and_passages_best_first(tmp_path: Path) -> None:
    file = passages(
        tmp_path,
        {"title": "Cats", "text": "Cats sleep."},
        {"text": "Dogs bark. " * 50},
        {"title": "Dogs and cats", "text": "Both sleep; cats more."},
    )
    made = as_tool(SearchTool(file=file, top=2, longest=20).function)
    assert made.schema["function"]["parameters"]["properties"]["query"]["description"] == (  # pyright: ignore
        "A few words to look for."
    )
    found = made.call({"query": "CATS!"})
    assert found == "[1] Cats\nCats sleep.\n\n[2] Dogs and cats\nBoth sleep; cats mor ..."
    assert made.call({"query": "bark"}).startswith("[1] Dogs bark. Dogs bark")
    assert made.call({"query": "birds"}) == "Nothing was found."


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"body": "x"}], 'passages.jsonl:1: no text under "text"'),
        ([{"text": "x"}, {"text": "y", "title": 3}], 'passages.jsonl:2: no text under "title"'),
        ([], "has no row"),
    ],
)
def test_a_file_without_passages_is_refused_with_the_row(
    tmp_path: Path, rows: list[Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        read_passages(passages(tmp_path, *rows))


def test_what_tools_need_is_looked_for_once_before_any_episode(tmp_path: Path) -> None:
    file = passages(tmp_path, {"text": "one two"})
    specs = ["calculator", {"name": "search", "file": file}, {"name": "python", "sandbox": "off"}]
    options = {"tools": specs}
    pool = EnvironmentPool("tools", options=options, timeout_s=20.0, memory_mb=4096)
    try:
        opening = pool.start(PROMPT, Patience())
        assert [made["function"]["name"] for made in opening.tools] == [  # pyright: ignore
            "calculator",
            "search",
            "python",
        ]
        episode = pool.open(Patience())
        episode.reset(PROMPT, 0, Patience())
        assert episode.closes
        Path(file).unlink()  # it is in memory
        calls = tagged("search", query="two") + tagged("python", code="1 + 1")
        texts = [m["content"] for m in episode.step(calls, Patience()).messages]
        assert texts == ["[1] one two", "2"]
        episode.finish()
    finally:
        pool.close()


def test_a_missing_file_of_a_search_is_found_before_any_episode() -> None:
    options = {"tools": [{"name": "search", "file": "missing.jsonl"}]}
    pool = EnvironmentPool("tools", options=options, timeout_s=20.0, memory_mb=4096)
    with pytest.raises(EnvironmentDefinitionError, match=r"name=tools: no data file .*missing"):
        pool.start(PROMPT, Patience())
    pool.close()


def test_a_class_method_prepare_is_called_once_and_its_error_names_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "class Made:\n"
        "    @classmethod\n"
        "    def prepare(cls, word):\n"
        "        if word == 'bad':\n"
        "            raise LookupError('no such word')\n"
        "        with open('prepared', 'a') as file: file.write(word)\n"
        "        cls.shared = word * 2\n"
        "    def __init__(self, word): ...\n"
        "    def reset(self, prompt, seed): return self.shared\n"
        "    def step(self, text): ...\n"
    )
    settings: dict[str, Any] = {"timeout_s": 20.0, "memory_mb": 4096}
    pool = EnvironmentPool("mine.py:Made", options={"word": "ab"}, **settings)
    for _ in range(2):
        assert pool.start(PROMPT, Patience()).messages[0]["content"] == "abab"
    pool.close()
    assert Path("prepared").read_text() == "ab"
    pool = EnvironmentPool("mine.py:Made", options={"word": "bad"}, **settings)
    with pytest.raises(
        EnvironmentDefinitionError, match=r"prepare raised LookupError: no such word \(.*mine.py:5"
    ):
        pool.start(PROMPT, Patience())
    pool.close()


def test_find_tool_runs_a_function_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def double(x: float) -> float:\n    return 2 * x\n")
    assert find_tool(f"{file}:double").function(x=4.0) == 8.0
    with pytest.raises(ValueError, match="is a function, which takes no top"):
        find_tool({"name": f"{file}:double", "top": 3})
