"""The code that the numbers of a run come from: noted when it starts, and compared when it goes on.

code.json   a file of oxRL's -> the beginning of its sha256; a library -> its version; "commit" ->
            of the repository around oxRL, where there is one
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from oxrl.entry_points import own_offers
from oxrl.runs.environment import git_state, versions
from oxrl.runs.files import Json
from oxrl.runs.pins import CODE, DIGITS, InputChange

COMMIT = "commit"
# The code of these groups of entry points scores and acts; trackers and datasets change no number.
GROUPS = ("oxrl.rewards", "oxrl.environments", "oxrl.tools")
SUFFIXES = (".py", ".jinja")
# Others that are installed compute nothing that a run records.
LIBRARIES = {
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "math-verify",
    "reasoning-gym",
    "deepspeed",
    "vllm",
    "peft",
}
MOST_FILES = 5  # in a message


def code_of_run() -> Json:
    """Describe the code that a run which starts now would run, as code.json holds it."""
    found: Json = {}
    for file, path in _own_files():
        found[file] = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS]
    installed = versions(*map(os.path.getmtime, filter(os.path.isdir, sys.path)))
    found |= {name: installed[name] for name in sorted(LIBRARIES & installed.keys())}
    found["python"] = ".".join(platform.python_version_tuple()[:2])
    git = git_state(Path(__file__).parent)
    return found if git is None else found | {COMMIT: git["commit"]}


def _own_files() -> Iterator[tuple[str, Path]]:
    """Yield the files of the core and of the packages beside it, with their names in messages."""
    places = [place for group in GROUPS for place in own_offers(group).values()]
    for top in sorted({place.partition(".")[0] for place in places}):
        spec = find_spec(top)
        for folder in [] if spec is None else spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.*")):
                if path.suffix in SUFFIXES:
                    yield f"{top}/{path.relative_to(folder).as_posix()}", path


def code_changes(then: Json, now: Json) -> Iterator[InputChange]:
    """Yield how code differs from what it was.

    Args:
        then: as code.json holds it.
        now: the same of this start. Another commit with the same files is no change.
    """
    other = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    files = [name for name in other if "/" in name]
    for name in sorted({*other} - {*files, COMMIT}):
        before, after = (state.get(name, "not installed") for state in (then, now))
        yield InputChange(CODE, f"{name} {before}", f"{name} {after}")
    if files:
        listed = ", ".join(files[:MOST_FILES])
        if len(files) > MOST_FILES:
            listed += f" and {len(files) - MOST_FILES} more"
        before, after = (state.get(COMMIT, "unknown")[:DIGITS] for state in (then, now))
        others = f"of commit {after}, other in {listed}"
        yield InputChange(CODE, f"oxRL of commit {before}", others)
