"""Resolved configurations as dotted paths, as runs record them: read, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from oxrl.errors import RunDirectoryError

# Fields of mappings: name -> field -> value. What may change of a reward may change of its parts.
PARTS = "reward.parts"
TEACHERS = "model.teachers"
NAMED = (PARTS, TEACHERS)
# Dotted path -> value.
Flat = dict[str, Any]
# Field -> what it was, and is now.
Changes = dict[str, tuple[Any, Any]]
# The parser takes seconds per hundred kilobytes, and no resolved config comes near that.
MOST_CONFIG = 200_000


@lru_cache
def flatten_config(config_yaml: str) -> Flat:
    """Dotted path -> value of every field of a resolved config, to be read only.

    A run that goes on reads one text several times, and parsing is most of its start.
    """
    sections = YAML(typ="safe", pure=True).load(config_yaml) or {}
    return {
        f"{section}.{name}": value
        for section, fields in sections.items()
        for name, value in fields.items()
    }


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], absent: str | None = None
) -> Changes:
    """Dotted path -> (old value, new value) wherever two flat configs differ.

    Args:
        old: dotted path -> value.
        new: dotted path -> value.
        absent: stands for a field that one of them does not have.
    """

    def ordered(value: object) -> object:  # the files of data.train draw by their place among them
        return list(value.items()) if isinstance(value, Mapping) else value

    old = with_parts(old)
    new = with_parts(new)
    found: Changes = {}
    for path in {**old, **new}:
        before = old.get(path, absent)
        now = new.get(path, absent)
        if ordered(before) != ordered(now):
            found[path] = (before, now)
    return found


def with_parts(values: Mapping[str, Any]) -> Flat:
    """Flatten a config so that every field of what is named by users has a path of its own."""
    found: Flat = {}
    for path, value in values.items():
        if path in NAMED and isinstance(value, Mapping):
            for name, part in value.items():
                fields = part if isinstance(part, Mapping) else {"name": part}
                for field_name, inner in fields.items():
                    found[f"{path}.{name}.{field_name}"] = inner
        else:
            found[path] = value
    return found


def named_in(path: str) -> str:
    """Return the field of mappings that a dotted path leads into; empty where it leads into none.

    Args:
        path: such as "reward.parts.correct.weight".
    """
    return next((field for field in NAMED if path.startswith(f"{field}.")), "")


def written_config(content: bytes) -> Flat:
    """Dotted path -> value of a run's config.yaml, which anything may have happened to.

    Raises:
        ValueError: it is none; says why.
    """
    if len(content) > MOST_CONFIG:
        raise ValueError(f"it has {len(content)} bytes")
    try:
        return flatten_config(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested far too deep") from None
    except YAMLError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, TypeError) as error:
        raise ValueError(f"it does not hold sections of fields ({error})") from error


def recorded_config(directory: Path) -> Flat:
    """Dotted path -> value of the config.yaml of a run directory.

    Raises:
        RunDirectoryError: it is not there, or not what a run writes; says why.
    """
    path = directory / "config.yaml"
    try:
        return written_config(path.read_bytes())
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunDirectoryError(
            f"{path} is no configuration of a run: {error}. Restore it from a copy"
        ) from error
