"""Runs on a tiny model, each of which writes what it imported and what it called.

    python tests/support/default_run.py CONFIG.yaml... [--calls]

What is found goes to CONFIG.json. `imported`: module -> its file. `calls`, where asked for, of the
first run: of the package, from the first question to the source of rollouts to the end of the run,
[event, file, qualified name, first line] for every call and return; what modules do while they are
imported is left out. A run is forked from a process that has imported what every run imports first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from oxrl.cli import app
from oxrl.models.lazy_transformers import import_model_classes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "oxrl") + "/"
BESIDE = str(ROOT / "packages") + "/"


class Watch:
    """A profiler that notes calls and returns of functions of the package."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str, int]] = []
        self._importing = 0

    def __call__(self, frame: FrameType, event: str, given: object) -> None:
        code = frame.f_code
        if event not in ("call", "return"):
            return
        if code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        elif not self._importing and code.co_filename.startswith((PACKAGE, BESIDE)):
            file = code.co_filename.removeprefix(PACKAGE).removeprefix(BESIDE)
            self.calls.append((event, file, code.co_qualname, code.co_firstlineno))

    def from_first_question(self) -> None:
        """Begin there: before it, everything is imported, which takes long to watch."""
        from oxrl.rollouts.sync import SyncRollouts

        ask = SyncRollouts.next

        def watched(*given: Any, **more: Any) -> Any:
            SyncRollouts.next = ask
            sys.setprofile(self)
            return ask(*given, **more)

        SyncRollouts.next = watched


def record(config: Path, *, calls: bool) -> None:
    watch = Watch()
    if calls:
        watch.from_first_question()
    try:
        app(["train", str(config)])
    finally:
        sys.setprofile(None)
        files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
        found = {"imported": files, "calls": watch.calls}
        config.with_suffix(".json").write_text(json.dumps(found))


def main(*words: str) -> None:
    import_model_classes()
    calls = "--calls" in words
    for config in words[: -1 if calls else None]:
        child = os.fork()
        if not child:
            record(Path(config), calls=calls and config == words[0])
            return
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
