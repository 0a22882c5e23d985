"""Numbers of an algorithm that make no sense together, or do something else than they seem to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oxrl.config.checks.base import Problems
from oxrl.config.reads import row_fields
from oxrl.config.schema import Config
from oxrl.config.source import Problem, Source
from oxrl.tables.numbers import NUMBERS

# How many times its default a number of the algorithm may be without a word.
FAR_OUT = 1e4


def check_numbers(cfg: Config) -> Problems:
    """Bounds are the right way round, and what is to happen in a run can happen."""
    read = row_fields(cfg.train.row)
    values: dict[str, Any] = {}
    for path in read:
        name = path.partition(".")[2]
        values[name] = getattr(cfg.train, name, None)
    yield from _clips(values)
    yield from _limits(cfg, values)


def _clips(values: dict[str, Any]) -> Problems:
    low = values.get("clip_low")
    high = values.get("clip_high")
    dual = values.get("clip_dual")
    if low == 0 and high == 0:
        rule = "and train.clip_low are both 0, which clips every token that moves; raise one"
        yield Problem("train.clip_high", rule, high, also=("train.clip_low",))
    if dual is not None and high is not None and dual < 1 + high:
        rule = f"must be at least 1 + train.clip_high = {1 + high:g}, where the other clip begins"
        yield Problem("train.clip_dual", rule, dual, also=("train.clip_high",))
    lowest = values.get("cov_low")
    highest = values.get("cov_high")
    if lowest is not None and highest is not None and lowest >= highest:
        rule = f"must be below train.cov_high = {highest:g}, else no token is chosen"
        yield Problem("train.cov_low", rule, lowest, also=("train.cov_high",))


def _limits(cfg: Config, values: dict[str, Any]) -> Problems:
    buffer = values.get("overlong_buffer")
    longest = cfg.rollout.max_tokens
    if buffer is not None and buffer > longest:
        rule = f"must be at most rollout.max_tokens = {longest}, within which the penalty grows"
        yield Problem("train.overlong_buffer", rule, buffer, also=("rollout.max_tokens",))


def number_notices(cfg: Config, source: Source) -> Iterator[str]:
    """What is to be said of the numbers that were written down."""
    yield from _dropped_signs(cfg, source)
    yield from _far_out(cfg)


def _dropped_signs(cfg: Config, source: Source) -> Iterator[str]:
    """One text for all clip bounds that were written with a sign."""
    signs: list[str] = []
    for name, value in source.values.get("train", {}).items():
        if name in ("clip_low", "clip_high") and float(str(value)) < 0:
            stored = getattr(cfg.train, name)
            place = source.place(f"train.{name}")
            signs.append(f"train.{name} = {value} is stored as {stored} ({place})")
    if signs:
        yield "clip bounds are magnitudes, the sign is dropped: " + "; ".join(signs)


def _far_out(cfg: Config) -> Iterator[str]:
    """Numbers of the algorithm that are so large that what they bound or weigh is hardly there."""
    for path in sorted(row_fields(cfg.train.row)):
        number = NUMBERS[path.removeprefix("train.")]
        value = cfg.train.value(number)
        if isinstance(value, int | str | None):
            continue
        default = number.default
        usual = abs(default) if isinstance(default, int | float) and default else 1.0
        if abs(value) > FAR_OUT * usual:
            yield (
                f"{path} = {value:g} is {abs(value) / usual:.0e} times what is usual ({usual:g}): "
                f"{number.meaning}"
            )
