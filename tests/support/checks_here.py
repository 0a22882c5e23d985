"""The checks of `oxrl plan` in this process: another one imports torch for each plan."""

from __future__ import annotations

from collections.abc import Iterator

from oxrl.config import Config
from oxrl.config.reads import read_values, sections_of
from oxrl.plan import preflight_process
from oxrl.plan.preflight import Prepared
from oxrl.usercode.messages import Json


def examine_here(cfg: Config) -> Iterator[tuple[str, str, str]]:
    """In the place of `preflight_process.examine_apart`."""
    values = sections_of(read_values(cfg))
    with Prepared() as prepared:
        for subject in preflight_process._subjects(cfg):
            request: Json = {"config": values, "subject": subject}
            reply = preflight_process._reply(request, prepared)
            yield subject, reply["state"], reply["text"]
