"""An environment's processes: `python -m oxrl.environments.serve FD`, and a fork per episode.

The first process loads the environment's file and waits. Asked for an episode, it forks: the child
makes an instance and serves it on the socket that came with the request, until that is closed. So
an episode starts in milliseconds and can be killed alone. The first process reaps its children only
when it is told to end them, so that a process number is never another's.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxrl.data.actions import Action
from oxrl.environments.find import find_environment
from oxrl.errors import EnvironmentDefinitionError, OxrlError
from oxrl.runs.waiting import end_of_episode
from oxrl.tables.user_code import ENVIRONMENT
from oxrl.types import Named, Prompt
from oxrl.usercode.environment_answers import as_messages, as_step
from oxrl.usercode.environments import Step
from oxrl.usercode.given import take_given
from oxrl.usercode.keeper import leave_keeper
from oxrl.usercode.locate import locate
from oxrl.usercode.messages import Json, Replies, decode, encode, prompt_of
from oxrl.usercode.user_code import raised_as

MOST_REQUEST = 1 << 16


class Episode:
    """One instance of an environment, and what its parent asks of it.

    Args:
        make: the class, or a function that makes an instance.
        options: what it is called with.
        path: of its file, for messages; None: it is built in.
    """

    def __init__(self, make: Callable[..., Any], options: Named, path: Path | None) -> None:
        self._make = make
        self._options = options
        self._path = path
        self._instance: Any = None

    def answer(self, request: Json) -> Json:
        """The reply to `reset`, to a step or to `close`; what the environment raises is a reply
        too.

        Args:
            request: JSON, with the key of what is asked.

        Returns:
            JSON, without the id; `failed`, in words, where the environment raised.
        """
        try:
            if "reset" in request:
                return self._reset(prompt_of(request["reset"]), request["seed"])
            if "close" in request:
                self._instance.close()
                return {}
            return vars(self._step(request["step"], request["act"], last=request["last"]))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever user code raises
            return {"failed": raised_as(error, self._path)}

    def _step(self, text: str, actions: list[Action] | None, *, last: bool) -> Step:
        acts = actions is not None and hasattr(self._instance, "act")
        answer = self._instance.act(actions) if acts else self._instance.step(text)
        step = as_step(answer)
        if not last or step.terminated or step.truncated:
            return step
        if not hasattr(self._instance, "worth_when_cut"):
            return step
        gained = float(self._instance.worth_when_cut())
        return as_step(replace(step, reward=step.reward + gained))

    def _reset(self, prompt: Prompt, seed: int) -> Json:
        # What draws without a generator of its own follows from the seed as well.
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        if not getattr(self._instance, "reusable", False):
            self._instance = self._make(**self._options)
        messages = as_messages(self._instance.reset(prompt, seed), "reset")
        return {
            "messages": messages,
            "tools": list(getattr(self._instance, "tools", None) or ()),
            "closes": callable(getattr(self._instance, "close", None)),
            "reusable": bool(getattr(self._instance, "reusable", False)),
        }


def begin(episode: Episode, fd: int, memory_mb: int) -> None:
    """In the child: leave a keeper behind, which ends all that is started here, and serve; no
    return.

    Args:
        episode: not begun.
        fd: descriptor of its socket.
        memory_mb: address space beyond what is used now, of 2**20 bytes; 0: no limit.
    """
    code = 1
    try:
        leave_keeper()
        if memory_mb:
            # Large libraries take much of what is mapped already.
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + (memory_mb << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        Replies(fd).answer_all(episode.answer)
        code = 0
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def load(request: Json) -> Episode:
    """The environment that a request names; a class with a class method `prepare` has got ready
    what all episodes share.

    Args:
        request: `name`, `options`, and a class in bytes where Python gave one.

    Returns:
        An episode that has not begun, of which every other is a copy.

    Raises:
        EnvironmentDefinitionError: it cannot be loaded, or says that it cannot work.
    """
    name = request["name"]
    options = request["options"]
    take_given(ENVIRONMENT, request, "its process cannot load the class")
    path = locate(ENVIRONMENT, name).file
    make: Any = find_environment(name)
    own = inspect.getattr_static(make, "prepare", None)
    if isinstance(own, (classmethod, staticmethod)):
        try:
            make.prepare(**options)
        except (Exception, SystemExit) as error:
            # What is built in has words of its own.
            own_words = path is None and isinstance(error, (OxrlError, ValueError))
            why = str(error) if own_words else f"prepare raised {raised_as(error, path)}"
            raise ENVIRONMENT.problem(name, why) from error
    return Episode(make, options, path)


def serve(fd: int) -> None:
    """Load an environment, then start and end episodes until nobody asks any more.

    Args:
        fd: descriptor of the socket to the parent.
    """
    parent = socket.socket(fileno=fd)
    parent.set_inheritable(False)
    with parent.makefile("rb") as lines:
        request = decode(lines.readline())  # it may bring a class with all that it holds
    try:
        episode = load(request)
    except EnvironmentDefinitionError as error:
        parent.sendall(encode({"id": request["id"], "failed": str(error)}))
        return
    parent.sendall(encode({"id": request["id"]}))
    while True:
        line, fds, _, _ = socket.recv_fds(parent, MOST_REQUEST, 1)
        if not line:
            return
        request = decode(line)
        if "end" in request:
            # The keeper of an episode, a child that has not been waited for.
            os.kill(request["end"], signal.SIGTERM)
            code = end_of_episode(request["end"])
            parent.sendall(encode({"id": request["id"], "code": code}))
            continue
        (theirs,) = fds
        pid = os.fork()
        if not pid:
            parent.close()
            begin(episode, theirs, request["memory_mb"])
        os.close(theirs)
        parent.sendall(encode({"id": request["id"], "pid": pid}))


if __name__ == "__main__":
    serve(int(sys.argv[1]))
