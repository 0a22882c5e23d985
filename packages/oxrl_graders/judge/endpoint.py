"""One endpoint that speaks OpenAI's API: a request, sent again where that may help.

Redirects are not followed: they could take the key elsewhere. The key is in no message. A judge is
asked for chat completions; who asks a server for something else builds on `Client`.

Source: https://platform.openai.com/docs/api-reference/chat/create, the fields of request and reply;
`response_format` as vLLM's server has it too.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import threading
import time
import urllib.parse
import urllib.request

from oxrl.runs.files import Json
from oxrl_graders.judge.record import Reply

# Waits between attempts, in seconds: the first, and the longest.
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
# The longest reply that is read, in bytes.
MOST_BYTES = 1 << 22
# More tokens than any question or reply has.
MOST_TOKENS = 1 << 40
# Answers that another attempt may not get.
PASSING = frozenset({408, 409, 425, 429, *range(500, 600)})
# Of its own, so that nobody's seeds depend on how often a server failed.
_CHANCE = random.SystemRandom()
# What a server says that does not know a field.
UNKNOWN_FIELD = frozenset({400, 404, 415, 422, 501})


class NoReplyError(Exception):
    """A server gave no reply; the text says why. `late`: for want of time.

    Args:
        problem: what is wrong, without the key.
        late: it is for want of time.
        status: with which the server refused; 0: it did not answer, or with something else.
        wait_s: seconds that it asks to wait before another attempt; None: it says nothing of that.
    """

    def __init__(
        self, problem: str, *, late: bool = False, status: int = 0, wait_s: float | None = None
    ) -> None:
        super().__init__(problem)
        self.late = late
        self.status = status
        self.wait_s = wait_s


class Client:
    """Sends requests; from any number of threads.

    Args:
        url: of the API, such as http://localhost:8000/v1.
        key: sent as a bearer token; empty: none.
        retries: times that a request which failed is sent again.
        most_bytes: of a reply.
    """

    def __init__(
        self, url: str, *, key: str = "", retries: int = 4, most_bytes: int = MOST_BYTES
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/completions").removesuffix("/chat")
        self._parts = urllib.parse.urlsplit(self.url)
        self._key = key
        self._retries = retries
        self._most_bytes = most_bytes
        # The socket of each exchange: a connection lets go of its own once it reads a reply.
        self._open: dict[http.client.HTTPConnection, socket.socket | None] = {}
        self._lock = threading.Lock()
        self._closed = False
        self.requests = 0
        self.retried = 0

    def ask(self, path: str, body: Json, deadline: float, *, retried: bool = True) -> Json:
        """Ask until there is a reply, or no use in asking.

        Args:
            path: behind the url, "/completions".
            body: of the request.
            deadline: of `time.monotonic`.
            retried: False: a request that fails is not sent again.

        Returns:
            The object that the server answered with.

        Raises:
            NoReplyError: no reply.
        """
        attempt = 0
        while True:
            try:
                return self._post(path, body, deadline)
            except NoReplyError as error:
                if not retried:
                    raise
                self._await_next(attempt, deadline, error)
            attempt += 1

    def close(self) -> None:
        """Cut every connection; whoever waits gives up."""
        with self._lock:
            self._closed = True
            still = list(self._open)
        for connection in still:
            self._cut(connection)

    def _await_next(self, attempt: int, deadline: float, failure: NoReplyError) -> None:
        """Wait before another attempt, if one may help.

        Raises:
            NoReplyError: the failure itself, if none may; or there is no time for one.
        """
        # Without a status nothing came, which is worth another attempt if there is time.
        again = failure.status in PASSING if failure.status else not failure.late
        if not again or attempt >= self._retries or self._closed:
            raise failure
        self._wait(attempt + 1, deadline, failure)
        with self._lock:
            self.retried += 1

    def _wait(self, attempt: int, deadline: float, failure: NoReplyError) -> None:
        """Wait before the next attempt, twice as long each time, or as long as the server says."""
        wait_s = failure.wait_s
        if wait_s is None:
            backed_off = FIRST_WAIT_S * 2.0 ** (attempt - 1) * _CHANCE.uniform(0.75, 1.25)
            wait_s = min(backed_off, LONGEST_WAIT_S)
        until = time.monotonic() + wait_s
        if until >= deadline:
            raise NoReplyError(f"no time for attempt {attempt + 1}; {failure}", late=True)
        while time.monotonic() < until:
            if self._closed:
                raise failure
            time.sleep(min(0.1, max(0.0, until - time.monotonic())))

    def _post(self, path: str, body: Json | None, deadline: float) -> Json:
        """One exchange; a GET where there is no body.

        Raises:
            NoReplyError: nothing came, or no JSON object.
        """
        left = deadline - time.monotonic()
        if left <= 0:
            raise NoReplyError(f"{self.url}: no answer in time", late=True)
        connection, target = self._connection(path, left)
        with self._lock:
            self._open[connection] = None
            self.requests += body is not None
        # A server may send a byte now and then for ever: no wait for one byte is too long.
        timer = threading.Timer(left, self._cut, [connection])
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            self._open[connection] = connection.sock
            if time.monotonic() >= deadline:
                raise TimeoutError
            found = json.loads(self._exchange(connection, target, path, body))
        except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
            late = time.monotonic() >= deadline
            said = "no answer in time" if late else f"{type(error).__name__}: {error}"
            raise NoReplyError(self._hidden(f"{self.url}: {said}"), late=late) from None
        finally:
            timer.cancel()
            with self._lock:
                del self._open[connection]
            connection.close()
        if not isinstance(found, dict):
            raise NoReplyError(f"{self.url} answered with JSON that is no object")
        return found

    def _cut(self, connection: http.client.HTTPConnection) -> None:
        """End an exchange; whoever reads there gets nothing more."""
        opened: socket.socket | None = self._open.get(connection) or connection.sock
        with contextlib.suppress(OSError):
            if opened is not None:
                opened.shutdown(socket.SHUT_RDWR)

    def _exchange(
        self, connection: http.client.HTTPConnection, target: str, path: str, body: Json | None
    ) -> bytes:
        headers = {"Accept": "application/json", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        if body is None:
            connection.request("GET", target, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            connection.request("POST", target, json.dumps(body).encode(), headers)
        # Closed here: who fails below keeps the frame, and with it an open socket.
        with connection.getresponse() as response:
            data = response.read(self._most_bytes + 1)
        if len(data) > self._most_bytes:
            raise ValueError(f"a reply of more than {self._most_bytes} bytes")
        if response.status != 200:
            said = data[:300].decode(errors="replace").strip()
            moved = response.getheader("Location")
            if moved:
                said = f"it has moved to {moved}: write that as url"
            # The URL itself, with whatever the user's has before this, is in no message.
            problem = self._hidden(f"{self.url}{path}: {response.status} {said}")
            raise NoReplyError(problem, status=response.status, wait_s=_retry_after(response))
        return data

    def _connection(self, path: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
        """A connection that is not open yet, by the proxy of the environment, and what to ask."""
        parts = self._parts
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        target = parts.path + path
        proxy = urllib.request.getproxies().get(parts.scheme)
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        if not proxy or urllib.request.proxy_bypass(f"{host}:{port}"):
            return kind(host, port, timeout=timeout_s), target
        by = urllib.parse.urlsplit(proxy if "//" in proxy else f"//{proxy}")
        connection = kind(by.hostname or "", by.port, timeout=timeout_s)
        if not secure:
            return connection, f"http://{parts.netloc}{target}"
        connection.set_tunnel(host, port)
        return connection, target

    def _hidden(self, text: str) -> str:
        """A text without the key, which some servers repeat."""
        return text.replace(self._key, "***") if self._key else text


def key_of(variable: str) -> str:
    """Return the key of a server, from the environment; empty where none is asked for.

    Args:
        variable: that holds it.

    Raises:
        ValueError: it is not set, or holds what no header can.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"the environment variable {variable} is not set: export {variable}=..., or leave "
            "key_env out where the endpoint needs no key"
        )
    if not key.isascii() or not key.isprintable():
        problem = "holds what no key has: characters that no HTTP header may hold"
        raise ValueError(f"{variable} {problem}")
    return key


