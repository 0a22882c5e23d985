"""Agents that own the loop: an unchanged program at a chat endpoint, as an environment."""

from __future__ import annotations

import importlib.util
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oxrl.environments.pool import EnvironmentPool, EpisodeProcess, LostEpisode
from oxrl.errors import EnvironmentDefinitionError
from oxrl.runs.waiting import Patience
from oxrl.types import Prompt
from oxrl_envs import chat_endpoint
from oxrl_envs.agent import filled
from oxrl_envs.chat_endpoint import (
    BadRequest,
    ChatEndpoint,
    answer_message,
    plain_message,
    read_request,
)

PROMPT = Prompt(
    uid="7", messages=({"role": "user", "content": "count to 2"},), token_ids=(1,), answer="2"
)
# What every agent below begins with: `ask(messages, **more)` gives the message of the answer.
CLIENT = """
import json, os, sys, urllib.request
def ask(messages, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.loads(answer.read())["choices"][0]
"""
COUNTS = """
row = json.loads(sys.stdin.readline())
messages = [{"role": "system", "content": "count"}, {"role": "user", "content": sys.argv[1]}]
said = []
for number in range(2):
    choice = ask(messages)
    said.append(choice["message"]["content"])
    messages += [choice["message"], {"role": "user", "content": f"heard {said[-1]}"}]
print(json.dumps({"reward": float(said == ["1", row["answer"]]), "reason": "counted"}))
"""
# The same with the public client, as its documentation has it.
COUNTS_WITH_OPENAI = """
import json, sys
from openai import OpenAI
client = OpenAI()
row = json.loads(sys.stdin.readline())
messages = [{"role": "system", "content": "count"}, {"role": "user", "content": sys.argv[1]}]
said = []
for number in range(2):
    answer = client.chat.completions.create(model="any", messages=messages)
    message = answer.choices[0].message
    said.append(message.content)
    messages.append(message)
    messages.append({"role": "user", "content": f"heard {message.content}"})
print(json.dumps({"reward": float(said == ["1", row["answer"]]), "reason": "counted"}))
"""

Open = Callable[..., EpisodeProcess]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Open]:
    """`begin(source, ...)` is an episode of the agent program `source`."""
    pools: list[EnvironmentPool] = []

    def begin_(source: str, timeout_s: float = 60.0, **options: Any) -> EpisodeProcess:
        (tmp_path / "agent.py").write_text(source)
        command = [sys.executable, str(tmp_path / "agent.py"), "{prompt}"]
        given = {"command": command} | options
        pool = EnvironmentPool("agent", options=given, timeout_s=timeout_s, memory_mb=0)
        pools.append(pool)
        return pool.open(Patience())

    yield begin_
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("source", [CLIENT + COUNTS, COUNTS_WITH_OPENAI], ids=["plain", "openai"])
def test_a_program_is_played_turn_by_turn(begin: Open, source: str) -> None:
    if "openai" in source and importlib.util.find_spec("openai") is None:
        pytest.skip("openai is not installed: pip install openai, beside oxrl")
    episode = begin(source)
    opening = episode.reset(PROMPT, 5, Patience())
    assert [dict(message) for message in opening.messages] == [
        {"role": "system", "content": "count"},
        {"role": "user", "content": "count to 2"},
    ]
    step = episode.step("1", Patience())
    assert step.after is None and not step.terminated
    assert step.messages == [{"role": "user", "content": "heard 1"}]
    last = episode.step("2", Patience())
    assert last.terminated and last.reward == 1.0 and last.reason == "counted"
    episode.finish()


