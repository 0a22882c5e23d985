"""A chat endpoint on loopback, as agent programs know it: `POST /v1/chat/completions`.

It answers nothing by itself: every request waits in `asked` until somebody has a reply. What is
sampled, and how, is the run's business; a request that asks for something else is refused in the
words that clients of such endpoints expect.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import re
import secrets
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from oxrl.data.tool_calls import TAGGED, ToolCall, find_calls
from oxrl.types import ROLES

Json = dict[str, Any]
PATH = "/v1/chat/completions"
# Longest request, in bytes.
MOST_BODY = 1 << 24
# Connections at a time that have not shown the key: a further one ends the oldest.
MOST_STRANGERS = 64
# Longest wait for the next bytes of a request, and for a client to take an answer, in seconds.
SOCKET_S = 60.0


class BadRequest(Exception):
    """A request that cannot be answered; says why."""


@dataclass(frozen=True)
class Asked:
    """A request that waits for the policy.

    messages: the conversation, in one form. tools: JSON schemas. reply: takes the policy's answer.
    """

    messages: list[Json]
    tools: list[Json]
    reply: queue.Queue[Json] = field(default_factory=lambda: queue.Queue(1))


def read_request(body: bytes) -> tuple[Asked, Json]:
    """The conversation of a request, and the request as it came.

    Args:
        body: of the HTTP request, JSON.

    Raises:
        BadRequest: it is none, or asks for what a run does not give.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(request, dict):
        raise BadRequest("the body is no JSON object")
    if request.get("n") not in (None, 1):
        raise BadRequest(f"n={request['n']!r}: a turn has one answer")
    plain = [plain_message(message) for message in _objects(request, "messages")]
    if not plain:
        raise BadRequest("messages must be a list with at least one message")
    if plain[-1]["role"] == "assistant":
        raise BadRequest("the last message is the assistant's: nothing is asked")
    return Asked(plain, _objects(request, "tools")), request


def _objects(given: Json, name: str) -> list[Json]:
    """The list of objects that is in a field; empty where there is none."""
    found = given.get(name) or []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise BadRequest(f"{name} must be a list of objects")
    return found


