"""Which data a run was started with, pinned so that a resume trains on the same rows."""

from __future__ import annotations

import json
from pathlib import Path

from oxrl.config import Config
from oxrl.data.hub import identity, locate
from oxrl.engines.train.ranks import Ranks
from oxrl.errors import DataError
from oxrl.runs.files import pretty_json, write_atomically

PINS_FILE = "data.json"


def with_pinned_data(cfg: Config, run: Path, ranks: Ranks) -> Config:
    """The configuration with files of the hub located, the same bytes at every start of the run.

    Args:
        run: the run directory. ranks: the first one reads and writes the pins.

    Raises:
        DataError: a file has changed since the run started, or two names are one file.
    """
    pins = ranks.agree(pin_files(cfg, run) if ranks.first else {})
    paths = {name: str(locate(name, pin)) for name, pin in pins.items()}
    data = cfg.data
    if isinstance(data.train, str):
        train: str | dict[str, float] = paths[data.train]
    else:
        train = {paths[name]: share for name, share in data.train.items()}
        if len(train) < len(data.train):
            names = ", ".join(data.train)
            raise DataError(f"data.train: two of {names} are one file; give it one share")
    held_out = data.eval and paths[data.eval]
    located = data.model_copy(update={"train": train, "eval": held_out})
    return cfg.model_copy(update={"data": located})


def pin_files(cfg: Config, run: Path) -> dict[str, str]:
    """The identity of every data file, compared with the one at the start of the run."""
    path = run / PINS_FILE
    known = read_pins(run)
    pins: dict[str, str] = {}
    for name in (*cfg.data.train_files, cfg.data.eval):
        if name is None:
            continue
        then = known.get(name)
        now = identity(name, locate(name, then))
        if then not in (None, now):
            raise DataError(
                f"{name} has changed since this run started (sha256 {then:.12} then, {now:.12} "
                f"now). Put the old file back, start a new run, or delete {path} to go on with the "
                "new rows"
            )
        pins[name] = now
    write_atomically(path, pretty_json(pins))
    return pins


def read_pins(run: Path) -> dict[str, str]:
    """`identity` of each data file when the run in `run` started; nothing where no run did."""
    path = run / PINS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
