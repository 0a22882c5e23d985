"""Lines of `oxrl plan` that packages write: the entry points `oxrl.planners`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oxrl.config.reads import read_values
from oxrl.config.schema import Config
from oxrl.entry_points import OURS, PLANNERS, all_offers
from oxrl.errors import ConfigError
from oxrl.plan.recorded_run import RecordedRun, read_recorded_run


def planned_lines(cfg: Config, like: Path | None) -> Iterator[str]:
    """Ask every package for what it has to say of a run.

    Args:
        cfg: of the run.
        like: the directory of a run that is like it; None: nothing is known of one.

    Yields:
        `label text`, as `plan_text` has them.

    Raises:
        ConfigError: `like` is no run directory, the run does not sample and train, or no package is
            there to ask.
        DataError: `like` has not recorded what a plan goes by.
    """
    offers = all_offers(PLANNERS)
    recorded = None if like is None else _like(cfg, like, asked=bool(offers))
    fields = read_values(cfg)
    for offer in offers:
        try:
            with offer.asked() as planner:
                lines = [f"{label:<12}{text}" for label, text in planner(fields, recorded)]
        except ConfigError as error:
            if offer.package == OURS:
                raise
            lines = [f"{'unknown':<12}{error}"]
        yield from lines


def _like(cfg: Config, folder: Path, *, asked: bool) -> RecordedRun:
    if not asked:
        raise ConfigError("--like needs the packages beside oxRL: install it with pip")
    stored = cfg.rollout.from_samples is not None
    if cfg.recipe != "rl" or cfg.run.only is not None or stored:
        raise ConfigError(
            f"--like {folder} is for a run that samples and trains, in turn or at the same time, "
            f"and {cfg.run.name} does one of them: leave it out"
        )
    return read_recorded_run(folder)