def plain_message(given: Json) -> Json:
    """A message in one form: text content, and what else a template may read.

    Args:
        given: as a client sent it.

    Raises:
        BadRequest: it is no message of text.
    """
    role = given.get("role")
    if role not in ROLES:
        raise BadRequest(f"a message has the role {role!r}, need one of {', '.join(ROLES)}")
    plain: Json = {"role": role, "content": _text_of(given.get("content"))}
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            plain[name] = str(given[name])
    calls = _objects(given, "tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _text_of(content: object) -> str:
    if isinstance(content, str | None):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    try:
        return "".join(part["text"] for part in parts)
    except (KeyError, TypeError) as error:
        problem = "the content of a message must be text, or parts of text"
        raise BadRequest(problem) from error


def _plain_call(call: Json) -> Json:
    named = call.get("function")
    if not isinstance(named, dict):
        raise BadRequest("a tool call needs a function")
    told = {"name": "", "arguments": ""} | named | {"id": call.get("id", "")}
    return {name: str(told[name]) for name in ("id", "name", "arguments")}


def answer_message(text: str, tools: Sequence[Json], turn: int) -> Json:
    """Turn what the policy wrote into a message; tool calls are taken out where tools were given.

    Args:
        text: as the policy wrote it.
        tools: that the request brought; empty: calls are not looked for.
        turn: number of the turn, from 0, which names of calls begin with.

    Returns:
        A message of the assistant, as clients of chat endpoints know it; `content` is None where
        there are calls alone.
    """
    message: Json = {"role": "assistant", "content": text}
    calls = find_calls(text) if tools else []
    made = [call for call in calls if isinstance(call, ToolCall)]
    if not made or len(made) < len(calls):
        return message  # nothing is called, or something that nobody could
    around = TAGGED.sub("", text).strip() if TAGGED.search(text) else ""
    named = [{"name": call.name, "arguments": json.dumps(dict(call.arguments))} for call in made]
    called = [
        {"id": f"call_{turn}_{number}", "type": "function", "function": function}
        for number, function in enumerate(named)
    ]
    return message | {"content": around or None, "tool_calls": called}


class ChatEndpoint(ThreadingHTTPServer):
    """The endpoint of one agent program: it serves every connection in a thread, those of strangers
    only as far as there is room.

    asked: requests in the order in which they came; None when somebody has put it there.
    """

    # Somebody may hang up while a reply is waited for.
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: queue.Queue[Asked | None] = queue.Queue()
        self.key = secrets.token_hex(16)
        self.strangers: dict[socket.socket, None] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See BaseServer: whoever connects is a stranger until the key is shown.

        Args:
            request: the connection.
            client_address: of the client.
        """
        self.strangers[request] = None
        if len(self.strangers) > MOST_STRANGERS:
            oldest = [*self.strangers][0]
            self.strangers.pop(oldest, None)
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """See BaseServer: nothing is said of a connection that is gone.

        Args:
            request: the connection.
            client_address: of the client.
        """
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    timeout = SOCKET_S
    server: Any

    def do_GET(self) -> None:
        """The list of models, which some clients ask for first."""
        if self.path.rstrip("/") == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": "oxrl", "object": "model"}]})
        else:
            self._refuse_place()

    def do_POST(self) -> None:
        """A turn of the policy."""
        endpoint: ChatEndpoint = self.server
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        length = self.headers.get("Content-Length", "")
        if not hmac.compare_digest(given.encode(), endpoint.key.encode()):
            self._refuse(401, "the key is not that of OPENAI_API_KEY")
        elif self.path.rstrip("/") != PATH:
            self._refuse_place()
        elif not re.fullmatch("[0-9]{1,18}", length):
            self._refuse(400, "Content-Length must be a number of bytes")
        elif int(length) > MOST_BODY:
            self._refuse(413, f"a request has at most {MOST_BODY} bytes")
        else:
            endpoint.strangers.pop(self.connection, None)
            self._answer(self.rfile.read(int(length)))

    def _answer(self, body: bytes) -> None:
        try:
            asked, request = read_request(body)
        except BadRequest as error:
            self._refuse(400, str(error))
            return
        self.server.asked.put(asked)
        message = asked.reply.get()
        reason = "tool_calls" if "tool_calls" in message else "stop"
        about = {"id": "chatcmpl-oxrl", "created": 0, "model": request.get("model") or "oxrl"}
        choice = {"index": 0, "finish_reason": reason, "logprobs": None}
        if request.get("stream"):
            self._stream(about, choice, message)
            return
        counted = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
        choices = [choice | {"message": message}]
        whole = about | {"object": "chat.completion", "choices": choices, "usage": counted}
        self._send(200, whole)

    def _stream(self, about: Json, choice: Json, message: Json) -> None:
        """The whole answer as one event, and one that says that it is over."""
        calls = [call | {"index": n} for n, call in enumerate(message.get("tool_calls", []))]
        delta = message | ({"tool_calls": calls} if calls else {})
        events = [choice | {"delta": delta, "finish_reason": None}, choice | {"delta": {}}]
        chunk = about | {"object": "chat.completion.chunk"}
        lines = [f"data: {json.dumps(chunk | {'choices': [event]})}\n\n" for event in events]
        self._write(200, "text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def _refuse_place(self) -> None:
        self._refuse(404, f"there is no {self.path}; POST {PATH}")

    def _refuse(self, status: int, why: str) -> None:
        # What was sent may not have been read.
        self.close_connection = True
        self._send(status, {"error": {"message": why, "type": "invalid_request_error"}})

    def _send(self, status: int, content: Json) -> None:
        self._write(status, "application/json", json.dumps(content))

    def _write(self, status: int, kind: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
