"""A trial of a chat template, in a process that can be killed, to see that it comes to an end.

A template is a program. One with loops over large ranges, or with texts multiplied, can take for
ever or all memory, and nothing in the process that renders it could stop it. So it renders a short
conversation elsewhere first. What else may be wrong with it is told where it is used.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from functools import lru_cache

from oxrl.errors import DataError

DEADLINE_S = 20.0
MOST_BYTES = 2 << 30
# A block that transformers adds to the language, and that renders what is inside.
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
REFUSED = 3
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 2 + 2?"},
]


@lru_cache(maxsize=8)
def require_end(template: str) -> None:
    """Refuse a chat template that does not render a short conversation in bounded time and memory.

    Args:
        template: Jinja.

    Raises:
        DataError: it does not end, or takes more than DEADLINE_S seconds or MOST_BYTES.
    """
    limits = f"within {DEADLINE_S:g} s and {MOST_BYTES >> 30} GB of memory"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "oxrl.data.template_trial"],
            input=template.encode("utf-8", errors="surrogatepass"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=False,
        )
        ended = done.returncode >= 0 and done.returncode != REFUSED
    except subprocess.TimeoutExpired:
        ended = False
    if not ended:
        raise DataError(
            f"the chat template does not end: it did not render four short messages {limits}. Look "
            "for loops over a range and for texts that are multiplied in it, or set "
            "model.chat_template to another"
        )


def conversations() -> list[list[dict[str, str]]]:
    """Return the trial's conversations: with and without a system message, one turn and two."""
    return [CONVERSATION[1:2], CONVERSATION[:2], CONVERSATION[1:], CONVERSATION]


def try_here(template: str) -> int:
    """Render in this process, as transformers would; the exit code of the trial.

    Args:
        template: Jinja; whatever else is wrong with it is no matter here.

    Returns:
        0: it ended; REFUSED: it took all memory there is.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(value: object, indent: int | None = None, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def today(form: str) -> str:
        return "2026-01-01"

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = today
    for messages in conversations():
        try:
            made = environment.from_string(GENERATION.sub("", template))
            made.render(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        except MemoryError:
            return REFUSED
        except Exception:  # noqa: BLE001 - whatever it is, it ended, and is told where it is used
            continue
    return 0


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (int(DEADLINE_S), int(DEADLINE_S)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(try_here(sys.stdin.buffer.read().decode("utf-8", errors="surrogatepass")))
