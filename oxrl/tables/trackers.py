"""The trackers that can show a run besides its own record: pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TrackerRow:
    """A tracker.

    title: in messages. module: what talks to it. package: imported there. install: what installs
    that, in the folder of oxRL's own repository.
    """

    title: str
    module: str
    package: str
    install: str


TRACKERS: Mapping[str, TrackerRow] = MappingProxyType(
    {
        "mlflow": TrackerRow(
            "MLflow",
            "oxrl_trackers.mlflow_tracker",
            "mlflow",
            "pip install -c constraints.txt -e .",
        ),
        "tensorboard": TrackerRow(
            "TensorBoard",
            "oxrl_trackers.tensorboard_tracker",
            "tensorboard",
            'pip install -c constraints.txt -e ".[tensorboard]"',
        ),
        "wandb": TrackerRow(
            "W&B",
            "oxrl_trackers.wandb_tracker",
            "wandb",
            'pip install -c constraints.txt -e ".[wandb]"',
        ),
        # Without the pins: it wants an older Pillow than they name.
        "trackio": TrackerRow(
            "trackio",
            "oxrl_trackers.trackio_tracker",
            "trackio",
            'pip install -e ".[trackio]"',
        ),
    }
)