class Endpoint(Client):
    """The chat completions of a server, as a judge gives them; see Client.

    Args:
        url, key, retries: as of Client.
    """

    def __init__(self, url: str, *, key: str = "", retries: int = 4) -> None:
        super().__init__(url, key=key, retries=retries)
        # Whether the server decodes to a schema; until it says that it does not.
        self.constrains = True

    def complete(self, question: Json, form: Json | None, deadline: float) -> Reply:
        """Ask until there is a reply, or no use in asking.

        Args:
            question: model, messages and sampling, as the API has them.
            form: JSON schema of the reply, for a server that decodes nothing else; or None.
            deadline: of `time.monotonic`.

        Returns:
            What the judge said, and how many tokens that took.

        Raises:
            NoReplyError: no reply.
        """
        attempt = 0
        constrained = form is not None and self.constrains
        described = {"name": "verdict", "schema": form, "strict": True}
        shaped = question | {"response_format": {"type": "json_schema", "json_schema": described}}
        while True:
            body = shaped if constrained else question
            try:
                reply = _reply_of(self._post("/chat/completions", body, deadline))
                if form is not None and not constrained:
                    self.constrains = False  # it does answer, but for the schema
                return reply
            except NoReplyError as error:
                if constrained and error.status in UNKNOWN_FIELD:
                    constrained = False
                    continue
                self._await_next(attempt, deadline, error)
            attempt += 1

    def look(self, timeout_s: float) -> str:
        """Ask for the list of models, which costs nothing.

        Args:
            timeout_s: seconds for the answer, with every attempt.

        Returns:
            Why nobody answers there; empty if somebody does.
        """
        try:
            self._post("/models", None, time.monotonic() + timeout_s)
        except NoReplyError as error:
            return "" if error.status in (401, 403, 404, 405) else str(error)
        return ""


def _reply_of(found: Json) -> Reply:
    """The reply in what the server answered.

    Raises:
        NoReplyError: there is none.
    """
    try:
        choice = found["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError) as error:
        problem = f"{type(error).__name__} {error}"
        raise NoReplyError(f"an answer without choices[0].message.content: {problem}") from None
    usage = found.get("usage")
    counts: Json = usage if isinstance(usage, dict) else {}
    return Reply(
        text=text if isinstance(text, str) else "",
        finish_reason=str(choice.get("finish_reason") or ""),
        prompt_tokens=_count(counts.get("prompt_tokens")),
        completion_tokens=_count(counts.get("completion_tokens")),
    )


def _count(value: object) -> int:
    """A number of tokens as a server says it; 0 of anything that can be none."""
    return value if type(value) is int and 0 < value < MOST_TOKENS else 0


def _retry_after(response: http.client.HTTPResponse) -> float | None:
    """Seconds that the server asks to wait; None where it says none, or a date."""
    text = response.getheader("Retry-After") or ""
    try:
        return min(max(float(text), 0.0), 3600.0)
    except ValueError:
        return None
