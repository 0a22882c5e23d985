"""The needs of a row's features: groups here, which nearly every row has some of."""

from __future__ import annotations

from oxrl.config.checks.base import Problems, several_samples
from oxrl.config.schema import Config
from oxrl.tables.cells import GROUPS


def check_groups(cfg: Config) -> Problems:
    """Samples of one prompt that can be compared."""
    yield from several_samples(cfg, cfg.train.row.advantage)


def check_features(cfg: Config) -> Problems:
    """Check that what the row adds to its cells has what it needs."""
    for need in cfg.train.row.needs:
        if need == GROUPS.name:
            yield from check_groups(cfg)
            continue
        from oxrl.config.checks.rarer_features import OF_FEATURE  # most rows have groups alone

        if need in OF_FEATURE:
            yield from OF_FEATURE[need](cfg)
