"""Numbers of features that are checked, and features whose engines stay with the driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oxrl.errors import ConfigError, why_no_file
from oxrl.recipes.features.base import Feature


def problem(feature: str, field: str, text: str) -> ConfigError:
    """The error about a number of a feature.

    Args:
        feature, field: names in `train.features`.
        text: what is wrong, and what to write.
    """
    return ConfigError(f"train.features={feature}: {field}: {text}")


def between(feature: str, field: str, value: float, low: float, high: float) -> float:
    """A number within its bounds.

    Args:
        feature, field: names in `train.features`.
        value: that stands there.
        low, high: least and most.

    Raises:
        ConfigError: it is none, or outside of them.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise problem(feature, field, f"must be a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def count(feature: str, field: str, value: int, least: int) -> int:
    """A whole number that is large enough.

    Args:
        feature, field: names in `train.features`.
        value: that stands there.
        least: that it may be.

    Raises:
        ConfigError: it is none, or too small.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise problem(feature, field, f"must be a whole number from {least} on, got {value!r}")
    return value


def file(feature: str, field: str, value: str, holds: str) -> str:
    """The name of a file that is there.

    Args:
        feature, field: names in `train.features`.
        value: that stands there.
        holds: what its rows are, for the error.

    Raises:
        ConfigError: it is none, or there is no such file.
    """
    wanted = f"give a JSONL or Parquet file {holds}"
    if not isinstance(value, str) or not value:
        raise problem(feature, field, f"is missing: {wanted}")
    if not Path(value).is_file():
        raise problem(feature, field, f"{value}: {why_no_file(value)}; {wanted}")
    return value


class Driving(Feature):
    """A feature of which the process that drives the run alone has everything.

    The policy's loss is sent to training ranks with the features that it was made with; what is
    named in `stays` is not.
    """

    stays: tuple[str, ...] = ()

    def __getstate__(self) -> Mapping[str, object]:
        """Return what is sent to another process."""
        return {name: value for name, value in vars(self).items() if name not in self.stays}
