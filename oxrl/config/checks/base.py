"""The form of a check: a generator of problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oxrl.config.schema import Config
from oxrl.config.source import AS_IT_IS, Problem

Problems = Iterator[Problem]
Check = Callable[[Config], Problems]


def at(path: str, rule: str, *also: str) -> Problem:
    """The problem of a field, told with the value that it has; fields `also` took part."""
    return Problem(path, rule, AS_IT_IS, also=also)


def several_samples(cfg: Config, comparer: str) -> Problems:
    """Groups of two samples or more, for what compares them."""
    if cfg.rollout.n_samples < 2:
        rule = f"{comparer} compares the samples of one prompt: set it to 2 or more"
        yield at("rollout.n_samples", rule, "train.advantage")
