"""A first checkpoint that names the models a run began with, instead of holding a copy of them.

reference.json   {"format", "model", "dtype", "seed", "pins": {field: its commit and hashes}}

Every start of a run builds the same models anyway: from the same files, which are pinned, or from
the same seed. So before the first step there is nothing else to store of them, and nothing to load.
"""

from __future__ import annotations

import logging
from pathlib import Path

from oxrl.config import Config
from oxrl.engines.train.base import Saved
from oxrl.errors import CheckpointError
from oxrl.modelfiles.folder import REFERENCE_FILE
from oxrl.runs.files import Json, pretty_json, read_json
from oxrl.runs.pins import INPUTS_FILE, read_noted

log = logging.getLogger(__name__)

FORMAT = "oxrl-reference-1"


def origin(cfg: Config) -> Json:
    """What the models of a run are built from."""
    noted = read_noted(cfg.run.directory, INPUTS_FILE)
    pins: Json = {}
    for field, found in noted.items():
        if field.startswith("model."):
            hashes = {name: file["sha256"] for name, file in found["files"].items()}
            pins[field] = {"commit": found["commit"], "files": hashes}
    return {
        "format": FORMAT,
        "model": cfg.model.name,
        "dtype": cfg.model.dtype,
        "seed": cfg.run.seed,
        "pins": pins,
    }


def write_reference(directory: Path, cfg: Config) -> None:
    """Name in `directory` what the models are built from."""
    (directory / REFERENCE_FILE).write_text(pretty_json(origin(cfg)), encoding="utf-8")


def restore_engine(engine: Saved, directory: Path, cfg: Config) -> None:
    """Load what a checkpoint holds; leave what it only names as it was built.

    Raises:
        CheckpointError: the models were built from something else than it names, or it holds
            nothing of this engine.
    """
    file = directory / REFERENCE_FILE
    if not file.is_file():
        engine.load(directory)
        return
    then = read_json(file) or {}
    now = origin(cfg)
    if not now["pins"] and "pins" in then:
        # A replay, which has compared every input itself.
        now["pins"] = then["pins"]
    for key, value in now.items():
        if then.get(key) != value:
            raise CheckpointError(
                f"{directory} is a reference to the model that the run began with, and its {key} "
                f"was {then.get(key)!r}: now it is {value!r}. Put it back, or begin a new run"
            )
    log.info("%s: the model as it was built", directory)
