"""The checks of `oxrl plan` in this process: another one imports torch for each plan.

Also a program, which is `oxrl` with checks of that kind.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from oxrl.cli import main
from oxrl.config import Config
from oxrl.config.reads import read_values, sections_of
from oxrl.plan import preflight_process
from oxrl.plan.preflight import Prepared, reply
from oxrl.usercode.messages import Json
from support.command_line import oxrl


def examine_here(cfg: Config) -> Iterator[tuple[str, str, str]]:
    """In the place of `preflight_process.examine_apart`."""
    values = sections_of(read_values(cfg))
    with closing(Prepared()) as prepared:
        for subject in preflight_process.LATE:
            request: Json = {"config": values, "subject": subject}
            found = reply(prepared, request)
            if found["text"]:
                yield subject, found["state"], found["text"]


def planned(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Give the command `oxrl plan ...`, as `command_line.oxrl` does."""
    return oxrl("plan", *words, folder=folder, script=__file__)


if __name__ == "__main__":
    preflight_process.examine_apart = examine_here
    main()
