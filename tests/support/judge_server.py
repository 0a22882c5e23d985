"""A judge to test with: an endpoint that speaks OpenAI's API and says the same of the same."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
# What a request is answered with: status, headers, body.
Answer = tuple[int, dict[str, str], bytes]


def material(request: Json) -> Json:
    """What a request asks to judge."""
    return json.loads(request["messages"][-1]["content"].partition("Material:\n")[2])


def verdict(request: Json) -> str:
    """A score by the share of digits, as a test's policy can learn; of two the one with more."""
    shown = material(request)

    def digits(text: str) -> int:
        return sum(character.isdigit() for character in text)

    if "response" in shown:
        score = min(10, 1 + 3 * digits(shown["response"]))
        return json.dumps({"reason": f"{digits(shown['response'])} digits", "score": score})
    first, second = digits(shown["response_A"]), digits(shown["response_B"])
    winner = "tie" if first == second else "A" if first > second else "B"
    return json.dumps({"reason": "digits", "winner": winner})


def said(text: str, **more: Any) -> Answer:
    """A reply as the API has it."""
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    body = {"choices": [choice | more], "usage": usage}
    return 200, {}, json.dumps(body).encode()


def refused(status: int, text: str = "no", **headers: str) -> Answer:
    return status, headers, text.encode()


class JudgeServer:
    """What was asked, and what is answered.

    `answer` may be replaced; `delay_s` comes before each answer.
    """

    def __init__(self) -> None:
        self.answer: Callable[[Json], Answer] = lambda request: said(verdict(request))
        self.delay_s = 0.0
        self.requests: list[Json] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.url = ""

    @property
    def questions(self) -> Counter[str]:
        """How often each was asked, by its content."""
        texts = [json.dumps(request["messages"]) for request in self.requests]
        return Counter(hashlib.sha256(text.encode()).hexdigest() for text in texts)

    def handle(self, path: str, request: Json | None, key: str | None) -> Answer:
        if request is None:
            found = path == "/v1/models"
            return (200, {}, b'{"data": []}') if found else refused(404)
        with self.lock:
            self.requests.append(request)
            self.keys.append(key)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            time.sleep(self.delay_s)
            return self.answer(request)
        finally:
            with self.lock:
                self.at_once -= 1


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    """A server on loopback, until the block ends."""
    judge = JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self.send(json.loads(self.rfile.read(length)))

        def do_GET(self) -> None:
            self.send(None)

        def send(self, request: Json | None) -> None:
            key = self.headers["Authorization"]
            status, headers, body = judge.handle(self.path, request, key)
            try:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                pass  # who asked has left

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
