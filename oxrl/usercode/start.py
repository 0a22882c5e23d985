"""The start of a process that loads one thing of a user's, before it is asked anything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from oxrl.tables.user_code import Kind
from oxrl.types import Objects
from oxrl.usercode.channel import LateReply, LostWorker, SuspectWorker
from oxrl.usercode.given import FIELD, given, is_given
from oxrl.usercode.messages import Json
from oxrl.usercode.packing import packed, receive
from oxrl.usercode.user_code import raised_as
from oxrl.usercode.worker import LAST_WORDS_S, Worker

# Loading may import large libraries, so it gets longer than a call.
START_TIMEOUT_S = 60.0
NOT_LOADED = f"not loaded within {START_TIMEOUT_S:g} s; what does it import?"


class NotLoaded(Exception):
    """A process could not load what it was started for, or did not end; says how."""


def load_request(kind: Kind, name: str, options: Objects) -> Json:
    """Make the first request to a process.

    Args:
        kind: of code.
        name: as of `locate`.
        options: that it is called with.

    Returns:
        JSON; under FIELD what Python gives, where that can leave this process.
    """
    request: Json = {"name": name, "options": dict(options)}
    sent = packed(given(name, kind.noun)) if is_given(name) else None
    if sent is not None:
        request[FIELD] = sent
    return request


@contextmanager
def loading(worker: Worker, what: str, late: str) -> Iterator[None]:
    """Inside, a process is asked to load something.

    Args:
        worker: that is asked.
        what: it is called, "its worker".
        late: what is wrong where it does not reply in time.

    Raises:
        NotLoaded: it did not; the process was ended.
    """
    try:
        yield
    except LateReply as error:
        worker.end()
        raise NotLoaded(late) from error
    except LostWorker as error:
        how = worker.end(LAST_WORDS_S)
        raise NotLoaded(f"{what} ended while loading it ({how})") from error
    except SuspectWorker as error:
        worker.end()
        raise NotLoaded(f"while loading it {what} {error}") from error


def take_given(kind: Kind, request: Json, cannot: str) -> None:
    """In the process: take what the parent was given itself, if its request brings it.

    Args:
        kind: of code.
        request: as of `load_request`.
        cannot: be done, in words, where it cannot be made again here.

    Raises:
        OxrlError: `kind.error`: it cannot.
    """
    if FIELD not in request:
        return
    name = request["name"]
    try:
        receive(name, request[FIELD])
    except Exception as error:  # any: loading it may import modules of the user's
        raise kind.problem(name, f"{cannot}: {raised_as(error, None)}") from error
