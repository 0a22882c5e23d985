"""Raw public datasets to oxRL's JSONL: `oxrl prepare NAME --out DIR [--source PATH] [key=value]`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from oxrl.data.prepare.arithmetic import arithmetic
from oxrl.data.prepare.gsm8k import gsm8k
from oxrl.data.prepare.output import read_options
from oxrl.data.prepare.procedural import reasoning_gym
from oxrl.data.prepare.published import CONVERTERS, prepare_files


class Preparer(Protocol):
    def __call__(
        self, source: Path | None, out: Path, *, seed: int = 0, limit: int | None = None, **options: Any
    ) -> dict[str, Any]:
        """Write data files and report.json into `out`, and return the report; options may be text."""
        ...


def _typed(preparer: Callable[..., dict[str, Any]]) -> Preparer:
    def run(
        source: Path | None, out: Path, *, seed: int = 0, limit: int | None = None, **options: Any
    ) -> dict[str, Any]:
        return preparer(source, out, seed=seed, limit=limit, **read_options(preparer, options))

    return run


PREPARERS: dict[str, Preparer] = {
    "arithmetic": _typed(arithmetic),
    "gsm8k": _typed(gsm8k),
    "reasoning-gym": _typed(reasoning_gym),
    **{name: partial(prepare_files, name) for name in CONVERTERS},
}
