"""`environment.name: openenv`: environments behind an OpenEnv server.

    environment:
      name: openenv
      options: {url: "http://127.0.0.1:8000", action: message, observation: echoed_message}

Every episode is a session of its own, over a WebSocket; only `websockets` is needed here, neither
OpenEnv nor the environment's own package.

Source: OpenEnv's client (`openenv.core.env_client`) and its server's messages
    (`openenv.core.env_server.types`): reset, step and close; observation and error.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

from oxrl.environments import Message, Step
from oxrl.environments.adapting import MOST_OBSERVATION, need, seed_of, with_text
from oxrl.types import Named, Prompt
from oxrl.usercode.user_code import capped

# Seconds for a connection.
CONNECT_S = 10.0
# Fields of an observation that are not for the policy.
ENVELOPE = ("done", "reward", "metadata")


class OpenEnvEnvironment:
    """One session.

    Args:
        url: of the server, http:// or https://.
        action: the field of an action that a turn's text becomes; empty: the only required one, or
            the turn is the action as JSON where there are several.
        observation: the field of an observation that is shown; empty: all of them, as JSON.
        reset: further arguments of the server's reset; a row's column of the same name is used
            instead where there is one.

    Raises:
        ValueError: no server there, or an action that it does not have.
    """

    def __init__(
        self,
        url: str = "",
        action: str = "",
        observation: str = "",
        reset: Named | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            found = f"environment.options.url={url!r}"
            raise ValueError(f"{found}: write the server's, such as http://127.0.0.1:8000")
        self._client = need("websockets.sync.client", "openenv")
        self._url = url.rstrip("/")
        self._field = action
        self._shown = observation
        self._reset = reset or {}
        self._socket: Any = None

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """Ask the server what actions it takes.

        Args:
            options: of the class.

        Raises:
            MissingExtraError: websockets is not installed.
            ValueError: no server there, or an action that it does not have.
        """
        cls(**options).fields()

    def fields(self) -> list[str]:
        """The required fields of an action; `action` is made sure of.

        Raises:
            ValueError: the server cannot be reached, or has no such field.
        """
        try:
            with urllib.request.urlopen(f"{self._url}/schema", timeout=CONNECT_S) as reply:
                schema = json.load(reply)["action"]
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # a refusal is an open reply
            raise ValueError(
                f"no OpenEnv server answers at {self._url}: {error}. Start it first, or see "
                "environment.options.url"
            ) from error
        known = list(schema.get("properties", {}))
        if self._field and self._field not in known:
            actions = ", ".join(known)
            raise ValueError(f"environment.options.action={self._field}: an action has {actions}")
        return list(schema.get("required", []))

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """The row's messages, and behind them what the environment shows.

        Args:
            prompt: the row; its columns go before the arguments of the same names.
            seed: of the episode.
        """
        if not self._field:
            required = self.fields()
            self._field = required[0] if len(required) == 1 else ""
        self._socket = self._client.connect(
            f"ws{self._url.removeprefix('http')}/ws", open_timeout=CONNECT_S, max_size=None
        )
        own = {name: prompt.metadata.get(name, value) for name, value in self._reset.items()}
        found = self._ask("reset", {"seed": seed_of(prompt, seed), **own})
        text = self._text(found)
        return with_text(prompt.messages, text, between="\n" if text else "")

    def step(self, text: str) -> Step:
        """Send a turn as an action.

        Args:
            text: of the turn: the one field of the action, or the action as JSON.

        Returns:
            The server's observation and reward; where it refuses the action, why, and the episode
            goes on.
        """
        try:
            found = self._ask("step", self._action(text))
        except RefusedAction as error:
            return Step(f"That is no action: {error}", reason="no action")
        reward = float(found.get("reward") or 0.0)
        return Step(self._text(found), reward, terminated=bool(found.get("done")))

    def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            self._socket.send(json.dumps({"type": "close"}))
            self._socket.close()

    def _action(self, text: str) -> object:
        if self._field:
            return {self._field: text}
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RefusedAction(str(error)) from error

    def _ask(self, what: str, data: object) -> Named:
        """Send a message; the data of the answer.

        Raises:
            RefusedAction: the server says that the data is no action.
            RuntimeError: the server says that something else is wrong.
        """
        self._socket.send(json.dumps({"type": what, "data": data}))
        reply = json.loads(self._socket.recv())
        found = reply.get("data") or {}
        if reply.get("type") != "error":
            return found
        why = capped(str(found.get("message", reply)), MOST_OBSERVATION)
        if what == "step" and found.get("code") == "VALIDATION_ERROR":
            raise RefusedAction(why)
        hint = " (lower environment.alive)" if found.get("code") == "CAPACITY_REACHED" else ""
        raise RuntimeError(f"the OpenEnv server answered {what} with {why}{hint}")

    def _text(self, found: Named) -> str:
        observation: object = found.get("observation") or {}
        if not isinstance(observation, dict):
            told = f"{observation!r:.80}"
            raise ValueError(f"the OpenEnv server sent no object as its observation, but {told}")
        value = {name: item for name, item in observation.items() if name not in ENVELOPE}
        if self._shown:
            if self._shown not in observation:
                has = ", ".join(observation) or "nothing"
                problem = f"environment.options.observation={self._shown}"
                raise ValueError(f"{problem}: an observation has {has}")
            value = observation[self._shown]
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return capped(text, MOST_OBSERVATION)


class RefusedAction(Exception):
    """The policy wrote no JSON, or nothing that the server takes for an action."""
