"""The part of `make test-processors` that pytest loads: which tests run, and how each ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one group: tests that ask for `learned`, those of the others that train, or both."""
    group = os.environ["OXRL_TEST_GROUP"]
    trained = os.environ.get("OXRL_TEST_ONLY")
    only = set(Path(trained).read_text().splitlines()) if trained else None
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item in items:
        learns = "learned" in getattr(item, "fixturenames", ())
        trains = only is None or learns or bool(only & names_of(item))
        wanted = group in ("both", "learned" if learns else "others")
        (kept if wanted and trains else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def trained(noted: list[str]) -> list[str]:
    """Tests and fixtures that trained, without those of these programs, which choose how to round."""
    names = {line.rpartition(" ")[0] for line in noted}
    return sorted(name for name in names if name and not name.startswith("tests/processors/"))


def names_of(item: pytest.Item) -> set[str]:
    """What a test is noted by: its own name, and those of its fixtures, of its file and of all."""
    file = item.nodeid.split("::")[0]
    fixtures = getattr(item, "fixturenames", ())
    return {item.nodeid} | {f"{place}::{name}" for place in (file, "") for name in fixtures}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down how a test ended; a worker tells the process that started it, which writes."""
    ended = report.when == "call" or report.outcome != "passed"
    if ended and "PYTEST_XDIST_WORKER" not in os.environ:
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        with Path(os.environ["OXRL_TEST_OUTCOMES"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
