"""Samples of a run, as samples.jsonl has them, as the objects that rewards read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from oxrl.data.samples import recorded_prompt
from oxrl.errors import RunDirectoryError
from oxrl.runs.files import read_records
from oxrl.types import Completion, Group, Segment, Turn

Line = Mapping[str, Any]
# Stands for every token of a response: samples.jsonl says how many there are, not which.
UNKNOWN_TOKEN = -1


@dataclass(frozen=True)
class StoredGroup:
    """Lines of samples.jsonl that were scored together: the responses to one prompt of a step."""

    lines: list[Line]
    group: Group


def stored_groups(path: Path, samples: int) -> Iterator[StoredGroup]:
    """The groups of a run, in the order in which they were written.

    Args:
        path: of samples.jsonl.
        samples: responses of a group; those numbered from there on are baselines, which are scored
            one by one.

    Raises:
        RunDirectoryError: a line is not what was written there; names it.
    """

    def key(numbered: tuple[int, Line]) -> object:
        """Return what the lines of one group have in common."""
        number, line = numbered
        try:
            baseline = int(line["sample"]) >= samples
            return line["step"], line["draw"], baseline
        except (KeyError, TypeError, ValueError) as error:
            raise _broken(path, f"line {number}", error) from error

    for _, numbered in groupby(enumerate(read_records(path), start=1), key):
        yield _group([line for _, line in numbered], path)


def _group(lines: list[Line], path: Path) -> StoredGroup:
    try:
        prompt = recorded_prompt(lines[0])
        completions = [recorded_completion(line) for line in lines]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        where = f"draw {lines[0]['draw']} of step {lines[0]['step']}"
        raise _broken(path, where, error) from error
    return StoredGroup(lines, (prompt, completions))


def _broken(path: Path, where: str, error: Exception) -> RunDirectoryError:
    problem = f"{type(error).__name__}: {error}"
    return RunDirectoryError(f"{path}, {where}: not a sample as runs write them ({problem})")


def recorded_completion(line: Line) -> Completion:
    """The response of a line; its tokens are as many as there were, and unknown.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the line holds none.
    """
    segments: list[Segment] = []
    for version, first, end in line.get("versions", []):
        tokens = int(end) - int(first)
        origin = "environment" if version < 0 else "policy"
        segment = Segment(
            token_ids=(UNKNOWN_TOKEN,) * tokens,
            logprobs=(0.0,) * tokens,
            versions=(int(version),) * tokens,
            origin=origin,
        )
        segments.append(segment)
    turns = [
        Turn(**{**turn, "messages": tuple(turn["messages"])}) for turn in line.get("turns", [])
    ]
    return Completion(
        segments=tuple(segments),
        text=str(line["response"]),
        finish_reason=line["finish_reason"],
        turns=tuple(turns),
        opening=tuple(line.get("opening", [])),
        end=line.get("end"),
        reason=str(line.get("reason", "")),
    )
