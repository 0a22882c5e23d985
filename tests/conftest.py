"""What every test shares: one thread per process, no network, and where real data lies."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from oxrl.models.lazy_transformers import LATER, called_later
from oxrl.runs import environment
from support import without_torch
from support.command_line import PRETEND, SHARED, share_server
from support.figures import Learned

# Before anything imports torch: tests run side by side, and thread pools fighting for cores are
# slower than none.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The few tests of two threads: one that waits for the other sleeps.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
# Nothing that a test leaves in a cache may be met by the user's own runs, nor the other way round.
# Workers of one session share a folder.
if "OXRL_TEST_CACHES" not in os.environ:
    caches = tempfile.TemporaryDirectory(prefix="oxrl-test-caches-")
    os.environ["OXRL_TEST_CACHES"] = caches.name
os.environ["XDG_CACHE_HOME"] = os.environ["OXRL_TEST_CACHES"]
os.environ.pop("HF_HOME", None)
# The folders of tests lie in memory where there is room for them: a third of a run of a step is
# waiting for the disk. Those of tests that kill runs do not (`disk_path`).
MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 << 30
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Ray listens on the loopback device alone; it looks at this when it is imported.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_worker_niceness"] = "0"

# Under nohup the tests ignore it, and so would every run that they start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parent.parent
# What git says of the package is the same for each of thousands of runs: it is asked once.
environment.git_state = cache(environment.git_state)


def pytest_configure(config: pytest.Config) -> None:
    """Parallel test processes, which are started after this, fork from the same servers; from Python 3.14
    on a server takes none but the process that started it.
    """
    if find_spec("torch") is None:
        config.pluginmanager.register(without_torch)
        return
    if config.getoption("numprocesses", None) and sys.version_info < (3, 14):
        for which in (SHARED, PRETEND):
            config.add_cleanup(share_server(Path(os.environ["XDG_CACHE_HOME"]), which))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import transformers as `oxrl` does, without SciPy and scikit-learn, and look for garbage
    afterwards, and only among what tests make: hardly any of all that is imported is.
    """
    gc.disable()
    with called_later(LATER):
        collected = yield
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_types.py")  # the longest, while others run
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(
                pytest.mark.skip(
                    reason="needs a CUDA device; torch.cuda.is_available() is False here"
                )
            )


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """While a fixture is made, it is what trains: tests/processors notes it, and every test that asks
    for it.
    """
    said = os.environ.get("PYTEST_CURRENT_TEST", "")
    everywhere = fixturedef.scope in ("session", "package")
    file = "" if everywhere else request.node.nodeid.split("::")[0]
    os.environ["PYTEST_CURRENT_TEST"] = f"{file}::{fixturedef.argname} (fixture)"
    try:
        return (yield)
    finally:
        os.environ["PYTEST_CURRENT_TEST"] = said


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Parallel workers send reports as UTF-8, which text captured on purpose (a lone surrogate) may
    not be.
    """
    outcome = yield
    report = outcome.get_result()
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]


@pytest.fixture
def disk_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that is not in memory; kept when the test fails."""
    folder = Path(tempfile.mkdtemp(prefix="oxrl-test-"))
    failed = request.session.testsfailed
    yield folder
    if request.session.testsfailed == failed:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """`real_data("gsm8k")` is that folder of the real-data root, or a skip that says how to provide
    it.
    """
    root = Path(os.environ.get("OXRL_TEST_DATA", ROOT.parent / "shared" / "data"))

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.skip(
                f"real data {name!r} is not under {root}; set OXRL_TEST_DATA to the folder that holds it"
            )
        return path

    return find


@pytest.fixture
def learned(request: pytest.FixtureRequest) -> Learned:
    """`learned("eval/accuracy", value, at_least=0.9)` asserts a figure that comes from training."""
    return Learned(request.node.nodeid)
