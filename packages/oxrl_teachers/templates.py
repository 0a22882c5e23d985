"""Templates of hints: what they read, and a trial in a process that can be ended.

A template is a program. One that loops over what it loops over can take for ever, or all memory,
and nothing in the process that renders it could stop it. So the first rows are written elsewhere:
this file is started by its path, with a request on its standard input.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, Template, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

DEADLINE_S = 20.0
MOST_BYTES = 2 << 30


class Trial(NamedTuple):
    """The outcome of writing a template.

    error: why it cannot be written; empty: it can. names: that it reads, whether or not it came
    across them. texts: what it made of each row.
    """

    error: str
    names: Sequence[str] = ()
    texts: Sequence[str] = ()


def environment() -> ImmutableSandboxedEnvironment:
    """Return the language of templates: what it is not given is an error, and nothing is drawn.

    A resumed run has to write what the first one wrote.
    """
    language = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    del language.globals["lipsum"]
    del language.filters["random"]
    return language


def compiled(text: str) -> Template:
    """Compile a template.

    Args:
        text: Jinja.
    """
    return environment().from_string(text)


def try_apart(text: str, rows: Sequence[Mapping[str, Any]]) -> Trial:
    """Write rows in another process, for a bounded time.

    Args:
        text: Jinja.
        rows: what it is given for each, by name; whatever JSON can hold.
    """
    request = json.dumps([text, list(rows)]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=request,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Trial(f"it did not end within {DEADLINE_S:g} s: look for loops in it")
    if done.returncode:
        limits = f"{DEADLINE_S:g} s and {MOST_BYTES >> 30} GB of memory"
        return Trial(f"it takes more than {limits}: look for loops and texts that are multiplied")
    return Trial(*json.loads(done.stdout))


def try_here(text: str, rows: Sequence[Mapping[str, Any]]) -> Trial:
    """Write rows in this process.

    Args:
        text, rows: as of `try_apart`.

    Raises:
        MemoryError: they take all there is.
    """
    names: list[str] = []
    try:
        names += sorted(meta.find_undeclared_variables(environment().parse(text)))
        template = compiled(text)
        return Trial("", names, [template.render(row) for row in rows])
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a program of the user's, which may raise anything
        return Trial(f"{type(error).__name__}: {error}", names)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(DEADLINE_S), int(DEADLINE_S)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.stdout.write(json.dumps(try_here(*json.loads(sys.stdin.buffer.read()))))
