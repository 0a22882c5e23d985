"""Features of this package: numbers and files that are looked at before a run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from oxrl.errors import ConfigError, DataError, why_no_file
from oxrl.recipes.features.base import Feature, Planned

Opened = TypeVar("Opened")


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


def opened(feature: str, field: str, value: str, holds: str, by: Callable[[str], Opened]) -> Opened:
    """The contents of a file.

    Args:
        feature, field: names in `train.features`.
        value: that stands there.
        holds: what its rows are, for the error.
        by: reads the file of a name.

    Raises:
        ConfigError: no file is named, none is there, or its rows are others.
    """
    wanted = f"give a JSONL or Parquet file {holds}"
    if not isinstance(value, str) or not value:
        raise problem(feature, field, f"is missing: {wanted}")
    if not Path(value).is_file():
        raise problem(feature, field, f"{value}: {why_no_file(value)}; {wanted}")
    try:
        return by(value)
    except DataError as error:
        raise problem(feature, field, f"{wanted}: {error}") from error


class Checked(Feature):
    """A feature whose numbers are looked at before a run begins, by making it once."""

    # Attributes that are not sent to training ranks with the policy's loss.
    stays: tuple[str, ...] = ()

    @classmethod
    def planned(cls, run: Planned, numbers: Mapping[str, Any]) -> str:
        """Make it as a run will, but for engines."""
        cls(run.given, **numbers)
        return ""

    def __getstate__(self) -> Mapping[str, object]:
        """Return what is sent to another process."""
        return {name: value for name, value in vars(self).items() if name not in self.stays}
