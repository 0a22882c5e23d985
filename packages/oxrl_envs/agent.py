"""An agent that owns its loop: an unchanged program, which sees nothing but a chat endpoint.

Every episode starts the program as a process of its own, with the address of an endpoint in its
environment. What it asks there is what the policy reads, what the policy writes is the reply. A
request that goes on from an earlier one and its answer, message by message, goes on from its
tokens; any other one begins anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from oxrl.environments import Environment, Message, Step
from oxrl.runs.waiting import end_of
from oxrl.types import Named, Objects, Prompt
from oxrl_envs.chat_endpoint import Asked, ChatEndpoint, Json, answer_message, plain_message

# How much of what a program printed is read for its reward, and shown where it failed.
MOST_OUTPUT = 1 << 16
MOST_SHOWN = 300
PLACE = re.compile("{(prompt|answer|uid|seed)}")
# What programs take for an option: negative numbers are none.
OPTION = re.compile(r"-(?!\d*\.?\d+$)")


class AgentEnvironment(Environment):
    """One run of an agent program.

    Args:
        command: the program and its arguments, as one text or a list; {prompt}, {answer}, {uid} and
            {seed} stand for what the row says, as `filled` has it.
        env: further variables of its environment.
    """

    @classmethod
    def prepare(cls, **options: Any) -> None:
        """See Environment.

        Args:
            options: of the class; `command` is looked at.

        Raises:
            ValueError: the program is not there.
        """
        words = words_of(options.get("command") or "")
        if not words:
            raise ValueError("name the program: environment.options.command")
        if shutil.which(words[0]) is None:
            raise ValueError(f"environment.options.command: there is no program {words[0]!r}")

    def __init__(self, command: str | Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._words = words_of(command)
        self._variables = env or {}
        self._endpoint = ChatEndpoint()
        self._output: IO[bytes] = tempfile.TemporaryFile()
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: Asked | None = None
        # The conversation after each turn, and the last message of it as the policy wrote it.
        self._turns: list[tuple[list[Json], str]] = []
        self.tools: list[Json] = []

    def reset(self, prompt: Prompt, seed: int) -> list[Message]:
        """Start the program and wait for what it asks first.

        Raises:
            RuntimeError: it ended without asking anything.
        """
        self._start(prompt, seed)
        self._asked = self._endpoint.asked.get()
        if self._asked is None:
            raise RuntimeError(f"the program asked nothing{self._how_it_ended()[1]}")
        self.tools = self._asked.tools
        return self._as_read(self._asked.messages)

    def step(self, text: str) -> Step:
        """Give the program what the policy wrote, and wait for what it asks next, or its end.

        Raises:
            RuntimeError: it failed.
        """
        asked = self._asked
        assert asked is not None
        reply = answer_message(text, asked.tools, len(self._turns))
        self._turns.append(([*asked.messages, plain_message(reply)], text))
        asked.reply.put(reply)
        self._asked = self._endpoint.asked.get()
        if self._asked is None:
            return self._over()
        messages = self._asked.messages
        turn = self._goes_on_from(messages)
        if turn is None:
            return Step(self._as_read(messages), after=-1)
        added = self._as_read(messages[len(self._turns[turn][0]) :])
        last = len(self._turns) - 1
        return Step(added, after=None if turn == last else turn)

    def _goes_on_from(self, messages: Sequence[Named]) -> int | None:
        """The turn after which `messages` go on, the longest conversation first; None: none."""
        turns: list[tuple[int, int]] = []
        for turn, (known, _) in enumerate(self._turns):
            added = messages[len(known) :]
            begins = list(messages[: len(known)]) == known
            if added and begins and all(message["role"] != "assistant" for message in added):
                turns.append((len(known), turn))
        return max(turns)[1] if turns else None

    def close(self) -> None:
        """End the program and the endpoint."""
        if self._process is not None:
            self._process.kill()
            end_of(self._process, "an agent's program")
        self._endpoint.close()

    def _start(self, prompt: Prompt, seed: int) -> None:
        row = {"prompt": prompt.question, "answer": prompt.answer, "uid": prompt.uid, "seed": seed}
        known = {"messages": list(prompt.messages), "metadata": dict(prompt.metadata)}
        address = {
            "OPENAI_BASE_URL": self._endpoint.url,
            "OPENAI_API_BASE": self._endpoint.url,
            "OPENAI_API_KEY": self._endpoint.key,
            "NO_PROXY": "127.0.0.1",
        }
        with tempfile.TemporaryFile() as given:
            given.write(json.dumps(row | known).encode() + b"\n")
            given.seek(0)
            # The keeper of the episode ends it, and what it starts.
            self._process = subprocess.Popen(
                filled(self._words, row),
                stdin=given,
                stdout=self._output,
                stderr=self._errors,
                env={**os.environ, **address, **self._variables},
            )
        threading.Thread(target=self._tell_its_end, args=[self._process], daemon=True).start()

    def _tell_its_end(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._endpoint.asked.put(None)

    def _over(self) -> Step:
        """The program has ended: its last line says what that was worth, if it says anything.

        Raises:
            RuntimeError: it failed.
        """
        code, told = self._how_it_ended()
        if code:
            raise RuntimeError(f"the program failed{told}")
        lines = _end_of(self._output).splitlines()
        found: Any = None
        with contextlib.suppress(ValueError, RecursionError, IndexError):
            found = json.loads(lines[-1])
        said: Json = found if isinstance(found, dict) else {}
        reward = said.get("reward", 0.0)
        return Step((), reward, terminated=True, reason=str(said.get("reason", "")))

    def _how_it_ended(self) -> tuple[int, str]:
        """The exit code of the program, and the words for it."""
        assert self._process is not None
        code = self._process.wait()
        printed = _end_of(self._errors)[-MOST_SHOWN:]
        last = f"; it printed last: {printed}" if printed else ""
        return code, f" (exit code {code}){last}"

    def _as_read(self, messages: Sequence[Named]) -> list[Message]:
        """Messages for the chat template; what the policy wrote as it wrote it."""
        found: list[Message] = []
        for message in messages:
            texts = [text for known, text in self._turns if known[-1] == message]
            plain = dict(message)
            calls = plain.pop("tool_calls", ())
            plain["content"] = texts[-1] if texts else plain["content"] + _calls_as_text(calls)
            found.append(plain)
        return found


def words_of(command: str | Sequence[str]) -> list[str]:
    """A command as the list of its words.

    Args:
        command: as a shell takes it, or its words.

    Raises:
        ValueError: a quotation mark of the text is never closed.
    """
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


def filled(words: Sequence[str], row: Objects) -> list[str]:
    """The words of a command with what a row says; a placeholder in what it says is plain text.

    Args:
        words: of the command.
        row: what placeholders stand for, by name; None is empty.

    Raises:
        ValueError: a word would be taken for an option.
    """
    values = {name: "" if value is None else str(value) for name, value in row.items()}
    found: list[str] = []
    for word in words:
        made = PLACE.sub(lambda place: values[place[1]], word)
        if OPTION.match(made) and not OPTION.match(word) and "--" not in found:
            raise ValueError(
                f"{word} is {made[:60]!r}, which a program takes for an option: read the row from "
                "standard input, where it is JSON, or put -- before it"
            )
        found.append(made)
    return found


def _end_of(file: IO[bytes]) -> str:
    """The end of what was written to a file."""
    start = max(0, os.fstat(file.fileno()).st_size - MOST_OUTPUT)
    return os.pread(file.fileno(), MOST_OUTPUT, start).decode(errors="replace").strip()


def _calls_as_text(calls: Sequence[Mapping[str, str]]) -> str:
    """Calls that somebody else made, as a policy would have written them."""
    found = ""
    for call in calls:
        try:
            arguments = json.loads(call["arguments"] or "{}")
        except ValueError:
            arguments = call["arguments"]
        written = json.dumps({"name": call["name"], "arguments": arguments})
        found += f"\n<tool_call>\n{written}\n</tool_call>"
    return found
