"""One algorithm in full, for `oxrl algorithms NAME`: cells with equations, numbers, origin."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from oxrl.errors import ConfigError, did_you_mean
from oxrl.tables.cells import FEATURES
from oxrl.tables.numbers import NUMBERS, Value
from oxrl.tables.policy import ROWS, Row
from oxrl.tables.preference import METHODS

CELL_KINDS = {
    "advantage": "advantage",
    "ratio": "ratio",
    "gate": "loss",
    "correction": "correction",
    "centering": "centering",
    "kl": "kl",
    "weights": "weights",
}


def describe(name: str) -> str:
    """Everything that there is to know of a row, as text.

    Args:
        name: as `train.alg_name`.

    Raises:
        ConfigError: there is no such row.
    """
    if name not in ROWS:
        hint = did_you_mean(name, ROWS) or "; `oxrl algorithms` lists them"
        raise ConfigError(f"no algorithm {name!r}{hint}")
    row = ROWS[name]
    lines = [f"{name}: {row.summary}", "", *_facts(row), "", *_numbers(row), *_equations(row)]
    return "\n".join(lines).rstrip()


def _facts(row: Row) -> Iterator[str]:
    yield from _wrapped("source", row.source or "common practice")
    yield from _wrapped("recipe", row.recipe)
    yield from _wrapped("use", row.use or "-")
    yield from _wrapped("deviation", row.deviation or "none")
    for need in row.needs:
        yield from _wrapped("needs", f"{need}: {FEATURES[need].meaning}")
    yield from _wrapped("not yet", row.unsupported)
    yield from _wrapped("not local", row.shared_weight)
    for proof, reason in row.exempt.items():
        yield from _wrapped("exempt", f"from the proof {proof}: {reason}")
    method = METHODS.get(row.name)
    if method is not None:
        kind = "single judged completions" if method.unpaired else "pairs"
        reference = "compared with a reference" if method.reference else "no reference"
        yield from _wrapped("reads", f"{kind}, {reference}")


def _wrapped(label: str, text: str) -> list[str]:
    """The lines of a text behind its label; none where it is empty."""
    return textwrap.wrap(text, width=100, initial_indent=f"{label:<11}", subsequent_indent=" " * 11)


def _numbers(row: Row) -> Iterator[str]:
    """Every number that the row reads, with its default and meaning."""
    for name, value in row.defaults.items():
        number = NUMBERS[name]
        unit = f" ({number.unit})" if number.unit else ""
        yield f"train.{name} = {_shown(value)}"
        yield f"    {number.meaning}{unit}"
    if row.defaults:
        yield ""


def _shown(value: Value) -> str:
    """A value as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _equations(row: Row) -> Iterator[str]:
    """The cells of a row, or its loss, each with what its function says."""
    from oxrl.functional import equations  # torch, which nothing else here needs

    if row.recipe == "rl":
        for kind, field in CELL_KINDS.items():
            name = str(getattr(row, kind))
            label = f"train.{field}: {name}"
            if kind == "ratio" and name != "none":
                label += f", train.denominator: {row.denominator}"
            yield label
            if name != "none":
                yield from _told(equations.EQUATIONS[kind][name], equations.told_of)
            yield ""
        return
    if row.name in equations.LOSSES:
        yield from _told(equations.LOSSES[row.name], equations.told_of)
        return
    method = METHODS[row.name]
    for part, weight in method.parts.items():
        yield f"{weight:g} x {part}"
    if method.loss:
        yield f"loss: {method.loss}"
        yield from _told(equations.EQUATIONS["preference"][method.loss], equations.told_of)


def _told(function: Callable[..., Any], told_of: Callable[[Callable[..., Any]], str]) -> list[str]:
    meant = inspect.unwrap(function)
    text = f"{told_of(function)}\n({meant.__module__}.{meant.__name__})"
    return textwrap.indent(text, "    ").splitlines()
