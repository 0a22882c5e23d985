"""Warnings of a run that does not learn: what raises no error and can teach nothing gets a name.

A warning is told once per cause, when it has held for some optimizer steps in a row. Nothing here
is computed for a run but from its own lines of metrics, and a resumed run reads the lines that it
has, so that it neither repeats a warning nor begins to count anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from oxrl.errors import Interrupted, NonFiniteError, NothingTrainedError, OxrlError
from oxrl.runs.files import Json, Record
from oxrl.runs.health_checks import SIGNS, History, Sign
from oxrl.types import Metrics

log = logging.getLogger(__name__)

# What stops a run by itself is told as an error, which begins with this.
FRUITLESS = "nothing was trained on"
NOTHING: Mapping[str, str] = MappingProxyType({})


class Health:
    """Looks at the line of every optimizer step, and warns where a run cannot learn.

    Args:
        vocabulary: tokens of the model; 0 where that is not known.
        wanted: name of a sign -> what it does: warn, stop or off; where nothing is said, what the
            sign does by itself.
    """

    def __init__(self, vocabulary: int = 0, wanted: Mapping[str, str] = NOTHING) -> None:
        self._seen = History(vocabulary)
        self._wanted = wanted
        self._in_a_row = {sign.name: 0 for sign in SIGNS}
        self._told: set[str] = set()

    def look(self, line: Metrics) -> str:
        """Warn of what the line of a step and those before it show.

        Returns:
            The sign at which the run is to stop, in words; empty where it is to go on.
        """
        stop = ""
        for sign in self.new(line):
            does = self._wanted.get(sign.name, sign.does)
            if does == "off":
                continue
            lasting = f"{sign.patience} steps in a row" if sign.patience > 1 else "this step"
            why = sign.why(self._seen)
            told = (sign.name, lasting, why + sign.advice, sign.threshold, page_of(sign.name))
            log.warning("%s, %s: %s (%s; %s)", *told)
            if does == "stop":
                stop = f"run.health, which stops at {sign.name}"
                if sign.does == "stop":
                    stop = f"{FRUITLESS}, {lasting}: {why}{sign.advice}"
        return stop

    def remember(self, records: Iterable[Json]) -> None:
        """Take over the lines that a run recorded before it was resumed; nothing is told again.

        But what stops a run by itself counts from the resume on, and stops it once more.
        """
        for record in records:
            self.new(_numbers(record))
        for sign in SIGNS:
            if sign.does == "stop":
                self._in_a_row[sign.name] = 0
                self._told.discard(sign.name)

    def new(self, line: Metrics) -> list[Sign]:
        """List the signs that have held long enough with this line, and were not told before."""
        self._seen.add(line)
        found: list[Sign] = []
        for sign in SIGNS:
            holds = sign.holds(self._seen)
            self._in_a_row[sign.name] = self._in_a_row[sign.name] + 1 if holds else 0
            if self._in_a_row[sign.name] >= sign.patience and sign.name not in self._told:
                self._told.add(sign.name)
                found.append(sign)
        return found


class Verdict(NamedTuple):
    """The verdict of a check on a whole run.

    state: ok, warning (since `step`), or unknown where its numbers were never measured. does: what
    it did in the run: warn, stop or off. page: where it is explained.
    """

    name: str
    state: str
    step: int | None
    threshold: str
    advice: str
    does: str
    page: str


def page_of(name: str) -> str:
    """Return the place in the documentation where a sign is explained."""
    return f"docs/health.md#{name}"


def verdicts(
    records: Iterable[Json], vocabulary: int = 0, wanted: Mapping[str, str] = NOTHING
) -> Iterator[Verdict]:
    """Make every check on the lines of a run, in the order of SIGNS.

    Args:
        records: lines of metrics.jsonl.
        vocabulary: tokens of the model; 0 where that is not known.
        wanted: as of Health.
    """
    health = Health(vocabulary)
    since: dict[str, int] = {}
    measured: set[str] = set()
    for record in records:
        line = _numbers(record)
        measured.update(line)
        for sign in health.new(line):
            since[sign.name] = int(line["step"])
    for sign in SIGNS:
        known = measured.issuperset(sign.reads)
        state = "warning" if sign.name in since else "ok" if known else "unknown"
        lasting = f", {sign.patience} steps in a row" if sign.patience > 1 else ""
        yield Verdict(
            name=sign.name,
            state=state,
            step=since.get(sign.name),
            threshold=sign.threshold + lasting,
            advice=sign.advice,
            does=wanted.get(sign.name, sign.does),
            page=page_of(sign.name),
        )


def _numbers(record: Record) -> Metrics:
    """Return the numbers of a line as it was read, those by name ("nan") included."""
    return {name: float(value) for name, value in record.items()}  # pyright: ignore


def end_of_run(stop: str, step: int) -> OxrlError:
    """The error of a run that was asked to stop, and saved everything.

    Args:
        stop: who asked: a signal, or what `Health.look` said.
        step: optimizer steps that are done.
    """
    if stop.startswith(FRUITLESS):
        told = (
            f"{stop}. Everything is saved after step {step}: mend that and continue with --resume"
        )
        return NothingTrainedError(told)
    return Interrupted(
        f"stopped by {stop} after step {step}; everything is saved. Continue with --resume"
    )


def too_many_in_a_row(run: Path, skipped: int, most: int) -> NonFiniteError:
    """The error of a run whose steps are refused one after the other.

    Args:
        run: the run directory.
        skipped: how many were.
        most: how many may be.
    """
    return NonFiniteError(
        f"{skipped} optimizer steps in a row were skipped, more than "
        f"train.max_skipped_steps={most}: NaN or infinite values, batches in {run / 'dumps'}. "
        "Lower train.lr or train.max_grad_norm"
    )
