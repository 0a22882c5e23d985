"""Tests where PyTorch is not installed: `make test-other-python`. One that needs it, or another
library that is left out there, is skipped and names it; every other one has to pass.

It is found out by running: a file that cannot be imported, or a test that fails, and says that such
a library is missing. So that not everything is skipped one day, `OXRL_TEST_LEAST` tests have to pass.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

# Libraries that oxRL depends on, under the names by which they are imported.
LEFT_OUT = [
    name
    for name in ("torch", "transformers", "tokenizers", "pyarrow", "pandas", "PIL", "mlflow")
    if find_spec(name) is None
]


def _skipped_if_left_out(report: pytest.CollectReport | pytest.TestReport, path: Path) -> None:
    """Make a report of a failure one of a skip, if what failed is missing on purpose."""
    told = str(report.longrepr)
    lacking = [name for name in LEFT_OUT if f"No module named '{name}'" in told]
    if report.failed and lacking:
        report.outcome = "skipped"
        report.longrepr = (str(path), 1, f"Skipped: needs {lacking[0]}, which is left out here")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _skipped_if_left_out(report, collector.path)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _skipped_if_left_out(report, item.path)
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # one of several workers, whose tests the first process counts
        return
    passed = len(reporter.stats.get("passed", ()))
    least = int(os.environ.get("OXRL_TEST_LEAST", "0"))
    if passed < least:
        reporter.write_line(
            f"{passed} tests passed, fewer than {least} (OXRL_TEST_LEAST)", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
