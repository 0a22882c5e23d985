"""The trackers that can show a run besides its own record: pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TrackerRow:
    """A tracker.

    title: in messages. package: imported to talk to it. install: what installs that, in the folder
    of oxRL's own repository.
    """

    title: str
    package: str
    install: str


TRACKERS: Mapping[str, TrackerRow] = MappingProxyType(
    {
        "mlflow": TrackerRow(
            "MLflow",
            "mlflow",
            "pip install -c constraints.txt -e .",
        ),
        "tensorboard": TrackerRow(
            "TensorBoard",
            "tensorboard",
            'pip install -c constraints.txt -e ".[tensorboard]"',
        ),
        "wandb": TrackerRow(
            "W&B",
            "wandb",
            'pip install -c constraints.txt -e ".[wandb]"',
        ),
        # Without the pins: it wants an older Pillow than they name.
        "trackio": TrackerRow(
            "trackio",
            "trackio",
            'pip install -e ".[trackio]"',
        ),
    }
)