def test_another_conversation_begins_anew_and_what_was_written_stays_as_it_was(
    begin: Open,
) -> None:
    source = CLIENT + (
        "first = ask([{'role': 'user', 'content': 'plan'}])['message']\n"
        "ask([{'role': 'user', 'content': 'act'}])\n"
        "ask([{'role': 'user', 'content': 'plan'}, first, {'role': 'user', 'content': 'more'}])\n"
        "third = {'role': 'assistant', 'content': '  three '}\n"
        "ask([{'role': 'user', 'content': 'PLAN'}, first, third,"
        " {'role': 'user', 'content': 'more'}])\n"
    )
    episode = begin(source)
    episode.reset(PROMPT, 0, Patience())
    step = episode.step("  one <x> ", Patience())
    assert step.after == -1 and step.messages == [{"role": "user", "content": "act"}]
    step = episode.step("two", Patience())
    assert step.after == 0 and step.messages == [{"role": "user", "content": "more"}]
    step = episode.step("  three ", Patience())
    assert step.after == -1
    said = ["  one <x> ", "  three "]
    assert [message["content"] for message in step.messages] == ["PLAN", *said, "more"]
    over = episode.step("four", Patience())
    assert over.terminated and over.reward == 0.0


def test_calls_of_tools_come_as_the_client_knows_them_and_go_back_as_they_were_written(
    begin: Open,
) -> None:
    source = CLIENT + (
        "tools = [{'type': 'function', 'function': {'name': 'add', 'parameters': {}}}]\n"
        "messages = [{'role': 'user', 'content': 'q'}]\n"
        "choice = ask(messages, tools=tools)\n"
        "call = choice['message']['tool_calls'][0]\n"
        "assert choice['finish_reason'] == 'tool_calls' and call['function']['name'] == 'add'\n"
        "value = json.loads(call['function']['arguments'])['a'] + 1\n"
        "messages += [choice['message'],\n"
        "             {'role': 'tool', 'tool_call_id': call['id'], 'content': str(value)}]\n"
        "assert ask(messages, tools=tools)['message']['content'] == 'done'\n"
        "print(json.dumps({'reward': 1}))\n"
    )
    episode = begin(source)
    assert [tool["function"]["name"] for tool in episode.reset(PROMPT, 0, Patience()).tools] == [
        "add"
    ]
    written = 'well <tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
    step = episode.step(written, Patience())
    assert step.after is None
    assert step.messages == [{"role": "tool", "content": "4", "tool_call_id": "call_0_0"}]
    assert episode.step("done", Patience()).reward == 1.0


