"""A first checkpoint that names the models a run began with, instead of holding a copy of them.

reference.json   {"format", "model", "dtype", "seed", "pins": {field: its commit and hashes}}

Every start of a run builds the same models anyway: from the same files, which are pinned, or from
the same seed. So before the first step there is nothing else to store of them, and nothing to load.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from oxrl.errors import CheckpointError
from oxrl.modelfiles.folder import REFERENCE_FILE
from oxrl.runs.files import Json, pretty_json, read_json
from oxrl.runs.pins import INPUTS_FILE, read_noted

log = logging.getLogger(__name__)

FORMAT = "oxrl-reference-1"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The names and files that the models of a run are built from.

    run: its directory, where the inputs of the models are noted. model: its name. dtype: of the
    weights. seed: of those that are random.
    """

    run: Path
    model: str
    dtype: str
    seed: int

    def write(self, directory: Path) -> None:
        """Name it in `directory`."""
        (directory / REFERENCE_FILE).write_text(pretty_json(self._content()), encoding="utf-8")

    def is_named(self, directory: Path) -> bool:
        """Tell whether `directory` only names what the models are built from, and holds none.

        Raises:
            CheckpointError: it names something else.
        """
        file = directory / REFERENCE_FILE
        if not file.is_file():
            return False
        then = read_json(file) or {}
        now = self._content()
        if not now["pins"] and "pins" in then:
            # A replay, which has compared every input itself.
            now["pins"] = then["pins"]
        for key, value in now.items():
            if then.get(key) != value:
                raise CheckpointError(
                    f"{directory} is a reference to the model that the run began with, and its "
                    f"{key} was {then.get(key)!r}: now it is {value!r}. Put it back, or begin a "
                    "new run"
                )
        log.info("%s: the model as it was built", directory)
        return True

    def _content(self) -> Json:
        pins: Json = {}
        for field, found in read_noted(self.run, INPUTS_FILE).items():
            if field.startswith("model."):
                hashes = {name: file["sha256"] for name, file in found["files"].items()}
                pins[field] = {"commit": found["commit"], "files": hashes}
        return {
            "format": FORMAT,
            "model": self.model,
            "dtype": self.dtype,
            "seed": self.seed,
            "pins": pins,
        }