def test_streamed_answers_and_the_list_of_models(begin: Open) -> None:
    source = CLIENT + (
        "base = os.environ['OPENAI_BASE_URL']\n"
        "assert json.loads(urllib.request.urlopen(base + '/models').read())['data'][0]['id']\n"
        "body = {'messages': [{'role': 'user', 'content': 'q'}], 'stream': True}\n"
        "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "asked = urllib.request.Request(base + '/chat/completions', json.dumps(body).encode(),"
        " headers)\n"
        "lines = urllib.request.urlopen(asked).read().decode().split('\\n\\n')\n"
        "assert lines[-2] == 'data: [DONE]', lines\n"
        "first = json.loads(lines[0].removeprefix('data: '))['choices'][0]['delta']['content']\n"
        "print(json.dumps({'reward': float(first == 'so')}))\n"
    )
    episode = begin(source)
    episode.reset(PROMPT, 0, Patience())
    assert episode.step("so", Patience()).reward == 1.0


@pytest.mark.parametrize(
    ("source", "calls", "end", "reason"),
    [
        ("", 0, "environment_error", "the program asked nothing (exit code 0)"),
        ("raise KeyError('board')", 0, "environment_error", "KeyError: 'board'"),
        (CLIENT + "ask([{'role': 'user', 'content': 'q'}])\nsys.exit(3)", 1, "environment_error",
         "the program failed (exit code 3)"),
        (CLIENT + "ask([{'role': 'user', 'content': 'q'}])\nprint('{\"reward\": \"x\"}')", 1,
         "environment_error", "the reward 'x'"),
        ("import time; time.sleep(60)", 0, "timeout", "reset did not return within"),
    ],
)  # fmt: skip
def test_a_program_that_fails_has_no_score(
    begin: Open, source: str, calls: int, end: str, reason: str
) -> None:
    episode = begin(source, timeout_s=3.0 if end == "timeout" else 60.0)
    with pytest.raises(LostEpisode) as found:
        episode.reset(PROMPT, 0, Patience())
        for _ in range(calls):
            episode.step("x", Patience())
    assert found.value.end == end
    assert reason in str(found.value)


def test_an_endpoint_is_for_its_own_program_only(begin: Open) -> None:
    source = CLIENT + (
        "import urllib.error\n"
        "key = os.environ['OPENAI_API_KEY']\n"
        "found = []\n"
        "for wrong, body in (('x', '{}'), (key, 'no'), (key, '{\"messages\": []}')):\n"
        "    asked = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions',\n"
        "                                   body.encode(), {'Authorization': 'Bearer ' + wrong})\n"
        "    try:\n"
        "        urllib.request.urlopen(asked)\n"
        "    except urllib.error.HTTPError as error:\n"
        "        found.append(error.code)\n"
        "ask([{'role': 'user', 'content': 'q'}])\n"
        "print(json.dumps({'reward': float(found == [401, 400, 400])}))\n"
    )
    episode = begin(source)
    episode.reset(PROMPT, 0, Patience())
    assert episode.step("x", Patience()).reward == 1.0


def test_a_command_that_is_not_there_is_found_at_the_start() -> None:
    for options, problem in (({}, "name the program"), ({"command": "no_such_x"}, "no program")):
        pool = EnvironmentPool("agent", options=options, timeout_s=20, memory_mb=0)
        try:
            with pytest.raises(EnvironmentDefinitionError, match=problem):
                pool.start(PROMPT, Patience())
        finally:
            pool.close()


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ({"messages": "hi"}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n=2"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing is asked"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts of text"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": 3}, "tools must be"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tools must be"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls must be"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "tool_calls must be"),
        ({"messages": ["hi"]}, "messages must be a list of objects"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a message has the role"),
    ],
)
def test_a_request_that_cannot_be_answered_says_why(request_: Any, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        read_request(json.dumps(request_).encode())


def test_parts_of_text_and_absent_content_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert plain_message({"role": "user", "content": parts, "extra": 1}) == {
        "role": "user",
        "content": "ab",
    }
    assert plain_message({"role": "assistant", "content": None})["content"] == ""


def test_a_broken_call_stays_text() -> None:
    text = "<tool_call>{no json</tool_call>"
    assert answer_message(text, [{}], 0) == {"role": "assistant", "content": text}
    assert answer_message('{"name": "f"}', [], 0)["content"] == '{"name": "f"}'


@pytest.fixture
def served() -> Iterator[ChatEndpoint]:
    endpoint = ChatEndpoint()
    yield endpoint
    endpoint.close()


def sent(endpoint: ChatEndpoint, key: str, length: str | None, body: bytes = b"") -> bytes:
    """What comes back for a request whose length may be anything."""
    port = int(endpoint.url.removesuffix("/v1").rpartition(":")[2])
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
    head += "Connection: close\r\n"
    if length is not None:
        head += f"Content-Length: {length}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        with connection.makefile("rb") as answer:
            return answer.read()


def test_whoever_has_not_the_key_is_refused_before_a_byte_of_the_body_is_read(
    served: ChatEndpoint,
) -> None:
    assert b" 401 " in sent(served, "x", "10000000", b"{").partition(b"\r\n")[0]
    assert b" 401 " in sent(served, "", "-1").partition(b"\r\n")[0]


LENGTHS = {"-1": 400, "no": 400, "1e3": 400, "9" * 5000: 400, "": 400, "16777217": 413}


@pytest.mark.parametrize("length", [*LENGTHS, None], ids=lambda length: str(length)[:10])
def test_a_length_that_is_none_is_refused_and_nothing_is_read(
    served: ChatEndpoint, length: str | None
) -> None:
    status = 400 if length is None else LENGTHS[length]
    assert f" {status} ".encode() in sent(served, served.key, length).partition(b"\r\n")[0]


def test_connections_that_ask_nothing_hold_few_threads_and_nobody_up(
    served: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    port = int(served.url.removesuffix("/v1").rpartition(":")[2])
    silent: list[socket.socket] = []
    for _ in range(150):
        silent.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        silent[-1].sendall(b"POST /v1/chat")
        time.sleep(0.01)  # a full queue of them would have each wait a second for the next try
    until = time.monotonic() + 10
    while threading.active_count() > before + 64 and time.monotonic() < until:
        time.sleep(0.05)
    assert threading.active_count() <= before + 64

    def reply() -> None:
        asked = served.asked.get()
        assert asked is not None
        asked.reply.put({"role": "assistant", "content": "hello"})

    threading.Thread(target=reply, daemon=True).start()
    body = b'{"messages": [{"role": "user", "content": "q"}]}'
    assert b"hello" in sent(served, served.key, str(len(body)), body)
    for connection in silent:
        connection.close()


def test_a_request_that_stops_in_the_middle_is_given_up(
    served: ChatEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat_endpoint._Handler.timeout
    monkeypatch.setattr(chat_endpoint._Handler, "timeout", 0.3)
    start = time.monotonic()
    assert sent(served, served.key, "100", b"{") == b""
    assert time.monotonic() - start < 4


def test_a_client_that_hangs_up_is_nothing_to_speak_of(
    served: ChatEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    port = int(served.url.removesuffix("/v1").rpartition(":")[2])
    body = b'{"messages": [{"role": "user", "content": "q"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {served.key}\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    before = threading.active_count()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(head.encode() + body)
        asked = served.asked.get(timeout=5)
        # Reset it, as the system does for a process that is killed.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert asked is not None
    asked.reply.put({"role": "assistant", "content": "hello" * 100_000})
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.05)
    assert capfd.readouterr().err == ""
    # Any other error is still told.
    try:
        raise LookupError("a fault of ours")
    except LookupError:
        served.handle_error(None, ("127.0.0.1", port))
    assert "a fault of ours" in capfd.readouterr().err


def test_many_requests_at_once_are_all_answered(served: ChatEndpoint) -> None:
    body = b'{"messages": [{"role": "user", "content": "q"}]}'
    found: list[bytes] = []

    def ask() -> None:
        found.append(sent(served, served.key, str(len(body)), body))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for _ in threads:
        asked = served.asked.get(timeout=5)
        assert asked is not None
        asked.reply.put({"role": "assistant", "content": "hello"})
    for thread in threads:
        thread.join()
    assert len(found) == 24 and all(b"hello" in answer for answer in found)


SAYS = CLIENT + "ask([{'role': 'user', 'content': json.dumps(sys.argv[1:])}])\n"


def arguments(begin: Open, text: str) -> list[str]:
    """What a program gets for a row."""
    messages = ({"role": "user", "content": text},)
    prompt = Prompt(uid="7", messages=messages, token_ids=(1,), answer="2")
    opening = begin(SAYS).reset(prompt, 5, Patience())
    return json.loads(str(opening.messages[0]["content"]))


def test_what_a_row_says_is_put_in_once(begin: Open) -> None:
    text = "what is {answer} of {uid}? {seed} {prompt} {other} $HOME `id`"
    assert arguments(begin, text) == [text]


ROW = {"prompt": "p", "answer": None, "uid": "u", "seed": 0}


def test_placeholders_stand_anywhere_in_a_word() -> None:
    words = ["run", "{prompt}-{uid}", "[{answer}]", "--seed={seed}", "{other}", "{{prompt}}"]
    assert filled(words, ROW) == ["run", "p-u", "[]", "--seed=0", "{other}", "{p}"]
    # Behind "--" and inside of an option anything is safe, and a negative number is no option.
    hostile = ROW | {"prompt": "--help", "answer": -2.5}
    words = ["run", "{answer}", "-q{prompt}", "--", "{prompt}"]
    assert filled(words, hostile) == ["run", "-2.5", "-q--help", "--", "--help"]


@pytest.mark.parametrize(
    "text", ["--help", "-c 1", "-", "a\0b", "x" * 200_000, "\U0001f600" * 40_000]
)
def test_a_row_that_no_program_can_be_given_ends_its_episode_with_a_reason(
    begin: Open, text: str
) -> None:
    why = "takes for an option|null byte|Argument list too long"
    with pytest.raises(LostEpisode, match=why) as found:
        arguments(begin, text)
    assert found.value.end == "environment_error"
    assert len(str(found.value)) < 600


def test_the_longest_word_that_a_program_can_be_given_is_given(begin: Open) -> None:
    text = "x" * ((1 << 17) - 1)
    assert arguments(begin, text) == [text]
